"""Drafters whose luck is known: they were told what plain decoding says, and are right or wrong as they are asked to.

They draft in tensors alone, so that a round with them can be captured; what the host knows is written down in `note`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.cache.kv import KVCache
from paceline.drafters.base import Context, HostRows, Observation, QuietDrafter, Target
from paceline.drafters.tree import Proposal

Recorded = dict[tuple[int, ...], list[int]]  # prompt → the tokens that plain decoding says after it


class Known(QuietDrafter):
    """Has every sequence's answer by its slot, on the device."""

    on_device = True

    def __init__(self, recorded: Recorded, max_nodes: int) -> None:
        self.recorded, self.max_nodes = recorded, max_nodes

    def create(self) -> Known:
        return self

    def attach(self, target: Target, cache: KVCache) -> None:
        shape = target.max_num_seqs + 1, target.max_model_len + 64
        self._texts = torch.zeros(shape, dtype=torch.int64, device=target.device)
        self._places = torch.arange(self.max_nodes, device=target.device)
        self._vocabulary = target.model.config.vocab_size
        self._known: set[int] = set()

    def note(self, rows: HostRows) -> None:
        for slot in rows.slots:
            if slot not in self._known:
                prompt = rows.table.tokens.host[slot, : rows.table.prompt_length(slot)].tolist()
                text = self.told(torch.tensor(prompt + self.recorded[tuple(prompt)]))
                self._texts[slot, : len(text)] = text.to(self._texts.device)
                self._known.add(slot)

    def told(self, text: Tensor) -> Tensor:
        """What is drafted of it."""
        return text

    def forget(self, slots: list[int]) -> None:
        self._known.difference_update(slots)

    def reset(self) -> None:
        self._known.clear()

    def truth(self, context: Context, count: int) -> Tensor:
        """[B, count] the tokens that plain decoding says next."""
        newest = torch.add(context.lengths, context.slots, alpha=self._texts.shape[1])
        return self._texts.take(newest[:, None] + self._places[:count])


class Fixed(Known):
    """A chain that is always right, or always wrong from its first token on."""

    name = "fixed"

    def __init__(self, recorded: Recorded, num_draft_tokens: int, right: bool) -> None:
        super().__init__(recorded, num_draft_tokens)
        self.right = right

    def told(self, text: Tensor) -> Tensor:
        return text if self.right else (text + 1) % self._vocabulary

    def propose(self, context: Context) -> Proposal:
        count = min(self.max_nodes, context.max_nodes)
        return Proposal.of_chains(self.truth(context, count), context.budgets.clamp(max=count), self.name)


class Replay(Known):
    """Right up to a depth that changes, in trees at a sibling that changes; both follow from the length alone.

    A depth has `width` siblings, under the right one of the depth above. Counts the branches that were accepted.
    """

    name = "replay"

    def __init__(self, recorded: Recorded, depth: int = 4, width: int = 1) -> None:
        super().__init__(recorded, depth * width)
        self.depth, self.width, self.trees = depth, width, width > 1

    def attach(self, target: Target, cache: KVCache) -> None:
        super().attach(target, cache)
        self.branches = torch.zeros(self.width + 1, dtype=torch.int64, device=target.device)  # the last: none

    @torch.inference_mode()
    def tell(self, recorded: Recorded) -> None:
        """Other answers, while no sequence runs; the count begins anew."""
        self.recorded = recorded
        self.reset()
        self.branches.zero_()

    def observe(self, seen: Observation) -> None:
        if seen.verdict is None:
            return
        nodes = seen.verdict.nodes  # [B, D], -1 beyond
        real = (seen.batch.slots[: len(nodes)] != seen.table.null)[:, None] & (nodes >= 0)
        branch = torch.where(real, nodes % self.width, self.width).flatten()
        self.branches.scatter_add_(0, branch, torch.ones_like(branch))

    def propose(self, context: Context) -> Proposal:
        device, width = self._texts.device, self.width
        depth, sibling = torch.arange(self.depth, device=device), torch.arange(width, device=device)
        truth, lengths = self.truth(context, self.depth), context.lengths[:, None]
        right = _mix(lengths, 1) % (self.depth + 1)  # [B, 1] so many depths hold the right token
        place = _mix(lengths * 31 + depth, 2) % width  # [B, D]
        true = (sibling == place[:, :, None]) & (depth[:, None] < right[:, :, None])
        tokens = torch.where(true, truth[:, :, None], (truth[:, :, None] + 1 + sibling) % self._vocabulary)
        above = torch.where(depth[:-1] < right, place[:, :-1], 0) + width * depth[:-1]
        parents = torch.cat([torch.full_like(above[:, :1], -1), above], dim=1)[:, :, None].expand_as(tokens)
        sizes = context.budgets.clamp(max=self.max_nodes)
        flat, names = (tokens.flatten(1), parents.flatten(1)), (self.name,)
        proposal = Proposal(*flat, sizes, not self.trees, names=names, max_depth=self.depth)
        return proposal.cut(sizes)


def _mix(value: Tensor, salt: int) -> Tensor:
    """A number made of both, the same wherever it is asked for."""
    mixed = ((value ^ (salt * 0x9E3779B1)) * 0x85EBCA6B) & 0xFFFFFFFF
    mixed = ((mixed ^ (mixed >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF
    return mixed ^ (mixed >> 16)
