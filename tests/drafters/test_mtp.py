"""MTP modules in every family's layout: each draft is the one the equations give for its text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from paceline import LLM, MTP, FirstOf, SamplingParams
from paceline.drafters.base import Context, Observation
from paceline.drafters.formats import find_held
from paceline.drafters.mtp import MTPDrafter
from paceline.drafters.mtp_network import Module
from paceline.drafters.tree import Proposal
from paceline.errors import CheckpointError, OptionError
from paceline.testing import prompts, set_apart, tiny_llm
from tests.drafters.equations import Spy
from tests.drafters.mtp_by_hand import Hand, llama_layer
from tests.drafters.mtp_models import write_apart
from tests.drafters.tiny_mtp import HEADS, WIDTH, mimo_model, modules, named, tiny_mtp, write_mimo
from tests.drafters.tiny_readers import write
from tests.fakes import Oracle, Recorded, Replay, tiny_model
from tests.native import EXACT

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def features(model: Any, text: list[int], normed: bool) -> Tensor:
    """[n-1, H] the target's states at all tokens but the newest, by transformers."""
    kept: list[Tensor] = []
    hook = model.model.norm.register_forward_hook(lambda _, given, made: kept.append((made if normed else given[0])[0]))
    with torch.no_grad():
        model(torch.tensor([text[:-1]]))
    hook.remove()
    return kept[0]


