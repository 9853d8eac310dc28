"""Whether a draft model speaks the target's language, and how to translate where it does not.

Same tokenizer: ids are equal, and rows that only pad one of the two heads are never proposed. Other tokenizer, if the
user asks for it: tokens whose strings exist on both sides are translated, the rest is masked.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from paceline.errors import OptionError, VocabularyError, not_an_object

MOST_PADDING = 1024  # rows by which one head may be longer than the other for no reason but its shape
SPACE_MARKS = ("\u0120", "\u2581")  # how byte-level BPE and SentencePiece write a leading space


class VocabularyMap:
    """Draft ids ↔ target ids; the two lists are given on the host."""

    def __init__(
        self, pairs: tuple[Tensor, Tensor], sizes: tuple[int, int], unknown: int, device: torch.device
    ) -> None:
        draft_ids, target_ids = pairs  # [shared] each
        self.target_size, draft_size = sizes
        self.num_shared = len(draft_ids)
        table = torch.full((self.target_size,), unknown, dtype=torch.int64)
        table[target_ids] = draft_ids
        self.same = torch.equal(draft_ids, target_ids) and draft_size == self.target_size == self.num_shared
        self.draft_ids, self.target_ids = draft_ids.to(device), target_ids.to(device)
        self._to_draft = table.to(device)

    def to_draft(self, ids: Tensor) -> Tensor:
        return ids if self.same else self._to_draft[ids]

    def to_target(self, logits: Tensor) -> Tensor:
        """[B, draft V] → [B, target V]; what the draft model cannot say is -inf."""
        if self.same:
            return logits
        result = logits.new_full((len(logits), self.target_size), float("-inf"))
        return result.index_copy(1, self.target_ids, logits.index_select(1, self.draft_ids))


def match(target: Any, draft: Any, sizes: tuple[int, int], cross: bool, device: torch.device) -> VocabularyMap:
    """Tokenizers (or None) and head sizes (target's, draft's) → a map, or an error naming the first differing id."""
    unknown = _unknown_id(draft)
    if unknown >= sizes[1]:  # a token that was added to the tokenizer and not to the model
        unknown = 0
    if target is None or draft is None:
        if cross:
            raise VocabularyError("cross_vocabulary=True needs the tokenizers of both models, and one has none")
        if target is not draft and abs(sizes[0] - sizes[1]) > MOST_PADDING:  # the ids cannot mean the same
            raise VocabularyError(
                f"the draft model's vocabulary has {sizes[1]} ids and the target's {sizes[0]}, and only one of the two "
                "has a tokenizer to compare them by; give the other's too (tokenizer=)"
            )
        shared = torch.arange(min(sizes))
        return VocabularyMap((shared, shared), sizes, unknown, device)
    target_texts, draft_texts = _texts(target), _texts(draft)
    if cross:
        return _intersection(_plain(target_texts), _plain(draft_texts), sizes, unknown, device)
    _check_same(target_texts, draft_texts)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        ours, theirs = getattr(target, name, None), getattr(draft, name, None)
        if name != "pad_token_id" and None not in (ours, theirs) and ours != theirs:
            raise VocabularyError(f"the draft model's {name} is {theirs}, the target's {ours}; they must agree")
    real = [i for i in sorted(target_texts.keys() & draft_texts.keys()) if i < min(sizes)]
    shared = torch.tensor(real, dtype=torch.int64)
    return VocabularyMap((shared, shared), sizes, unknown, device)


def _texts(tokenizer: Any) -> dict[int, str]:
    if not hasattr(tokenizer, "get_vocab"):
        raise OptionError(f"tokenizer must be one that tells its tokens (get_vocab), {not_an_object(tokenizer)}")
    return {index: text for text, index in tokenizer.get_vocab().items()}


def _unknown_id(tokenizer: Any) -> int:
    for name in ("unk_token_id", "eos_token_id"):
        value = getattr(tokenizer, name, None)
        if value is not None:
            return int(value)
    return 0


def _check_same(target: dict[int, str], draft: dict[int, str]) -> None:
    """Every id both define must mean the same; ids only one defines must lie beyond the other's end."""
    for index in sorted(target.keys() | draft.keys()):
        ours, theirs = target.get(index), draft.get(index)
        if (ours is None and index >= len(target)) or (theirs is None and index >= len(draft)):
            continue  # a row that only pads the other's head
        if ours != theirs:
            raise VocabularyError(
                f"the draft model's vocabulary differs from the target's at id {index} ({theirs!r} against {ours!r}); "
                "use a drafter with the same tokenizer, or cross_vocabulary=True (on the command line "
                ":cross_vocabulary=true behind the drafter)"
            )


def _plain(texts: dict[int, str]) -> dict[str, int]:
    """Token strings with a real space for the family's mark; the lowest id wins."""
    marks = [mark for mark in SPACE_MARKS if any(text.startswith(mark) for text in texts.values())]
    result: dict[str, int] = {}
    for index in sorted(texts):
        text = texts[index]
        for mark in marks:
            text = text.replace(mark, " ")
        result.setdefault(text, index)
    return result


def _intersection(
    target: dict[str, int], draft: dict[str, int], sizes: tuple[int, int], unknown: int, device: torch.device
) -> VocabularyMap:
    pairs = [(draft[text], target[text]) for text in target.keys() & draft.keys()]
    pairs = sorted(pair for pair in pairs if pair[0] < sizes[1] and pair[1] < sizes[0])
    if not pairs:
        raise VocabularyError("the two vocabularies share no token, so the draft model cannot draft for this target")
    draft_ids, target_ids = torch.tensor(pairs, dtype=torch.int64).unbind(1)
    return VocabularyMap((draft_ids.contiguous(), target_ids.contiguous()), sizes, unknown, device)
