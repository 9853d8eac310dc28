"""The draft model's books: whatever was accepted, its next drafts are those of a fresh start on the same tokens.

The oracle for a draft is transformers' greedy continuation of the draft model itself.
"""

from __future__ import annotations

import copy
import functools
import weakref
from typing import Any

import pytest
import torch
import transformers

from paceline import LLM, DraftModel, FirstOf, NGram, SamplingParams
from paceline.drafters.base import Context, QuietDrafter
from paceline.drafters.draft_model import DraftModelDrafter
from paceline.drafters.tree import Proposal
from paceline.errors import OptionError
from paceline.outputs import CompletionOutput
from tests.fakes import VOCAB, tiny_llm, tiny_model

PROMPTS = [[(5 * i * i + 3 * i + n) % VOCAB for i in range(9 + 5 * n)] for n in range(4)]


@functools.cache
def near_model(noise: float = 0.06) -> Any:
    """The target with its weights shaken: it agrees with it often, not always."""
    model = copy.deepcopy(tiny_model())
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight += noise * weight.std() * torch.randn_like(weight) if weight.dim() > 1 else 0
    return model


def greedy(model: Any, tokens: list[int], count: int, first: int = 0) -> list[int]:
    """transformers' continuation of tokens[first:] at their true positions."""
    ids = list(tokens)
    for _ in range(count):
        positions = torch.arange(first, len(ids))[None]
        with torch.no_grad():
            logits = model(torch.tensor([ids[first:]]), position_ids=positions).logits[0, -1]
        ids.append(int(logits.argmax()))
    return ids[len(tokens) :]


class Spied(DraftModelDrafter):
    """Keeps every draft with the committed tokens it was made for."""

    def __init__(self, config: DraftModel) -> None:
        super().__init__(config)
        self.seen: list[tuple[list[int], list[int], int]] = []  # committed, drafts, first position it may see
        self.rows = 0

    def propose(self, context: Context) -> Proposal:
        places = zip(context.slot_list, context.lengths.tolist())  # the device's, which may be ahead of the host's
        committed = [context.table.tokens.tensor[slot, :length].tolist() for slot, length in places]
        self.num_slots = context.table.num_slots
        proposal = super().propose(context)
        for tokens, drafts, size, slot in zip(
            committed, proposal.tokens.tolist(), proposal.sizes.tolist(), context.slot_list
        ):
            self.seen.append((tokens, drafts[:size], int(self.first[slot])))
        return proposal

    def _translate(self, batch: Any) -> None:
        """Every pass of its model goes through here; rows that belong to nobody cost nothing that is counted."""
        self.rows += int((batch.layout.slots < self.num_slots).sum())
        super()._translate(batch)

    def check(self, model: Any, masked: bool = False) -> None:
        for tokens, drafts, first in self.seen:
            assert masked or first == 0
            assert drafts == greedy(model, tokens, len(drafts), first), (len(tokens), first)


class Spy:
    def __init__(self, model: Any, count: int = 4) -> None:
        self.made = Spied(DraftModel(model, count))

    def create(self) -> Spied:
        return self.made


def generate(llm: LLM, prompts: list[list[int]], **params: Any) -> list[CompletionOutput]:
    given = SamplingParams(**{"temperature": 0.0, "max_tokens": 16, "ignore_eos": True, **params})
    return [output for result in llm.generate(prompts, given) for output in result.outputs]


def texts(outputs: list[CompletionOutput]) -> list[list[int]]:
    return [output.token_ids for output in outputs]


BEHIND = pytest.mark.parametrize("behind", [None, 1, 2])


@functools.cache
def plain_engine() -> LLM:
    return tiny_llm()


# An identical draft model is always right.


WISHES: list[dict[str, Any]] = [{}, {"temperature": 0.9, "seed": 3}, {"temperature": 1.3, "seed": 4, "top_k": 8}]
PAIRS = [  # each pair of rounds behind, acceptance rule and parameters
    (behind, acceptance, WISHES[(first + second) % 3])
    for first, behind in enumerate((None, 1, 2))
    for second, acceptance in enumerate(("exact", "rejection", "block"))
]


@pytest.mark.parametrize("behind, acceptance, params", PAIRS)
def test_a_draft_model_equal_to_the_target_is_always_accepted(
    behind: int | None, acceptance: str, params: dict[str, Any]
) -> None:
    llm = tiny_llm(DraftModel(tiny_model(), 3), behind, acceptance=acceptance, block_size=4)
    for output in generate(llm, PROMPTS[:3], **params):
        assert output.stats.acceptance == 1.0 and sum(output.stats.proposed) == 11
    if acceptance == "exact":
        assert texts(generate(llm, PROMPTS[:3], **params)) == texts(generate(plain_engine(), PROMPTS[:3], **params))


