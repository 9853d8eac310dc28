"""Any other decoder: transformers' own module, run on our pages.

The module is given a `Cache` whose layers are ours: what it stores goes into pages, what it reads back is gathered from
them in the order of positions, for each strand of rows that stands alone (`strands`). So it computes what it always
does: causal masks, windows, soft caps, rotary or learned positions and ALiBi are its own, also where drafts are trees.
Slower than our families: pages are copied together for every layer, and each strand of a tree looks at its own copy.

With the reference kernels rows go one at a time, each in one shape that its position alone decides.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from paceline.errors import OptionError
from paceline.kernels.ops import FINAL, Caches, Hidden, LayerCache, LayerSpec, Ops, Part, Weight
from paceline.models.base import Model
from paceline.models.batch import Batch
from paceline.models.config import ModelConfig
from paceline.models.strands import Pass, cut, gather, group
from paceline.models.weights import Weights


class PageLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer during one pass: keys and values before the strands are in pages, and theirs go there."""

    is_compileable, is_sliding, is_croppable = False, False, False

    def __init__(self, kept: LayerCache, look: Pass) -> None:
        super().__init__()
        self._kept, self._look = kept, look

    def update(self, key: Tensor, value: Tensor, *ignored: Any, **more: Any) -> tuple[Tensor, Tensor]:
        """key and value [G, heads, R, D] → the same for all positions [G, heads, C+R, D]."""
        found, look = [], self._look
        for part, new in zip(self._kept, (key, value)):
            part.index_copy_(0, look.write.flatten(), new.transpose(1, 2).flatten(0, 1).to(part.dtype))
            heads = part.transpose(0, 1).index_select(1, look.keys.flatten())  # a head's rows lie side by side
            found.append(heads.view(len(heads), *look.keys.shape, -1).transpose(0, 1).to(new.dtype))
        return found[0], found[1]

    def get_seq_length(self) -> int:
        return self._look.keys.shape[1] - self._look.write.shape[1]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing is allocated here."""


class SeenLayer(PageLayer):
    """A layer that keeps nothing and remembers what it was given: the first token's pass."""

    def __init__(self) -> None:
        CacheLayerMixin.__init__(self)
        self.seen: list[tuple[Part, Part]] = []

    def update(self, key: Tensor, value: Tensor, *ignored: Any, **more: Any) -> tuple[Tensor, Tensor]:
        self.seen.append(
            (Part(key.shape[1], key.shape[3], key.dtype), Part(value.shape[1], value.shape[3], value.dtype))
        )
        return key, value

    def get_seq_length(self) -> int:
        return 0


class Given:
    """Stands for the output of a module's body, so that its head alone can be run."""

    def __init__(self, state: Tensor) -> None:
        self.last_hidden_state = state

    def __getitem__(self, place: Any) -> Any:
        return (self.last_hidden_state,)[place]

    def __getattr__(self, name: str) -> None:
        return None


