"""Slot tables against lists: in memory both sides share, and apart, where the device is ahead of the host."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from paceline.cache.slots import Slots, Table

NUM_SLOTS, MAX_LENGTH = 4, 12
CPU = torch.device("cpu")


class SlotsMachine(RuleBasedStateMachine):
    """The host alone: it begins, appends and gives back. Apart or not, it reads back what it did."""

    apart = False

    def __init__(self) -> None:
        super().__init__()
        self.slots = Slots(NUM_SLOTS, MAX_LENGTH, 5, CPU, apart=self.apart)
        self.taken: dict[int, tuple[list[int], int, int]] = {}  # slot → committed tokens, prompt length, limit

    @precondition(lambda self: len(self.taken) < NUM_SLOTS)
    @rule(tokens=st.lists(st.integers(0, 96), min_size=1, max_size=MAX_LENGTH), data=st.data())
    def begin(self, tokens: list[int], data: st.DataObject) -> None:
        slot = self.slots.take()
        assert slot not in self.taken and 0 <= slot < NUM_SLOTS and slot != self.slots.null
        prompt = data.draw(st.integers(1, len(tokens)))
        limit = data.draw(st.none() | st.integers(len(tokens), MAX_LENGTH))
        self.slots.begin(slot, tokens, prompt, limit)
        self.taken[slot] = (list(tokens), prompt, MAX_LENGTH if limit is None else limit)

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def append(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.taken)))
        tokens = self.taken[slot][0]
        room = MAX_LENGTH + 1 - len(tokens)
        new = data.draw(st.lists(st.integers(0, 96), max_size=room))
        if self.apart:  # the device decided it before
            self.slots.flush()
            self.write_on_device(slot, new)
        self.slots.append([slot], [new])
        tokens += new

    def write_on_device(self, slot: int, new: list[int]) -> None:
        length = len(self.taken[slot][0])
        self.slots.tokens.tensor[slot, length : length + len(new)] = torch.tensor(new, dtype=torch.int64)
        self.slots.lengths[slot] = length + len(new)

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.taken)))
        self.slots.give_back(slot)
        del self.taken[slot]
        with pytest.raises(AssertionError, match=f"slot {slot} was given back twice"):
            self.slots.give_back(slot)

    @precondition(lambda self: len(self.taken) == NUM_SLOTS)
    @rule()
    def reset(self) -> None:
        self.slots.reset()
        self.taken = {}

    @invariant()
    def agrees(self) -> None:
        slots = self.slots
        slots.flush()
        assert slots.num_free == NUM_SLOTS - len(self.taken)
        for slot, (tokens, prompt, limit) in self.taken.items():
            assert slots.length(slot) == len(tokens) == int(slots.lengths[slot])
            assert slots.prompt_length(slot) == prompt == int(slots.prompt_lengths[slot])
            assert int(slots.limits[slot]) == limit
            assert slots.tokens.tensor[slot, : len(tokens)].tolist() == tokens
            assert slots.tokens.host[slot, : len(tokens)].tolist() == tokens
        longest = max((len(tokens) for tokens, _, _ in self.taken.values()), default=0)
        assert slots.longest(list(self.taken)) == (MAX_LENGTH if self.apart else longest)
        assert int(slots.lengths[slots.null]) == int(slots.limits[slots.null]) == 1, "nobody's row never changes"


class ApartMachine(SlotsMachine):
    apart = True


TestSlots = SlotsMachine.TestCase
TestSlots.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestApartSlots = ApartMachine.TestCase
TestApartSlots.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def begun(apart: bool, texts: list[list[int]], limits: list[int]) -> Slots:
    """Sequence n in slot n."""
    slots = Slots(len(texts), MAX_LENGTH, 2, CPU, apart=apart)
    for _ in texts:
        slots.take()
    for slot, (text, limit) in enumerate(zip(texts, limits)):
        slots.begin(slot, text, len(text), limit)
    slots.flush()
    return slots


def committed(slots: Slots, slot: int) -> list[int]:
    """As the device sees it."""
    tokens: list[int] = slots.tokens.tensor[slot, : int(slots.lengths[slot])].tolist()
    return tokens


def commit_some(chooser: random.Random) -> int:
    """Several rounds over random slots in random order, some rows nobody's; how many counts a limit has cut."""
    texts = [[chooser.randrange(97) for _ in range(chooser.randint(1, 6))] for _ in range(NUM_SLOTS)]
    limits = [chooser.randint(len(text), MAX_LENGTH) for text in texts]
    slots, begun_with, clamped = begun(True, texts, limits), [list(text) for text in texts], 0
    for _ in range(5):
        rows = chooser.sample(range(NUM_SLOTS), chooser.randint(1, NUM_SLOTS)) + [slots.null] * chooser.randint(0, 2)
        width = chooser.randint(1, 5)
        tokens = [[chooser.randrange(97) for _ in range(width)] for _ in rows]
        counts = [chooser.randint(0, width) for _ in rows]
        slots.commit(torch.tensor(rows), torch.tensor(tokens), torch.tensor(counts))
        for slot, new, count in zip(rows, tokens, counts):
            if slot != slots.null:
                clamped += count > limits[slot] - len(texts[slot])
                texts[slot] += new[: min(count, limits[slot] - len(texts[slot]))]
        assert [committed(slots, slot) for slot in range(NUM_SLOTS)] == texts
        assert int(slots.lengths[slots.null]) == 1, "nobody's row is full: nothing is ever appended to it"
        host = [slots.tokens.host[slot, : slots.length(slot)].tolist() for slot in range(NUM_SLOTS)]
        assert host == begun_with, "the host learns only by append"
    for slot, text in enumerate(texts):
        slots.append([slot], [text[len(begun_with[slot]) :]])
    slots.flush()
    assert [slots.tokens.host[slot, : slots.length(slot)].tolist() for slot in range(NUM_SLOTS)] == texts
    assert [committed(slots, slot) for slot in range(NUM_SLOTS)] == texts, "a flush sends nothing back over it"
    return clamped