def padded(size: int) -> Any:
    """The target with rows of padding that would win every argmax if they were let."""
    torch.manual_seed(2)
    model = copy.deepcopy(tiny_model())
    config = copy.deepcopy(model.config)
    config.vocab_size = size
    wide = transformers.LlamaForCausalLM(config).eval().float()
    state = model.state_dict()
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        extra = 30 * torch.randn(size - VOCAB, state[name].shape[1])
        state[name] = torch.cat([state[name], extra])
    wide.load_state_dict(state)
    return wide


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0, "seed": 5}])
def test_a_padded_head_never_proposes_its_padding_and_is_accepted_all_the_same(params: dict[str, Any]) -> None:
    model = padded(104)
    with torch.no_grad():
        assert int(model(torch.tensor([PROMPTS[0]])).logits[0, -1].argmax()) >= VOCAB, "the padding would win"
    spy = Spy(model)
    outputs = generate(tiny_llm(spy), PROMPTS[:2], **params)
    assert all(token < VOCAB for _, drafts, _ in spy.made.seen for token in drafts)
    assert [output.stats.acceptance for output in outputs] == [1.0, 1.0]
    assert texts(outputs) == texts(generate(plain_engine(), PROMPTS[:2], **params))


def test_a_target_with_padding_may_say_what_the_draft_model_cannot() -> None:
    target = padded(104)
    llm = LLM(target, DraftModel(tiny_model(), 3), kernels="reference", max_model_len=64)
    (output,) = generate(llm, PROMPTS[:1], max_tokens=6)
    assert output.token_ids == greedy(target, PROMPTS[0], 6) and max(output.token_ids) >= VOCAB


# The books.


@BEHIND
def test_after_any_accepted_count_drafts_are_those_of_a_fresh_start(behind: int | None) -> None:
    spy = Spy(near_model())
    llm = tiny_llm(spy, behind=behind, block_size=4)
    outputs = generate(llm, PROMPTS, max_tokens=40)
    assert texts(outputs) == texts(generate(plain_engine(), PROMPTS, max_tokens=40))
    accepted = {len([t for t in o.provenance if t.round == r]) - 1 for o in outputs for r in range(1, o.stats.rounds)}
    assert accepted == {0, 1, 2, 3, 4}, "every count has to occur, or this shows little"
    spy.made.check(near_model())


class Sometimes(QuietDrafter):
    """Speaks up every now and then, so that whoever comes after it is not asked every round."""

    name, max_nodes = "sometimes", 1

    def create(self) -> Sometimes:
        return self

    def propose(self, context: Context) -> Proposal:
        trees = [([1], [-1]) if context.table.length(slot) % 3 else ([], []) for slot in context.slot_list]
        return Proposal.of_trees(trees, context.slots.device, self.name)


@BEHIND
def test_drafts_are_right_after_rounds_in_which_it_was_not_asked(behind: int | None) -> None:
    spy = Spy(near_model(0.3))
    outputs = generate(tiny_llm(FirstOf(Sometimes(), spy), behind=behind, block_size=4), PROMPTS, max_tokens=40)
    assert texts(outputs) == texts(generate(plain_engine(), PROMPTS, max_tokens=40))
    assert len(spy.made.seen) > 20
    spy.made.check(near_model(0.3))


def test_a_committed_token_is_read_once() -> None:
    spy = Spy(tiny_model(), 3)
    (output,) = generate(tiny_llm(spy), PROMPTS[:1], max_tokens=13)
    assert output.stats.rounds == 4
    rounds = 3  # with drafts; 2 tokens were never fed after each but the first, then 2 more drafts are fed
    assert spy.made.rows == (len(PROMPTS[0]) + 1) + 2 * (rounds - 1) + 2 * rounds


@BEHIND
@pytest.mark.parametrize("limits", [[4, 2, 1, 3], [4, 1, 1, 1]])
def test_sequences_with_shorter_budgets_keep_their_books_and_spoil_nobodys(
    behind: int | None, limits: list[int]
) -> None:
    spy = Spy(tiny_model())
    llm = tiny_llm(spy, behind=behind, block_size=4)
    params = [SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, max_draft_tokens=most) for most in limits]
    outputs = [result.outputs[0] for result in llm.generate(PROMPTS, params)]
    spy.made.check(tiny_model())
    assert [output.stats.acceptance for output in outputs] == [1.0] * 4


