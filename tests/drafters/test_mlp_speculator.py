"""MLP speculators: every layout loads, every draft is what the equations say, and trees are fms' trees."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

from paceline import LLM, MLPSpeculator
from paceline.drafters import make
from paceline.drafters.mlp_speculator import state_weight
from paceline.errors import CheckpointError, OptionError
from tests.drafters.tiny_heads import PROMPTS, Draft, Spy, generate, state_before, texts, write
from tests.drafters.tiny_mlp import MLPWeights, knowing_mlp, mlp, mlp_config, mlp_weights
from tests.fakes import tiny_llm, tiny_model


def llm_with(drafter: Any, **options: Any) -> LLM:
    return tiny_llm(drafter, **{"kernels": "torch", **options})


def chain_of(weights: MLPWeights, text: list[int], count: int) -> list[int]:
    """By hand, greedy."""
    state, tokens = state_before(text), [text[-1]]
    for step in range(count):
        state, logits = weights.step(step, state, tokens[-1])
        tokens.append(int(logits.argmax()))
    return tokens[1:]


def paths_of(weights: MLPWeights, text: list[int], branching: list[int], num_paths: int) -> list[tuple[int, ...]]:
    """By hand: every branch grows by a step's likeliest; the likeliest full-length paths, the best first."""
    live: list[tuple[float, tuple[int, ...], Any]] = [(0.0, (), state_before(text))]
    for step, count in enumerate(branching):
        grown = []
        for score, path, state in live:
            after, logits = weights.step(step, state, path[-1] if path else text[-1])
            best = torch.log_softmax(logits, dim=0).topk(count)
            grown += [(score + float(v), (*path, int(t)), after) for v, t in zip(best.values, best.indices)]
        live = grown
    return [path for _, path, _ in sorted(live, key=lambda item: -item[0])[:num_paths]]


LAYOUTS = [
    (tied, scaled, aliases) for tied, scaled, aliases in itertools.product((False, True), repeat=3)
]  # aliases: all under the prefix; else the fewest tensors without one


@pytest.mark.parametrize(("tied", "scaled", "aliases"), LAYOUTS)
def test_every_layout_drafts_what_the_equations_say(tied: bool, scaled: bool, aliases: bool) -> None:
    path, weights = mlp(tied, scaled, aliases)
    spy = Spy(make(path))
    assert spy.config == MLPSpeculator(path), "told from its config"
    outputs = generate(llm_with(spy))
    assert texts(outputs) == texts(generate(llm_with(None)))
    assert spy.made.max_nodes == 3, "the checkpoint's own length"
    drafts = [draft for draft in spy.seen if draft.tokens]
    assert {len(draft.tokens) for draft in drafts} >= {3}
    for draft in drafts:
        assert draft.tokens == chain_of(weights, draft.text, len(draft.tokens)), len(draft.text)


def test_a_tied_checkpoint_without_its_aliases_is_the_same_model() -> None:
    found = []
    for aliases in (True, False):
        spy = Spy(MLPSpeculator(mlp(True, False, aliases)[0]))
        generate(llm_with(spy))
        found.append(spy.seen)
    assert found[0] == found[1]


def test_state_weights_are_the_published_ones() -> None:
    assert round(state_weight(3), 7) == 0.8908987 and round(state_weight(5), 7) == 0.9330330


def test_the_weight_of_a_token_is_the_checkpoints_whatever_the_draft_length() -> None:
    path, weights = mlp()
    spy = Spy(MLPSpeculator(path, 2))
    generate(llm_with(spy))
    assert spy.made.steps[0].share == pytest.approx(
        math.sqrt((1 - state_weight(3) ** 2) * 24 / 2) / state_weight(3), rel=1e-9
    )
    assert max(len(draft.tokens) for draft in spy.seen) == 2
    assert all(draft.tokens == chain_of(weights, draft.text, len(draft.tokens)) for draft in spy.seen)


