"""MLP speculators, the `*-accelerator` checkpoints of IBM: one small step for each token ahead.

Each step mixes the state before it with the token drafted last and gives the next state, whose head gives the next
token. It begins with the target's final state in front of the newest token. No cache, no positions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.drafters.base import FINAL, Context, Needs, Target
from paceline.drafters.checkpoint import Checkpoint, chain_length, check_options
from paceline.drafters.heads import draw_at_once, draw_next, newest_tokens, run_head
from paceline.drafters.states import StateKeeper
from paceline.drafters.tree import Proposal
from paceline.errors import CheckpointError, OptionError
from paceline.kernels.chain import Link
from paceline.kernels.ops import Forward, Weight
from paceline.models.config import is_whole
from paceline.models.weights import Weights
from paceline.params import check_flag

EPS = 1e-6
MOST_STEPS = 64  # of tied ones, which no tensor counts
DEFAULTS = {"n_predict": 3, "top_k_tokens_per_head": (5, 4, 3), "n_candidates": 5}  # of the published config class


@dataclass(frozen=True)
class MLPSpeculator:
    """An MLP speculator's checkpoint as the drafter.

    num_draft_tokens: the length of a chain, at most the checkpoint's steps, which it is by default; of a tree the most
    nodes.
    tree: propose the likeliest paths of a tree instead of a chain.
    top_k: how many tokens of each step a tree tries; by default as the checkpoint says.
    num_paths: how many paths of a tree are proposed; by default as the checkpoint says.
    quantization: int8 packs the weights at load (native and Triton kernels), int4 too (native), none keeps floats.
    """

    model: str
    num_draft_tokens: int | None = None
    tree: bool = False
    top_k: Sequence[int] | None = None
    num_paths: int | None = None
    quantization: str = "int8"

    def __post_init__(self) -> None:
        check_options(self.num_draft_tokens, self.quantization)
        check_flag("tree", self.tree)
        if not self.tree and (self.top_k is not None or self.num_paths is not None):
            raise OptionError("top_k and num_paths are for trees; give tree=True too")

    def create(self) -> MLPSpeculatorDrafter:
        return MLPSpeculatorDrafter(self)


@dataclass(eq=False)
class Step:
    """state, token → next state; `head` gives the logits behind it."""

    embedding: Weight  # [V, D]
    projection: Weight  # [D, D], of the first step [D, H]
    norm: Tensor  # [D]
    shift: Tensor  # [D]
    head: Weight  # [V, D]
    share: float  # of the token, beside 1 of the state
    even: Tensor | None = None  # ones [H]: the state is normed first, and halved in power

    def describe(self, f: Forward) -> Any:
        x = f.input("states", self.projection.shape[1])
        if self.even is not None:
            x = f.scale(f.rms_norm(x, self.even, EPS), 2**-0.5)
        x = f.add(f.linear(x, self.projection, None), f.scale(f.embed(self.embedding), self.share))
        return f.activation(f.rms_norm(x, self.norm, EPS, self.shift), "gelu")


def state_weight(num_steps: int) -> float:
    """What is left of the target's state after each step; after all of them half its power."""
    return float(0.5 ** (0.5 / num_steps))


