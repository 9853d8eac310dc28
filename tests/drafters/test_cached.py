"""Drafters with cache layers of their own: whatever was shared, accepted, chunked or ahead, each draft is the one a
fresh start on the same text makes."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from paceline import NGram
from tests.drafters.contract import SETTINGS, plain, prompts
from tests.drafters.pair_reader import CROSS, OWN, TARGET_LAYER, Network, Spied
from tests.fakes import check_books, tiny_llm, tiny_model

BEHIND = pytest.mark.parametrize("behind", [None, 1, 2])


@functools.cache
def network() -> Network:
    llm = tiny_llm()
    return Network(llm.engine.target)


@functools.cache
def dense() -> dict[str, torch.Tensor]:
    net = network()
    return {name: getattr(net, name).data.double() for name in ("fusion", "qkv", "out", "query", "cross", "head")}


def keys_and_values(layer: Any, hidden: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the tiny target's layer, by transformers' own modules: [heads, positions, D], keys turned."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    normed = layer.input_layernorm(hidden[None])
    shape = (1, length, CROSS.num_kv_heads, CROSS.head_dim)
    k, v = (project(normed).view(shape).transpose(1, 2) for project in (layer.self_attn.k_proj, layer.self_attn.v_proj))
    cos, sin = tiny_model().model.rotary_emb(v, torch.arange(length)[None])
    return apply_rotary_pos_emb(k, k, cos, sin)[0][0], v[0]


def drafts_of(text: list[int], count: int, first: int) -> list[int]:
    """The same drafter, greedy, computed densely and afresh from the text."""
    with torch.no_grad():
        out = tiny_model()(torch.tensor([text]), output_hidden_states=True)
        states, boundary = out.hidden_states[-1][0], out.hidden_states[TARGET_LAYER][0]
        keys, values = keys_and_values(tiny_model().model.layers[TARGET_LAYER], boundary, len(text))
    w, embedding = dense(), tiny_model().model.embed_tokens.weight.detach().double()
    newest = len(text) - 1
    own_keys, own_values = {}, {}

    def row(place: int, token: int, state: torch.Tensor, below: int) -> torch.Tensor:
        x = w["fusion"] @ torch.cat([embedding[token], state.double()])
        q, k, v = (w["qkv"] @ x).split([OWN.num_heads * OWN.head_dim, OWN.head_dim, OWN.head_dim])
        own_keys[place], own_values[place] = k, v
        seen = [p for p in sorted(own_keys) if first <= p <= place]
        x = x + w["out"] @ look(
            q.view(2, 1, 8),
            torch.stack([own_keys[p] for p in seen])[None].expand(2, -1, -1),
            torch.stack([own_values[p] for p in seen])[None].expand(2, -1, -1),
        )
        q = (w["query"] @ x).view(CROSS.num_heads, 1, CROSS.head_dim)
        k, v = (part[:, :below].double().repeat_interleave(2, dim=0) for part in (keys, values))
        return x + w["cross"] @ look(q, k, v) if below else x

    for place in range(max(first, 1), len(text)):
        state = row(place, text[place], states[place - 1], min(place, newest))
    drafts: list[int] = []
    for step in range(count):
        drafts.append(int((w["head"] @ state).argmax()))
        state = row(len(text) + step, drafts[-1], state, newest)
    return drafts


def look(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    scores = torch.softmax(q @ k.transpose(1, 2) / q.shape[2] ** 0.5, dim=-1)
    return (scores @ v).flatten()


def check_drafts(drafter: Spied, masked: bool = False) -> None:
    assert drafter.seen
    for text, drafts, first in drafter.seen:
        assert masked or first == 1, "nothing is hidden from it but the text's first place"
        assert drafts == drafts_of(text, len(drafts), first), (len(text), first)


@BEHIND
@pytest.mark.parametrize("options", [{}, {"max_batched_tokens": 9, "block_size": 4}], ids=["fresh", "chunked"])
def test_every_draft_is_that_of_a_fresh_start(options: dict[str, int], behind: int | None) -> None:
    drafter = Spied()
    llm = tiny_llm(drafter, behind, **options)
    outputs = llm.generate(prompts(3), SETTINGS["greedy"])
    assert [output.outputs[0].token_ids for output in outputs] == plain(3, "greedy")
    check_drafts(drafter)
    assert drafter._standing == {}


@BEHIND
def test_after_a_prefix_hit_it_goes_on_from_its_own_rows(behind: int | None) -> None:
    """Pages it filled are shared with their rows, and the pair that crosses the hit is there."""
    drafter = Spied()
    llm = tiny_llm(drafter, behind, block_size=4)
    llm.generate(prompts(3), SETTINGS["greedy"])
    drafter.seen.clear()
    again = llm.generate(prompts(3), SETTINGS["greedy"])
    assert all(output.outputs[0].stats.prefix_hit for output in again)
    assert [output.outputs[0].token_ids for output in again] == plain(3, "greedy")
    check_drafts(drafter)


@BEHIND
def test_pages_others_filled_stay_masked_and_nothing_is_made_up(behind: int | None) -> None:
    drafter = Spied()
    llm = tiny_llm(NGram(3, min_match=1, max_match=2), behind, block_size=4)
    llm.generate(prompts(3), SETTINGS["greedy"])
    llm.set_drafter(drafter)
    outputs = llm.generate(prompts(3), SETTINGS["greedy"])
    assert [output.outputs[0].token_ids for output in outputs] == plain(3, "greedy")
    assert any(first > 1 for _, _, first in drafter.seen)
    check_drafts(drafter, masked=True)


@BEHIND
def test_switched_on_in_the_middle_it_reads_what_it_is_shown(behind: int | None) -> None:
    drafter = Spied()
    llm = tiny_llm(None, behind, block_size=4)
    tokens: list[int] = []
    for chunk in llm.stream(prompts(1)[0], SETTINGS["greedy"]):
        tokens += chunk.token_ids
        if len(tokens) == 5:
            llm.set_drafter(drafter)
        check_books(llm)
    assert tokens == plain(1, "greedy")[0]
    check_drafts(drafter, masked=True)
