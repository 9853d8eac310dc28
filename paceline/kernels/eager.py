"""PyTorch's own kernels. Rows of one sequence share one gather of its keys; sequences of like length share one call.

Nothing here waits for the device: shapes come from the host's spans, everything else stays in tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.kernels.chain import Branches, Chain, Drafts, Growing, Sprout
from paceline.kernels.experts import mix, route
from paceline.kernels.ops import (
    FINAL,
    Describes,
    Experts,
    Head,
    Heads,
    Hidden,
    Inputs,
    LayerCache,
    Layout,
    Packed,
    Span,
    Weight,
    activate,
    cache_rows,
    unpack,
)
from paceline.kernels.rounds import Rounds

SHARED_ROWS = 64  # spans of more rows (prefill chunks) get a call of their own


class EagerForward:
    """A forward carried out at once, on tensors."""

    def __init__(self, inputs: Inputs, caches: Sequence[LayerCache], taps: tuple[int, ...]) -> None:
        self.inputs, self.caches, self.taps = inputs, caches, taps
        self.states: dict[int, Tensor] = {}
        self._plans: dict[Any, Any] = {}

    @property
    def layout(self) -> Layout:
        if self.inputs.layout is None:
            raise ValueError("the description asks for positions or a cache layer, but it was run without a layout")
        return self.inputs.layout

    @property
    def positions(self) -> Tensor:
        return self.layout.positions

    def embed(self, weight: Weight) -> Tensor:
        if self.inputs.ids is None:
            raise ValueError("the description embeds token ids, but it was run without any")
        return F.embedding(self.inputs.ids, weight.data)

    def input(self, name: str, width: int) -> Tensor:
        return self.inputs.find(name, width)

    def add_positions(self, x: Tensor, table: Tensor, offset: int) -> Tensor:
        return x + table[self.positions + offset]

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
        return F.linear(widened(x, weight), weight.data, bias)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, bias: Tensor | None = None) -> Tensor:
        wide = x.float()
        normed = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype) * weight
        return normed if bias is None else normed + bias

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        return F.layer_norm(x, (x.shape[-1],), weight, bias, eps)

    def activation(self, x: Tensor, kind: str) -> Tensor:
        return activate(x, kind)

    def gated(self, x: Tensor, kind: str) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return self.activation(gate, kind) * up

    def experts(self, x: Tensor, scores: Tensor, experts: Experts) -> Tensor:
        return mix(x, route(scores, experts.routing, experts.bias), experts)

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y

    def multiply(self, x: Tensor, y: Tensor) -> Tensor:
        return x * y

    def scale(self, x: Tensor, factor: float) -> Tensor:
        return x * factor

    def concat(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.cat([x, y], dim=-1)

    def split(self, x: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        return list(torch.split(x, list(sizes), dim=-1))

    def head_norm(self, qkv: Tensor, heads: Heads, query: Tensor, key: Tensor, eps: float) -> Tensor:
        q, k, v = split_heads(qkv, heads)
        q, k = self.rms_norm(q, query, eps), self.rms_norm(k, key, eps)
        return torch.cat([q.flatten(1), k.flatten(1), v.flatten(1)], dim=1)

    def rope(self, qkv: Tensor, heads: Heads, cos: Tensor, sin: Tensor) -> Tensor:
        cos, sin = cos[self.positions][:, None], sin[self.positions][:, None]
        count = (heads.num_heads + heads.num_kv_heads) * heads.head_dim
        turning = qkv[:, :count].reshape(len(qkv), -1, heads.head_dim)
        half = cos.shape[-1]
        first, second = turning[..., :half].float(), turning[..., half : 2 * half].float()
        turned = [(first * cos - second * sin).to(qkv.dtype), (second * cos + first * sin).to(qkv.dtype)]
        heads_turned = torch.cat([*turned, turning[..., 2 * half :]], dim=-1)
        return torch.cat([heads_turned.flatten(1), qkv[:, count:]], dim=1)

    def attention(
        self,
        qkv: Tensor,
        heads: Heads,
        layer: int,
        window: int | None,
        scale: float | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        query, key, value = split_heads(qkv, heads)
        keys, values = self.caches[layer]
        looking = self if window is None or self.layout.windowed is None else self._through(self.layout.windowed)
        keys.index_copy_(0, looking.layout.write, key.to(keys.dtype))
        values.index_copy_(0, looking.layout.write, value.to(values.dtype))
        plan = self._planned(looking, heads, window, None)
        return self.attend(query, keys, values, plan, scale, softcap).reshape(len(qkv), -1)

    def cross_attention(
        self, q: Tensor, heads: Heads, layer: int, below: str, scale: float | None = None, softcap: float | None = None
    ) -> Tensor:
        bound = torch.minimum(self.inputs.find(below, None), self.positions + 1)
        # The look of a row that stands on the last position under its bound, all of them at their own place.
        layout = replace(self.layout, positions=bound - 1, path=None, first=None, until=None)
        plan = self._planned(self._through(layout), heads, None, below)
        keys, values = self.caches[layer]
        seen = self.attend(q.reshape(len(q), heads.num_heads, -1), keys, values, plan, scale, softcap)
        return torch.where((bound > 0)[:, None], seen.reshape(len(q), -1), 0)

    def per_head(self, x: Tensor, weight: Weight, num_heads: int) -> Tensor:
        kept, given = split_kept(x, weight, num_heads)
        made = torch.einsum("tha,hba->thb", given, weight.data.view(num_heads, -1, weight.shape[1]))
        return torch.cat([kept, made], dim=-1).flatten(1)

    def latent_attention(
        self, q: Tensor, latent: Tensor, num_heads: int, rank: int, layer: int, scale: float
    ) -> Tensor:
        (keys,) = self.caches[layer]
        keys.index_copy_(0, self.layout.write, latent[:, None].to(keys.dtype))
        plan = self._planned(self, Heads(num_heads, 1, latent.shape[1], rank), None, None)
        query = q.reshape(len(q), num_heads, -1)
        return self.attend(query, keys, keys[..., -rank:], plan, scale, None).reshape(len(q), -1)

    def _through(self, layout: Layout) -> EagerForward:
        """The same rows, placed otherwise."""
        return type(self)(replace(self.inputs, layout=layout), (), ())

    def _planned(self, looking: EagerForward, heads: Heads, window: int | None, below: str | None) -> Any:
        key = heads.num_heads // heads.num_kv_heads, window, below
        if key not in self._plans:
            self._plans[key] = looking.plan(heads, window)
        return self._plans[key]

    def tap(self, boundary: int, x: Tensor) -> None:
        if boundary in self.taps:
            self.states[boundary] = x

    def finish(self, final: Tensor) -> Hidden:
        self.states[FINAL] = final
        return Hidden(final, self.tapped())

    def tapped(self) -> Tensor | None:
        """The tapped boundaries side by side, in the order asked for; one alone as it is, for nobody writes into it."""
        if len(self.taps) == 1:
            return self.states[self.taps[0]]
        return torch.cat([self.states[tap] for tap in self.taps], dim=-1) if self.taps else None

    # What other kernels do differently.

    def plan(self, heads: Heads, window: int | None) -> Any:
        """Made once a forward for all layers that see equally far."""
        per_kv_head = heads.num_heads // heads.num_kv_heads
        layout = self.layout
        if layout.grid is not None and layout.grid.shape[1] <= SHARED_ROWS:  # one shape: nothing is sent to the device
            reach = max(span.reach for span in layout.spans)
            return [_group(layout, layout.grid, reach, per_kv_head, window)]
        return [
            _group(layout, _rows(spans, layout.positions.device), max(s.reach for s in spans), per_kv_head, window)
            for spans in _alike(layout.spans)
        ]

    def attend(
        self, query: Tensor, keys: Tensor, values: Tensor, plan: Any, scale: float | None, softcap: float | None
    ) -> Tensor:
        result = query.new_empty(*query.shape[:2], values.shape[2])  # [T, heads, D of values]
        kv_heads, width = keys.shape[1], keys.shape[2]
        for group in plan:
            sequences, rows = group.rows.shape
            q = query[group.rows].view(sequences, rows, kv_heads, -1, width)
            q = q.permute(0, 2, 1, 3, 4).reshape(sequences, kv_heads, -1, width)  # the heads of a kv head become rows
            k = keys[group.keys].transpose(1, 2).to(q.dtype)
            v = values[group.keys].transpose(1, 2).to(q.dtype)
            out = look(q, k, v, group.mask, scale, softcap)
            out = out.view(sequences, kv_heads, rows, -1, values.shape[2]).permute(0, 2, 1, 3, 4)
            result[group.rows] = out.reshape(sequences, rows, -1, values.shape[2])
        return result


def look(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float | None, softcap: float | None) -> Tensor:
    """Queries [G, heads, R, D] at keys and values [G, heads, C, D] where mask [G, 1 or heads, R, C] lets them."""
    if softcap is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    scores = q.float() @ k.float().transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    # Not -inf: a row that sees nothing would be NaN.
    scores = (softcap * torch.tanh(scores / softcap)).masked_fill(~mask, torch.finfo(torch.float32).min)
    return (torch.softmax(scores, dim=-1) @ v.float()).to(q.dtype)


class EagerOps:
    name, chains, trees, captures = "torch", False, False, False
    rounds: Rounds | None = None
    forward: type[EagerForward] = EagerForward

    def prepare(self, rounds: Iterable[Callable[[], object]]) -> None:
        """Nothing is compiled."""

    def pack(
        self,
        parts: Sequence[Tensor | Packed],
        dtype: torch.dtype,
        device: torch.device,
        exact: bool = False,
        picked: bool = False,
    ) -> Weight:
        dense = unpack(parts, dtype, device)
        return Weight(dense, (dense.shape[0], dense.shape[1]))

    def run(
        self, model: Describes, inputs: Inputs, caches: Sequence[LayerCache], taps: tuple[int, ...], head: Head | None
    ) -> Hidden:
        f = self.forward(inputs, caches, taps)
        hidden = f.finish(model.describe(f))
        if head is not None:
            hidden.logits = self.logits(hidden.final if head.rows is None else hidden.final[head.rows], head.weight)
        return hidden

    def chain(self, chain: Chain, caches: Sequence[LayerCache]) -> Drafts:
        raise NotImplementedError(f"the {self.name} kernels draw no chains in one go")

    def tree(self, sprout: Sprout, form: Branches | Growing, caches: Sequence[LayerCache]) -> Drafts:
        raise NotImplementedError(f"the {self.name} kernels draw no trees in one go")

    def keep(self, caches: Sequence[LayerCache], source: Tensor, target: Tensor) -> None:
        for part in (part for layer in caches for part in layer):
            part[target] = part[source]

    def embed(self, weight: Weight, ids: Tensor) -> Tensor:
        return F.embedding(ids, weight.data)

    def logits(self, hidden: Tensor, weight: Weight) -> Tensor:
        return F.linear(hidden, weight.data).float()


def widened(x: Tensor, weight: Weight) -> Tensor:
    """Rows in the weight's dtype where that is wider; a narrower one PyTorch refuses."""
    return x.to(torch.promote_types(x.dtype, weight.data.dtype))


