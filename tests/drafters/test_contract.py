"""Every drafter in every situation, every pair of (drafter, situation, batch, sampling setting): token for token what
plain decoding says."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from paceline.kernels.cpu.library import library
from paceline.testing import BATCHES, SETTINGS, SITUATIONS, options_in, plain, prompts, tokens_of
from tests.drafters.contract import DRAFTERS, recorded
from tests.fakes import Replay, Scratching, tiny_llm

HEADS = ("medusa", "medusa_tree", "mlp_speculator", "mlp_speculator_tree", "hydra_prefix_tree")
READERS = ("eagle_static", "eagle3", "glide", "glide_layers", "glide_cape", "pard", "dflash", "dflash_own")
NATIVE = (
    "ngram",
    "draft_model",
    "replay_tree",
    "drawn_tree",
    "pair_reader",
    "lookahead",
    "early_exit",
    *HEADS,
    *READERS,
)


def pairwise() -> list[tuple[str, int, str, str]]:
    """Each drafter in each situation, with batches and settings in turn."""
    rows = []
    for first, name in enumerate(DRAFTERS):
        for second, situation in enumerate(SITUATIONS):
            setting = list(SETTINGS)[(first + second) % len(SETTINGS)]
            rows.append((name, BATCHES[(first + second + second // 3) % 2], situation, setting))
    return rows


def test_every_pair_is_run() -> None:
    rows = pairwise()
    for one, other in itertools.combinations(range(4), 2):
        values = [(DRAFTERS, BATCHES, SITUATIONS, SETTINGS)[factor] for factor in (one, other)]
        assert {(row[one], row[other]) for row in rows} == set(itertools.product(*values))


@pytest.mark.parametrize("name, batch, situation, setting", pairwise())
def test_a_drafter_changes_no_token(name: str, batch: int, situation: str, setting: str) -> None:
    llm = tiny_llm(DRAFTERS[name](recorded(batch, setting)), **options_in(situation, batch))
    assert tokens_of(llm, batch, setting) == plain(batch, setting)
    if "preempted" in situation and batch == 3:
        assert llm.engine.scheduler.num_preemptions > 0


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", DRAFTERS)
def test_a_prefix_hit_and_a_budget_of_zero_change_no_token(name: str, setting: str) -> None:
    batch = BATCHES[(list(DRAFTERS).index(name) + list(SETTINGS).index(setting)) % 2]
    llm = tiny_llm(DRAFTERS[name](recorded(batch, setting)), block_size=4)
    first = tokens_of(llm, batch, setting)
    again = llm.generate(prompts(batch), SETTINGS[setting])
    hits = [output.outputs[0].stats.prefix_hit for output in again]
    assert all(hits), "a test of prefix hits needs some"
    assert [output.outputs[0].token_ids for output in again] == first == plain(batch, setting)
    assert tokens_of(llm, batch, setting, max_draft_tokens=0) == first
    assert tokens_of(llm, batch, setting, max_draft_tokens=2) == first


@pytest.mark.parametrize("trees", [False, True])
@pytest.mark.parametrize("setting", SETTINGS)
def test_replay_accepts_every_length_and_every_branch(
    setting: str, trees: bool, record_property: Callable[[str, object], None]
) -> None:
    """The honesty of the suite: equality is only worth something if everything that can be accepted was."""
    replay = Replay(recorded(3, setting), seed=0, trees=trees)
    llm = tiny_llm(replay)
    for number in range(12):
        replay.seed = number
        assert tokens_of(llm, 3, setting) == plain(3, setting)
    lengths, branches = (dict(sorted(c.items())) for c in (replay.histogram.lengths, replay.histogram.branches))
    record_property("shown", f"{setting}, {'tree' if trees else 'chain'}: accepted {lengths}, branches {branches}")
    assert set(lengths) >= set(range(Replay.max_depth + 1))
    assert set(branches) == set(range(Replay.max_siblings if trees else 1))


@pytest.mark.parametrize("setting", SETTINGS)
def test_scratch_nodes_are_never_accepted_and_their_logits_are_shown(setting: str) -> None:
    drafter = Scratching(recorded(3, setting), seed=1)
    llm = tiny_llm(drafter)
    assert tokens_of(llm, 3, setting) == plain(3, setting)
    assert max(drafter.num_logits) > 2 and sum(drafter.histogram.lengths.values()) > 0


@pytest.mark.parametrize("behind", [None, 1, 2])
@pytest.mark.parametrize("name", NATIVE)
def test_the_native_kernels_keep_the_contract_on_shared_and_on_static_batches(name: str, behind: int | None) -> None:
    if library() is None:
        pytest.skip("the native kernels are not built here")
    wanted = tokens_of(tiny_llm(kernels="native"), 3, "seeded")
    known = {tuple(p): p + out for p, out in zip(prompts(3), wanted)}
    llm = tiny_llm(DRAFTERS[name](known), behind, kernels="native", block_size=4)
    assert tokens_of(llm, 3, "seeded") == wanted
