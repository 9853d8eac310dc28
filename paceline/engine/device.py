"""Rounds on a device of its own, whose tables are apart from the host's.

A round is packed by a frame (`models/frame.py`): nothing in it is sent to the device or read from it, so that rounds
can be ahead of the host. Where the kernels allow it a round is captured once for its kind, and replayed with other
sequences ever after. Where users' functions come behind its forward, it is captured up to there. What needs the host
before that is launched as it stands.
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
from paceline.drafters.base import Drafter, Observation, Target, captured_as
from paceline.drafters.tree import PADDING, Proposal
from paceline.engine.budget import Costs
from paceline.engine.context import DraftContext, Given
from paceline.engine.round import Plan, PromptRows, Report, Round, Sent, Times, histories, pad_proposal, undrafted
from paceline.engine.runner import Runner, wanted_rows
from paceline.engine.sizes import find_size, usual_sizes
from paceline.kernels.held import holding
from paceline.kernels.ops import Hidden, see_windows
from paceline.models.batch import Batch, Nodes, Static, pack_rows, places_of, reaches_of
from paceline.models.frame import Frame, FrameInput, Size
from paceline.sampling.processors import common_kind, process
from paceline.sampling.rules import Rule
from paceline.sampling.state import TEMPERED, Kind
from paceline.sampling.verify import Judged, Verdict, follow_there, verify

TIMED = 8  # replays of a captured round that tell what it takes


class Key(NamedTuple):
    """What a round has in common with all that replay it."""

    size: Size
    kind: Kind | None  # what the pipeline does; None: up to functions of users
    drafts: bool
    new: bool
    shaped: Hashable  # what the drafter, or what it handed over, adds


class Asked(NamedTuple):
    """What a round is to do."""

    slots: list[int]  # of those that sample, the null slot behind them: their parameters say which stages run
    drafts: bool  # the drafter proposes
    new: bool  # somebody is seen for the first time, and not from its beginning
    handed: Proposal | None = None  # what a drafter on the host proposes
    more: Tensor | None = None  # rows whose logits are wanted beside the sampled ones
    open: bool = False  # what comes behind the forward asks the host, and is launched every time


class Outcome(NamedTuple):
    """What a round made, on the device."""

    proposal: Proposal
    batch: Batch
    out: Hidden
    verdict: Verdict | None = None
    report: Report | None = None
    paths: Tensor | None = None  # of the proposal's nodes


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


class DeviceRunner(Runner):
    def __init__(
        self, target: Target, cache: KVCache, table: Slots, rule: Rule, capture: Capture | None = None
    ) -> None:
        self._capture = capture
        table.rounds = target.model.ops.rounds
        super().__init__(target, cache, table, rule)

    def set_drafter(self, drafter: Drafter | None) -> None:
        super().set_drafter(drafter)
        self._captured: dict[Key, Captured] = {}

    def run(self, plan: Plan, times: Times) -> Round:
        """Launch all of a round, or replay it; what the host will read of it is on its way."""
        self.table.flush()
        times.before_draft = time.perf_counter()
        handed = self._hand(plan)
        times.drafted = time.perf_counter()
        new = self.meet(plan) if self.taps.hidden else [False] * len(plan.work)
        key = None if self._capture is None else self._find_key(plan, handed, any(new))
        if key is None:
            return self._launch(plan, handed, new, times)
        if key not in self._captured:
            self._captured[key] = self._remember(key, plan.slots[: plan.num_sampling], handed)
            times.usual = False
            log.info("captured on the way, in %.2f s: %s", time.perf_counter() - times.drafted, key)
        return self._replay(self._captured[key], plan, handed, new, times)

    def _hand(self, plan: Plan) -> Proposal | None:
        """What a drafter on the host proposes for those that sample."""
        if self.drafter is None or self.drafter.on_device or not plan.num_drafting:
            return None
        work = plan.work[: plan.num_drafting]
        slots, budgets = [item.slot for item in work], [item.num_nodes for item in work]
        context = DraftContext(slots, budgets, self.state, self.rule)
        proposal = context.cut(self.drafter.propose(context))
        plan.cut(proposal.num_nodes)
        if not proposal.num_nodes:  # a round like any without drafts
            plan.num_drafting = 0
            return None
        return pad_proposal(proposal, plan.num_sampling)

    def _fill(self, frame: Frame, plan: Plan, new: list[bool]) -> None:
        starts = [-1 if item.start is None else item.start for item in plan.work]
        given = FrameInput(plan.slots, starts, [item.num_nodes for item in plan.work], new)
        frame.fill(plan.shape, plan.num_sampling, given, self.table)

    # What is launched as it stands.

    def _launch(self, plan: Plan, handed: Proposal | None, new: list[bool], times: Times) -> Round:
        frame = Frame(Size.exact(plan.shape, plan.num_sampling), self.table.device)
        own = places_of(plan.shape, plan.num_sampling, frame.num_nodes, self.table.device)
        frame.own_spans = own.spans(reaches_of(plan.work))
        self._fill(frame, plan, new)
        prompt_rows: list[PromptRows] = []
        more = None
        if plan.wants_prompt_logprobs:
            prompt_rows, rows = wanted_rows(plan, own.first_rows)
            more = torch.tensor(rows, dtype=torch.int64).to(self.table.device)
        slots, drafts = plan.slots[: plan.num_sampling], bool(plan.num_drafting)
        made = self.compute(frame, Asked(slots, drafts, any(new), handed, more))
        return self._round(plan, made, made.out, times, prompt_rows)

    def _round(
        self, plan: Plan, made: Outcome, out: Hidden, times: Times, prompt_rows: list[PromptRows] | None = None
    ) -> Round:
        verdict, report = (made.verdict, made.report) if plan.num_sampling else (None, None)
        sent, stride = None if report is None else Sent(report), 1 + made.batch.places.num_nodes
        return Round(plan, made.proposal, made.batch, out, verdict, times, prompt_rows or [], sent, stride)

    # What is captured.

    def _find_key(self, plan: Plan, handed: Proposal | None, new: bool) -> Key | None:
        """Of its own size; else, at the end of answers where fewer nodes fit, of a size for what the budget gives."""
        most = 0 if self.drafter is None else self.drafter.max_nodes
        key = self._key(plan, find_size(plan, most), handed, new)
        if key is None or key in self._captured or handed is not None:
            return key
        return self._key(plan, find_size(plan, most, plan.budget), handed, new)

    def _key(self, plan: Plan, size: Size | None, handed: Proposal | None, new: bool) -> Key | None:
        """None: the round is not to be captured."""
        kind, shaped = self._kind(plan), self._shape(handed)
        drawn = plan.num_drafting and handed is None  # then functions of users have a part in the drafts, too
        if size is None or shaped is None or plan.wants_prompt_logprobs or (kind is None and drawn):
            return None
        if self.rule.follows and size.chunks and kind is not None and kind.tempered:
            kind = self.state.kinds[TEMPERED]  # little beside a prompt, and half as many to capture
        return Key(size, kind, bool(plan.num_drafting), new, shaped)

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
        sizes = [] if self._capture is None else usual_sizes(self.table.num_slots, rows, nodes, arms)
        asked = [(key, chains if size.nodes else None) for size in sizes for key in self._usual_keys(size, chains)]
        if not asked:
            return
        start = time.perf_counter()
        ops = self.target.model.ops
        ops.prepare(functools.partial(self.compute, *self._lay_out(key, (), handed)) for key, handed in asked)
        if drafter is not None:
            drafter.reset()  # what it was shown was nobody's
        compiled = time.perf_counter()
        for number, (key, handed) in enumerate(asked):
            yield number, len(asked)
            if key not in self._captured:
                self._captured[key] = self._remember(key, (), handed)
        spent = compiled - start, time.perf_counter() - compiled
        log.info("kernels compiled in %.1f s, %d rounds captured in %.1f s", spent[0], len(asked), spent[1])

    def _usual_chains(self) -> Proposal | None:
        """What a drafter on the host that says its name and no more usually proposes; None: nobody can tell."""
        drafter = self.drafter
        if drafter is None or drafter.on_device or drafter.trees or captured_as(drafter) != ():
            return None
        return Proposal.of_texts([], self.table.device, drafter.name)

    def measure_rounds(self) -> Costs:
        """What the captured rounds of decoding alone take with nobody in them. Nothing may be in flight."""
        found: dict[tuple[int, int], float] = {}
        for key, captured in self._captured.items():
            frame, size = captured.frame, captured.frame.size
            if size.chunks == 0 and size.rows == size.sampled and key.kind is not None and key.kind.greedy:
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
        assert self._capture is not None
        frame, asked = self._lay_out(key, slots, handed)
        with holding() as held:
            outcome, replay = self._capture(lambda: (self._prepare if asked.open else self.compute)(frame, asked))
        return Captured(frame, asked, outcome, replay, held)

    def _replay(self, captured: Captured, plan: Plan, handed: Proposal | None, new: list[bool], times: Times) -> Round:
        self._fill(captured.frame, plan, new)
        if handed is not None and captured.asked.handed is not None:
            _copy_proposal(handed, captured.asked.handed)
        captured.replay()
        made, asked = captured.outcome, captured.asked
        if asked.open:
            slots = plan.slots[: plan.num_sampling]
            made = self._conclude(made, asked._replace(slots=slots + asked.slots[len(slots) :]))
        out = made.out
        if any(sequence.params.logprobs is not None for sequence in plan.sequences) and out.logits is not None:
            out = replace(out, logits=out.logits.clone())  # the next replay writes over them
        return self._round(plan, made, out, times)

    # A round itself.

    def compute(self, frame: Frame, asked: Asked) -> Outcome:
        """Propose, pack, forward, verify, commit and observe. Nothing is sent to the device, and nothing read."""
        return self._conclude(self._prepare(frame, asked), asked)

    def _prepare(self, frame: Frame, asked: Asked) -> Outcome:
        table, proposal = self.table, self._draft(frame, asked)
        paths = proposal.paths(table.rounds)
        given = Static([], Nodes(proposal.tokens, proposal.sizes, paths), newest=True)
        batch = pack_rows(frame, frame.slots, frame.starts, table, self.cache.pool.block_size, given)
        if table.windowed is not None:
            see_windows(batch.layout, table.windowed.table.tensor)
        rows = frame.sampled if asked.more is None else torch.cat([frame.sampled, asked.more])
        out = self.target.model.forward(batch, self.cache.layers, self.taps.hidden, rows)
        return Outcome(proposal, batch, out, paths=paths)

    def _conclude(self, made: Outcome, asked: Asked) -> Outcome:
        frame = made.batch.places
        assert isinstance(frame, Frame)
        if frame.num_sampling:
            verdict = self._decide(made.proposal, made.paths, made.batch, made.out, asked.slots)
            if not verdict.committed:
                self.table.commit(frame.slots[: frame.num_sampling], verdict.tokens, verdict.lengths + 1)
            made = made._replace(verdict=verdict, report=Report.of(made.proposal, verdict))
        self._settle_frame(made, asked.new)
        return made

    def _draft(self, frame: Frame, asked: Asked) -> Proposal:
        if asked.handed is not None:
            return asked.handed
        if self.drafter is None or not asked.drafts:
            return undrafted(frame.num_sampling, self.table.device)
        budgets = [frame.num_nodes] * frame.num_sampling
        context = DraftContext(asked.slots, budgets, self.state, self.rule, Given(frame.drafting, frame.budgets))
        return context.cut(self.drafter.propose(context))

    def _decide(self, proposal: Proposal, paths: Tensor | None, batch: Batch, out: Hidden, slots: list[int]) -> Verdict:
        assert out.logits is not None
        width, index = proposal.num_nodes, batch.places.index
        if width != batch.places.num_nodes:
            index = index[:, torch.arange(width + 1, device=index.device).clamp(max=index.shape[1] - 1)]
        if self.table.rounds is not None and self._follows(slots):
            return follow_there(proposal, out, batch, index, self.state, slots)
        history = histories(proposal, paths, batch, slots)
        logits = process(out.logits[: len(history.slots)], history, self.state)
        return verify(Judged(proposal, logits, history, index, self.state), self.rule)

    def _settle_frame(self, made: Outcome, new: bool) -> None:
        """What is permanent becomes so for the cache and the drafter."""
        if made.verdict is not None and not made.proposal.chain:
            self._keep_accepted(made.verdict, made.batch)
        if self.listener is None:
            return
        frame = made.batch.places
        assert isinstance(frame, Frame)
        slots = [self.table.null] * frame.size.sequences  # nobody on the device asks for them
        seen = Observation(self.table, made.batch, made.verdict, slots, made.out.tapped, on_device=True)
        if seen.states is not None:
            self.keep_room(seen.states)
            seen.before = self.read_before(made.batch, frame.firsts, frame.new != 0) if new else None
            self.cache.write_tails(seen.tails, seen.states)
        if self.listener.on_device or getattr(self.listener, "mixed", False):
            self.tell(self.listener, seen, made.out)

    def settle(self, round: Round) -> None:
        """The cache knows, and who drafts on the device; who drafts on the host is told now."""
        if self.listener is not None and not self.listener.on_device:
            parts = (round.batch, round.verdict, round.plan.slots, round.out.tapped)
            self.tell(self.listener, Observation(self.table, *parts, on_device=False), round.out)

    def _moves(self, moved: Tensor, source: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Everything: what stays is moved to where nobody looks."""
        return source.flatten(), target.flatten()


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