@BEHIND
def test_a_budget_longer_than_a_page_stays_inside_the_page_table(behind: int | None) -> None:
    llm = tiny_llm(DraftModel(tiny_model(), 12), behind=behind, block_size=4, max_model_len=40)
    prompts = [[3] * 37, PROMPTS[0]]
    outputs = generate(llm, prompts, max_tokens=20)
    assert texts(outputs) == texts(generate(tiny_llm(max_model_len=40), prompts, max_tokens=20))


@BEHIND
def test_a_preempted_sequence_is_read_anew(behind: int | None) -> None:
    spy = Spy(near_model(), 3)
    llm = tiny_llm(spy, behind=behind, block_size=4, num_pages=11, max_model_len=40)
    prompts = [prompt[:8] for prompt in PROMPTS]
    outputs = generate(llm, prompts, max_tokens=24)
    assert sum(output.stats.preemptions for output in outputs) > 0
    assert texts(outputs) == texts(generate(plain_engine(), prompts, max_tokens=24))
    spy.made.check(near_model(), masked=True)


# Prefix hits.

LONG = [(11 * i + 2) % VOCAB for i in range(21)]


def test_a_hit_on_pages_it_filled_itself_is_not_read_again() -> None:
    spy = Spy(near_model())
    llm = tiny_llm(spy, block_size=4)
    first = generate(llm, [LONG], max_tokens=6)
    rows = spy.made.rows
    again = generate(llm, [LONG], max_tokens=6)
    assert again[0].stats.prefix_hit == 20 and texts(again) == texts(first)
    assert spy.made.rows - rows == rows - 20
    spy.made.check(near_model())


@BEHIND
def test_a_hit_on_pages_that_only_the_target_filled_is_read_by_the_draft_model(behind: int | None) -> None:
    llm = tiny_llm(behind=behind, block_size=4)
    first = generate(llm, [LONG])
    spy = Spy(near_model())
    llm.set_drafter(spy)
    again = generate(llm, [LONG])
    assert again[0].stats.prefix_hit == 20 and texts(again) == texts(first)
    spy.made.check(near_model())


@BEHIND
def test_a_hit_on_pages_of_another_drafter_is_foreign_too(behind: int | None) -> None:
    llm = tiny_llm(DraftModel(tiny_model(layers=1), 2), behind=behind, block_size=4)
    first = generate(llm, [LONG])
    spy = Spy(near_model())
    llm.set_drafter(spy)
    assert texts(generate(llm, [LONG])) == texts(first)
    spy.made.check(near_model())


@BEHIND
def test_samples_of_one_prompt_share_its_rows(behind: int | None) -> None:
    spy = Spy(tiny_model(), 3)
    outputs = generate(tiny_llm(spy, behind=behind, block_size=4), [LONG], n=3, temperature=0.8, seed=2)
    assert [output.stats.prefix_hit for output in outputs] == [0, 20, 20]
    assert [output.stats.acceptance for output in outputs] == [1.0] * 3
    assert all(first == 0 for _, _, first in spy.made.seen)


@BEHIND
def test_shared_pages_it_did_not_fill_stay_masked_and_nobody_writes_them(behind: int | None) -> None:
    """Two sequences hold the pages when it is switched on: it may not write there, so it sees what comes after."""
    llm = tiny_llm(behind=behind, block_size=4)
    expected = generate(llm, [LONG], max_tokens=30)[0].token_ids
    spy = Spy(near_model())
    other = llm.stream(LONG, SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True))
    next(other)
    tokens: list[int] = []
    for chunk in llm.stream(LONG, SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)):
        tokens += chunk.token_ids
        if len(tokens) == 3:
            llm.set_drafter(spy)
    other.close()
    assert tokens == expected
    assert {first for _, _, first in spy.made.seen} != {0}
    spy.made.check(near_model(), masked=True)


@BEHIND
def test_pages_completed_by_drafts_that_came_true_count_as_its_own(behind: int | None) -> None:
    """A second turn hits the pages of the first one's output while the first still holds them."""
    llm = tiny_llm(behind=behind, block_size=4)
    spy = Spy(tiny_model(), 3)
    llm.set_drafter(spy)
    stream = llm.stream(LONG, SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True))
    said: list[int] = []
    while len(said) < 20:
        said += next(stream).token_ids
    turn = [*LONG, *said[:16]]
    (output,) = generate(llm, [turn], max_tokens=9)
    stream.close()
    assert output.stats.prefix_hit == 36
    assert output.stats.acceptance == 1.0
    assert max(first for tokens, _, first in spy.made.seen) == 0