class Layout:
    """Where each step's tensors stand in a checkpoint: each has its own, or, tied, all share the first there is."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint, config = checkpoint, checkpoint.config
        self.tied = bool(config.get("tie_weights", False))
        self.num_steps = len(checkpoint.names(r"emb\.\d+\.weight"))
        if self.tied:  # a file may hold one of each
            given = config.get("n_predict", DEFAULTS["n_predict"])
            if not is_whole(given) or not 2 <= given <= MOST_STEPS:
                allowed = f"for tied weights a whole number from 2 to {MOST_STEPS}"
                raise CheckpointError(f"{checkpoint.label} gives n_predict={given!r}; allowed: {allowed}")
            self.num_steps = given
        if not self.num_steps:
            raise CheckpointError(f"{checkpoint.label} holds no MLP speculator: no tensor such as emb.0.weight")

    def find(self, part: str, step: int, kind: str = "weight") -> str:
        """The tensor's name; tied ones are equal, whichever of them the file holds."""
        if not self.tied:
            return f"{part}.{step}.{kind}"
        least = min(step, 1) if part == "proj" else 0
        present = self.aliases(part, kind, least)
        if not present or (part == "proj" and step == 0):
            return f"{part}.{least}.{kind}"
        return present[0]

    def aliases(self, part: str, kind: str, least: int) -> list[str]:
        named = {int(name.split(".")[1]): name for name in self.checkpoint.names(rf"{part}\.\d+\.{kind}")}
        return [named[number] for number in sorted(named) if number >= least]

    def check_aliases(self) -> None:
        """A file may hold a tied tensor once or under every step; then all have to be equal."""
        for part, kind in (("emb", "weight"), ("proj", "weight"), ("ln", "weight"), ("ln", "bias"), ("head", "weight")):
            names = self.aliases(part, kind, int(part == "proj")) if self.tied else []
            for name in names[1:]:
                if not torch.equal(self.checkpoint.tensor(names[0]), self.checkpoint.tensor(name)):
                    raise CheckpointError(
                        f"{self.checkpoint.label} says that its weights are tied, but {name} is not {names[0]}"
                    )

    def read(self, weights: Weights) -> list[Step]:
        """The steps; a tensor that several share is read and packed once."""
        self.check_aliases()
        inner, hidden = self.checkpoint.matrix(self.find("proj", 0))
        vocabulary = self.checkpoint.matrix(self.find("emb", 0))[0]
        kept = state_weight(self.num_steps)
        share = math.sqrt((1 - kept**2) * inner / 2) / kept
        even = torch.ones(hidden, dtype=weights.dtype, device=weights.device)
        scaled = bool(self.checkpoint.config.get("scale_input", False))
        matrices: dict[str, Weight] = {}

        def matrix(part: str, step: int, shape: tuple[int, int]) -> Weight:
            name = self.find(part, step)
            if name not in matrices:
                matrices[name] = weights.matrix([name], [shape], picked=part == "emb")
            return matrices[name]

        return [
            Step(
                matrix("emb", step, (vocabulary, inner)),
                matrix("proj", step, (inner, inner if step else hidden)),
                weights.whole(self.find("ln", step), (inner,)),
                weights.whole(self.find("ln", step, "bias"), (inner,)),
                matrix("head", step, (vocabulary, inner)),
                share,
                even if scaled and step == 0 else None,
            )
            for step in range(self.num_steps)
        ]


