"""The speculators format: what is written is read as the same drafter, and its draft length is the default."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from paceline import LLM, DFlash, Eagle, SamplingParams
from paceline.drafters import eagle_form, make
from paceline.drafters.base import FINAL, DrafterConfig
from paceline.drafters.checkpoint import Checkpoint
from paceline.drafters.speculators import MadeFor, save_dflash, save_eagle
from paceline.errors import OptionError
from tests.drafters.contract import prompts
from tests.drafters.equations import Spy
from tests.drafters.tiny_eagle import Facts, Tensors, config_of, deep_target, random_tensors, renamed, write
from tests.drafters.tiny_readers import dflash_config, dflash_state, speculators_config, write_dflash
from tests.fakes import VOCAB

MADE_FOR = MadeFor(VOCAB, 32, 4, "owner/target", "LlamaForCausalLM")
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
STATE_NORMS = {f"{name}.weight": torch.rand(32) + 0.5 for name in ("aux_norm_low", "aux_norm_mid", "aux_norm_high")}


def drafted(config: DrafterConfig) -> tuple[Any, list[Any]]:
    """The drafter, and every text with what it proposed there."""
    spy = Spy(config)
    llm = LLM(deep_target(), spy, kernels="reference", max_model_len=100, device="cpu")
    llm.generate(prompts(2), GREEDY)
    return spy.made, [(text, drafts) for text, _, drafts, _ in spy.seen]


def tensors_of(folder: str, strip: str = "") -> Tensors:
    files = Checkpoint(folder, strip=strip)
    return {name: files.tensor(name) for name in files.source.names()}


HEADS: dict[str, tuple[Facts, dict[str, Any], Tensors, list[tuple[str, str]]]] = {
    "the original": (Facts(), {}, {}, []),
    "behind a prefix": (Facts(), {}, {}, [("", "model.")]),
    "all flags": (
        Facts(layers=2, qkv_bias=True),
        {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True, "hidden_act": "gelu"},
        {"input_norm.weight": torch.rand(96) + 0.5},
        [],
    ),
    "old state norms": (Facts(), {"use_aux_norm": True}, STATE_NORMS, []),
    "heads normed, another size": (Facts(hidden=64, embedding=True, head_norms=True), {"rope_theta": 5e5}, {}, []),
    "all tokens": (Facts(vocab=VOCAB), {"rope_scaling": LLAMA3 | {"original_max_position_embeddings": 16}}, {}, []),
    "stretched": (Facts(), {"rope_scaling": {"type": "linear", "factor": 2.0}, "max_position_embeddings": 64}, {}, []),
    "states that begin with the first": (Facts(), {"eagle_aux_hidden_state_layer_ids": [0, 2, 6]}, {}, []),
    "parallel": (Facts(mask=True), {"mask_token_id": 96}, {}, []),
}


@pytest.mark.parametrize("name", HEADS)
def test_a_head_that_is_written_drafts_as_it_did(name: str, tmp_path: Path) -> None:
    facts, more, tensors, rename = HEADS[name]
    path = write(renamed(random_tensors(facts) | tensors, *rename), config_of(facts) | more)
    before, drafts = drafted(Eagle(path, 4))
    form = before.network.form
    save_eagle(tmp_path / "new", form, tensors_of(path, eagle_form.STRIPPED), MADE_FOR)
    assert isinstance(make(str(tmp_path / "new")), Eagle)
    after, again = drafted(Eagle(str(tmp_path / "new")))
    assert again == drafts and len(drafts) > 10
    assert after.max_nodes == 4 and after.taps == before.taps
    new = after.network.form
    names = ("first", "fusion", "state_norms")
    assert {**vars(new), **dict.fromkeys(names)} == {**vars(form), **dict.fromkeys(names)}


def test_boundaries_in_this_format_are_taken_as_they_are(tmp_path: Path) -> None:
    """Elsewhere ids that begin with 1 name layers, whose outputs are one boundary on."""
    path = write(random_tensors(Facts()), config_of(Facts()) | {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]})
    before, _ = drafted(Eagle(path, layer_ids=(1, 3, 4)))
    save_eagle(tmp_path, before.network.form, tensors_of(path), MADE_FOR)
    after, _ = drafted(Eagle(str(tmp_path)))
    assert before.taps.hidden == after.taps.hidden == (1, 3, 4)


def test_the_config_is_as_the_format_has_it(tmp_path: Path) -> None:
    facts = Facts(hidden=64, embedding=True, mask=True)
    more = {"mask_token_id": 96, "eagle_aux_hidden_state_layer_ids": [2, 4, 5]}
    path = write(random_tensors(facts), config_of(facts) | more)
    drafter, _ = drafted(Eagle(path))
    save_eagle(tmp_path, drafter.network.form, tensors_of(path), MADE_FOR)
    config = json.loads((tmp_path / "config.json").read_text())
    layer = config.pop("transformer_layer_config")
    assert config == {
        "architectures": ["PEagleSpeculator"],
        "speculators_model_type": "peagle",
        "speculators_config": {
            "algorithm": "peagle",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": 4,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {"name_or_path": "owner/target", "architectures": ["LlamaForCausalLM"]},
        },
        "draft_vocab_size": 40,
        "target_hidden_size": 32,
        "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
        "norm_before_residual": False,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
        "mask_token_id": 96,
    }
    read = transformers.LlamaConfig(**layer)
    assert (read.hidden_size, read.num_attention_heads, read.head_dim, read.vocab_size) == (64, 4, 8, VOCAB)
    assert set(tensors_of(str(tmp_path))) >= {"layers.0.hidden_norm.weight", "fc.weight", "mask_hidden", "d2t", "t2d"}


@pytest.mark.parametrize("name", ["eagle 1", "last state"])
def test_what_the_format_cannot_say_is_refused(name: str, tmp_path: Path) -> None:
    facts = Facts(third=False) if name == "eagle 1" else Facts(states=0)
    path = write(random_tensors(facts), config_of(facts))
    drafter, _ = drafted(Eagle(path))
    assert drafter.taps.hidden == (FINAL,)
    with pytest.raises(OptionError, match="speculators format"):
        save_eagle(tmp_path / "new", drafter.network.form, tensors_of(path), MADE_FOR)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("name", ["native", "own", "anchor"])
def test_a_block_drafter_that_is_written_drafts_as_it_did(name: str, tmp_path: Path) -> None:
    config, state = {
        "native": (dflash_config(), dflash_state()),
        "own": (dflash_config(), dflash_state(own=40, hidden=16)),
        "anchor": (speculators_config(sample_from_anchor=True), dflash_state()),
    }[name]
    path = str(write_dflash(tmp_path / "old", config, state))
    before, drafts = drafted(DFlash(path))
    made_for = MadeFor(VOCAB, 32, before.max_nodes)
    save_dflash(tmp_path / "new", before._shape, before.network.config, tensors_of(path), made_for)
    made = make(str(tmp_path / "new"))
    assert made == DFlash(str(tmp_path / "new"))
    after, again = drafted(made)
    assert again == drafts and len(drafts) > 10
    assert (after._shape, after.network.config) == (before._shape, before.network.config)


def test_a_causal_block_drafter_is_not_written(tmp_path: Path) -> None:
    path = str(write_dflash(tmp_path / "old", dflash_config(causal=True), dflash_state()))
    before, _ = drafted(DFlash(path))
    with pytest.raises(OptionError, match="a causal DFlash drafter has no place in the speculators format"):
        save_dflash(tmp_path / "new", before._shape, before.network.config, tensors_of(path), MADE_FOR)


# The default draft length


def proposing(**method: Any) -> dict[str, Any]:
    return {
        "speculators_config": {"proposal_methods": [{"proposal_type": "greedy", **method}, {"speculative_tokens": 9}]}
    }


def most_of(config: Any) -> int:
    drafter = LLM(deep_target(), config, kernels="reference", max_model_len=100, device="cpu").engine.drafter
    assert drafter is not None
    return drafter.max_nodes


@pytest.mark.parametrize(
    ("said", "options", "most"),
    [
        (proposing(speculative_tokens=3), {}, 3),
        (proposing(speculative_tokens=3), {"num_draft_tokens": 6}, 6),
        (proposing(proposal_type="sampling", speculative_tokens=2), {}, 2),
        (proposing(), {}, 5),
        (proposing(speculative_tokens="many"), {}, 5),
        ({"speculators_config": {}}, {}, 5),
        ({"speculators_config": {"proposal_methods": []}}, {}, 5),
        ({}, {}, 5),
        (proposing(proposal_type="dynamic_tree", speculative_tokens=48), {}, 5),
        (proposing(proposal_type="dynamic_tree", speculative_tokens=12), {"tree": "dynamic"}, 12),
        (proposing(speculative_tokens=3), {"tree": "dynamic"}, 31),
        (proposing(speculative_tokens=3), {"tree": "static", "num_draft_tokens": 60}, 25),
    ],
)
def test_a_head_drafts_as_many_as_its_file_says_unless_told(said: dict[str, Any], options: Any, most: int) -> None:
    path = write(random_tensors(Facts()), config_of(Facts()) | said)
    assert most_of(Eagle(path, **options)) == most


@pytest.mark.parametrize(("count", "most"), [(2, 2), (3, 3), (20, 3)])
def test_a_block_drafter_drafts_as_many_as_its_file_says_and_its_block_holds(
    count: int, most: int, tmp_path: Path
) -> None:
    path = str(write_dflash(tmp_path, speculators_config(**proposing(speculative_tokens=count)), dflash_state()))
    assert most_of(path) == most
    assert most_of(DFlash(path, 1)) == 1


def test_a_loose_acceptance_in_a_file_is_told_and_left_out(caplog: pytest.LogCaptureFixture) -> None:
    path = write(random_tensors(Facts()), config_of(Facts()) | proposing(speculative_tokens=3, verifier_accept_k=2))
    with caplog.at_level(logging.WARNING, "paceline"):
        assert most_of(Eagle(path)) == 3
    assert "asks for verifier_accept_k=2, which would change the text; it is left out" in caplog.text
