"""Medusa heads: every layout loads, every draft is what the equations say, trees are the published ones."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from paceline import LLM, FirstOf, Medusa, NGram
from paceline.drafters import make
from paceline.drafters.static_tree import PUBLISHED, find_tree
from paceline.errors import CheckpointError, OptionError
from tests.drafters.tiny_heads import PROMPTS, Spy, begin, generate, state_before, texts, write
from tests.drafters.tiny_medusa import (
    MEDUSA,
    ORIGINAL,
    MedusaWeights,
    knowing_medusa,
    medusa,
    medusa_weights,
    original_names,
    vllm_names,
)
from tests.fakes import VOCAB, tiny_llm, tiny_model


def llm_with(drafter: Any, **options: Any) -> LLM:
    return tiny_llm(drafter, **{"kernels": "torch", **options})


def chain_of(weights: MedusaWeights, text: list[int], count: int) -> list[int]:
    state = state_before(text)
    return [int(weights.logits(head, state).argmax()) for head in range(count)]


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("layout", MEDUSA)
def test_every_layout_drafts_what_the_equations_say(layout: str, layers: int) -> None:
    path, weights = medusa(layout, layers)
    spy = Spy(make(path))
    assert spy.config == Medusa(path), "told from config or tensors"
    outputs = generate(llm_with(spy), max_tokens=8)
    assert texts(outputs) == texts(generate(llm_with(None), max_tokens=8))
    assert spy.made.max_nodes == 3, "heads are counted; the config says 2 or nothing"
    drafts = [draft for draft in spy.seen if draft.tokens]
    assert max(len(draft.tokens) for draft in drafts) == 3
    for draft in drafts:
        assert draft.tokens == chain_of(weights, draft.text, len(draft.tokens)), len(draft.text)
        if weights.token_map is not None:
            assert set(draft.tokens) <= set(weights.token_map.tolist())


def test_without_its_blocks_a_head_is_its_output_matrix_alone() -> None:
    weights = medusa_weights()
    weights.blocks = [[(torch.zeros_like(w), torch.zeros_like(b)) for w, b in blocks] for blocks in weights.blocks]
    spy = Spy(Medusa(write(ORIGINAL, original_names(weights), "medusa_lm_head.pt")))
    generate(llm_with(spy))
    for draft in spy.seen:
        state = state_before(draft.text)
        assert draft.tokens == [int((out @ state).argmax()) for out in weights.outs][: len(draft.tokens)]


# Trees


def test_the_published_trees_are_whole_and_have_63_nodes() -> None:
    for name in PUBLISHED:
        tree = find_tree(name)
        assert len(set(tree.nodes)) == 63 and tree.depth == 4, name
        parents = tree.parents
        assert all(parent < node for node, parent in enumerate(parents))
        siblings: dict[int, list[int]] = {}
        for ranks, parent in zip(tree.nodes, parents):
            siblings.setdefault(parent, []).append(ranks[-1])
        assert all(ranks == list(range(len(ranks))) for ranks in siblings.values()), "ranks 0, 1, 2, … in order"


def test_a_tree_that_is_cut_keeps_its_likelier_part() -> None:
    assert find_tree("mc_sim_7b_63").nodes[:5] == ((0,), (0, 0), (1,), (0, 0, 0), (0, 1))
    assert find_tree([(1,), (0,), (0, 3)]).first(2).nodes == ((0,), (1,))


OWN = [(0,), (2,), (0, 0), (0, 1), (2, 4), (0, 1, 1)]  # ranks need not be neighbours


@pytest.mark.parametrize("tree", [*PUBLISHED, OWN], ids=[*PUBLISHED, "own"])
def test_a_node_is_a_rank_of_its_depths_head_whatever_stands_above_it(tree: Any) -> None:
    path, weights = medusa("pt", 1, 4)
    spy = Spy(Medusa(path, tree=tree))
    begin(llm_with(spy), 3)
    ranks = find_tree(tree).nodes
    assert [len(draft.tokens) for draft in spy.seen] == [len(ranks)] * 6
    for draft in spy.seen:
        state = state_before(draft.text)
        order = [weights.logits(head, state).argsort(descending=True, stable=True).tolist() for head in range(4)]
        wanted = [tuple(order[depth][rank] for depth, rank in enumerate(node)) for node in ranks]
        assert list(draft.tree) == wanted[: len(draft.tokens)]


def test_a_tree_is_cut_to_a_number_of_nodes() -> None:
    spy = Spy(Medusa(medusa("pt", 1, 4)[0], 7, tree="mc_sim_7b_63"))
    begin(llm_with(spy), 3)
    assert [len(draft.tokens) for draft in spy.seen] == [7] * 6


@pytest.mark.parametrize("tree", [None, "mc_sim_7b_63"])
def test_heads_that_know_the_text_are_believed(tree: str | None) -> None:
    """Fitted outside to (state, token behind it) pairs: a wrong shift would make them wrong."""
    plain = texts(generate(llm_with(None), max_tokens=40))
    known = {tuple(prompt): prompt + answer for prompt, answer in zip(PROMPTS, plain)}
    outputs = generate(llm_with(Medusa(knowing_medusa(known), tree=tree)), max_tokens=40)
    assert texts(outputs) == plain
    accepted = sum(sum(output.stats.accepted) for output in outputs)
    assert accepted > 40


@pytest.mark.parametrize("tree", [None, "zephyr_stage2"])
@pytest.mark.parametrize("acceptance", ["exact", "rejection", "typical"])
def test_a_sampled_answer_goes_well_under_every_rule(acceptance: str, tree: str | None) -> None:
    llm = llm_with(Medusa(medusa("pt", 1, 4)[0], tree=tree), acceptance=acceptance)
    outputs = generate(llm, temperature=1.0, seed=3, max_tokens=20)
    assert [len(output.token_ids) for output in outputs] == [20] * 3
    if acceptance == "exact":
        assert texts(outputs) == texts(generate(llm_with(None), temperature=1.0, seed=3, max_tokens=20))
    if acceptance == "typical":  # by name only, since it changes the text; greedy it does not
        assert texts(generate(llm)) == texts(generate(llm_with(None)))


def test_a_tree_keeps_the_distribution_under_rejection() -> None:
    """The second and third token of many samples, against the target's own probabilities of all that can be said."""
    prompt, count = PROMPTS[0], 480
    plain = texts(generate(llm_with(None), [prompt], max_tokens=8))[0]
    heads = Medusa(knowing_medusa({tuple(prompt): prompt + plain}), tree=[(0,), (1,), (0, 0), (1, 0)])
    llm = llm_with(heads, acceptance="rejection", max_num_seqs=96)
    outputs = generate(llm, [prompt], max_tokens=5, temperature=1.0, top_k=2, seed=8, n=count)
    assert sum(sum(output.stats.accepted) for output in outputs) > count / 4
    found = Counter(tuple(output.token_ids[:3]) for output in outputs)
    said: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        grown = {}
        for path, chance in said.items():
            with torch.no_grad():
                best = tiny_model()(torch.tensor([prompt + list(path)])).logits[0, -1].double().topk(2)
            for token, share in zip(best.indices.tolist(), torch.softmax(best.values, 0).tolist()):
                grown[(*path, token)] = chance * share
        said = grown
    assert set(found) <= set(said)
    likely = [(found[path], count * chance) for path, chance in said.items() if count * chance > 4]
    assert len(likely) > 3 and sum((seen - wanted) ** 2 / wanted for seen, wanted in likely) < 3 * len(likely)


