"""A drafter's own embedding or head that is the target's over again is held once; one that differs is kept."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline import LLM, MTP, DFlash, Eagle, Glide, Medusa, SamplingParams
from tests.drafters.tiny_eagle import Facts, config_of, random_tensors, write
from tests.drafters.tiny_heads import write as write_heads
from tests.drafters.tiny_medusa import medusa_weights, vllm_names
from tests.drafters.tiny_mtp import modules, named
from tests.drafters.tiny_readers import dflash_config, dflash_state, glide_state, write_dflash, write_glide
from tests.drafters.tiny_readers import write as write_folder
from tests.fakes import VOCAB, tiny_model
from tests.native import EXACT, needs_native

Parts = tuple[Tensor, Tensor]  # an embedding and a vocabulary head
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = [[5, 17, 42, 5], [9, 9, 9]]


def of_target() -> Parts:
    model = tiny_model()
    return model.model.embed_tokens.weight.detach().clone(), model.lm_head.weight.detach().clone()


def eagle(parts: Parts, folder: Path) -> Eagle:
    own = {"embed_tokens.weight": parts[0], "lm_head.weight": parts[1]}
    config = config_of(Facts(vocab=VOCAB)) | {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
    return Eagle(write(random_tensors(Facts(vocab=VOCAB)) | own, config, folder), 3)


def dflash(parts: Parts, folder: Path) -> DFlash:
    own = {"embed_tokens.weight": parts[0], "lm_head.weight": parts[1]}
    return DFlash(str(write_dflash(folder, dflash_config(), dflash_state() | own)))


def glide(parts: Parts, folder: Path) -> Glide:
    own = {"model.embed_tokens.weight": parts[0], "lm_head.weight": parts[1]}
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    return Glide(str(write_glide(folder, state=glide_state(hidden=32) | own, **sizes)), 3)


def mtp(parts: Parts, folder: Path) -> MTP:
    (state,) = modules("deepseek", 1)
    state |= {"embed_tokens.weight": parts[0], "shared_head.head.weight": parts[1]}
    return MTP(str(write_folder(folder, {"model_type": "deepseek_v3"}, named("deepseek", [state]))), 3)


def shared_medusa(parts: Parts, folder: Path) -> Medusa:
    names = vllm_names(medusa_weights(outs="shared"), shared=True)
    (head,) = [name for name in names if name.startswith("lm_heads.")]
    return Medusa(write_heads({"model_type": "medusa"}, names | {head: parts[1]}))


MAKERS: dict[str, Callable[[Parts, Path], Any]] = {"eagle": eagle, "dflash": dflash, "glide": glide, "mtp": mtp}


def held(llm: LLM) -> tuple[Any, Any]:
    """A drafter's embedding and head."""
    drafter: Any = llm.engine.drafter
    network = drafter.modules[0] if hasattr(drafter, "modules") else getattr(drafter, "model", None) or drafter.network
    return network.embedding, network.head


@pytest.mark.parametrize("how", ["torch", *EXACT, pytest.param("packed", marks=needs_native)])
@pytest.mark.parametrize("name", MAKERS)
def test_a_copy_of_the_targets_is_held_once_and_what_differs_is_kept(name: str, how: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"kernels": "native" if how == "packed" else how, "max_model_len": 64, "device": "cpu"}
    options |= {"quantization": "int8"} if how == "packed" else {}
    embedding, head = of_target()
    other = head.clone()
    other[-1, -1] += 0.5  # the last value of all
    plain = [out.outputs[0].token_ids for out in LLM(tiny_model(), **options).generate(PROMPTS, GREEDY)]
    for parts, aliased in (((embedding, head), (True, True)), ((embedding, other), (True, False))):
        llm = LLM(tiny_model(), MAKERS[name](parts, tmp_path / str(aliased[1])), **options)
        model = llm.engine.target.model
        assert (held(llm)[0] is model.embedding, held(llm)[1] is model.head) == aliased
        assert [out.outputs[0].token_ids for out in llm.generate(PROMPTS, GREEDY)] == plain


def test_a_matrix_that_all_medusa_heads_share_is_held_once(tmp_path: Path) -> None:
    for parts, aliased in ((of_target(), True), (tuple(2 * part for part in of_target()), False)):
        llm = LLM(tiny_model(), shared_medusa(parts, tmp_path), kernels="reference", max_model_len=64)  # type: ignore[arg-type]
        drafter: Any = llm.engine.drafter
        assert {one.head is llm.engine.target.model.head for one in drafter.heads} == {aliased}


def test_half_precision_copies_are_compared_as_the_target_keeps_them(tmp_path: Path) -> None:
    embedding, head = (part.to(torch.bfloat16) for part in of_target())
    target = copy.deepcopy(tiny_model()).to(torch.bfloat16)  # the other is everybody's
    llm = LLM(target, eagle((embedding, head.float()), tmp_path), kernels="torch", max_model_len=64)
    assert held(llm)[0] is llm.engine.target.model.embedding and held(llm)[1] is llm.engine.target.model.head
