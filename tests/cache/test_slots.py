"""Slot tables against lists, on the CPU's shared memory and with the writes collected as for another device."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from paceline.cache.slots import Slots, Table

NUM_SLOTS, MAX_LENGTH = 4, 12
CPU = torch.device("cpu")


class SlotsMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.slots = Slots(NUM_SLOTS, MAX_LENGTH, 5, CPU)
        self.taken: dict[int, tuple[list[int], int]] = {}  # slot → committed tokens, prompt length

    @precondition(lambda self: len(self.taken) < NUM_SLOTS)
    @rule(tokens=st.lists(st.integers(0, 96), min_size=1, max_size=MAX_LENGTH), data=st.data())
    def begin(self, tokens: list[int], data: st.DataObject) -> None:
        slot = self.slots.take()
        assert slot not in self.taken and 0 <= slot < NUM_SLOTS
        prompt = data.draw(st.integers(1, len(tokens)))
        self.slots.begin(slot, tokens, prompt)
        self.taken[slot] = (list(tokens), prompt)

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def append(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.taken)))
        tokens, _ = self.taken[slot]
        room = MAX_LENGTH + 1 - len(tokens)
        new = data.draw(st.lists(st.integers(0, 96), max_size=room))
        self.slots.append(slot, new)
        tokens += new

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.taken)))
        self.slots.give_back(slot)
        del self.taken[slot]
        with pytest.raises(AssertionError, match=f"slot {slot} was given back twice"):
            self.slots.give_back(slot)

    @invariant()
    def agrees(self) -> None:
        assert self.slots.num_free == NUM_SLOTS - len(self.taken)
        for slot, (tokens, prompt) in self.taken.items():
            assert self.slots.length(slot) == len(tokens) == int(self.slots.lengths[slot])
            assert self.slots.prompt_length(slot) == prompt == int(self.slots.prompt_lengths[slot])
            assert self.slots.tokens.device[slot, : len(tokens)].tolist() == tokens


TestSlots = SlotsMachine.TestCase
TestSlots.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


class Elsewhere(Table):
    """A table whose device copy is memory of its own: what a table on an accelerator is, without one."""

    class _Copy:
        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor, self.device = tensor, torch.device("meta")

        def __setitem__(self, index: tuple[torch.Tensor, ...], values: torch.Tensor) -> None:
            self.tensor[index] = values

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__(rows, columns, CPU)
        self.copy = torch.zeros(rows, columns, dtype=torch.int64)
        self.device, self._apart = self._Copy(self.copy), True  # type: ignore[assignment]


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 5), st.lists(st.integers(1, 99), max_size=3), st.booleans()),
        max_size=12,
    )
)
@settings(max_examples=80, deadline=None)
def test_after_a_flush_the_device_holds_what_the_host_holds(writes: list[tuple[int, int, list[int], bool]]) -> None:
    table, expected = Elsewhere(3, 8), torch.zeros(3, 8, dtype=torch.int64)
    to = torch.Tensor.to
    with pytest.MonkeyPatch.context() as patch:  # the packed writes stay where they are: there is no other device here
        patch.setattr(
            torch.Tensor, "to", lambda self, *a, **k: self if a and a[0] == torch.device("meta") else to(self, *a)
        )
        for row, start, values, flush in writes:
            table.write(row, start, values)
            expected[row, start : start + len(values)] = torch.tensor(values, dtype=torch.int64)
            assert table.host.tolist() == expected.tolist(), "the host copy is always current"
            if flush:
                table.flush()
                assert torch.equal(table.copy, expected)
        table.flush()
    assert torch.equal(table.copy, expected)
    assert not table._pending


def test_on_a_cpu_host_and_device_are_the_same_memory() -> None:
    table = Table(2, 4, CPU)
    table.write(1, 2, [7, 8])
    assert table.device.tolist() == [[0, 0, 0, 0], [0, 0, 7, 8]]


def test_the_newest_token_may_lie_at_the_length_limit() -> None:
    slots = Slots(1, 5, 1, CPU)
    slot = slots.take()
    slots.begin(slot, [1, 2, 3, 4, 5], 5)
    slots.append(slot, [6])
    assert slots.length(slot) == 6
    assert slots.tokens.device[slot].tolist() == [1, 2, 3, 4, 5, 6]