def test_a_chain_goes_under_the_rule_that_judges_whole_chains_and_a_tree_does_not() -> None:
    path = medusa("pt", 1, 4)[0]
    generate(llm_with(Medusa(path), acceptance="block"), temperature=1.0, seed=1)
    with pytest.raises(OptionError, match="judges chains, but the drafter 'medusa' proposes trees"):
        llm_with(Medusa(path, tree="zephyr_stage2"), acceptance="block")


def test_medusa_drafts_where_others_have_nothing_to_say() -> None:
    llm = llm_with(FirstOf(NGram(3), Medusa(medusa()[0])))
    outputs = generate(llm, max_tokens=20)
    assert texts(outputs) == texts(generate(llm_with(None), max_tokens=20))
    assert llm.engine.drafter is not None and llm.engine.drafter.max_nodes == 3


def test_a_whole_model_with_heads_drafts_for_itself() -> None:
    path, _ = medusa("full")
    llm = LLM(path, path, kernels="torch", max_model_len=200, device="cpu")
    assert llm.engine.drafter is not None and llm.engine.drafter.name == "medusa"
    assert texts(generate(llm)) == texts(generate(llm_with(None)))


@pytest.mark.parametrize("quantization", ["int8", "int4", "none"])
def test_packed_weights_change_drafts_a_little_and_no_text(quantization: str) -> None:
    path, weights = medusa()
    spy = Spy(Medusa(path, quantization=quantization))
    outputs = generate(tiny_llm(spy, kernels="native"), max_tokens=24)
    assert texts(outputs) == texts(generate(tiny_llm(kernels="native"), max_tokens=24))
    pairs = [pair for d in spy.seen for pair in zip(d.tokens, chain_of(weights, d.text, len(d.tokens)))]
    agreed = sum(own == wanted for own, wanted in pairs) / len(pairs)
    assert agreed == 1.0 if quantization == "none" else agreed > 0.6
    assert spy.made._ops.quantization == {"int8": "Q8_0", "int4": "Q4_1", "none": None}[quantization]


