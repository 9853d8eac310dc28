"""GLIDE: its layers by the equations, what it sees of the target, CAPE's comb, its files, and that it can learn."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from paceline import LLM, DraftModel, Glide, SamplingParams
from paceline.drafters import make
from paceline.drafters.base import Context
from paceline.drafters.glide import TRIED, training_bound
from paceline.errors import PacelineError
from paceline.kernels.training import Sequences, run_dense, weights_of
from tests.drafters.equations import Spy, State, doubled, feed_forward, keys_and_values, look, rms, turn
from tests.drafters.tiny_readers import glide_state, large_model, llm_with, shared, write_glide
from tests.engine.windows import windowed_llm
from tests.fakes import VOCAB, tiny_model
from tests.models.tiny_deepseek import tiny_deepseek

EPS, THETA, LARGE_THETA = 1e-5, 5000.0, 10000.0
PROMPTS = [[(5 * i * i + 3 * i + n) % VOCAB for i in range(9 + 5 * n)] for n in range(3)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=18, ignore_eos=True)
LONGER = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


def own_layer(x: Tensor, w: State, sizes: dict[str, Any], first: int) -> Tensor:
    """Llama's self-attention, its residual added."""
    count, positions = len(x), torch.arange(len(x))
    normed = rms(x, w["input_layernorm.weight"], sizes["eps"])
    q, k, v = ((normed @ w[f"self_attn.{n}_proj.weight"].T).view(count, -1, sizes["width"]) for n in "qkv")
    seen = (positions <= positions[:, None]) & (positions >= first)
    turned = (turn(part, positions, sizes["theta"]) for part in (q, k))
    return x + look(*turned, v, seen) @ w["self_attn.o_proj.weight"].T


def glide_logits(state: State, target: Any, rows: list[int], n: int, first: int, sizes: dict[str, Any]) -> Tensor:
    """[rows, V] in float64; x_n is rows[n], and drafts stand behind it. Formats, section 9.3."""
    large = keys_and_values(target, rows[:n])
    layers, positions = sum(name.endswith("cross_attn.q_proj.weight") for name in state), torch.arange(len(rows))
    x = state["model.embed_tokens.weight"].double()[rows]
    for j in range(layers):
        w = doubled(state, f"model.layers.{j}.")
        x = own_layer(x, w, sizes, first)
        keys, values = large[len(large) - layers + j]
        q = turn((x @ w["cross_attn.q_proj.weight"].T).view(len(rows), 4, 8), positions, LARGE_THETA)
        below = positions.clamp(max=n)  # neither the row's own position, nor x_n, nor drafts
        x = x + look(q, keys, values, torch.arange(n) < below[:, None]) @ w["cross_attn.o_proj.weight"].T
        x = feed_forward(x, w, sizes["eps"])
    return rms(x, state["model.norm.weight"].double(), sizes["eps"]) @ state["lm_head.weight"].double().T


TINY = {"eps": EPS, "theta": THETA, "width": 8}
ITSELF = {"eps": 1e-6, "theta": LARGE_THETA, "width": 8}


def chain_of(state: State, target: Any, text: list[int], count: int, first: int, sizes: dict[str, Any]) -> list[int]:
    rows = list(text)
    for _ in range(count):
        rows.append(int(glide_logits(state, target, rows, len(text) - 1, first, sizes)[-1].argmax()))
    return rows[len(text) :]


@functools.cache
def like_target(layers: int, noise: float) -> tuple[tuple[str, Tensor], ...]:
    """The target's own weights, and a glance of a certain strength: it agrees often, not always."""
    g = torch.Generator().manual_seed(2)
    state = dict(tiny_model(layers=layers).state_dict())
    for j in range(layers):
        prefix = f"model.layers.{j}.cross_attn."
        state[f"{prefix}q_proj.weight"] = torch.randn(32, 32, generator=g)
        state[f"{prefix}o_proj.weight"] = noise * torch.randn(32, 32, generator=g)
    return tuple(state.items())


def write_like_target(folder: Path, layers: int, noise: float) -> Path:
    changes = {"num_attention_heads": 4, "rope_theta": LARGE_THETA, "rms_norm_eps": 1e-6}
    return write_glide(folder, layers, dict(like_target(layers, noise)), **changes)


def tokens_of(llm: LLM, params: SamplingParams = GREEDY, prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params)]


# The forward.