def test_a_commit_on_the_device_appends_what_lists_would_up_to_each_limit() -> None:
    assert sum(commit_some(random.Random(seed)) for seed in range(40)) > 40, "limits have to be met"


def test_a_token_that_could_not_be_sampled_is_counted_and_written_as_zero() -> None:
    """-1 ends a sequence; until the host has read it, later rounds may look at the place."""
    slots = begun(True, [[5, 6], [7]], [MAX_LENGTH, MAX_LENGTH])
    slots.commit(torch.tensor([0, 1]), torch.tensor([[9, -1, -1], [-1, -1, -1]]), torch.tensor([2, 1]))
    assert committed(slots, 0) == [5, 6, 9, 0] and committed(slots, 1) == [7, 0]


def test_what_lies_beyond_a_count_is_written_nowhere() -> None:
    slots = begun(True, [[1, 2, 3], [4]], [3, MAX_LENGTH])
    before = slots.tokens.tensor[: slots.null].clone()
    slots.commit(torch.tensor([0, 1, slots.null]), torch.full((3, 4), 50), torch.tensor([4, 0, 4]))
    assert torch.equal(slots.tokens.tensor[: slots.null], before)
    assert slots.lengths[: slots.null].tolist() == [3, 1]


def test_what_the_host_appends_late_never_undoes_what_the_device_did_since() -> None:
    """Two rounds on the device, then the host reads the first and hands out a page."""
    slots = begun(True, [[1, 2]], [MAX_LENGTH])
    for token in (10, 11):
        slots.commit(torch.tensor([0]), torch.tensor([[token]]), torch.tensor([1]))
    slots.append([0], [[10]])
    slots.pages.write(0, 1, [7])
    slots.flush()
    assert slots.length(0) == 3 and committed(slots, 0) == [1, 2, 10, 11]
    assert slots.pages.tensor[0].tolist() == [0, 7]
    slots.append([0], [[11]])
    assert slots.tokens.host[0, : slots.length(0)].tolist() == [1, 2, 10, 11]


