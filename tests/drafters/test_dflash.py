"""DFlash: its block by the equations, over states that transformers' own target gives; its files and refusals."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline import LLM, DFlash, SamplingParams
from paceline.drafters import make
from paceline.errors import PacelineError
from tests.drafters.equations import Spy, State, doubled, feed_forward, look, rms, turn
from tests.drafters.tiny_readers import (
    MASK,
    dflash_config,
    dflash_state,
    large_model,
    llm_with,
    speculators_config,
    write,
    write_dflash,
)
from tests.fakes import VOCAB, tiny_model

EPS, THETA = 1e-5, 5000.0
PROMPTS = [[(5 * i * i + 3 * i + n) % 90 for i in range(9 + 5 * n)] for n in range(3)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)


def block_logits(state: State, target: Any, text: list[int], rows: int, how: dict[str, Any]) -> Tensor:
    """[rows, Vd] in float64: x_n and mask tokens behind it. Formats, section 12.4."""
    w, n = doubled(state), len(text) - 1
    with torch.no_grad():
        hidden = target(torch.tensor([text]), output_hidden_states=True).hidden_states
    states = torch.cat([hidden[tap][0, :n] for tap in how["taps"]], dim=-1).double()
    context = rms(states @ w["fc.weight"].T, w["hidden_norm.weight"], EPS)  # [n, h]
    embedding = w.get("embed_tokens.weight", target.model.embed_tokens.weight.detach().double())
    x = embedding[[text[-1], *[MASK] * (rows - 1)]]
    places = torch.arange(n + rows)
    seen = torch.ones(rows, n + rows, dtype=torch.bool)
    if how.get("causal"):
        seen = places <= places[n:, None]
    seen = seen & (places >= how.get("first", 0))
    for j in range(2):
        own = doubled(state, f"layers.{j}.")
        normed = rms(x, own["input_layernorm.weight"], EPS)
        both = torch.cat([context, normed])  # context is the same in every layer, and meets no input norm
        q = rms((normed @ own["self_attn.q_proj.weight"].T).view(rows, 4, 8), own["self_attn.q_norm.weight"], EPS)
        k = rms((both @ own["self_attn.k_proj.weight"].T).view(-1, 2, 8), own["self_attn.k_norm.weight"], EPS)
        v = (both @ own["self_attn.v_proj.weight"].T).view(-1, 2, 8)
        out = look(turn(q, places[n:], THETA), turn(k, places, THETA), v, seen)
        x = feed_forward(x + out @ own["self_attn.o_proj.weight"].T, own, EPS)
    head = w.get("lm_head.weight", target.lm_head.weight.detach().double())
    return rms(x, w["norm.weight"], EPS) @ head.T


def drafts_of(state: State, target: Any, text: list[int], count: int, how: dict[str, Any]) -> list[int]:
    anchor = int(how.get("anchor", 0))
    logits = block_logits(state, target, text, 1 + count - anchor, how)[1 - anchor :]
    chosen = logits.argmax(-1)
    return (chosen + state["d2t"][chosen]).tolist() if "d2t" in state else chosen.tolist()


def tokens_of(llm: LLM, params: SamplingParams = GREEDY) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params)]


@functools.cache
def plain(layers: int) -> list[list[int]]:
    return tokens_of(llm_with(tiny_model(layers), None))


LAYOUTS: dict[str, tuple[dict[str, Any], State, dict[str, Any]]] = {
    "native": (dflash_config(), dflash_state(), {"taps": (1, 2)}),
    "causal": (dflash_config(causal=True), dflash_state(), {"taps": (1, 2), "causal": True}),
    "one layer read": (dflash_config(layer_ids=(0,)), dflash_state(taps=1), {"taps": (1,)}),
    "own vocabulary": (dflash_config(), dflash_state(own=40), {"taps": (1, 2)}),
    "own width": (dflash_config(), dflash_state(hidden=16), {"taps": (1, 2)}),
    "speculators": (speculators_config(), dflash_state(own=40), {"taps": (1, 2)}),
    "from the anchor": (speculators_config(sample_from_anchor=True), dflash_state(), {"taps": (1, 2), "anchor": 1}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_drafts_are_those_of_the_equations_in_every_layout(layout: str, tmp_path: Path) -> None:
    config, state, how = LAYOUTS[layout]
    target = tiny_model(3)  # after 3 layers, transformers gives the normed state: not read here
    folder = write(tmp_path, config, {f"model.{n}": t for n, t in state.items()} if layout == "own width" else state)
    spy = Spy(DFlash(str(folder)))
    assert tokens_of(llm_with(target, spy)) == plain(3)
    assert spy.made.max_nodes == 4 - (not how.get("anchor"))
    assert len(spy.seen) > 20 and max(len(drafts) for _, _, drafts, _ in spy.seen) == spy.made.max_nodes
    for text, first, drafts, _ in spy.seen:
        assert first == 0 and drafts == drafts_of(state, target, text, len(drafts), how)


@pytest.mark.parametrize("kernels", ["native", "torch"])
@pytest.mark.parametrize("behind", [None, 1])
def test_every_set_of_kernels_drafts_the_same(kernels: str, behind: int | None, tmp_path: Path) -> None:
    config = dflash_config(block_size=6, layer_ids=(1, 6))
    spy = Spy(DFlash(str(write_dflash(tmp_path, config)), quantization="none"))
    tokens_of(llm_with(large_model(), spy, behind, kernels=kernels))
    assert spy.made.taps.hidden == (2, 7) and len(spy.seen) > 20
    for text, _, drafts, _ in spy.seen:
        assert drafts == drafts_of(dflash_state(), large_model(), text, len(drafts), {"taps": (2, 7)})


def test_a_row_of_the_block_sees_the_rows_behind_it() -> None:
    target, text = tiny_model(3), PROMPTS[0]
    both, causal = ({"taps": (1, 2), "causal": causal} for causal in (False, True))
    free, bound = (block_logits(dflash_state(), target, text, 4, how) for how in (both, causal))
    assert (free[0] - bound[0]).abs().max() > 0.01 and (free[3] - bound[3]).abs().max() > 0.01


@pytest.mark.parametrize("behind", [None, 1, 2])
def test_chunks_budgets_and_hits_change_no_draft(behind: int | None, tmp_path: Path) -> None:
    spy, state, target = Spy(DFlash(str(write_dflash(tmp_path)))), dflash_state(), tiny_model(3)
    llm = llm_with(target, spy, behind, max_batched_tokens=9)
    params = [SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True, max_draft_tokens=n) for n in (3, 1, 2)]
    first = [output.outputs[0] for output in llm.generate(PROMPTS, params)]
    again = [output.outputs[0] for output in llm.generate(PROMPTS, params)]
    assert all(output.stats.prefix_hit for output in again)
    assert [output.token_ids for output in first] == [output.token_ids for output in again] == plain(3)
    for text, lowest, drafts, _ in spy.seen:
        assert lowest == 0, "pages it filled itself are its own"
        assert drafts == drafts_of(state, target, text, len(drafts), {"taps": (1, 2)})


@pytest.mark.parametrize("behind", [None, 1])
def test_switched_on_in_the_middle_it_sees_what_it_was_shown(behind: int | None, tmp_path: Path) -> None:
    spy, state, target = Spy(DFlash(str(write_dflash(tmp_path)))), dflash_state(), tiny_model(3)
    llm, tokens = llm_with(target, None, behind), []
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    for chunk in llm.stream(PROMPTS[1], params):
        tokens += chunk.token_ids
        if len(tokens) == 5:
            llm.set_drafter(spy)
    assert tokens == tokens_of(llm_with(target, None), params)[1]
    drafted = [(text, first, drafts) for text, first, drafts, _ in spy.seen if drafts]
    assert len(drafted) > 8 and all(first > len(PROMPTS[1]) for _, first, _ in drafted)
    for text, first, drafts in drafted:
        assert drafts == drafts_of(state, target, text, len(drafts), {"taps": (1, 2), "first": first})


REFUSALS: list[tuple[dict[str, Any], State, dict[str, Any], str]] = [
    (dflash_config(), dflash_state(), {"num_draft_tokens": 4}, "num_draft_tokens=4 is too many: .* drafts 3 at most"),
    (dflash_config(layer_ids=(0, 3)), dflash_state(), {}, r"reads layers \[0, 3\] of its target, but this one has 2"),
    (dflash_config(), dflash_state(taps=3), {}, "made for a target with states of together 96, but this one has 64"),
    (dflash_config(mask_token_id=97), dflash_state(), {}, "gives mask_token_id=97; its embedding has 97 rows"),
    (dflash_config(mask_token_id=None), dflash_state(), {}, "gives mask_token_id=None; a DFlash drafter needs"),
    (dflash_config(target_layer_ids=None), dflash_state(), {}, "does not say which layers of the target it reads"),
    (dflash_config(use_swa=True), dflash_state(), {}, "with sliding windows, which are not supported"),
    (dflash_config(block_size=1), dflash_state(), {}, "gives block_size=1, in which there is no draft"),
    (
        dflash_config(),
        {n: t for n, t in dflash_state(hidden=16).items() if n != "embed_tokens.weight"},
        {},
        "made for a target with hidden size 16, but this one has 32",
    ),
    (
        dflash_config(),
        {n: t for n, t in dflash_state(own=40).items() if n != "d2t"},
        {},
        "made for a target with a vocabulary of 40, but this one has 97",
    ),
    (
        dflash_config(),
        {**dflash_state(own=40), "d2t": torch.full((40,), VOCAB)},
        {},
        "d2t does not give each of the head's 40 rows another token of the target's 97",
    ),
    (dflash_config(), {**dflash_state(), "more": torch.zeros(1)}, {}, "tensors that no drafter of this kind has: more"),
]


@pytest.mark.parametrize(("config", "state", "given", "said"), REFUSALS)
def test_what_does_not_fit_is_refused_in_a_sentence(
    config: dict[str, Any], state: State, given: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(PacelineError, match=said):
        llm_with(tiny_model(), DFlash(str(write(tmp_path, config, state)), **given))


def test_a_folder_is_told_by_its_config_and_lengths_are_checked(tmp_path: Path) -> None:
    assert make(str(write_dflash(tmp_path))) == DFlash(str(tmp_path))
    assert make(str(tmp_path), num_draft_tokens=2) == DFlash(str(tmp_path), 2)
    with pytest.raises(PacelineError, match="num_draft_tokens=0 is not allowed"):
        DFlash("d", 0)


def test_native_kernels_pack_its_weights_as_int8_unless_told_otherwise(tmp_path: Path) -> None:
    folder, found = str(write_dflash(tmp_path)), []
    for quantization in ("int8", "none"):
        llm = llm_with(tiny_model(), DFlash(folder, quantization=quantization), kernels="native")
        assert tokens_of(llm) == tokens_of(llm_with(tiny_model(), None, kernels="native"))
        found.append(llm.engine.drafter.network.ops.quantization)  # type: ignore[union-attr]
    assert found == ["Q8_0", None]