# Switching.


@BEHIND
def test_a_draft_model_switched_on_in_the_middle_reads_what_was_said_before(behind: int | None) -> None:
    llm, spy = tiny_llm(behind=behind, block_size=4), Spy(near_model())
    tokens: list[int] = []
    second = Spy(near_model(), 2)
    turns: list[Any] = [None, spy, NGram(2, max_match=1), second, None]
    since = 0
    for chunk in llm.stream(PROMPTS[1], SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)):
        tokens += chunk.token_ids
        if turns and len(tokens) >= since + 5:  # more than rounds that were already on their way could bring
            since, turn = len(tokens), turns.pop(0)
            llm.set_drafter(turn)
    assert not turns and tokens == generate(plain_engine(), [PROMPTS[1]], max_tokens=60)[0].token_ids
    for drafter in (spy.made, second.made):
        assert drafter.seen
        drafter.check(near_model())


@BEHIND
def test_finished_sequences_are_forgotten(behind: int | None) -> None:
    spy = Spy(near_model())
    llm = tiny_llm(spy, behind=behind)
    generate(llm, PROMPTS)
    stream = llm.stream(LONG, SamplingParams(max_tokens=9))
    next(stream)
    stream.close()
    while llm.engine.has_work:  # a round in flight still has its slot
        llm.step()
    assert spy.made._standing == {}


# Learned positions end.


def gpt2(positions: int) -> Any:
    torch.manual_seed(3)
    config = transformers.GPT2Config(
        vocab_size=VOCAB, n_embd=32, n_layer=1, n_head=4, n_positions=positions, initializer_range=0.4, eos_token_id=2
    )
    return transformers.GPT2LMHeadModel(config).eval()


@BEHIND
def test_a_learned_position_model_drafts_up_to_its_limit(behind: int | None) -> None:
    model = gpt2(64)
    spy = Spy(model, 3)
    outputs = generate(tiny_llm(spy, behind=behind, max_model_len=64), PROMPTS[:2], max_tokens=12)
    assert texts(outputs) == texts(generate(plain_engine(), PROMPTS[:2], max_tokens=12))
    assert len(spy.made.seen) > 10
    spy.made.check(model)


@BEHIND
@pytest.mark.parametrize("company", [False, True])
def test_a_learned_position_model_stops_drafting_where_its_positions_end(behind: int | None, company: bool) -> None:
    prompts = [LONG, PROMPTS[0]] if company else [LONG]
    spy = Spy(gpt2(32), 3)
    outputs = generate(tiny_llm(spy, behind=behind), prompts, max_tokens=20)
    assert texts(outputs) == texts(generate(plain_engine(), prompts, max_tokens=20))
    assert all(len(tokens) + len(drafts) <= 32 for tokens, drafts, _ in spy.made.seen if drafts)
    spy.made.check(gpt2(32))


@pytest.mark.parametrize("behind", [None, 1, 2])
def test_a_hit_beyond_a_learned_position_models_end_leaves_nothing_to_read(behind: int | None) -> None:
    """Pages that samples share are not read again: what it may see begins where its positions have ended."""
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=6, n=3, ignore_eos=True)
    llm = tiny_llm(None, behind=behind, block_size=4)
    wanted = [sample.token_ids for sample in llm.generate([PROMPTS[3]], params)[0].outputs]
    llm.set_drafter(DraftModel(gpt2(10), 3))  # the prompt's 24 tokens are there, and none of their pages is its own
    assert [sample.token_ids for sample in llm.generate([PROMPTS[3]], params)[0].outputs] == wanted


@pytest.mark.parametrize("count", [0, -1, 2.5])
def test_a_draft_length_below_one_is_refused(count: Any) -> None:
    with pytest.raises(OptionError, match="1 or more"):
        DraftModel("d", count)


def test_a_drafter_that_was_switched_off_is_gone_with_its_weights_and_layers() -> None:
    """Six in a row take the room of one: nothing holds on to the one before."""
    llm = tiny_llm(DraftModel(near_model(), 2))
    generate(llm, PROMPTS[:2])
    for _ in range(6):
        drafter = llm.engine.drafter
        assert isinstance(drafter, DraftModelDrafter)
        kept = [weakref.ref(drafter), weakref.ref(drafter.model), weakref.ref(drafter._caches[0][0])]
        del drafter
        llm.set_drafter(DraftModel(near_model(), 2))
        generate(llm, PROMPTS[:2])
        assert [held() for held in kept] == [None] * 3
