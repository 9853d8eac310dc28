"""Hydra heads: both kinds load, every draft is what the equations say, each behind its own path."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paceline import LLM, Hydra
from paceline.drafters import make
from paceline.drafters.static_tree import find_tree
from paceline.errors import CheckpointError, OptionError
from tests.drafters.tiny_heads import PROMPTS, Spy, begin, generate, texts, write
from tests.drafters.tiny_hydra import HYDRA, HydraWeights, hydra, hydra_weights, knowing_hydra
from tests.fakes import check_books, tiny_llm, tiny_model


def llm_with(drafter: Any, **options: Any) -> LLM:
    return tiny_llm(drafter, **{"kernels": "torch", **options})


def states_of(text: list[int], offset: int = 0) -> torch.Tensor:
    """[positions, H] before the newest token, by transformers."""
    with torch.no_grad():
        out = tiny_model()(torch.tensor([text[:-1]]), output_hidden_states=True)
    found: torch.Tensor = out.hidden_states[-1 - offset][0]
    return found


def chain_of(weights: HydraWeights, text: list[int], count: int, offset: int = 0) -> list[int]:
    feature, tokens = weights.feature(states_of(text, offset)), [text[-1]]
    for head in range(count):
        tokens.append(int(weights.logits(head, feature, tokens).argmax()))
    return tokens[1:]


@pytest.mark.parametrize("grounded", [True, False])
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("kind", ["mlp", "prefix-mlp"])
def test_both_kinds_draft_what_the_equations_say(kind: str, layers: int, grounded: bool) -> None:
    path, weights = hydra(kind, layers, grounded)
    spy = Spy(make(path))
    assert spy.config == Hydra(path), "told from its config"
    outputs = generate(llm_with(spy, max_batched_tokens=9))  # prompts in chunks
    assert texts(outputs) == texts(generate(llm_with(None)))
    assert spy.made.max_nodes == 4, "heads are counted; the config says 2"
    drafts = [draft for draft in spy.seen if draft.tokens]
    assert max(len(draft.tokens) for draft in drafts) == 4
    for draft in drafts:
        assert draft.tokens == chain_of(weights, draft.text, len(draft.tokens)), len(draft.text)


def test_an_earlier_state_is_read_where_the_config_asks_for_it() -> None:
    path, weights = hydra("mlp", 1, True, 1)
    spy = Spy(Hydra(path))
    generate(llm_with(spy))
    assert spy.made.taps.hidden == (1,), "after the first of two layers"
    assert all(draft.tokens == chain_of(weights, draft.text, len(draft.tokens), 1) for draft in spy.seen)


@pytest.mark.parametrize("kind", ["mlp", "prefix-mlp"])
@pytest.mark.parametrize("tree", ["mc_sim_7b_63", [(0,), (2,), (0, 0), (0, 1), (2, 4), (0, 1, 1)]])
def test_a_node_is_a_rank_of_its_head_behind_its_own_path(kind: str, tree: Any) -> None:
    path, weights = hydra(kind)
    spy = Spy(Hydra(path, tree=tree))
    begin(llm_with(spy), 2)
    nodes = find_tree(tree).nodes
    assert [len(draft.tokens) for draft in spy.seen] == [len(nodes)] * 3
    for draft in spy.seen:
        feature, told = weights.feature(states_of(draft.text)), dict[tuple[int, ...], list[int]]()
        told[()] = [draft.text[-1]]
        for node in nodes:
            above = told[node[:-1]]
            order = weights.logits(len(node) - 1, feature, above).argsort(descending=True, stable=True)
            told[node] = [*above, int(order[node[-1]])]
        assert list(draft.tree) == [tuple(told[node][1:]) for node in nodes]


@pytest.mark.parametrize("kind", ["mlp", "prefix-mlp"])
@pytest.mark.parametrize("tree", [None, "mc_sim_7b_63"])
def test_heads_that_know_the_text_are_believed(kind: str, tree: str | None) -> None:
    plain = texts(generate(llm_with(None), max_tokens=40))
    known = {tuple(prompt): prompt + answer for prompt, answer in zip(PROMPTS, plain)}
    outputs = generate(llm_with(Hydra(knowing_hydra(known, kind), tree=tree)), max_tokens=40)
    assert texts(outputs) == plain
    assert sum(sum(output.stats.accepted) for output in outputs) > 40


@pytest.mark.parametrize("behind", [None, 1, 2])
def test_the_prefix_layer_goes_on_after_hits_rounds_ahead_and_accepted_branches(behind: int | None) -> None:
    plain = texts(generate(llm_with(None), max_tokens=24))
    known = {tuple(prompt): prompt + answer for prompt, answer in zip(PROMPTS, plain)}
    path = knowing_hydra(known, "prefix-mlp")
    spy = Spy(Hydra(path, tree=[(0,), (1,), (0, 0), (1, 0), (0, 0, 0)]))
    llm = tiny_llm(spy, behind, kernels="torch", block_size=4)
    for _ in range(2):  # the second time on pages that are its own
        assert texts(generate(llm, max_tokens=24)) == plain
    check_books(llm)
    half = len(spy.seen) // 2
    fresh = {tuple(draft.text): draft.tokens for draft in spy.seen[:half]}
    again = [(draft.tokens, fresh[tuple(draft.text)]) for draft in spy.seen[half:] if tuple(draft.text) in fresh]
    shared = [(new[: len(old)], old[: len(new)]) for new, old in again]
    assert len(shared) > 10 and all(new == old for new, old in shared)


@pytest.mark.parametrize("kind", ["mlp", "prefix-mlp"])
def test_a_drafter_that_is_switched_on_in_the_middle_drafts_from_what_it_sees(kind: str) -> None:
    llm = llm_with(None, block_size=4)
    generate(llm)
    spy = Spy(Hydra(hydra(kind)[0]))
    llm.set_drafter(spy)
    assert texts(generate(llm)) == texts(generate(llm_with(None)))
    assert sum(len(draft.tokens) for draft in spy.seen) > 40


@pytest.mark.parametrize("quantization", ["int8", "none"])
def test_packed_weights_change_drafts_a_little_and_no_text(quantization: str) -> None:
    path, weights = hydra("prefix-mlp")
    spy = Spy(Hydra(path, quantization=quantization))
    outputs = generate(tiny_llm(spy, kernels="native"), max_tokens=24)
    assert texts(outputs) == texts(generate(tiny_llm(kernels="native"), max_tokens=24))
    first = [(d.tokens[0], chain_of(weights, d.text, 1)[0]) for d in spy.seen if d.tokens]
    agreed = sum(own == wanted for own, wanted in first) / len(first)
    assert agreed == 1.0 if quantization == "none" else agreed > 0.6


def changed(change: dict[str, Any], config: dict[str, Any] | None = None) -> str:
    tensors = {name: t for name, t in (hydra_weights(1, True).parts | change).items() if t is not None}
    return write({**HYDRA, **(config or {})}, tensors, "hydra_lm_head.pt")


REFUSED: list[tuple[Any, str]] = [
    (lambda: Hydra(hydra()[0], 5), "num_draft_tokens=5 is too many: .* drafts 4 at most"),
    (lambda: Hydra(hydra()[0], tree=[(0,) * n for n in range(1, 6)]), "5 nodes deep, but .* has 4 heads"),
    (lambda: Hydra(changed({}, {"hydra_head_arch": "eagle-attn"})), "kind 'eagle-attn'; allowed: mlp, prefix-mlp"),
    (lambda: Hydra(changed({}, {"hydra_head_arch": "prefix-mlp"})), "lacks the tensor prefix_embeding_layer"),
    (lambda: Hydra(changed({}, {"hidden_state_offset": 3})), "hidden_state_offset=3; allowed: 0 to 2"),
    (lambda: Hydra(changed({"hydra_mlp.1.0.linear.bias": None})), r"lacks the tensor hydra_mlp\.1\.0\.linear\.bias"),
    (lambda: Hydra(changed({"odd": torch.zeros(2)})), "holds tensors that no drafter .*: odd"),
    (lambda: Hydra(changed({"hydra_mlp.0.0.linear.weight": torch.zeros(48, 96)})), "hidden size 48, but this one has"),
    (
        lambda: Hydra(changed({"hydra_mlp.0.0.linear.weight": None})),
        r"lacks the tensor hydra_mlp\.0\.0\.linear",
    ),
    (lambda: Hydra(changed({"hydra_lm_head.1.weight": torch.zeros(104, 32)})), "vocabulary size 104, but this one"),
    (lambda: Hydra(write(HYDRA, {"x": torch.zeros(1)}, "hydra_lm_head.pt")), "holds no Hydra head"),
]


@pytest.mark.parametrize(("config", "said"), REFUSED, ids=[said for _, said in REFUSED])
def test_what_does_not_fit_is_refused_in_a_sentence(config: Any, said: str) -> None:
    with pytest.raises((OptionError, CheckpointError), match=said):
        llm_with(config())
