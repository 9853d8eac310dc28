"""EAGLE drafts from the target's own states: one small layer, fed a token and the state in front of it.

It reads the pairs of committed tokens in `observe`, beside the target's rows, and keeps for each sequence what the
newest pair gave. From there it feeds itself: a chain, a tree of one shape (EAGLE-1) or one that grows where drafts are
likely (EAGLE-2). P-EAGLE drafts a whole chain in one pass, places that are not known yet holding a mask.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.cache.kv import KVCache
from paceline.cache.slots import Slots
from paceline.drafters import eagle_form, eagle_static, speculators
from paceline.drafters.base import Context, Drawn, Needs, Taps, Target
from paceline.drafters.cached import StateReader
from paceline.drafters.checkpoint import Checkpoint, check_load_format, check_packing, is_dummy
from paceline.drafters.eagle_dummy import make_dummy
from paceline.drafters.eagle_form import Overrides
from paceline.drafters.eagle_network import OWN, Network, Reading
from paceline.drafters.tree import PADDING, ROOT, Proposal
from paceline.errors import OptionError
from paceline.kernels.chain import MOST_CHILDREN, Branches, Chain, Drafts, Growing, Link, Picks, Sprout
from paceline.models.batch import Batch
from paceline.params import check_count, check_flag, check_number

DEFAULT_LENGTH, DEFAULT_GROWN = 5, 31  # of a chain, of a tree that grows
GROWN = ("chain", "dynamic")  # as far as there is room, or where drafts are likely; other trees have one shape


@dataclass(frozen=True)
class Eagle:
    """An EAGLE, EAGLE-2, EAGLE-3 or P-EAGLE head; which one its files show.

    num_draft_tokens: the most tokens to propose, of all branches together; None: what its files say, else 5, of a
        dynamic tree 31, and all of a tree of one shape.
    tree: chain, dynamic (EAGLE-2's, which grows where drafts are likely), or a tree of one shape, of fewer tokens its
        likelier part: static (EAGLE-1's, of 25), wide (of 31 on three levels: the head runs fewer times), or a list of
        rank tuples such as [(0,), (1,), (0, 0)], typed as 0/1/0.0.
    top_k: children of a node, and nodes that grow on a level, of a dynamic tree; refused without one.
    depth: levels of a dynamic tree below its first; refused without one.
    layer_ids: the target's states an EAGLE-3 head reads, each by the layers before it, as (2, 15, 27) or "2/15/27".
    norm_before_residual: whether an EAGLE-3 head adds to the normed state, where its config is wrong about it.
    min_probability: a chain ends where the head itself gives all of it a smaller chance; 0: at its end. No tree does.
    noise_weight: how much of a sampled token's noise counts where the head guesses with it; 1: all, as if it were sure.
    quantization: int8 packs the weights at load (native and Triton kernels), int4 too (native), none keeps floats.
    load_format: dummy makes random weights from its config.json, auto reads them; None: as the engine does.
    """

    model: str
    num_draft_tokens: int | None = None
    tree: Any = "chain"
    top_k: int = 10
    depth: int = 7
    layer_ids: tuple[int, ...] | str | None = None
    norm_before_residual: bool | None = None
    min_probability: float = 0.0
    noise_weight: float = 0.75
    quantization: str = "int8"
    load_format: str | None = None

    def __post_init__(self) -> None:
        if self.num_draft_tokens is not None:
            check_count("num_draft_tokens", self.num_draft_tokens, 1)
        check_count("top_k", self.top_k, 1)
        check_count("depth", self.depth, 1)
        check_number("min_probability", self.min_probability, 0.0, 1.0)
        check_number("noise_weight", self.noise_weight, 0.0, 1.0)
        if self.tree not in GROWN:
            eagle_static.find(self.tree)
        for name, shape in (("top_k", "dynamic"), ("depth", "dynamic"), ("min_probability", "chain")):
            given = getattr(self, name)
            if self.tree != shape and given != getattr(Eagle, name):
                raise OptionError(f"{name}={given} has no effect with tree={self.tree!r}; it is for tree={shape!r}")
        eagle_form.read_ids(self.layer_ids)
        if self.norm_before_residual is not None:
            check_flag("norm_before_residual", self.norm_before_residual)
        check_packing(self.quantization)
        check_load_format(self.load_format)

    def create(self) -> EagleDrafter:
        return EagleDrafter(self)


class Frontier(NamedTuple):
    """The P nodes of a level that get children."""

    nodes: Tensor  # [B, P] by number; ROOT, and PADDING where one may not grow
    logits: Tensor  # [B, P, Vd] of their children
    states: Tensor  # [B, P, h] what their children are fed with
    paths: Tensor | None  # [B, P, D] where on the line their ancestors lie, themselves last; None: a chain


class EagleDrafter(StateReader):
    name = "eagle"

    def __init__(self, config: Eagle) -> None:
        self.config = config
        self.trees = self.nested = config.tree != "chain"  # those that grow: nearly, with fewer nodes they are narrower
        self._fixed = config.tree not in GROWN
        self.max_nodes = config.num_draft_tokens or 1  # until `plan` has seen the checkpoint

    def plan(self, target: Target) -> Needs:
        config = self.config
        make = partial(make_dummy, target=target) if is_dummy(config.load_format, target) else None
        checkpoint = Checkpoint(config.model, strip=eagle_form.STRIPPED, make=make)
        kinds = speculators.TREES if config.tree == "dynamic" else () if self.trees else speculators.CHAINS
        said = speculators.draft_length(checkpoint.config, kinds, checkpoint.label)
        tree = eagle_static.find(config.tree) if self._fixed else None
        usual = len(tree.nodes) if tree is not None else DEFAULT_GROWN if self.trees else DEFAULT_LENGTH
        self.max_nodes = config.num_draft_tokens or said or usual
        given = Overrides(eagle_form.read_ids(config.layer_ids), config.norm_before_residual)
        with checkpoint.reading():
            form = eagle_form.read(checkpoint, target, given)
        if form.mask is not None and self.trees:
            raise OptionError(
                f"{checkpoint.label} drafts in parallel; tree={config.tree!r} is not allowed; allowed: chain"
            )
        self.network = Network(form, checkpoint, target, config.quantization)
        if tree is not None:
            self._tree = tree.within(self.network.head.shape[0]).first(self.max_nodes)
            self.max_nodes = len(self._tree.nodes)
        self.taps = Taps(hidden=form.states)
        return Needs(self.network.layer_specs(), self.network.width)

    def attach(self, target: Target, cache: KVCache) -> None:
        self.open_cache(target, cache, self.network.layer_specs(), target.max_model_len)
        rows, hidden = target.max_num_seqs + 1, self.network.form.hidden
        # Of each newest pair: the state it is followed with, and what the head reads. [S+1, h]
        self._states = torch.zeros(rows, hidden, dtype=self.network.dtype, device=target.device)
        self._finals = torch.zeros_like(self._states)
        steps, head = self.network.steps, self.network.head
        self._links = tuple([Link(steps if step else None, head) for step in range(self.max_nodes)])
        # Of a tree of one shape, by size; sent now, for nothing is sent in a captured round.
        self._shapes = eagle_static.shapes(self._tree, target.device) if self._fixed else []

    def read_pairs(self, batch: Batch, states: Tensor, table: Slots) -> None:
        out = self.network.run(self.network.pairs, batch, states, self._caches, every=False)
        assert out.tapped is not None
        self.keep(batch, table, (out.tapped, out.final), (self._states, self._finals))

    def propose(self, context: Context) -> Proposal:
        most, (finals, states) = self.recall(context, (self._finals, self._states))
        at_once = self._draw_at_once(context, finals, states, most)
        if at_once is not None:
            return at_once
        logits = self.network.logits(finals)
        root = Frontier(torch.full_like(context.slots, ROOT)[:, None], logits[:, None], states[:, None], None)
        if self.network.form.mask is not None:
            self._draw_parallel(context, root, most)
            most = self._likely(context, most)
        elif self._fixed:
            return self._fill(context, root, most)
        elif self.config.tree == "dynamic":
            self._grow(context, root, most)
            return context.drawn(self.name, chain=False, keep=context.max_nodes, most=most)
        else:
            self._follow(context, root, most)
            most = self._likely(context, most)
        return context.drawn(self.name, chain=not self.trees, most=most)

    def _draw_at_once(self, context: Context, finals: Tensor, states: Tensor, most: Tensor) -> Proposal | None:
        """A chain or a tree, by kernels that draw it in one call."""
        network, own = self.network, ("states", OWN)
        if network.mask is not None or not (network.ops.trees if self.trees else network.ops.chains):
            return None
        form = self._form(context) if self.trees else None
        if form is not None and form.children > MOST_CHILDREN:
            return None

        def run(picking: Picks | None) -> Drafts:
            feeding = self.feeding(context, most)
            if form is not None:
                places = feeding, finals, states, own, context.table.max_length, network.ids, picking
                return network.ops.tree(Sprout(network.steps, network.head, *places), form, self._caches)
            links, least = self._links[: context.max_nodes], self.config.min_probability  # all of a tuple is itself
            chain = Chain(links, feeding, None, finals, {"states": states}, own, network.ids, picking, least)
            return network.ops.chain(chain, self._caches)

        counts = context.draw_chain(run, self.config.noise_weight)
        return None if counts is None else context.drawn(self.name, most=counts)

    def _form(self, context: Context) -> Branches | Growing:
        nodes = min(context.max_nodes, self.max_nodes)
        return self._shapes[nodes].branches if self._fixed else self._growing(nodes)

    def _growing(self, nodes: int) -> Growing:
        """A node that grows takes a line of the cache, and there are as many as nodes may be proposed: with few of them
        fewer than top_k grow on a level."""
        levels, children = min(self.config.depth + 1, nodes), min(self.config.top_k, self.network.head.shape[0])
        return Growing(levels, max(1, min(children, (nodes - 1) // max(1, levels - 1))), children, nodes)

    def _draw(
        self, context: Context, logits: Tensor, parents: Tensor, count: int = 1, likeliest: bool = False
    ) -> Drawn:
        return context.draw(logits, parents, count, likeliest, self.network.ids, self.config.noise_weight)

    def _follow(self, context: Context, at: Frontier, most: Tensor) -> None:
        """A chain: one child at a time, each fed in its turn."""
        for step in range(1, context.max_nodes + 1):
            drawn = self._draw(context, at.logits, at.nodes)
            if step < context.max_nodes:
                batch = self.step_batch(context, drawn.tokens[:, 0, 0], step, most)
                logits, states = self._run(self.network.steps, batch, at.states)
                at = Frontier(drawn.nodes[:, :, 0], logits, states, None)

    def _likely(self, context: Context, most: Tensor) -> Tensor:
        """[B] of a chain as many drafts as are likely enough, all before them included."""
        least = self.config.min_probability
        return torch.minimum(most, context.likely(least)) if least else most

    def _draw_parallel(self, context: Context, root: Frontier, most: Tensor) -> None:
        """P-EAGLE: the places behind the newest token hold masks, and one pass gives the drafts behind each."""
        network, more = self.network, context.max_nodes - 1
        assert network.mask is not None
        logits, nodes = root.logits, root.nodes
        if more:
            masks = torch.full((len(nodes), more), network.form.mask or 0, device=nodes.device)
            batch = self.level_batch(context, masks, None, 0, most)
            found, _ = self._run(network.pairs, batch, network.mask.expand(*masks.shape, -1))
            logits = torch.cat([logits, found], dim=1)
        for place in range(context.max_nodes):
            nodes = self._draw(context, logits[:, place, None], nodes).nodes[:, :, 0]

    def _fill(self, context: Context, at: Frontier, most: Tensor) -> Proposal:
        """A tree of one shape: the same places every time."""
        fed, shape = 0, self._shapes[min(context.max_nodes, self.max_nodes)]
        for growth in shape.levels:
            tokens, nodes = [], []
            for count, group in groupby(range(len(growth.counts)), key=growth.counts.__getitem__):
                parents = list(group)
                some = slice(parents[0], parents[-1] + 1)
                drawn = self._draw(context, at.logits[:, some], at.nodes[:, some], count)
                tokens.append(drawn.tokens.flatten(1))
                nodes.append(drawn.nodes.flatten(1))
            if not len(growth.fed):
                break
            above, chosen = (part.expand(len(most), -1) for part in (growth.above, growth.fed))
            level = Level(torch.cat(tokens, dim=1), torch.cat(nodes, dim=1), above)
            at = self._descend(context, at, level.only(chosen), fed, most)
            fed += len(growth.fed)
        counts = shape.counts[most.clamp(max=len(shape.parents))]
        return context.drawn(self.name, chain=False, most=counts, order=shape.order)

    def _grow(self, context: Context, at: Frontier, most: Tensor) -> None:
        """EAGLE-2's tree: on each level the nodes grow whose whole path is likeliest; the best of all are kept."""
        levels, width, count, _ = self._growing(min(context.max_nodes, self.max_nodes))
        for level in range(levels):
            drawn = self._draw(context, at.logits, at.nodes, count, likeliest=True)
            if level + 1 == levels:
                break
            tokens, nodes = drawn.tokens.flatten(1), drawn.nodes.flatten(1)
            scores = context.scores()[:, -tokens.shape[1] :]
            best = torch.sort(scores, dim=1, descending=True, stable=True).indices[:, :width]
            parent = torch.arange(tokens.shape[1], device=best.device).expand_as(tokens) // count
            at = self._descend(context, at, Level(tokens, nodes, parent).only(best), level * width, most)

    def _descend(self, context: Context, at: Frontier, level: Level, fed: int, most: Tensor) -> Frontier:
        """Feed the nodes of a level that are to grow, behind the `fed` rows that were fed before them."""
        width = level.tokens.shape[1]
        own = fed + torch.arange(width, device=most.device).expand(len(most), width)
        paths = own[:, :, None]
        if at.paths is not None:
            paths = torch.cat([_gather(at.paths, level.parents), paths], dim=2)
        batch = self.level_batch(context, level.tokens, paths, fed, most)
        logits, states = self._run(self.network.steps, batch, _gather(at.states, level.parents))
        nodes = torch.where(own < most[:, None] - 1, level.nodes, PADDING)
        return Frontier(nodes, logits, states, paths)

    def _run(self, reading: Reading, batch: Batch, states: Tensor) -> tuple[Tensor, Tensor]:
        """states [B, P, W] → the logits [B, P, Vd] behind each row, and its own state [B, P, h]."""
        batch_size, width, _ = states.shape
        out = self.network.run(reading, batch, states.flatten(0, 1), self._caches, every=True)
        assert out.logits is not None and out.tapped is not None
        return out.logits.view(batch_size, width, -1), out.tapped.view(batch_size, width, -1)


class Level(NamedTuple):
    """Nodes drawn at one depth, all [B, n]."""

    tokens: Tensor
    nodes: Tensor  # by number
    parents: Tensor  # by place among the nodes that had children

    def only(self, chosen: Tensor) -> Level:
        """The ones at places chosen [B, W]."""
        return Level(*(part.gather(1, chosen) for part in self))


def _gather(values: Tensor, places: Tensor) -> Tensor:
    """values [B, P, …] at places [B, W]."""
    return values.gather(1, places[:, :, None].expand(-1, -1, values.shape[2]))
