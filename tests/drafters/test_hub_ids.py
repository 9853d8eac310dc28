"""A drafter named by its hub id is told apart by what the hub says of it, before its weights are fetched."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from paceline import LLM, DraftModel, SamplingParams, drafters
from paceline.errors import CheckpointError, OptionError
from paceline.models import hub
from tests.drafters.tiny_eagle import Facts, config_of, random_tensors, tiny_eagle, write
from tests.drafters.tiny_medusa import medusa
from tests.fakes import tiny_llm, tiny_model

PLAIN = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}


class Hub:
    """Repositories that are folders here; notes every file that leaves them."""

    def __init__(self, home: Path) -> None:
        self.home, self.away, self.sent = home, False, list[str]()

    def repository(self, name: str, files: dict[str, Any]) -> str:
        """files: a config, a list of tensors' names, or bytes."""
        folder = self.home / "there" / name
        folder.mkdir(parents=True)
        for file, held in files.items():
            if isinstance(held, dict):
                (folder / file).write_text(json.dumps(held))
            elif isinstance(held, list):
                save_file({tensor: torch.zeros(2, 2) for tensor in held}, folder / file)
            else:
                (folder / file).write_bytes(held)
        return name

    def snapshot_download(self, name: str, allow_patterns: list[str]) -> str:
        here = self.home / "here" / name
        if self.away and here.is_dir():
            return str(here)
        for path in self._folder(name).iterdir():
            if any(fnmatch(path.name, pattern) for pattern in allow_patterns):
                here.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, here)
                self.sent.append(path.name)
        return str(here)

    def model_info(self, name: str, timeout: float) -> Any:
        files = [SimpleNamespace(rfilename=path.name) for path in self._folder(name).iterdir()]
        return SimpleNamespace(siblings=files)

    def parse_safetensors_file_metadata(self, name: str, file: str) -> Any:
        raw = (self._folder(name) / file).read_bytes()
        header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
        return SimpleNamespace(tensors={tensor: None for tensor in header if tensor != "__metadata__"})

    def _folder(self, name: str) -> Path:
        if self.away:
            raise OSError("no route. Try later")
        return self.home / "there" / name


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    made = Hub(tmp_path)
    for name in ("snapshot_download", "model_info", "parse_safetensors_file_metadata"):
        monkeypatch.setattr(f"huggingface_hub.{name}", getattr(made, name))
    monkeypatch.chdir(tmp_path)
    hub.look.cache_clear()
    return made


@pytest.mark.parametrize(
    ("word", "files"),
    [
        ("eagle", {"config.json": PLAIN, "model.safetensors": ["midlayer.self_attn.q_proj.weight", "d2t"]}),
        ("eagle", {"config.json": {"speculators_model_type": "eagle3"}, "model.safetensors": ["norm.weight"]}),
        ("glide", {"config.json": {**PLAIN, "large_hidden_size": 64}, "model.safetensors": ["norm.weight"]}),
        ("medusa", {"config.json": PLAIN, "medusa_lm_head.pt": b"large", "training_args.bin": b"other"}),
        ("hydra", {"hydra_lm_head.pt": b"large"}),
        (
            "medusa",
            {
                "config.json": PLAIN,
                "model.safetensors.index.json": {"weight_map": {"medusa_head.0.0.linear.weight": "one.safetensors"}},
                "one.safetensors": b"large",
            },
        ),
        ("draft", {"config.json": PLAIN, "model.safetensors": ["model.layers.0.self_attn.q_proj.weight"]}),
    ],
)
def test_a_hub_id_is_told_without_its_weights(word: str, files: dict[str, Any], there: Hub) -> None:
    name = there.repository("e/eagle", files)  # nearly a drafter's word
    kind, options = drafters.read_word(name)
    assert (kind.word, options) == (word, {"model": name})
    assert all(file.endswith(".json") for file in there.sent)


def test_weights_without_a_header_are_fetched_to_tell_and_only_once(there: Hub) -> None:
    """As the originals of EAGLE are published: a config like a small llama's, and one .bin."""
    facts = Facts(third=False)
    path = Path(write(random_tensors(facts), config_of(facts), file="pytorch_model.bin"))
    name = there.repository("owner/any", {file.name: file.read_bytes() for file in path.iterdir()})
    llm = LLM(tiny_model(), name, kernels="reference", max_model_len=64)
    assert llm.engine.drafter is not None and llm.engine.drafter.name == "eagle"
    hub.look.cache_clear()
    there.sent.clear()
    there.away = True
    assert drafters.read_word(name)[0].word == "eagle"  # from what is here
    assert there.sent == []


@pytest.mark.parametrize(
    ("word", "make"), [("eagle", lambda: tiny_eagle("third")), ("medusa", lambda: medusa("pt")[0])]
)
def test_a_learned_head_drafts_by_its_hub_id(word: str, make: Callable[[], str], there: Hub) -> None:
    name = there.repository("owner/any", {file.name: file.read_bytes() for file in Path(make()).iterdir()})
    llm = tiny_llm(drafter=name)
    (answer,) = llm.generate([[5, 17, 42, 5]], SamplingParams(temperature=0, max_tokens=8))
    assert llm.engine.drafter is not None and llm.engine.drafter.name == word
    assert sum(answer.outputs[0].stats.proposed) > 0


def test_a_draft_model_that_is_none_is_refused_unfetched(there: Hub) -> None:
    eagle = there.repository("owner/small-llama", {"config.json": PLAIN, "model.safetensors": ["fc.weight"]})
    with pytest.raises(OptionError, match="owner/small-llama holds an EAGLE drafter, not a draft model; write eagle:"):
        LLM(tiny_model(), DraftModel(eagle), kernels="reference", max_model_len=32)
    mtp = there.repository(
        "owner/large", {"config.json": PLAIN, "model.safetensors": ["model.layers.61.eh_proj.weight"]}
    )
    with pytest.raises(OptionError, match="owner/large holds an MTP module, not a draft model; write mtp:model="):
        LLM(tiny_model(), DraftModel(mtp), kernels="reference", max_model_len=32)
    assert set(there.sent) == {"config.json"}


def test_a_hub_that_does_not_answer_is_said_at_once(there: Hub) -> None:
    there.away = True
    with pytest.raises(CheckpointError, match="the hub did not deliver 'owner/gone': no route; check the network"):
        drafters.read_word("owner/gone")