# Refusals


def changed(change: dict[str, Any]) -> str:
    tensors = original_names(medusa_weights()) | change
    return write(ORIGINAL, {name: t for name, t in tensors.items() if t is not None}, "medusa_lm_head.safetensors")


def mapped(change: dict[str, Any]) -> str:
    weights = medusa_weights(bias=False, outs="map")
    tensors = vllm_names(weights) | {"token_map": weights.token_map} | change
    return write({"model_type": "medusa"}, {name: t for name, t in tensors.items() if t is not None})


REFUSED: list[tuple[Any, str]] = [
    (lambda: Medusa(medusa()[0], 4), "num_draft_tokens=4 is too many: .* drafts 3 at most"),
    (lambda: Medusa(medusa()[0], tree="mc_sim_7b_63"), "the tree is 4 nodes deep, but .* has 3 heads"),
    (lambda: Medusa(medusa()[0], tree="mc_sim"), "tree='mc_sim' is not known; allowed: mc_sim_7b_63, vicuna"),
    (lambda: Medusa(medusa()[0], tree=[(0,), (1, 0)]), r"tree holds \(1, 0\), but not the node above it, \(1,\)"),
    (lambda: Medusa(medusa()[0], tree=[(0,), (0,)]), r"tree holds \(0,\) twice"),
    (lambda: Medusa(medusa()[0], tree=[(0,), 1]), "is not a tree; allowed: rank tuples"),
    (lambda: Medusa(medusa()[0], -1), "num_draft_tokens=-1 is not allowed"),
    (lambda: Medusa(changed({"1.0.linear.weight": None})), r"lacks the tensor 1\.0\.linear\.weight"),
    (lambda: Medusa(changed({"1.1.weight": None})), r"lacks the tensor 1\.1\.weight"),
    (lambda: Medusa(mapped({"lm_heads.2.weight": None})), r"lacks the tensor lm_heads\.2\.weight"),
    (lambda: Medusa(changed({"odd.weight": torch.zeros(2)})), r"holds tensors that no drafter .*: odd\.weight"),
    (lambda: Medusa(changed({"0.0.linear.weight": torch.zeros(48, 48)})), "hidden size 48, but this one has 32"),
    (lambda: Medusa(changed({"2.1.weight": torch.zeros(104, 32)})), "vocabulary size 104, but this one has 97"),
    (lambda: Medusa(mapped({"token_map": None})), "vocabulary size 40, but this one has 97"),
    (lambda: Medusa(mapped({"token_map": torch.full((40,), VOCAB)})), "token_map does not give .* 40 rows another"),
    (lambda: Medusa(mapped({"token_map": torch.arange(40) // 2})), "token_map does not give each .* 40 rows another"),
    (lambda: Medusa(write({"medusa_num_heads": 3}, {"x": torch.zeros(1)})), "holds no Medusa head"),
]


@pytest.mark.parametrize(("config", "said"), REFUSED, ids=[said for _, said in REFUSED])
def test_what_does_not_fit_is_refused_in_a_sentence(config: Any, said: str) -> None:
    with pytest.raises((OptionError, CheckpointError), match=said):
        llm_with(config())


def test_drafts_come_after_a_switch_on_a_prefix_hit_and_behind_a_device_too() -> None:
    path, weights = medusa()
    for behind in (None, 1, 2):
        llm = tiny_llm(None, behind, kernels="torch", block_size=4)
        generate(llm)
        spy = Spy(Medusa(path))
        llm.set_drafter(spy)
        generate(llm, [PROMPTS[2], PROMPTS[0]])
        assert sum(len(draft.tokens) for draft in spy.seen) > 30
        assert all(draft.tokens == chain_of(weights, draft.text, len(draft.tokens)) for draft in spy.seen)