@pytest.mark.parametrize("behind", [None, 2])
@pytest.mark.parametrize("layers", [1, 2])
def test_after_any_accepted_count_drafts_are_those_of_the_equations(
    layers: int, behind: int | None, tmp_path: Path
) -> None:
    folder, state, target = (
        write_like_target(tmp_path, layers, 0.25),
        dict(like_target(layers, 0.25)),
        tiny_model(layers),
    )
    spy = Spy(Glide(str(folder), 3))
    outputs = [output.outputs[0] for output in llm_with(target, spy, behind).generate(PROMPTS, LONGER)]
    accepted = {len([t for t in o.provenance if t.round == r]) - 1 for o in outputs for r in range(1, o.stats.rounds)}
    assert accepted >= {0, 1, 2}, "several counts have to occur, or this shows little"
    assert [output.token_ids for output in outputs] == tokens_of(llm_with(target, None), LONGER)
    for text, first, drafts, _ in spy.seen:
        assert drafts == chain_of(state, target, text, len(drafts), first, ITSELF)


@pytest.mark.parametrize("kernels", ["reference", "native", "torch"])
@pytest.mark.parametrize("layers", [1, 2])
def test_draft_layers_look_at_the_last_layers_of_a_target_with_shared_heads(
    layers: int, kernels: str, tmp_path: Path
) -> None:
    spy = Spy(Glide(str(write_glide(tmp_path, layers)), 3, quantization="none"))
    llm = llm_with(large_model(), spy, kernels=kernels)
    llm.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True))
    assert spy.made.taps.kv == tuple(range(8 - layers, 8))
    assert len(spy.seen) >= 9
    for text, first, drafts, _ in spy.seen:
        assert drafts == chain_of(glide_state(layers), large_model(), text, len(drafts), first, TINY)


@pytest.mark.parametrize("layers", [1, 2])
def test_without_what_it_gets_from_the_target_it_is_a_plain_llama(layers: int, tmp_path: Path) -> None:
    target = tiny_model(layers)
    for given in (Glide(str(write_like_target(tmp_path, layers, 0.0)), 3), DraftModel(target, 3)):
        outputs = [output.outputs[0] for output in llm_with(target, given).generate(PROMPTS, GREEDY)]
        assert [output.stats.acceptance for output in outputs] == [1.0] * 3