def known() -> Recorded:
    """What the tiny target says."""
    said = tiny_llm().generate(prompts(3), SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
    return {tuple(prompt): prompt + output.outputs[0].token_ids for prompt, output in zip(prompts(3), said)}


def hand(kind: str, states: list[Any], model: Any) -> Hand:
    embedding, head = model.model.embed_tokens.weight.detach(), model.lm_head.weight.detach()
    eps = model.config.rms_norm_eps
    return Hand(kind, states, llama_layer(HEADS, WIDTH, eps), embedding, head, eps, state_first=kind == "mimo")


def check_drafts(spy: Spy, by_hand: Hand, model: Any, normed: bool, count: int) -> None:
    assert len(spy.seen) > 6
    for text, first, tokens, _ in spy.seen:
        assert first == 1
        wanted = by_hand.drafts(text, features(model, text, normed), count)
        assert tokens == wanted[: len(tokens)]
    assert max(len(tokens) for _, _, tokens, _ in spy.seen) == count


@pytest.mark.parametrize("kernels", ["torch", *EXACT])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_mimo_drafts_with_the_modules_of_its_own_folder(count: int, kernels: str, tmp_path: Path) -> None:
    """Its target is Qwen2's; the state comes first and is not normed."""
    states = modules("mimo", count, bias=True)
    folder, model = write_mimo(tmp_path, count), mimo_model()
    spy = Spy(MTP(num_draft_tokens=5, quantization="none"))
    llm = LLM(folder, spy, kernels=kernels, max_model_len=100, device="cpu")
    found = [output.outputs[0].token_ids for output in llm.generate(prompts(3), GREEDY)]
    plain = LLM(folder, kernels=kernels, max_model_len=100, device="cpu").generate(prompts(3), GREEDY)
    assert found == [output.outputs[0].token_ids for output in plain]
    check_drafts(spy, hand("mimo", states, model), model, normed=False, count=5)


@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_modules_in_deepseeks_names_read_the_normed_state_behind_the_embedding(count: int, copies: bool) -> None:
    spy = Spy(MTP(tiny_mtp("deepseek", count, copies), 4))
    tiny_llm(spy).generate(prompts(3), GREEDY)
    by_hand = hand("deepseek", modules("deepseek", count, copies=copies), tiny_model())
    check_drafts(spy, by_hand, tiny_model(), normed=True, count=4)


def test_modules_in_the_speculators_format_draft_as_many_as_it_says(tmp_path: Path) -> None:
    states = modules("speculators", 1)
    proposal = {"proposal_type": "greedy", "speculative_tokens": 3}
    config = {"speculators_model_type": "mtp", "speculators_config": {"proposal_methods": [proposal]}}
    spy = Spy(MTP(str(write(tmp_path, config, named("speculators", states)))))
    tiny_llm(spy).generate(prompts(3), GREEDY)
    check_drafts(spy, hand("speculators", states, tiny_model()), tiny_model(), normed=True, count=3)


def test_a_whole_model_with_modules_inside_is_a_draft_model_where_one_is_given(tmp_path: Path) -> None:
    folder = write_mimo(tmp_path)
    assert find_held(folder) is None
    llm = tiny_llm(folder)
    assert llm.engine.drafter is not None and llm.engine.drafter.name == "draft_model"


@pytest.mark.parametrize("options", [{"max_batched_tokens": 9}, {"behind": 1}, {"behind": 2, "block_size": 4}])
def test_several_modules_draft_the_same_in_chunks_and_behind(options: dict[str, Any]) -> None:
    spy = Spy(MTP(tiny_mtp("mimo", 3), 4))
    tiny_llm(spy, **options).generate(prompts(3), GREEDY)
    by_hand = hand("mimo", modules("mimo", 3), tiny_model())
    for text, _, tokens, _ in spy.seen:
        assert tokens == by_hand.drafts(text, features(tiny_model(), text, False), 4)[: len(tokens)]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_after_a_prefix_hit_modules_draft_what_they_would_have_drafted(count: int) -> None:
    """What each gave at the end of a page is found again, and so are its keys."""
    spy = Spy(MTP(tiny_mtp("mimo", count), 4))
    llm = tiny_llm(spy, block_size=4)
    llm.generate(prompts(3), GREEDY)
    first, spy.seen = spy.seen, []
    again = llm.generate(prompts(3), GREEDY)
    assert all(output.outputs[0].stats.prefix_hit for output in again)
    assert sorted(spy.seen) == sorted(first)


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("count", [1, 2])
def test_accepted_tokens_are_absorbed_in_one_pass_of_each_module(
    count: int, apart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many were accepted: here five by an oracle that is asked first."""
    passes: list[tuple[int, int]] = []  # for each observation: passes, and the pairs that became whole
    ran: list[int] = []
    run, observe = Module.run, MTPDrafter.observe

    def counted(self: Module, *given: Any) -> Any:
        ran.append(self.number)
        return run(self, *given)

    def watched(self: MTPDrafter, seen: Observation) -> None:
        ran.clear()
        observe(self, seen)
        passes.append((len(ran), int(seen.pairs().valid.sum())))

    monkeypatch.setattr(Module, "run", counted)
    monkeypatch.setattr(MTPDrafter, "observe", watched)
    llm = tiny_llm()
    if apart:
        set_apart(llm, 1)
    llm.set_drafter(FirstOf(Oracle(known(), 5), MTP(tiny_mtp("deepseek", count), 4)))
    llm.generate(prompts(3), SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
    assert {number for number, _ in passes} == {count}
    assert max(pairs for _, pairs in passes[1:]) == 3 * 6, "five accepted and one more, of three sequences"


class Sometimes(Replay):
    """Trees for some texts, right up to a random depth and at a random sibling; for others nothing."""

    def propose(self, context: Context) -> Proposal:
        tree = super().propose(context)
        return tree.cut(torch.where(context.lengths % 2 == 0, tree.sizes, 0))


@pytest.mark.parametrize("behind", [None, 1])
@pytest.mark.parametrize("count", [1, 3])
def test_modules_read_what_another_drafters_trees_brought(count: int, behind: int | None) -> None:
    """Rows of accepted branches lie apart from one another, modules' places do not."""
    spy, trees = Spy(MTP(tiny_mtp("mimo", count), 4)), Sometimes(known(), seed=3, trees=True)
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    tiny_llm(FirstOf(trees, spy), behind, block_size=4).generate(prompts(3), params)
    assert max(trees.histogram.branches) > 0 and len(spy.seen) > 10, "both had their say"
    by_hand = hand("mimo", modules("mimo", count), tiny_model())
    for text, _, tokens, _ in spy.seen:
        assert tokens == by_hand.drafts(text, features(tiny_model(), text, False), 4)[: len(tokens)]


def test_as_many_drafts_as_modules_unless_another_number_is_asked_for() -> None:
    for count in (1, 3):
        drafter: Any = tiny_llm(MTP(tiny_mtp("deepseek", count))).engine.drafter
        assert drafter.max_nodes == count
    drafter = tiny_llm(MTP(tiny_mtp("deepseek", 3), 2)).engine.drafter
    assert drafter.max_nodes == 2


def test_a_folder_of_modules_is_known_by_its_tensors() -> None:
    llm = tiny_llm(tiny_mtp("deepseek"))
    assert llm.engine.drafter is not None and llm.engine.drafter.name == "mtp"


def test_a_target_without_modules_is_told_so(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path)
    with pytest.raises(
        CheckpointError, match=r"holds no MTP module; known are those of mimo, deepseek_v3, glm4_moe, speculators$"
    ):
        LLM(str(tmp_path), "mtp", kernels="reference", max_model_len=64)
    with pytest.raises(
        OptionError, match=r"reads the target's own folder, but .* the Llama\w+ object; write mtp:model="
    ):
        tiny_llm("mtp")


def test_modules_for_another_width_are_told_so() -> None:
    with pytest.raises(CheckpointError, match="was made for a target with a hidden size of 32, but this one has 16"):
        LLM(tiny_model(layers=1, hidden=16, seed=1), MTP(tiny_mtp("mimo")), kernels="torch", max_model_len=64)


def test_a_target_that_lends_no_layers_is_told_so() -> None:
    config = transformers.GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=64)
    folder = tiny_mtp("mimo")
    with pytest.raises(CheckpointError) as refused:
        LLM(transformers.GPT2LMHeadModel(config), MTP(folder), kernels="torch")
    assert str(refused.value) == (
        f"{folder} holds modules made of their target's layers, and this target lends none: "
        "such modules come from mimo models, the target is of type 'gpt2'"
    )


def test_a_target_run_by_transformers_is_told_what_can_draft_for_it() -> None:
    with pytest.raises(OptionError, match=r"^an MTP drafter computes .* a model run by transformers does not lend"):
        tiny_llm(MTP(tiny_mtp("mimo")), model_impl="transformers")


def test_modules_of_another_family_are_told_whose_they_are(tmp_path: Path) -> None:
    folder = write_apart(tmp_path / "modules", "deepseek_v3", 1)
    said = r"such modules come from deepseek_v3 and glm4_moe models, the target is of type 'llama'$"
    with pytest.raises(CheckpointError, match=said):
        tiny_llm(MTP(folder))