def split_heads(qkv: Tensor, heads: Heads) -> tuple[Tensor, Tensor, Tensor]:
    widths = heads.head_dim, heads.head_dim, heads.value_width
    counts = heads.num_heads, heads.num_kv_heads, heads.num_kv_heads
    parts = torch.split(qkv, [count * width for count, width in zip(counts, widths)], dim=1)
    q, k, v = (part.reshape(len(qkv), -1, width) for part, width in zip(parts, widths))
    return q, k, v


def split_kept(x: Tensor, weight: Weight, num_heads: int) -> tuple[Tensor, Tensor]:
    """Each head's values before those that meet its matrix, and those; both [T, heads, …]."""
    heads = x.reshape(len(x), num_heads, -1)
    return heads[..., : -weight.shape[1]], heads[..., -weight.shape[1] :]


@dataclass
class Group:
    """Some spans, padded to one shape: G sequences, R rows, C cache positions."""

    rows: Tensor  # [G, R] rows of the batch; padding repeats a span's first row
    keys: Tensor  # [G, C] rows of the cache
    mask: Tensor  # [G, 1, R·heads per kv head, C] bool


def _alike(spans: list[Span]) -> list[list[Span]]:
    """Spans that waste little when padded to one shape: short ones by the power of two their reach falls under."""
    groups: dict[int, list[Span]] = {}
    for index, span in enumerate(spans):
        key = -1 - index if span.num_rows > SHARED_ROWS else span.reach.bit_length()
        groups.setdefault(key, []).append(span)
    return list(groups.values())


