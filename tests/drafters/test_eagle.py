"""EAGLE heads in every layout: each draft is the one the equations give for its text, chain, tree and in parallel."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline import LLM, Eagle, SamplingParams
from paceline.drafters import make
from paceline.drafters.base import FINAL, Context
from paceline.drafters.eagle import EagleDrafter
from paceline.drafters.formats import find_held
from paceline.drafters.tree import Proposal
from paceline.engine.context import DraftContext
from paceline.errors import CheckpointError, OptionError
from paceline.testing import tiny_llm, tokens_of
from tests.drafters.contract import prompts
from tests.drafters.eagle_by_hand import Hand, Node
from tests.drafters.tiny_eagle import Facts, Tensors, config_of, deep_target, random_tensors, renamed, tiny_eagle, write
from tests.native import needs_native

MAX_TOKENS = 8
FIRST, THIRD = Facts(third=False, bias=True), Facts()


class Spied(EagleDrafter):
    """Keeps every proposal with the text it was made for, as paths of tokens in the order of its nodes."""

    seen: list[tuple[list[int], list[Node]]]

    def propose(self, context: Context) -> Proposal:
        proposal = super().propose(context)
        for row, (slot, length) in enumerate(zip(context.slot_list, context.lengths.tolist())):
            assert int(self.first[slot]) == 1
            paths: list[Node] = []
            for token, above in list(zip(proposal.tokens[row].tolist(), proposal.parents[row].tolist())):
                if above > -2:
                    paths.append((*(paths[above] if above >= 0 else ()), token))
            self.seen.append((context.table.tokens.tensor[slot, :length].tolist(), paths))
        return proposal


@dataclasses.dataclass(frozen=True)
class Spy(Eagle):
    def create(self) -> Spied:
        drafter = Spied(self)
        drafter.seen = []
        return drafter


def run(config: Eagle, max_tokens: int = MAX_TOKENS, **options: Any) -> tuple[Any, list[list[int]]]:
    given = {"kernels": "reference", "max_model_len": 100, "device": "cpu", **options}
    llm = LLM(deep_target(), drafter=config, **given)
    outputs = llm.generate(prompts(2), SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True))
    return llm.engine.drafter, [output.outputs[0].token_ids for output in outputs]


@functools.cache
def plain(max_tokens: int = MAX_TOKENS) -> list[list[int]]:
    llm = LLM(deep_target(), kernels="reference", max_model_len=100, device="cpu")
    outputs = llm.generate(prompts(2), SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True))
    return [output.outputs[0].token_ids for output in outputs]


def states_of(text: list[int], boundaries: tuple[int, ...]) -> Tensor:
    with torch.no_grad():
        found = deep_target()(torch.tensor([text]), output_hidden_states=True).hidden_states
    return torch.cat([found[boundary][0] for boundary in boundaries], dim=1)  # the last of them is post-norm


def hand(tensors: Tensors, third: bool, **flags: Any) -> Hand:
    target = deep_target()
    return Hand(tensors, target.model.embed_tokens.weight.detach(), target.lm_head.weight.detach(), third, flags)


def norms(facts: Facts, *names: str) -> Tensors:
    sizes = {"input_norm": 3 * facts.target, "enorm": 32, "hnorm": 32}
    generator = torch.Generator().manual_seed(9)
    return {f"{n}.weight": 1 + 0.3 * torch.randn(sizes.get(n, facts.target), generator=generator) for n in names}


def layered(config: dict[str, Any], **top: Any) -> dict[str, Any]:
    """As speculators writes it."""
    inner = {**config, "model_type": "llama"}
    return {"transformer_layer_config": inner, "speculators_config": {}, "norm_before_residual": False, **top}


SPECULATORS = {"speculators_model_type": "eagle3", "architectures": ["Eagle3Speculator"]}
STATE_NORMS = ("fc_norm.0", "fc_norm.1", "fc_norm.2")


def chains() -> dict[str, tuple[Facts, Tensors, Tensors, dict[str, Any], dict[str, Any]]]:
    """name → facts, tensors by hand, tensors on disk, config, flags."""
    rows: dict[str, Any] = {}

    def add(name: str, facts: Facts, more: Any = (), rename: Any = (), config: Any = (), **flags: Any) -> None:
        tensors = random_tensors(facts) | dict(more)
        on_disk = renamed(tensors, *rename)
        whole = config(config_of(facts)) if callable(config) else config_of(facts) | dict(config)
        rows[name] = facts, tensors, on_disk, whole, flags

    add("eagle 1", Facts(third=False))
    add("eagle 1 with biases", Facts(third=False, bias=True, qkv_bias=True, embedding=True))
    add("eagle 1 of two layers", Facts(third=False, layers=2))
    add("eagle 1 as vllm converts it", FIRST, {}, [("", "model.model.")],
        lambda c: {"model_type": "eagle", "model": c})  # fmt: skip
    add("eagle 1 with norms on its inputs", FIRST, norms(FIRST, "enorm", "hnorm"), [("", "model.")],
        lambda c: {"model_type": "eagle", "model": {**c, "add_para_norm": True}})  # fmt: skip
    add("eagle 1 in speculators", FIRST, {}, [("fc.", "fusion_fc."), ("layers.0.", "transformer.")],
        lambda c: layered(c, speculators_model_type="eagle", fusion_bias=True))  # fmt: skip
    names = ("enorm", "layers.0.input_layernorm", "norm")
    published = ("embedding_layernorm", "transformer.input_layernorm", "pre_lm_head_layernorm")
    moved = [("fc.", "fusion_fc."), *zip(names, published), ("layers.0.", "transformer.")]
    add("eagle 1 in speculators with norms", FIRST, norms(FIRST, *names), moved,
        lambda c: layered(c, speculators_model_type="eagle", layernorms=True), norms=True)  # fmt: skip
    few = {"token_map": torch.tensor([3, 96, 7, 40, 12]), "lm_head.weight": torch.eye(5, 32)}
    add("eagle 1 of few tokens", FIRST, few, [("", "model.")],
        lambda c: {"model_type": "eagle", "model": c, "truncated_vocab_size": 5})  # fmt: skip
    add("eagle 3", THIRD)
    add(
        "eagle 3 of specforge",
        THIRD,
        {},
        [("midlayer.", "layers.0.")],
        {"architectures": ["LlamaForCausalLMEagle3"], "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}},
    )
    add("eagle 3 in speculators", THIRD, {}, [("midlayer.", "layers.0.")], lambda c: layered(c, **SPECULATORS))
    add("eagle 3 with the residual normed", THIRD, {}, [], {"norm_before_residual": True}, norm_before_residual=True)
    add("eagle 3 that feeds its normed state", THIRD, {}, [], {"norm_output": True}, norm_output=True)
    add("eagle 3 with a norm over states", THIRD, norms(THIRD, "input_norm"), [], {"norm_before_fc": True})
    add("eagle 3 with a norm a state", THIRD, norms(THIRD, *STATE_NORMS), [], {"fc_norm": True})
    old = [("fc_norm.0", "aux_norm_low"), ("fc_norm.1", "aux_norm_mid"), ("fc_norm.2", "aux_norm_high")]
    add("eagle 3 with a norm a state, as once named", THIRD, norms(THIRD, *STATE_NORMS), old, {"use_aux_norm": True})
    add("eagle 3 of two layers", Facts(layers=2))
    add("eagle 3 of the last state", Facts(states=0), [], [], {"eagle_config": {"use_aux_hidden_state": False}})
    add("eagle 3 with all tokens", Facts(vocab=97))
    add("eagle 3 of another size", Facts(hidden=64, embedding=True))
    add("eagle 3 with normed heads", Facts(head_norms=True, qkv_bias=True))
    return rows


@pytest.mark.parametrize("name", chains())
def test_every_draft_of_a_chain_is_that_of_the_equations(name: str) -> None:
    facts, tensors, on_disk, config, flags = chains()[name]
    drafter, outputs = run(Spy(write(on_disk, config), 3))
    assert outputs == plain()
    assert drafter.taps.hidden == ((2, 4, 5) if facts.third and facts.states else (FINAL,))
    check_chains(drafter.seen, tensors, facts, flags)


def check_chains(seen: list[tuple[list[int], list[Node]]], tensors: Tensors, facts: Facts, flags: Any) -> None:
    assert len(seen) >= MAX_TOKENS
    for text, paths in seen[:: max(1, len(seen) // 5)]:
        states = states_of(text, (2, 4, 5) if facts.third and facts.states else (8,))
        drafts = hand(tensors, facts.third, **flags).chain(text, states, len(paths))
        assert paths == [tuple(drafts[: n + 1]) for n in range(len(paths))], len(text)


@needs_native
def test_the_native_kernels_draft_the_same_without_quantisation() -> None:
    tensors = random_tensors(THIRD)
    drafter, _ = run(Spy(write(tensors, config_of(THIRD)), 3, quantization="none"), kernels="native")
    check_chains(drafter.seen, tensors, THIRD, {})
    packed, _ = run(Spy(write(tensors, config_of(THIRD)), 3), kernels="native")
    assert packed.network.ops.quantization == "Q8_0" and drafter.network.ops.quantization is None


def test_a_parallel_head_drafts_all_tokens_in_one_pass() -> None:
    facts = Facts(mask=True)
    tensors = random_tensors(facts)
    config = layered(config_of(facts), speculators_model_type="peagle", mask_token_id=96)
    path = write(renamed(tensors, ("midlayer.", "layers.0.")), config)
    drafter, outputs = run(Spy(path, 3))
    assert outputs == plain()
    for text, paths in drafter.seen[::3]:
        drafts = hand(tensors, True).parallel(text, states_of(text, (2, 4, 5)), len(paths), 96)
        assert paths == [tuple(drafts[: n + 1]) for n in range(len(paths))]
    with pytest.raises(OptionError, match="drafts in parallel; tree='static' is not allowed; allowed: chain"):
        run(Eagle(path, tree="static"))


def test_a_dynamic_tree_keeps_the_likeliest_of_its_pool() -> None:
    tensors = random_tensors(THIRD)
    drafter, outputs = run(Spy(write(tensors, config_of(THIRD)), 7, tree="dynamic", top_k=3, depth=2), 14)
    assert outputs == plain(14)
    full = [(text, paths) for text, paths in drafter.seen if len(paths) == 7]
    assert len(full) >= 4
    for text, paths in full[::2]:
        pool = hand(tensors, True).dynamic(text, states_of(text, (2, 4, 5)), 3, 2)
        assert len(pool) == 3 + 2 * 9
        best = sorted(pool, key=lambda item: -item[0])[:7]
        assert set(paths) == {node for _, node in best}
        assert all(path[:-1] == () or path[:-1] in paths for path in paths) and max(map(len, paths)) <= 3


def test_a_dynamic_tree_of_a_small_budget_grows_fewer_nodes_a_level() -> None:
    drafter, outputs = run(Spy(write(random_tensors(THIRD), config_of(THIRD)), 5, tree="dynamic", top_k=4, depth=3))
    assert outputs == plain()
    assert max(len(paths) for _, paths in drafter.seen) == 5


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("setting", ["greedy", "everything"])
def test_a_tree_with_fewer_nodes_than_a_round_has_room_for_says_the_same_a_round_behind(
    setting: str, captured: bool
) -> None:
    """Of one child a node and two levels three nodes are asked for."""
    drafter = Eagle(tiny_eagle("third"), 3, tree="dynamic", top_k=1, depth=1)
    llm = tiny_llm(drafter, behind=1, captured=captured, budget="fixed")
    assert tokens_of(llm, 2, setting) == tokens_of(tiny_llm(), 2, setting)


def test_the_static_tree_is_that_of_the_first_eagle() -> None:
    tensors = random_tensors(FIRST)
    drafter, outputs = run(Spy(write(tensors, config_of(FIRST)), 60, tree="static"), 32)
    assert outputs == plain(32)
    counts: dict[Node, int] = {(): 4, (0,): 3, (1,): 2, (2,): 2, (3,): 1, (0, 0): 3, (0, 1): 2, (0, 2): 2, (1, 0): 1}
    counts |= {(0, 0, 0): 3, (0, 0, 0, 0): 2}
    whole = [(text, paths) for text, paths in drafter.seen if len(paths) == 25]
    assert len(whole) > 4
    for text, paths in whole[::3]:
        assert set(paths) == hand(tensors, False).static(text, states_of(text, (8,)), counts)


def test_the_static_tree_of_a_head_of_two_tokens_has_no_third_child() -> None:
    few = dataclasses.replace(THIRD, vocab=2)
    drafter, outputs = run(Spy(write(random_tensors(few), config_of(few)), 60, tree="static"))
    assert outputs == plain() and drafter.max_nodes == 15
    _, paths = max(drafter.seen, key=lambda seen: len(seen[1]))
    assert len(paths) == len(set(paths)) == 15


def test_a_tree_of_one_shape_is_named_or_given_and_whole_unless_it_is_cut() -> None:
    path = write(random_tensors(FIRST), config_of(FIRST))
    given = [(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]
    for options, size, deepest in (
        ({"tree": "wide"}, 31, 3),
        ({"tree": "static"}, 25, 5),
        ({"tree": given}, 6, 3),
        ({"tree": given, "num_draft_tokens": 2}, 2, 2),
    ):
        drafter, outputs = run(Spy(path, **options), 24)
        assert outputs == plain(24) and drafter.max_nodes == size
        _, paths = max(drafter.seen, key=lambda seen: len(seen[1]))
        assert len(set(paths)) == size and max(map(len, paths)) == deepest
    with pytest.raises(OptionError, match=r"^tree holds \(1, 0\), but not the node above it, \(1,\)$"):
        Eagle(path, tree=[(0,), (1, 0)])
    with pytest.raises(OptionError, match=r"^tree holds \(0, 2\), but not its likelier sister \(0, 1\)$"):
        Eagle(path, tree=[(0,), (0, 0), (0, 2)])


def test_a_head_is_found_in_its_folder_and_by_the_names_others_give_it() -> None:
    for facts, _, on_disk, config, _ in chains().values():
        path = write(on_disk, config)
        found = find_held(path)
        assert found is not None and found.word == "eagle", facts
    assert make(path) == Eagle(path) and make(path, num_draft_tokens=2) == Eagle(path, 2)
    llm = LLM(deep_target(), kernels="reference", max_model_len=50, device="cpu",
              speculative_config={"method": "eagle3", "model": path, "num_speculative_tokens": 2})  # fmt: skip
    assert llm.engine.drafter is not None and llm.engine.drafter.max_nodes == 2


def logits_of(tensors: Tensors, config: dict[str, Any], **options: Any) -> list[tuple[list[int], list[Node]]]:
    drafter, _ = run(Spy(write(tensors, config), 3, **options))
    seen: list[tuple[list[int], list[Node]]] = drafter.seen
    return seen


def test_explicit_ids_of_both_conventions_name_the_default_states() -> None:
    tensors, config = random_tensors(THIRD), config_of(THIRD)
    default = logits_of(tensors, config)
    assert logits_of(tensors, {**config, "eagle_aux_hidden_state_layer_ids": [1, 3, 4]}) == default
    assert logits_of(tensors, {**config, "eagle_aux_hidden_state_layer_ids": [2, 4, 5]}) == default
    assert logits_of(tensors, config, layer_ids=(2, 4, 5)) == logits_of(tensors, config, layer_ids="2/4/5") == default
    assert logits_of(tensors, config, layer_ids=(1, 3, 4)) != default


def test_one_state_may_be_read_twice() -> None:
    drafter, outputs = run(Eagle(write(random_tensors(THIRD), config_of(THIRD)), 2, layer_ids=(2, 3, 3)))
    assert drafter.taps.hidden == (2, 3, 3) and outputs == plain()


def test_halves_and_flags_matter() -> None:
    tensors, config = random_tensors(FIRST), config_of(FIRST)
    swapped = {**tensors, "fc.weight": tensors["fc.weight"].roll(32, dims=1)}
    assert logits_of(tensors, config) != logits_of(swapped, config)
    third = random_tensors(THIRD)
    normed = logits_of(third, {**config_of(THIRD), "norm_before_residual": True})
    assert normed != logits_of(third, config_of(THIRD))
    assert normed == logits_of(third, config_of(THIRD), norm_before_residual=True)


def test_a_norm_in_front_of_the_first_layer_is_ignored_unless_the_file_asks_for_it() -> None:
    tensors, config = random_tensors(FIRST), config_of(FIRST)
    more = {**tensors, "layers.0.input_layernorm.weight": torch.full((32,), 3.0)}
    assert logits_of(more, config) == logits_of(tensors, config)
    assert logits_of(more, {**config, "skip_prenorm": False}) != logits_of(tensors, config)


def test_a_bin_file_loads_as_the_same_head() -> None:
    tensors, config = random_tensors(FIRST), config_of(FIRST)
    drafter, _ = run(Spy(write(tensors, config, file="pytorch_model.bin"), 3))
    assert drafter.seen == logits_of(tensors, config)


def without(tensors: Tensors, *names: str) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if name not in names}


def test_drafts_are_of_the_draft_vocabulary() -> None:
    tensors = random_tensors(THIRD)
    known = set((tensors["d2t"] + torch.arange(len(tensors["d2t"]))).tolist())
    assert known == set(tensors["t2d"].nonzero()[:, 0].tolist())
    for _, paths in logits_of(tensors, config_of(THIRD)):
        assert not paths or set(paths[-1]) <= known


REFUSED: dict[str, tuple[Facts, Any, dict[str, Any], str]] = {
    "hidden size": (Facts(target=48), None, {}, "no multiple of this target's hidden size 32"),
    "narrow": (Facts(hidden=64), None, {}, "has a hidden size of 64 and no embed_tokens.weight of its own"),
    "eagle 1 size": (Facts(third=False, hidden=64, embedding=True), None, {}, "no lm_head.weight of its own"),
    "vocabulary": (Facts(vocab=50), ("d2t", "t2d"), {}, "a vocabulary of 50, but this one has 97"),
    "layers": (THIRD, None, {"eagle_aux_hidden_state_layer_ids": [2, 16, 29]}, "but this target has 8"),
    "states": (THIRD, None, {"eagle_aux_hidden_state_layer_ids": [2, 5]}, "reads 3 states .* but is given 2"),
    "missing": (THIRD, ("midlayer.hidden_norm.weight",), {}, "lacks the tensor midlayer.hidden_norm.weight"),
    "no fusion": (FIRST, ("fc.weight", "fc.bias"), {}, "lacks the tensor fc.weight"),
    "heads": (THIRD, None, {"head_dim": 7}, "cannot be cut into heads of 7"),
    "mask": (Facts(mask=True), None, {"mask_token_id": 200}, "mask_token_id=200; allowed: a token id below 97"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_with_the_reason(name: str) -> None:
    facts, dropped, config, said = REFUSED[name]
    path = write(without(random_tensors(facts), *(dropped or ())), config_of(facts) | config)
    with pytest.raises(CheckpointError, match=said):
        run(Eagle(path))


def test_tensors_nobody_asked_for_and_wrong_maps_are_refused() -> None:
    tensors = random_tensors(THIRD)
    with pytest.raises(CheckpointError, match="holds tensors that no drafter of this kind has: extra"):
        run(Eagle(write(tensors | {"extra.weight": torch.zeros(2)}, config_of(THIRD))))
    twice = {"d2t": torch.cat([tensors["d2t"][:1], tensors["d2t"][:1] - 1, tensors["d2t"][2:]])}
    for wrong in ({"d2t": tensors["d2t"] + 60}, {"d2t": tensors["d2t"].flip(0)}, {"t2d": ~tensors["t2d"]}, twice):
        with pytest.raises(CheckpointError, match="does not give each of the head's 40 rows another"):
            run(Eagle(write(tensors | wrong, config_of(THIRD))))


def test_of_a_map_of_few_tokens_each_is_another() -> None:
    few = {"token_map": torch.tensor([3, 96, 3, 40, 12]), "lm_head.weight": torch.eye(5, 32)}
    with pytest.raises(CheckpointError, match="token_map does not give each of the head's 5 rows another"):
        run(Eagle(write(random_tensors(FIRST) | few, {"model_type": "eagle", "model": config_of(FIRST)})))


def test_maps_that_were_left_at_zero_mean_all_tokens() -> None:
    facts = Facts(vocab=97)
    zeros = {"d2t": torch.zeros(97, dtype=torch.int64), "t2d": torch.zeros(97, dtype=torch.bool)}
    tensors = random_tensors(facts)
    assert logits_of(tensors | zeros, config_of(facts)) == logits_of(tensors, config_of(facts))


@pytest.mark.parametrize(
    "options",
    [
        *({"num_draft_tokens": 0}, {"tree": "bush"}, {"top_k": 0}, {"depth": 0}, {"noise_weight": 1.5}),
        *({"layer_ids": "2/x"}, {"layer_ids": ()}),
    ],
)
def test_options_that_are_not_allowed_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match="is not allowed; allowed: "):
        Eagle("head", **options)


@pytest.mark.parametrize(
    "options, said",
    [
        ({"depth": 3}, "depth=3 has no effect with tree='chain'; it is for tree='dynamic'"),
        ({"top_k": 3, "tree": "static"}, "top_k=3 has no effect with tree='static'; it is for tree='dynamic'"),
        ({"min_probability": 0.1, "tree": "dynamic"}, "min_probability=0.1 has no effect with tree='dynamic';"),
    ],
)
def test_an_option_of_another_shape_is_refused_and_not_left_out(options: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError) as refused:
        Eagle("head", **options)
    assert str(refused.value).startswith(said)


@pytest.mark.parametrize(
    "kind, options",
    [
        ("third", {}),
        ("third", {"tree": "static"}),
        ("third", {"tree": "dynamic", "top_k": 3, "depth": 2}),
        ("parallel", {}),
    ],
)
@pytest.mark.parametrize("kernels", ["reference", pytest.param("native", marks=needs_native)])
def test_noise_counts_as_much_as_is_asked_for_in_every_shape(
    kind: str, options: dict[str, Any], kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[float] = []
    for name in ("draw", "draw_chain"):
        asked = getattr(DraftContext, name)

        def note(self: DraftContext, *values: Any, asked: Any = asked, **named: Any) -> Any:
            given.append(inspect.signature(asked).bind(self, *values, **named).arguments.get("weight"))
            return asked(self, *values, **named)

        monkeypatch.setattr(DraftContext, name, note)
    params = SamplingParams(temperature=0.9, seed=3, max_tokens=6, ignore_eos=True)
    texts = []
    for config in (None, Eagle(tiny_eagle(kind), 6, noise_weight=0.5, **options)):
        llm = LLM(deep_target(), drafter=config, kernels=kernels, max_model_len=100, device="cpu")
        texts.append([output.outputs[0].token_ids for output in llm.generate(prompts(2), params)])
    assert texts[0] == texts[1] and given and set(given) == {0.5}


def test_a_parallel_chain_ends_where_the_head_finds_it_unlikely() -> None:
    counts = []
    for least in (0.0, 0.02, 1.0):
        drafter, outputs = run(Spy(tiny_eagle("parallel"), 4, min_probability=least))
        assert outputs == plain()
        counts.append(sum(len(paths) for _, paths in drafter.seen))
    assert counts[0] > counts[1] > counts[2] == 0