@pytest.mark.parametrize("count", [0, 1, 15, 48])
def test_what_is_appended_to_many_at_once_is_what_one_after_another_would_append(count: int) -> None:
    chooser = random.Random(count)
    at_once, in_turn = Slots(48, MAX_LENGTH, 5, CPU, apart=True), Slots(48, MAX_LENGTH, 5, CPU, apart=True)
    for table in (at_once, in_turn):
        for slot in range(48):
            table.begin(slot, [slot] * (1 + slot % 3), 1)
    for _ in range(3):
        slots = chooser.sample(range(48), count)
        tokens = [[chooser.randrange(97) for _ in range(chooser.randint(0, 3))] for _ in slots]
        at_once.append(slots, tokens)
        for slot, own in zip(slots, tokens):
            in_turn.append([slot], [own])
        assert (at_once.tokens.host == in_turn.tokens.host).all()
        assert at_once.known_lengths(slots) == [in_turn.length(slot) for slot in slots]


def test_a_new_sequence_in_an_old_slot_starts_from_its_own_tokens_alone() -> None:
    slots = begun(True, [[1, 2, 3]], [5])
    slots.commit(torch.tensor([0]), torch.tensor([[4, 5]]), torch.tensor([2]))
    slots.give_back(0)
    assert slots.take() == 0
    slots.begin(0, [9], 1, 4)
    slots.flush()
    slots.commit(torch.tensor([0]), torch.tensor([[8, 8, 8, 8]]), torch.tensor([4]))
    assert committed(slots, 0) == [9, 8, 8, 8], "its own limit, not the old one"


@given(
    st.lists(
        st.tuples(
            st.integers(0, 2),
            st.integers(0, 5),
            st.lists(st.integers(1, 99), max_size=3),
            st.booleans(),
            st.booleans(),
        ),
        max_size=12,
    )
)
@settings(max_examples=80, deadline=None)
def test_after_a_flush_the_device_holds_what_was_written_for_it(
    writes: list[tuple[int, int, list[int], bool, bool]],
) -> None:
    """What only the host learned is its own; what was written goes to both, as the host holds it when it is sent."""
    table = Table(3, 8, CPU, apart=True)
    host, device = (torch.zeros(3, 8, dtype=torch.int64) for _ in range(2))
    pending: list[tuple[int, int]] = []
    for row, start, values, learned, flush in writes:
        if learned:
            table.host[row, start : start + len(values)] = values
        else:
            table.write(row, start, values)
        host[row, start : start + len(values)] = torch.tensor(values, dtype=torch.int64)
        if not learned:
            pending += [(row, start + place) for place in range(len(values))]
        assert table.host.tolist() == host.tolist(), "the host copy is always current"
        assert torch.equal(table.tensor, device), "nothing is sent before the flush"
        if flush:
            table.flush()
            for place in pending:
                device[place] = host[place]
            pending = []
            assert torch.equal(table.tensor, device)
    table.flush()
    for place in pending:
        device[place] = host[place]
    assert torch.equal(table.tensor, device)
    assert not table._pending


def test_on_a_cpu_host_and_device_are_the_same_memory() -> None:
    table = Table(2, 4, CPU, apart=False)
    table.write(1, 2, [7, 8])
    assert table.tensor.tolist() == [[0, 0, 0, 0], [0, 0, 7, 8]]
    table.tensor[0, 3] = 5
    assert table.host[0, 3] == 5


def test_tables_are_apart_wherever_the_device_is_not_the_cpu() -> None:
    assert not Slots(1, 5, 1, CPU).apart and Slots(1, 5, 1, torch.device("meta")).apart


@pytest.mark.parametrize("apart", [False, True])
def test_the_newest_token_may_lie_at_the_length_limit(apart: bool) -> None:
    slots = Slots(1, 5, 1, CPU, apart=apart)
    slot = slots.take()
    slots.begin(slot, [1, 2, 3, 4, 5], 5, 6)
    slots.flush()
    if apart:
        slots.commit(torch.tensor([slot]), torch.tensor([[6]]), torch.tensor([1]))
    slots.append([slot], [[6]])
    assert slots.length(slot) == 6
    assert slots.tokens.tensor[slot].tolist() == slots.tokens.host[slot].tolist() == [1, 2, 3, 4, 5, 6]