def _rows(spans: list[Span], device: torch.device) -> Tensor:
    """[G, R] their rows, the shorter spans' first ones again."""
    count = max(span.num_rows for span in spans)
    listed = [[span.row + (i if i < span.num_rows else 0) for i in range(count)] for span in spans]
    return torch.tensor(listed, dtype=torch.int64).to(device, non_blocking=True)


def _group(layout: Layout, rows: Tensor, reach: int, per_kv_head: int, window: int | None) -> Group:
    device = layout.positions.device
    slots = layout.slots[rows[:, :1]]  # [G, 1]
    line = torch.arange(reach, device=device)
    positions, base = layout.positions[rows], layout.tree_base[rows]  # [G, R]
    last = positions if layout.until is None else layout.until[rows] - 1
    lowest = torch.zeros_like(positions) if layout.first is None else layout.first[rows]
    if window is not None:
        lowest = torch.maximum(lowest, last - window + 1)
    below = last + 1 if layout.path is None else torch.minimum(last + 1, base)
    mask = (line < below[..., None]) & (line >= lowest[..., None])  # [G, R, C]
    if layout.path is not None:
        path = layout.path[rows]  # [G, R, D]
        depth = torch.arange(path.shape[-1], device=device)
        seen = (path >= 0) & (base[..., None] + depth >= lowest[..., None])
        nodes = (base[..., None] + path).clamp(0, reach - 1)
        spots = torch.zeros(*mask.shape[:2], reach, dtype=torch.int64, device=device)
        mask = mask | (spots.scatter_add(2, nodes, seen.long()) > 0)
    mask = mask.repeat_interleave(per_kv_head, dim=1)[:, None]
    # Beyond its last row a sequence looks at that row again, never at another sequence's: 0 · NaN is NaN.
    ends = layout.lines[rows].amax(1, keepdim=True)
    return Group(rows, cache_rows(layout, slots, torch.minimum(line[None], ends)), mask)