class MLPSpeculatorDrafter(StateKeeper):
    """Wertheimer et al., 2024: steps in turn, each fed the token that was drafted before it."""

    name = "mlp_speculator"

    def __init__(self, config: MLPSpeculator) -> None:
        self.config, self.trees = config, config.tree
        self.max_nodes = config.num_draft_tokens or 1  # until `plan` has seen the checkpoint

    def plan(self, target: Target) -> Needs:
        checkpoint = Checkpoint(self.config.model, strip=r"speculator\.")
        layout = Layout(checkpoint)
        checkpoint.check("hidden size", checkpoint.matrix(layout.find("proj", 0))[1], target.model.tap_width(FINAL))
        checkpoint.check("vocabulary size", checkpoint.matrix(layout.find("emb", 0))[0], target.model.head.shape[0])
        self._choose_shape(checkpoint, layout.num_steps)
        weights = checkpoint.weights(target, self.config.quantization)
        self.steps, self._ops = layout.read(weights), weights.ops
        chained = self.steps[: self.max_nodes] if self._ops.chains else []  # by kernels that draw a chain in one call
        self._links = [Link(step, step.head) for step in chained]
        tied = r"(emb|proj|ln|head)\.\d+\.(weight|bias)"
        checkpoint.finish(weights, tied if layout.tied else "")
        return super().plan(target)

    def _choose_shape(self, checkpoint: Checkpoint, num_steps: int) -> None:
        """How long a chain is, or how a tree branches."""
        asked, label = self.config.num_draft_tokens, checkpoint.label
        if not self.trees:
            self.max_nodes = chain_length(asked, num_steps, label)
            return
        options = {**DEFAULTS, **checkpoint.config}
        given = options["top_k_tokens_per_head"] if self.config.top_k is None else self.config.top_k
        listed = list(given) if isinstance(given, list | tuple) else []
        if len(listed) != num_steps or not all(type(k) is int and k > 0 for k in listed):
            raise OptionError(f"top_k={given!r} does not fit {label}; allowed: {num_steps} numbers of 1 or more")
        self._branching = listed
        paths = options["n_candidates"] if self.config.num_paths is None else self.config.num_paths
        if type(paths) is not int or not 1 <= paths <= math.prod(self._branching):
            most = math.prod(self._branching)
            raise OptionError(f"num_paths={paths!r} does not fit {label}; allowed: 1 to {most}, the leaves of its tree")
        self._num_paths = paths
        self.max_nodes = min(asked or paths * num_steps, paths * num_steps)

    def propose(self, context: Context) -> Proposal:
        most = self.most_nodes(context)
        if self.trees:
            return self._propose_tree(context).cut(most)
        state, token = self.newest(context), newest_tokens(context)
        if self._links:
            counts = draw_at_once(self._ops, context, most, self._links, state, FINAL)
            if counts is not None:
                return context.drawn(self.name, most=counts)
        for number, step in enumerate(self.steps[: min(context.max_nodes, self.max_nodes)]):
            found = run_head(self._ops, step, step.head, state, token)
            state, token = found.final, draw_next(context, found.logits, number)
        return context.drawn(self.name, most=most)

    def _propose_tree(self, context: Context) -> Proposal:
        """Every branch grows by a step's likeliest tokens; of the full-length paths the likeliest are kept."""
        state, token = self.newest(context), newest_tokens(context)
        parents = torch.full_like(context.slots, -1)[:, None]  # [B, P]
        tokens: list[Tensor] = []  # [B, P] of each depth
        for step, count in zip(self.steps, self._branching):
            found = run_head(self._ops, step, step.head, state, token)
            assert found.logits is not None
            drawn = context.draw(found.logits.view(*parents.shape, -1), parents, count, likeliest=True)
            parents, state = drawn.nodes.flatten(1), found.final.repeat_interleave(count, dim=0)
            tokens.append(drawn.tokens.flatten(1))
            token = drawn.tokens.flatten()
        scores = context.scores()[:, -parents.shape[1] :]
        best = torch.sort(scores, dim=1, descending=True, stable=True).indices[:, : self._num_paths]
        return self._merge(tokens, best, min(context.max_nodes, self.max_nodes))

    def _merge(self, tokens: list[Tensor], leaves: Tensor, width: int) -> Proposal:
        """One tree of the paths to some leaves [B, C], the best first, each node where it is met first."""
        num_paths = leaves.shape[1]
        depth, path = len(tokens), torch.arange(num_paths, device=leaves.device)
        first = torch.full_like(leaves, -1)
        columns: list[tuple[Tensor, Tensor, Tensor]] = []  # token, parent and whether it is new, of each path's node
        for level in range(depth):
            node = leaves // math.prod(self._branching[level + 1 :])  # [B, C] among its depth's
            above = first * depth + level - 1 if level else first
            same = node[:, :, None] == node[:, None]
            first = torch.where(same, path, num_paths).amin(2)  # the first path that goes through the same node
            columns.append((tokens[level].gather(1, node), above, first == path))
        found, parents, kept = (torch.stack(parts, dim=2).flatten(1) for parts in zip(*columns))
        sizes = torch.full_like(leaves[:, 0], depth * num_paths)
        whole = Proposal(found, parents, sizes, chain=False, names=(self.name,), max_depth=depth)
        return whole.only(kept, width)