class Fallback(Model):
    """A causal language model of transformers, and its body: all of it but the head.

    alone: each row is a pass of its own, as the reference kernels promise.
    pads: whether strands with pasts of different length go together.
    """

    def __init__(self, config: ModelConfig, ops: Ops, module: Any, body: Any) -> None:
        self.config, self.ops, self.module, self.body = config, ops, module, body
        self.alone, self.pads = ops.name == "reference", True
        self.embedding = _weight(module.get_input_embeddings())
        self.head = _weight(module.get_output_embeddings())
        self.specs: list[LayerSpec] = []
        self._blocks = find_blocks(self.body, config.num_layers)
        named = inspect.signature(self.body.forward).parameters
        self._takes_any = any(one.kind is one.VAR_KEYWORD for one in named.values())
        self._takes = set(named)

    def layer_specs(self, dtype: torch.dtype) -> list[LayerSpec]:
        return self.specs  # as the module gave them; a window is the module's own affair, which masks it

    def forward(
        self, batch: Batch, caches: Caches, taps: tuple[int, ...] = (), rows: Tensor | None = None, best: bool = True
    ) -> Hidden:
        if taps:
            self._check_taps(taps)
        layout = batch.layout
        if layout.until is not None:
            raise ValueError("rows that see one another cannot be run by the fallback")
        strands = cut(layout, self.alone)
        like = self.embedding.data
        states = {tap: like.new_zeros(len(batch.ids), self.tap_width(tap)) for tap in {*taps, FINAL}}
        for members in [[one] for one in strands] if self.alone else group(strands, alike=not self.pads):
            look = gather(layout, members)
            layers = [PageLayer(kept, look) for kept in caches]
            found = self._run(batch.ids[look.rows], layout.positions[look.rows], Cache(layers=layers), look.seen, taps)
            for tap, state in found.items():  # padding rows, which no strand has, stay zeros
                states[tap][look.rows] = state.to(like.dtype)
        final = states[FINAL]
        tapped = torch.cat([states[tap] for tap in taps], dim=-1) if taps else None
        return Hidden(final, tapped, None if rows is None else self.logits(final[rows]))

    def logits(self, hidden: Tensor) -> Tensor:
        if not len(hidden):
            return hidden.new_zeros(0, self.head.shape[0], dtype=torch.float32)
        if self.alone:
            return torch.cat([self._read(row[None].clone()) for row in hidden])
        return self._read(hidden)

    @torch.no_grad()
    def _run(
        self, ids: Tensor, positions: Tensor, cache: Cache, seen: Tensor | None, taps: tuple[int, ...] = ()
    ) -> dict[int, Tensor]:
        """One pass of the body: strands [G, R] → their states [G, R, H] at the taps, and the final ones."""
        mask = None if seen is None else seen.long()
        given = {"input_ids": ids, "position_ids": positions, "attention_mask": mask, "past_key_values": cache}
        with self._tapping(taps) as states:
            out = self.body(**self._taken({**given, "use_cache": True}))
        states[FINAL] = out[0]
        return states

    def _taken(self, given: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in given.items() if self._takes_any or name in self._takes}

    @torch.no_grad()
    def _read(self, hidden: Tensor) -> Tensor:
        """The module's own head, with whatever it does to logits: [R, H] → [R, V] float32."""
        own = vars(self.body).get("forward")
        self.body.forward = lambda *ignored, **more: Given(hidden[None])
        try:
            out = self.module(input_ids=torch.zeros(1, len(hidden), dtype=torch.int64, device=hidden.device))
        finally:
            del self.body.forward
            if own is not None:
                self.body.forward = own
        logits: Tensor = out[0]
        return logits[0].float()

    @contextmanager
    def _tapping(self, taps: tuple[int, ...]) -> Iterator[dict[int, Tensor]]:
        """The residual in front of the first block, or behind so many."""
        states: dict[int, Tensor] = {}

        def enter(module: Any, args: tuple[Any, ...], given: dict[str, Any]) -> None:
            states[0] = args[0] if args else given["hidden_states"]

        def leave(boundary: int) -> Any:
            def keep(module: Any, args: Any, out: Any) -> None:
                states[boundary] = out if isinstance(out, Tensor) else out[0]

            return keep

        hooks = []
        for tap in set(taps) - {FINAL}:
            if tap:
                hooks.append(self._blocks[tap - 1].register_forward_hook(leave(tap)))
            else:
                hooks.append(self._blocks[0].register_forward_pre_hook(enter, with_kwargs=True))
        try:
            yield states
        finally:
            for hook in hooks:
                hook.remove()

    def _check_taps(self, taps: tuple[int, ...]) -> None:
        super()._check_taps(taps)
        if not self._blocks and set(taps) != {FINAL}:
            raise OptionError(f"the layers of {type(self.module).__name__} cannot be told apart, so none can be tapped")

    def first_layers(self, count: int) -> NoReturn:
        self._keep_layers("early exit")

    def extra_layer(self, weights: Weights) -> NoReturn:
        self._keep_layers("an MTP drafter")

    def key_turns(self) -> NoReturn:
        self._keep_layers("a GLIDE drafter")

    def _keep_layers(self, drafter: str) -> NoReturn:
        raise OptionError(
            f"{drafter} computes with the target's own layers, which a model run by transformers does not lend; "
            "allowed for it: drafters without a model, draft models, and heads that read its states"
        )


def _weight(module: Any) -> Weight:
    found = module.weight
    return Weight(found.detach(), (found.shape[0], found.shape[1]))


@torch.no_grad()
def find_body(module: Any) -> Any:
    """What the module runs to get the states that its head reads; None: nothing that is apart from it."""
    ids = torch.zeros(1, 1, dtype=torch.int64, device=next(module.parameters()).device)
    words = module.get_input_embeddings()
    for body in (module.base_model, module.get_decoder(), *module.children()):
        if body is module or all(part is not words for part in body.modules()):
            continue
        called: list[Any] = []
        hook = body.register_forward_hook(lambda *ignored, called=called: called.append(True))
        module(input_ids=ids, use_cache=False)
        hook.remove()
        if called:
            return body
    return None


def find_blocks(body: Any, count: int) -> list[Any]:
    """Its decoder layers: the first list of so many modules; none where there is no such list."""
    for module in body.modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) == count:
            return list(module)
    return []
