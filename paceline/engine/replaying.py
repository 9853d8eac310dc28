"""Rounds that are captured once for their kind, and replayed with other sequences ever after.

Where users' functions come behind a round's forward, it is captured up to there. What needs the host before that is
launched as it stands (`device.py`).
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.cache.kv import KVCache
from paceline.cache.slots import Slots
from paceline.drafters.base import Drafter, Target, captured_as
from paceline.drafters.tree import PADDING, Proposal
from paceline.engine.budget import Costs
from paceline.engine.device import Asked, DeviceRunner, Outcome
from paceline.engine.round import Plan, Round, Times
from paceline.engine.sizes import find_size, usual_sizes
from paceline.kernels.held import holding
from paceline.kernels.ops import Hidden
from paceline.models.frame import Frame, FrameInput, Size
from paceline.sampling.processors import common_kind
from paceline.sampling.rules import Rule
from paceline.sampling.state import TEMPERED, Kind

TIMED = 8  # replays of a captured round that tell what it takes

log = logging.getLogger("paceline")

# Runs a round and remembers how: what it made, and a function that makes it anew in the same memory.
Capture = Callable[[Callable[[], Outcome]], tuple[Outcome, Callable[[], None]]]


@dataclass
class Captured:
    frame: Frame
    asked: Asked
    outcome: Outcome
    replay: Callable[[], None]
    held: list[Any]  # kept tensors that it reads


class Key(NamedTuple):
    """What a round has in common with all that replay it."""

    size: Size
    kind: Kind | None  # what the pipeline does; None: up to functions of users
    drafts: bool
    new: bool
    shaped: Hashable  # what the drafter, or what it handed over, adds
    logits: bool = False  # somebody reads them after the round


class Start(NamedTuple):
    """What getting ready took."""

    compiling: float  # seconds
    capturing: float
    rounds: int  # that were asked for


class ReplayingRunner(DeviceRunner):
    start: Start | None = None

    def __init__(self, target: Target, cache: KVCache, table: Slots, rule: Rule, capture: Capture) -> None:
        self._capture = capture
        super().__init__(target, cache, table, rule)

    def set_drafter(self, drafter: Drafter | None) -> None:
        super().set_drafter(drafter)
        self.captured: dict[Key, Captured] = {}

    def _launch(self, plan: Plan, handed: Proposal | None, new: list[bool], times: Times) -> Round:
        """Replay it, captured first if need be."""
        asked = self._shape(handed), any(new)
        if asked not in plan.found:
            plan.found[asked] = self._find_key(plan, handed, *asked)
        key = plan.found[asked]
        if key is None:
            return super()._launch(plan, handed, new, times)
        if key not in self.captured:
            self.captured[key] = self._remember(key, plan.slots[: plan.num_sampling], handed)
            times.usual = False
            log.info("captured on the way, in %.2f s: %s", time.perf_counter() - times.drafted, key)
        return self._replay(self.captured[key], plan, handed, new, times)

    def _find_key(self, plan: Plan, handed: Proposal | None, shaped: Hashable | None, new: bool) -> Key | None:
        """Of its own size; else, where fewer nodes fit or are handed over, of a size for what the budget gives; beside
        prompts, whose rounds are large anyway, for all that the drafter may. None is captured: of the budget's."""
        most = 0 if self.drafter is None else self.drafter.max_nodes
        drawn = bool(plan.num_drafting) and handed is None  # then functions of users have a part in the drafts, too
        tried = list[Key | None]()
        for least in (0, plan.budget) if plan.decodes else (0, plan.budget, most):
            tried.append(self._key(plan, find_size(plan, most, least), drawn, shaped, new))
            if tried[-1] is None or tried[-1] in self.captured:
                return tried[-1]
        return tried[1]

    def _key(self, plan: Plan, size: Size | None, drawn: bool, shaped: Hashable | None, new: bool) -> Key | None:
        """None: the round is not to be captured."""
        kind = self._kind(plan)
        if size is None or shaped is None or plan.wants_prompt_logprobs or (kind is None and drawn):
            return None
        if self.rule.follows and size.chunks and kind is not None and kind.tempered:
            kind = self.state.kinds[TEMPERED]  # little beside a prompt, and half as many to capture
        logits = kind is None or self.taps.node_logits or plan.wants_logprobs
        return Key(size, kind, bool(plan.num_drafting), new, shaped, logits)

    def _kind(self, plan: Plan) -> Kind | None:
        return common_kind(set(map(self.state.kinds.__getitem__, plan.slots[: plan.num_sampling])), self.state)

    def _shape(self, handed: Proposal | None) -> Hashable | None:
        """What the drafter's part depends on; None: it is not to be captured."""
        shaped = captured_as(self.drafter)
        if handed is None or shaped is None:
            return shaped
        if handed.probs is not None:
            return None
        return shaped, handed.chain, handed.scratch is None, handed.origins is None, handed.names

    def warm_up(self, rows: int, arms: Iterable[int] = ()) -> Iterator[tuple[int, int]]:
        """Capture what most rounds will be: of at most so many rows, greedy or with a temperature; arms: nodes that a
        budget may choose. Yields how many are done, and of how many; the rest is captured when it is first needed."""
        drafter, chains = self.drafter, self._usual_chains()
        drafts = drafter is not None and (drafter.on_device or chains is not None)
        self.table.flush()
        nodes = drafter.max_nodes if drafter is not None and drafts else 0
        sizes = usual_sizes(self.table.num_slots, rows, nodes, arms)
        asked = [(key, chains if size.nodes else None) for size in sizes for key in self._usual_keys(size, chains)]
        if not asked:
            return
        began = time.perf_counter()
        ops = self.target.model.ops
        ops.prepare(functools.partial(self.compute, *self._lay_out(key, (), handed)) for key, handed in asked)
        if drafter is not None:
            drafter.reset()  # what it was shown was nobody's
        compiled = time.perf_counter()
        for number, (key, handed) in enumerate(asked):
            yield number, len(asked)
            if key not in self.captured:
                self.captured[key] = self._remember(key, (), handed)
        self.start = Start(compiled - began, time.perf_counter() - compiled, len(asked))
        log.info("kernels compiled in %.1f s; captured in %.1f s: %d rounds", *self.start)

    def _usual_chains(self) -> Proposal | None:
        """What a drafter on the host that says its name and no more usually proposes; None: nobody can tell."""
        drafter = self.drafter
        if drafter is None or drafter.on_device or drafter.trees or captured_as(drafter) != ():
            return None
        return Proposal.of_texts([], self.table.device, drafter.name)

    def measure_rounds(self) -> Costs:
        """What the captured rounds of decoding alone take with nobody in them. Nothing may be in flight."""
        found: dict[tuple[int, int], float] = {}
        usual = self.state.kinds[self.table.null]
        for key, captured in self.captured.items():
            frame, size = captured.frame, captured.frame.size
            if size.chunks == 0 and size.rows == size.sampled and key.kind == usual:
                frame.fill((), 0, FrameInput([], [], [], []), self.table)
                found[size.sampling, size.nodes] = self._time(captured.replay)
        return found

    def _time(self, replay: Callable[[], None]) -> float:
        device, start = self.table.device, 0.0
        for count in (2, TIMED):  # the first bring it up to its pace
            start = time.perf_counter()
            for _ in range(count):
                replay()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        return (time.perf_counter() - start) / TIMED

    def _usual_keys(self, size: Size, chains: Proposal | None) -> list[Key]:
        greedy, tempered = self.state.kinds[self.table.null], self.state.kinds[TEMPERED]
        shaped = self._shape(chains if size.nodes else None)
        kinds = [greedy] if not self.rule.follows else [tempered] if size.chunks else [greedy, tempered]
        return [] if shaped is None else [Key(size, kind, size.nodes > 0, False, shaped) for kind in kinds]

    def _lay_out(self, key: Key, slots: Sequence[int] = (), handed: Proposal | None = None) -> tuple[Frame, Asked]:
        """A round of rows of nobody; slots: of those who ask for more than temperature and noise."""
        size, frame = key.size, Frame(key.size, self.table.device)
        frame.fill((), 0, FrameInput([], [], [], []), self.table)
        if key.kind is not None and key.kind.tempered:  # whoever comes first, it serves all others too
            slots = () if key.kind.greedy else (TEMPERED,)
        slots = [*slots, *[self.table.null] * (size.sampling - len(slots))]
        handed = None if handed is None else _in_fixed_memory(handed, size)
        return frame, Asked(slots, key.drafts, key.new, handed, open=key.kind is None)

    def _remember(self, key: Key, slots: Sequence[int] = (), handed: Proposal | None = None) -> Captured:
        frame, asked = self._lay_out(key, slots, handed)
        with holding() as held:
            outcome, replay = self._capture(lambda: (self.prepare if asked.open else self.compute)(frame, asked))
        return Captured(frame, asked, self._kept(outcome, key), replay, held)

    def _kept(self, made: Outcome, key: Key) -> Outcome:
        """What is read after the round, by the host or to conclude it: the memory of all else serves other rounds."""
        open, told = key.kind is None, self.listener is not None and not self.listener.on_device
        out, nothing = made.out, torch.empty(0)
        tapped = out.tapped if open or told else None
        out = Hidden(nothing, tapped, out.logits if key.logits else None)
        drawn = made.proposal.probs is not None and not open
        return made._replace(proposal=replace(made.proposal, probs=None) if drawn else made.proposal, out=out)

    def _replay(self, captured: Captured, plan: Plan, handed: Proposal | None, new: list[bool], times: Times) -> Round:
        self._fill(captured.frame, plan, new)
        if handed is not None and captured.asked.handed is not None:
            _copy_proposal(handed, captured.asked.handed)
        captured.replay()
        made, asked = captured.outcome, captured.asked
        if asked.open:
            slots = plan.slots[: plan.num_sampling]
            nobody = [self.table.null] * (len(asked.slots) - len(slots))
            made = self.conclude(made, asked._replace(slots=slots + nobody))
        out = made.out
        if plan.wants_logprobs and out.logits is not None:
            out = replace(out, logits=out.logits.clone())  # the next replay writes over them
        return self._round(plan, made, out, times)


def _in_fixed_memory(proposal: Proposal, size: Size) -> Proposal:
    """A proposal of nothing, of a frame's size, to be copied into."""

    def room(like: Tensor | None, value: int) -> Tensor | None:
        return None if like is None else like.new_full((size.sampling, size.nodes), value)

    tokens, parents = room(proposal.tokens, 0), room(proposal.parents, PADDING)
    assert tokens is not None and parents is not None
    sizes = proposal.sizes.new_zeros(size.sampling)
    scratch, origins = room(proposal.scratch, 0), room(proposal.origins, 0)
    return Proposal(tokens, parents, sizes, proposal.chain, None, scratch, proposal.names, origins)


def _copy_proposal(source: Proposal, target: Proposal) -> None:
    """Into fixed memory; what it leaves over is padding."""
    batch, width = source.tokens.shape
    target.parents.fill_(PADDING)
    target.sizes.zero_()
    target.sizes[:batch] = source.sizes
    for name in ("tokens", "parents", "scratch", "origins"):
        given, room = getattr(source, name), getattr(target, name)
        if given is not None and room is not None:
            room[:batch, :width] = given
