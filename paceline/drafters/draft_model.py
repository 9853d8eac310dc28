"""A smaller model of the same kind drafts for a larger one.

It needs tokens only, so whatever it has not read yet (a prompt, the tokens of the last round) it reads when next asked
to propose. Where the device is ahead of the host, it does so in fixed shapes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from paceline.cache.kv import KVCache
from paceline.drafters import formats, table
from paceline.drafters.base import Context, Needs, Target
from paceline.drafters.chain import ChainReader
from paceline.drafters.checkpoint import check_load_format, is_dummy
from paceline.drafters.tree import Proposal
from paceline.drafters.vocabulary import VocabularyMap, match
from paceline.errors import CheckpointError
from paceline.models import loader
from paceline.models.base import Model
from paceline.params import check_count, check_flag


@dataclass(frozen=True)
class DraftModel:
    """Any supported causal model as the drafter.

    cross_vocabulary: draft with a model that has another tokenizer, through the tokens both vocabularies share.
    quantization: int8 packs its float weights at load, whatever the target's are (native and Triton kernels); int4 too
        (native).
    load_format: dummy makes random weights from its config.json, auto reads them; None: as the engine does.
    """

    model: Any
    num_draft_tokens: int = 5
    cross_vocabulary: bool = False
    dtype: str = "auto"
    tokenizer: Any = None
    quantization: str | None = None
    load_format: str | None = None

    def __post_init__(self) -> None:
        check_count("num_draft_tokens", self.num_draft_tokens, 1)
        check_flag("cross_vocabulary", self.cross_vocabulary)
        check_load_format(self.load_format)

    def create(self) -> DraftModelDrafter:
        return DraftModelDrafter(self)


class DraftModelDrafter(ChainReader):
    """Reads what is unread, then feeds itself one draft at a time. Rows it fed itself and that came true are read."""

    name = "draft_model"

    def __init__(self, config: DraftModel) -> None:
        super().__init__(config.num_draft_tokens)
        self.config = config

    def plan(self, target: Target) -> Needs:
        if isinstance(self.config.model, str | Path):
            formats.check_loads(str(self.config.model))
        self.model, self.vocabulary, self._furthest, dtype = load(self.config, target)
        self._specs = tuple(self.model.layer_specs(dtype))
        return Needs(self._specs)

    def attach(self, target: Target, cache: KVCache) -> None:
        self.open(target, cache, self._specs, self._furthest)

    def propose(self, context: Context) -> Proposal:
        return context.drawn(self.name, most=self.draft_chain(context))


def load(
    config: DraftModel, target: Target, packing: str | None = None
) -> tuple[Model, VocabularyMap, int, torch.dtype]:
    """The model, its ids beside the target's, the position it can read no more, and the type it computes in.

    packing: how its weights are packed unless the config says it; those of a model that transformers runs stay floats.
    """
    dummy = is_dummy(config.load_format, target) and isinstance(config.model, str | Path)
    with _known_by_word(config.model):
        found = loader.find(config.model, config.tokenizer, load_format=loader.DUMMY if dummy else "auto")
    formats.check_tensors(found.source.label, found.source.names())
    sizes = (target.model.config.vocab_size, found.config.vocab_size)
    vocabulary = match(target.tokenizer, found.tokenizer, sizes, config.cross_vocabulary, target.device)
    dtype = loader.find_dtype(config.dtype, found.config, target.device)
    reach = found.config.max_position if found.config.learned_positions else target.max_model_len
    where = target.device, target.kernels, target.max_model_len
    quantization = config.quantization or (packing if found.fallback is None else None)
    loaded = loader.build(found, dtype, *where, quantization, drafts=True)
    return loaded.model, vocabulary, min(reach, target.max_model_len), loaded.dtype


@contextmanager
def _known_by_word(model: Any) -> Iterator[None]:
    """What is no path and has no slash may be meant as a drafter's word."""
    try:
        yield
    except CheckpointError as error:
        if not isinstance(model, str) or "/" in model or Path(model).exists():
            raise
        raise CheckpointError(f"{model!r} is no drafter's word ({table.listed()}), and {error}") from None