class Poisoned(Spy):
    """Before each proposal the target's keys and values from position n + `of` on are spoiled."""

    def __init__(self, config: Any, of: int) -> None:
        super().__init__(config)
        self.of = of

    def before(self, context: Context) -> None:
        table, cache = context.table, self.made._cache
        size = cache.pool.block_size
        kept = torch.zeros(cache.pool.num_rows, dtype=torch.bool)
        for slot, length in zip(context.slot_list, context.lengths.tolist()):
            line = torch.arange(length - 1 + self.of)
            kept[table.pages.tensor[slot, line // size] * size + line % size] = True
        for part in cache.layers[-1]:
            part[: len(kept)][~kept] = 50.0


def test_drafts_depend_on_all_the_target_computed_and_on_nothing_else(tmp_path: Path) -> None:
    """All drafts of a round see positions 0 … n-1: not x_n's, which the target has not computed yet."""
    folder = write_glide(tmp_path)
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    seen = []
    for spy in (Spy(Glide(str(folder), 3)), Poisoned(Glide(str(folder), 3), 0), Poisoned(Glide(str(folder), 3), -1)):
        llm = llm_with(large_model(), spy)
        llm.generate(PROMPTS[:1], params)
        seen.append(spy.seen)
    assert seen[0] == seen[1] and len(seen[0]) > 3
    assert seen[0][0][:2] == seen[2][0][:2] and seen[0][0][2] != seen[2][0][2]


def test_in_training_a_row_sees_the_blocks_before_its_own() -> None:
    bounds = training_bound(torch.arange(12), 5).tolist()
    assert (bounds[7], bounds[10], bounds[3]) == (5, 10, 4)  # 0 … 4, 0 … 9, 0 … 3
    assert bounds == [1, 2, 3, 4, 5, 5, 5, 5, 5, 5, 10, 10]


# CAPE.


@pytest.mark.parametrize("behind", [None, 1])
def test_cape_is_a_comb_around_the_chain_wider_where_it_is_unsure(behind: int | None, tmp_path: Path) -> None:
    folder, state, target = write_like_target(tmp_path, 1, 0.25), dict(like_target(1, 0.25)), tiny_model(1)
    spy, long = Spy(Glide(str(folder), 3, cape=True)), SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)
    assert tokens_of(llm_with(target, spy, behind), long) == tokens_of(llm_with(target, None), long)
    widths: set[int] = set()
    for text, first, tokens, parents in spy.seen:
        if len(text) > len(PROMPTS[0]) + 20:  # later on there is no room for all siblings
            continue
        chain = chain_of(state, target, text, 3, first, ITSELF)
        logits = glide_logits(state, target, text + chain, len(text) - 1, first, ITSELF)[len(text) - 1 : -1]
        for depth, (row, sure) in enumerate(zip(logits, torch.softmax(logits, -1).amax(-1).tolist())):
            children = [token for token, parent in zip(tokens, parents) if parent == depth - 1]
            assert children == row.sort(descending=True).indices[: TRIED[int(10 * sure)]].tolist()
            widths.add(len(children))
        assert tokens[:3] == chain and max(parents) == 1
    assert len(widths) > 1


def test_cape_is_accepted_beside_its_chain_too(tmp_path: Path) -> None:
    folder, target = write_like_target(tmp_path, 1, 0.4), tiny_model(1)
    rounds = []
    for cape in (False, True):
        outputs = llm_with(target, Glide(str(folder), 3, cape=cape)).generate(PROMPTS, GREEDY)
        rounds.append(sum(output.outputs[0].stats.rounds for output in outputs))
    assert rounds[1] < rounds[0]


def test_cape_is_refused_where_only_chains_are_judged() -> None:
    with pytest.raises(PacelineError, match="judges chains, but the drafter 'glide' proposes trees"):
        llm_with(tiny_model(), Glide(shared("glide"), 3, cape=True), acceptance="block")


# Files.


def test_a_joint_checkpoint_gives_its_small_model_and_a_short_config_is_filled_in(tmp_path: Path) -> None:
    state = {f"small_model.{name}": tensor for name, tensor in glide_state().items()}
    state["large_model.model.embed_tokens.weight"] = torch.zeros(3, 3)
    seen = []
    for folder in (write_glide(tmp_path / "one"), write_glide(tmp_path / "joint", state=state)):
        spy = Spy(make(str(folder)))
        tokens_of(llm_with(tiny_model(), spy))
        seen.append(spy.seen)
    short = write_glide(tmp_path / "short")
    (short / "config.json").write_text(json.dumps({"model_type": "llama"}))
    given = Glide(str(short), num_attention_heads=2, rms_norm_eps=EPS, rope_theta=THETA, large_hidden_size=32)
    spy = Spy(given)
    tokens_of(llm_with(tiny_model(), spy))
    assert seen[0] == seen[1] == spy.seen and len(spy.seen) > 10
    assert make(str(short)) == Glide(str(short)), "told by its tensors"


REFUSALS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"state": glide_state(large=64)}, {}, "made for a target with large_hidden_size 64, but this one has 32"),
    ({"large_num_attention_heads": 8}, {}, "made for a target with large_num_attention_heads 8, but this one has 4"),
    ({}, {"large_hidden_size": 64}, "its tensors say large_hidden_size=32, not 64"),
    ({"state": glide_state(vocab=96)}, {}, "made for a target with a vocabulary of 96, but this one has 97"),
    ({"layers": 3}, {}, "has 3 layers and looks at as many of the target, which has 2"),
    ({"num_attention_heads": None}, {}, "says nowhere how many heads it has; give num_attention_heads"),
    ({}, {"num_attention_heads": 3}, "num_attention_heads=3 is no divisor of its 16 queries"),
    ({"state": {**glide_state(), "extra.weight": torch.zeros(2)}}, {}, "no drafter of this kind has: extra.weight"),
    ({"state": {n: t for n, t in glide_state().items() if "up_proj" not in n}}, {}, "lacks the tensor .*up_proj"),
    ({}, {"quantization": "int3"}, "quantization='int3' is not known"),
]


@pytest.mark.parametrize(("files", "given", "said"), REFUSALS)
def test_what_does_not_fit_is_refused_in_a_sentence(
    files: dict[str, Any], given: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(PacelineError, match=said):
        llm_with(tiny_model(), Glide(str(write_glide(tmp_path, **files)), **given))


def test_a_target_whose_keys_are_not_turned_is_refused() -> None:
    sizes = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 64, "eos_token_id": 2}
    target = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).eval()
    said = "^a GLIDE drafter's target turns its keys by cos and sin; one of type 'gpt2' does not$"
    with pytest.raises(PacelineError, match=said):
        llm_with(target, Glide(shared("glide")), max_model_len=64)


def test_a_target_that_caches_one_row_for_all_heads_is_refused() -> None:
    with pytest.raises(PacelineError, match="looks at its target's keys and values; a deepseek_v3 model makes them of"):
        llm_with(tiny_deepseek("dense"), Glide(shared("glide")), max_model_len=64)


def test_a_target_that_does_not_keep_all_positions_is_refused() -> None:
    with pytest.raises(PacelineError, match="whose targets see all positions; this one has windows"):
        windowed_llm("mistral", Glide(shared("glide")))


def test_a_draft_length_below_one_is_refused() -> None:
    with pytest.raises(PacelineError, match="num_draft_tokens=0 is not allowed"):
        Glide("d", 0)


