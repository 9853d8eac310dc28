"""An EAGLE head from its config alone: the tensors such a head has, with random values.

What a file's tensors would show (EAGLE-3 or not, how wide its layers are, which tokens its head knows) the config says
here, or the target. Knows names and shapes; `eagle_form` reads them like a file's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from paceline.drafters.base import Target
from paceline.drafters.eagle_form import spelled_out
from paceline.errors import CheckpointError
from paceline.models.config import is_whole
from paceline.models.dummy import DummySource
from paceline.models.weights import Shape

STATES = 3  # of the target, joined by an EAGLE-3 head


def make_dummy(config: dict[str, Any], label: str, target: Target) -> DummySource:
    """third: EAGLE-3, where its architecture says so or it has a draft vocabulary."""
    fields = spelled_out(config)
    named = f"{fields.get('architectures')} {fields.get('speculators_model_type')}".lower()
    third = "eagle3" in named or fields.get("draft_vocab_size") is not None
    vocabulary = target.model.config.vocab_size
    known = _count(fields, label, "draft_vocab_size", vocabulary) if third else vocabulary
    given = {"d2t": torch.zeros(known, dtype=torch.int64)} if known < vocabulary else {}  # the first tokens
    shapes = _shapes(fields, label, target, third, known)
    return DummySource(label, shapes, given, target.dtype, target.device)


def _shapes(fields: Mapping[str, Any], label: str, target: Target, third: bool, known: int) -> dict[str, Shape]:
    theirs, vocabulary = target.model.config.hidden_size, target.model.config.vocab_size
    hidden = _count(fields, label, "hidden_size", theirs)
    shapes: dict[str, Shape] = {"fc.weight": (hidden, STATES * theirs if third else hidden + theirs)}
    if third:
        states = fields.get("eagle_aux_hidden_state_layer_ids")
        if isinstance(states, list) and states:
            shapes["fc.weight"] = (hidden, len(states) * theirs)
        shapes |= {"norm.weight": (hidden,), "lm_head.weight": (known, hidden)}
    if hidden != theirs:
        shapes |= {"embed_tokens.weight": (vocabulary, hidden), "lm_head.weight": (known, hidden)}
    for number in range(_count(fields, label, "num_hidden_layers", 1)):
        first = number == 0
        shapes |= _layer(f"layers.{number}.", fields, label, hidden, third and first)
        if third or not first:
            shapes[f"layers.{number}.input_layernorm.weight"] = (hidden,)
    return shapes


def _layer(front: str, fields: Mapping[str, Any], label: str, hidden: int, joined: bool) -> dict[str, Shape]:
    """joined: attention reads embedding and state side by side."""
    heads = _count(fields, label, "num_attention_heads")
    groups = _count(fields, label, "num_key_value_heads", heads)
    width = _count(fields, label, "head_dim", hidden // heads)
    wide = _count(fields, label, "intermediate_size")
    reads = 2 * hidden if joined else hidden
    shapes: dict[str, Shape] = {
        "self_attn.q_proj.weight": (heads * width, reads),
        "self_attn.k_proj.weight": (groups * width, reads),
        "self_attn.v_proj.weight": (groups * width, reads),
        "self_attn.o_proj.weight": (hidden, heads * width),
        "mlp.gate_proj.weight": (wide, hidden),
        "mlp.up_proj.weight": (wide, hidden),
        "mlp.down_proj.weight": (hidden, wide),
        "post_attention_layernorm.weight": (hidden,),
        **({"hidden_norm.weight": (hidden,)} if joined else {}),
    }
    return {front + name: shape for name, shape in shapes.items()}


def _count(fields: Mapping[str, Any], label: str, name: str, otherwise: int | None = None) -> int:
    found: Any = fields.get(name)
    if found is None and otherwise is not None:
        return otherwise
    if not is_whole(found) or found < 1:
        raise CheckpointError(
            f"{label}: config.json gives {name}={found!r}, and dummy weights need it; allowed: 1 or more"
        )
    return int(found)
