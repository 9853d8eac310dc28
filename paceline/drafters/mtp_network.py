"""MTP's networks: each module reads a token's embedding and a state, through a decoder layer of the target's kind.

A row is the pair (token x_p, state in front of it) and predicts x_{p+1}. The first module's states are the target's, a
later one's are what the module before it gave. What a module gives is what its head reads, behind its last norm.
"""

from __future__ import annotations

import re
from typing import Any

from torch import Tensor

from paceline.drafters.base import Target
from paceline.drafters.checkpoint import Checkpoint, own_or_borrowed
from paceline.drafters.mtp_form import Form, Transposed
from paceline.errors import CheckpointError
from paceline.kernels.ops import Forward, Head, Hidden, Inputs, LayerCache, LayerSpec, Part
from paceline.models.batch import Batch
from paceline.models.layers.linear import Linear
from paceline.models.weights import Weights

OWN = 0  # the boundary that is tapped: what it gives


class Module:
    """One of them. `number`: its place in turn, and its cache layer."""

    def __init__(self, form: Form, weights: Weights, target: Target, number: int) -> None:
        self.form, self.number, self.model = form, number, target.model
        self.layer = self.model.extra_layer(weights.under(form.layer))  # first: not every target lends one
        self.ops, self.dtype, config = weights.ops, weights.dtype, target.model.config
        self.hidden, self.eps = config.hidden_size, config.norm_eps
        shape = (config.vocab_size, self.hidden)
        self.embedding = own_or_borrowed(
            weights, f"{form.embedding}.weight", shape, self.model.embedding, self.model.ops, picked=True
        )
        self.head = own_or_borrowed(weights, f"{form.head}.weight", shape, self.model.head, self.model.ops)
        norms = (form.embedding_norm, form.state_norm, form.last_norm)
        self.embedding_norm, self.state_norm, self.last_norm = (
            weights.whole(f"{name}.weight", (self.hidden,)) + config.norm_offset for name in norms
        )
        bias = f"{form.fusion}.bias"
        self.fusion = Linear(
            weights.matrix([f"{form.fusion}.weight"], [(self.hidden, 2 * self.hidden)]),
            weights.whole(bias, (self.hidden,)) if weights.has(bias) else None,
        )

    def describe(self, f: Forward) -> Any:
        embedded = f.rms_norm(f.embed(self.embedding), self.embedding_norm, self.eps)
        state = f.rms_norm(f.input("states", self.hidden), self.state_norm, self.eps)
        both = f.concat(state, embedded) if self.form.state_first else f.concat(embedded, state)
        x = self.model.run_layer(f, self.layer, self.fusion(f, both), self.number)
        last = f.rms_norm(x, self.last_norm, self.eps)
        f.tap(OWN, last)
        return last

    def run(self, batch: Batch, states: Tensor, caches: list[LayerCache], rows: Tensor | None = None) -> Hidden:
        """With `rows` also the logits of those."""
        head = None if rows is None else Head(self.head, rows)
        inputs = Inputs(batch.ids, batch.layout, {"states": states.to(self.dtype)})
        return self.ops.run(self, inputs, caches, (), head)

    def logits(self, finals: Tensor) -> Tensor:
        """[B, H] what it gave → [B, V]."""
        return self.ops.logits(finals, self.head)


def load_modules(
    form: Form, prefixes: list[str], checkpoint: Checkpoint, target: Target, quantization: str
) -> list[Module]:
    model = target.model
    own = checkpoint.vector(f"{prefixes[0]}{form.embedding_norm}.weight")
    checkpoint.check("a hidden size of", own, model.config.hidden_size)
    weights = checkpoint.weights(target, quantization)
    if form.transposed:
        weights.source = Transposed(weights.source, f"{form.embedding}.weight")
    try:
        found = [Module(form, weights.under(prefix), target, number) for number, prefix in enumerate(prefixes)]
    except CheckpointError as error:
        if model.config.architecture in form.families:
            raise
        made = f"such modules come from {' and '.join(form.families)} models, the target is of type"
        raise CheckpointError(f"{error}: {made} {model.config.architecture!r}") from None
    checkpoint.finish(weights, rf"(?!{'|'.join(map(re.escape, prefixes))}).*")  # the rest is the target's
    return found


def layer_specs(modules: list[Module], target: Target) -> tuple[LayerSpec, ...]:
    """A cache layer for each, then one for what each but the last gave, place by place: the next one reads it."""
    first = modules[0]
    own = target.model.layer_specs(first.dtype)[-1]
    states = LayerSpec((Part(1, first.hidden, first.dtype),))
    return (LayerSpec(own.parts),) * len(modules) + (states,) * (len(modules) - 1)
