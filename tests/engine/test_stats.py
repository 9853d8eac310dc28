"""A drafter with weights that never says anything right is named, once."""

from __future__ import annotations

import logging

import pytest

from paceline import DraftModel
from paceline.engine import stats
from paceline.engine.stats import VAIN_ROUNDS, EngineStats, RoundRecord
from tests.fakes import Hopeless, tiny_llm, tiny_model

SAID = "probably belongs to another target"


def told(caplog: pytest.LogCaptureFixture) -> int:
    return sum(SAID in record.getMessage() for record in caplog.records)


def rounds(engine: EngineStats, count: int, proposed: int = 3, accepted: int = 0) -> None:
    for _ in range(count):
        engine.add(RoundRecord(4, 1, 10, proposed, accepted, 1 + accepted, 0.0, 0.0, 0.0))


def test_hundreds_of_rounds_without_an_accepted_token_bring_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    engine = EngineStats()
    engine.watch("eagle")
    rounds(engine, VAIN_ROUNDS - 1)
    rounds(engine, 5, proposed=0)  # a round without drafts proves nothing
    assert told(caplog) == 0
    rounds(engine, 3 * VAIN_ROUNDS)
    assert told(caplog) == 1 and "'eagle'" in caplog.text
    engine.watch("medusa")  # another drafter is another matter
    rounds(engine, VAIN_ROUNDS)
    assert told(caplog) == 2


def test_one_accepted_token_is_enough(caplog: pytest.LogCaptureFixture) -> None:
    engine = EngineStats()
    engine.watch("eagle")
    rounds(engine, VAIN_ROUNDS - 1)
    rounds(engine, 1, accepted=1)
    rounds(engine, 2 * VAIN_ROUNDS)
    assert told(caplog) == 0


@pytest.mark.parametrize("learned", [True, False])
def test_only_a_drafter_with_weights_is_suspected(
    learned: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stats, "VAIN_ROUNDS", 8)
    prompt = list(range(3, 12))
    [plain] = tiny_llm().generate([prompt], temperature=0, max_tokens=20, ignore_eos=True)
    drafter = Hopeless({tuple(prompt): prompt + plain.outputs[0].token_ids}, 3)
    drafter.learned = learned
    llm = tiny_llm(drafter)
    with caplog.at_level(logging.WARNING, "paceline"):
        llm.generate([prompt], temperature=0, max_tokens=20, ignore_eos=True)
    assert told(caplog) == learned


def test_a_model_that_drafts_for_itself_is_not_suspected(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stats, "VAIN_ROUNDS", 2)
    llm = tiny_llm(DraftModel(tiny_model(), 2))
    assert llm.engine.drafter is not None and llm.engine.drafter.learned
    llm.generate([list(range(3, 12))], temperature=0, max_tokens=12, ignore_eos=True)
    assert told(caplog) == 0