def merged(paths: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Every node once, where it is met first."""
    return list(dict.fromkeys(path[: depth + 1] for path in paths for depth in range(len(path))))


def check_tree(draft: Draft, weights: MLPWeights, branching: list[int], num_paths: int) -> int:
    """The tree is the one by hand, as far as the budget goes; how many nodes paths share."""
    wanted = merged(paths_of(weights, draft.text, branching, num_paths))
    assert list(draft.tree) == wanted[: len(draft.tokens)]
    return len(branching) * num_paths - len(wanted)


def test_a_tree_holds_the_likeliest_full_paths_with_shared_beginnings_merged() -> None:
    path, weights = mlp()
    spy = Spy(MLPSpeculator(path, tree=True))
    outputs = generate(llm_with(spy))
    assert texts(outputs) == texts(generate(llm_with(None)))
    assert spy.made.max_nodes == 15 and spy.made.trees
    shared = [check_tree(draft, weights, [4, 3, 2], 5) for draft in spy.seen if draft.tokens]
    assert len(shared) > 15 and min(shared) < max(shared), "paths share more here and less there"


def test_a_tree_of_the_user_s_own_shape_is_cut_to_a_number_of_nodes() -> None:
    path, weights = mlp(True, True)
    spy = Spy(MLPSpeculator(path, 4, tree=True, top_k=(2, 1, 3), num_paths=6))
    generate(llm_with(spy))
    assert max(len(draft.tokens) for draft in spy.seen) == 4
    for draft in spy.seen:
        check_tree(draft, weights, [2, 1, 3], 6)


@pytest.mark.parametrize("tree", [False, True])
def test_steps_that_know_the_text_are_believed(tree: bool) -> None:
    """Fitted outside to what comes next: a wrong shift would make them wrong."""
    plain = texts(generate(llm_with(None), max_tokens=40))
    known = {tuple(prompt): prompt + answer for prompt, answer in zip(PROMPTS, plain)}
    outputs = generate(llm_with(MLPSpeculator(knowing_mlp(known), tree=tree)), max_tokens=40)
    assert texts(outputs) == plain
    accepted = sum(sum(output.stats.accepted) for output in outputs)
    assert accepted > 60


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("acceptance", ["exact", "rejection", "typical"])
def test_a_sampled_answer_goes_well_under_every_rule(acceptance: str, tree: bool) -> None:
    llm = llm_with(MLPSpeculator(mlp()[0], tree=tree), acceptance=acceptance)
    outputs = generate(llm, temperature=1.0, seed=3, max_tokens=20)
    assert [len(output.token_ids) for output in outputs] == [20] * 3
    if acceptance == "exact":
        assert texts(outputs) == texts(generate(llm_with(None), temperature=1.0, seed=3, max_tokens=20))


@pytest.mark.parametrize("quantization", ["int8", "int4", "none"])
def test_packed_weights_change_drafts_a_little_and_no_text(quantization: str) -> None:
    """Inner size 32, since only whole blocks of 32 are packed."""
    path, weights = mlp(inner=32)
    spy = Spy(MLPSpeculator(path, quantization=quantization))
    outputs = generate(tiny_llm(spy, kernels="native"), max_tokens=24)
    assert texts(outputs) == texts(generate(tiny_llm(kernels="native"), max_tokens=24))
    first = [(d.tokens[0], chain_of(weights, d.text, 1)[0]) for d in spy.seen if d.tokens]
    agreed = sum(own == wanted for own, wanted in first) / len(first)
    assert agreed == 1.0 if quantization == "none" else agreed > 0.6
    assert spy.made._ops.quantization == {"int8": "Q8_0", "int4": "Q4_1", "none": None}[quantization]


def changed(**changes: Any) -> str:
    """The untied checkpoint with other tensors; None: without it."""
    tensors = {f"speculator.{name}": tensor for name, tensor in mlp_weights(False, False).parts.items()}
    tensors = {name: t for name, t in (tensors | changes).items() if t is not None}
    return write(mlp_config(), tensors)


REFUSED: list[tuple[Any, str]] = [
    (lambda: MLPSpeculator(mlp()[0], 4), "num_draft_tokens=4 is too many: .* drafts 3 at most"),
    (lambda: MLPSpeculator(mlp()[0], tree=True, top_k=(2, 2)), "top_k=.* allowed: 3 numbers"),
    (lambda: MLPSpeculator(mlp()[0], tree=True, top_k=(1, 2, 1), num_paths=3), "num_paths=3 .* allowed: 1 to 2"),
    (lambda: MLPSpeculator(mlp()[0], top_k=(1, 2, 1)), "top_k and num_paths are for trees"),
    (lambda: MLPSpeculator(mlp()[0], 0), "num_draft_tokens=0 is not allowed"),
    (lambda: MLPSpeculator(mlp()[0], quantization="int3"), "quantization='int3' is not known; allowed: int8"),
    (lambda: MLPSpeculator(changed(**{"speculator.ln.2.bias": None})), r"lacks the tensor ln\.2\.bias"),
    (lambda: MLPSpeculator(changed(**{"speculator.odd": torch.zeros(2)})), "holds tensors that no drafter .*: odd"),
    (
        lambda: MLPSpeculator(changed(**{"speculator.proj.0.weight": torch.zeros(24, 48)})),
        "made for a target with hidden size 48, but this one has 32",
    ),
    (
        lambda: MLPSpeculator(changed(**{"speculator.emb.0.weight": torch.zeros(104, 24)})),
        "made for a target with vocabulary size 104, but this one has 97",
    ),
]


@pytest.mark.parametrize(("config", "said"), REFUSED, ids=[said for _, said in REFUSED])
def test_what_does_not_fit_is_refused_in_a_sentence(config: Any, said: str) -> None:
    with pytest.raises((OptionError, CheckpointError), match=said):
        llm_with(config())


def test_tied_weights_that_differ_are_refused() -> None:
    tensors = dict(mlp_weights(True, False).parts)
    tensors["head.2.weight"] = tensors["head.2.weight"] + 1
    with pytest.raises(CheckpointError, match=r"says that its weights are tied, but head\.2\.weight is not head\.0"):
        llm_with(MLPSpeculator(write(mlp_config(tied=True), tensors)))


def test_drafts_come_after_a_switch_on_a_prefix_hit_and_behind_a_device_too() -> None:
    path, weights = mlp()
    for behind in (None, 1, 2):
        llm = tiny_llm(None, behind, kernels="torch", block_size=4)
        generate(llm)
        spy = Spy(MLPSpeculator(path))
        llm.set_drafter(spy)
        generate(llm, [PROMPTS[2], PROMPTS[0]])
        assert sum(len(draft.tokens) for draft in spy.seen) > 30
        assert all(draft.tokens == chain_of(weights, draft.text, len(draft.tokens)) for draft in spy.seen)


def test_the_tiny_target_is_the_one_the_checkpoints_are_for() -> None:
    assert (tiny_model().config.hidden_size, tiny_model().config.vocab_size) == (32, 97)