def test_native_kernels_pack_its_weights_as_int8_unless_told_otherwise(tmp_path: Path) -> None:
    folder = str(write_like_target(tmp_path, 1, 0.1))
    found = []
    for quantization in ("int8", "int4", "none"):
        llm = llm_with(tiny_model(1), Glide(folder, 2, quantization=quantization), kernels="native")
        assert tokens_of(llm) == tokens_of(llm_with(tiny_model(1), None, kernels="native"))
        found.append(llm.engine.drafter.model.ops.quantization)  # type: ignore[union-attr]
    assert found == ["Q8_0", "Q4_1", None]


# Switching.


@pytest.mark.parametrize("behind", [None, 1])
def test_a_live_engine_changes_between_a_draft_model_and_glide(behind: int | None, tmp_path: Path) -> None:
    target, state = tiny_model(1), dict(like_target(1, 0.25))
    folder, draft = str(write_like_target(tmp_path, 1, 0.25)), tiny_model(1, 16, 1)
    llm, spies = llm_with(target, None, behind), [Spy(Glide(folder, 3)), Spy(Glide(folder, 2))]
    turns: list[Any] = [spies[0], DraftModel(draft, 2), spies[1], None]
    tokens: list[int] = []
    since = 0
    for chunk in llm.stream(PROMPTS[1], SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True)):
        tokens += chunk.token_ids
        if turns and len(tokens) >= since + 6:
            since = len(tokens)
            llm.set_drafter(turns.pop(0))
    long = SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True)
    assert not turns and [tokens] == tokens_of(llm_with(target, None), long, PROMPTS[1:2])
    for spy in spies:
        assert spy.seen
        for text, first, drafts, _ in spy.seen:
            assert drafts == chain_of(state, target, text, len(drafts), first, ITSELF)


# Learning.


def acceptance(llm: LLM) -> float:
    prompts = [[(7 * i * i + 11 * i * n + n) % SMALL for i in range(12)] for n in range(6)]
    stats = [output.outputs[0].stats for output in llm.generate(prompts, GREEDY)]
    return sum(sum(one.accepted) for one in stats) / sum(sum(one.proposed) for one in stats)


def told_by(target: Any) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """Texts of the target, its log-probabilities, and the keys and values of its last layer."""
    torch.manual_seed(0)
    with torch.no_grad():
        begun = torch.randint(0, SMALL, (256, 8))
        how = {"do_sample": True, "max_new_tokens": 24, "pad_token_id": 0, "eos_token_id": None}
        ids = target.generate(begun, attention_mask=torch.ones_like(begun), **how)
        out = target(ids, use_cache=True)
    last = out.past_key_values.layers[-1]
    return ids, out.logits.log_softmax(-1), (last.keys.transpose(1, 2), last.values.transpose(1, 2))


SMALL = 17  # ids of a target that is soon understood


def test_it_learns_through_the_target_s_keys_what_it_then_drafts_when_served(tmp_path: Path) -> None:
    """Without attention of its own, all it learns of the text before x_n comes from the target's cache. Seeing it one
    place off, or not at all, it drafts badly."""
    target = tiny_model(1, 32, 0, SMALL)
    state = {n: t / 2 if t.dim() > 1 else t for n, t in glide_state(hidden=32, vocab=SMALL).items()}
    state["model.layers.0.self_attn.o_proj.weight"].zero_()
    llm = llm_with(target, Glide(str(write_glide(tmp_path, state=state)), 3), kernels="torch", block_size=16)
    network: Any = llm.engine.drafter.model  # type: ignore[union-attr]
    before = acceptance(llm)
    ids, wanted, (keys, values) = told_by(target)
    positions = torch.arange(ids.shape[1]).expand(32, -1)
    named = {"below": training_bound(positions, 5)}
    trained = [w for w in (*weights_of(network), network.head.data) if w is not network.layers[0].out.weight.data]
    for weight in trained:
        weight.requires_grad_()
    optimiser = torch.optim.AdamW(trained, lr=0.02, weight_decay=0.0)
    for step in range(150):
        some = torch.arange(32) + 32 * (step % 8)
        text = Sequences(ids[some], positions, named, borrowed={1: (keys[some], values[some])})
        logits = run_dense(network, text).final @ network.head.data.T
        optimiser.zero_grad()
        torch.nn.functional.kl_div(
            logits.log_softmax(-1), wanted[some], reduction="batchmean", log_target=True
        ).backward()
        optimiser.step()
    for weight in trained:
        weight.requires_grad_(False)
    after, turns = acceptance(llm), network.large_turns
    network.large_turns = tuple(table.roll(1, 0) for table in turns)
    shifted = acceptance(llm)
    network.large_turns, network.layers[0].answer.data = turns, torch.zeros_like(network.layers[0].answer.data)
    assert before < 0.1 and after > 0.25 and shifted < after - 0.08 and acceptance(llm) < 0.1
