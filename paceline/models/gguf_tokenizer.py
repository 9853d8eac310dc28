"""The tokenizer inside a GGUF file, rebuilt from its `tokenizer.ggml.*` metadata.

Knows the two vocabulary kinds in use (byte-level BPE as "gpt2", SentencePiece BPE as "llama") and how text is cut up
before merging for each named pre-tokenizer. Must not know tensors, model architectures or generation.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from paceline.errors import CheckpointError
from paceline.models.gguf import GGUFFile
from paceline.models.tokenizer import Tokenizer

# Token types as GGUF numbers them.
_NORMAL, _UNKNOWN, _CONTROL, _USER = 1, 2, 3, 4
_SPACE = "▁"

_ENGLISH = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS = _ENGLISH + r"|[^\r\n\p{L}\p{N}]?\p{L}+|"
_MARKS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*" + _TAIL
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _cased(suffix: str, digits: str) -> str:
    """Words split where lower case turns to upper, each with an optional `suffix`."""
    lead = r"[^\r\n\p{L}\p{N}]?"
    words = f"{lead}{_UPPER}*{_LOWER}+{suffix}|{lead}{_UPPER}+{_LOWER}*{suffix}"
    return f"{words}|{digits}" + r"| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _TAIL


@dataclass(frozen=True)
class _Pre:
    """How one pre-tokenizer cuts text: each pattern in turn isolates its matches inside the pieces left so far."""

    patterns: tuple[str, ...]
    whole_words: bool = False  # a piece that is itself in the vocabulary skips the merges
    add_bos: bool = False  # when the file does not say


_DIGITWISE = _Pre((r"\p{N}", _GPT2))
_PLAIN = _Pre((_GPT2,))
_QWEN = _Pre((_WORDS + r"\p{N}" + _MARKS,))
_LLAMA3 = _Pre((_WORDS + r"\p{N}{1,3}" + _MARKS,), whole_words=True, add_bos=True)
_O200K = _Pre((_cased(_ENGLISH + "?", r"\p{N}{1,3}"),))
_PRE: dict[str, _Pre] = {
    "default": _Pre((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "falcon": _Pre((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")),
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais"), _PLAIN),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"), _DIGITWISE),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "stablelm2"), _QWEN),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3"), _LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe"), _Pre(_LLAMA3.patterns)),
    "tekken": _Pre((_cased("", r"\p{N}"),), whole_words=True, add_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4"), _O200K),
    "deepseek-coder": _Pre(("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-\ud7ff]+", r"\p{N}")),
}


class _Vocabulary:
    """The `tokenizer.ggml.*` entries, checked against each other as they are read."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self.tokens = self._tokens()
        self.ids = {token: index for index, token in enumerate(self.tokens)}
        if len(self.ids) != len(self.tokens):
            twice = next(token for index, token in enumerate(self.tokens) if self.ids[token] != index)
            self.fail(f"token {twice!r} is listed twice")
        types = self.array("token_type", "iu")
        self.types: list[int] = [_NORMAL] * len(self.tokens) if types is None else types

    def fail(self, reason: str) -> NoReturn:
        raise CheckpointError(f"{self.file.path}: {reason}")

    def get(self, key: str) -> Any:
        return self.file.metadata.get(f"tokenizer.ggml.{key}")

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key)
        if value is not None and not isinstance(value, bool):
            self.fail(f"tokenizer.ggml.{key} is {value!r}, not true or false")
        return default if value is None else value

    def strings(self, key: str) -> list[str]:
        value = self.get(key)
        if not isinstance(value, list) or not isinstance(next(iter(value), ""), str):  # an array is of one type
            self.fail(f"tokenizer.ggml.{key} is missing or not a list of strings")
        return value

    def array(self, key: str, kinds: str) -> list[Any] | None:
        """One number per token, or None where the file has none."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, np.ndarray) or value.dtype.kind not in kinds or len(value) != len(self.tokens):
            self.fail(f"tokenizer.ggml.{key} does not hold one number for each of the {len(self.tokens)} tokens")
        return list(value.tolist())

    def token(self, key: str, default: int | None = None) -> str | None:
        """The token that a `..._token_id` entry points at."""
        index = self.get(key)
        if index is None:
            return self.tokens[default] if default is not None and default < len(self.tokens) else None
        if not isinstance(index, int) or isinstance(index, bool) or not 0 <= index < len(self.tokens):
            self.fail(f"tokenizer.ggml.{key} is {index!r}, outside of the {len(self.tokens)} tokens")
        return self.tokens[index]

    def _tokens(self) -> list[str]:
        tokens = self.strings("tokens")
        if not tokens:
            self.fail("tokenizer.ggml.tokens is empty")
        # Nameless tokens occur in the wild, several to a file; a made-up name keeps their ids in place.
        return [token or f"[EMPTY_{index}]" for index, token in enumerate(tokens)]


def tokenizer_from_gguf(file: GGUFFile) -> Tokenizer:
    """A tokenizer whose ids are the positions in the file's token list."""
    vocabulary = _Vocabulary(file)
    model = vocabulary.get("model")
    if not isinstance(model, str):
        vocabulary.fail("tokenizer.ggml.model is not a word; can read gpt2, llama")
    sentencepiece = model == "llama"
    if sentencepiece:
        backend, add_bos = _sentencepiece(vocabulary), True
    elif model == "gpt2":
        backend, add_bos = _byte_level(vocabulary)
    else:
        vocabulary.fail(f"tokenizer.ggml.model is {model!r}; can read gpt2, llama")
    found = {
        "bos_token": vocabulary.token("bos_token_id", 1 if sentencepiece else None),
        "eos_token": vocabulary.token("eos_token_id", 2 if sentencepiece else None),
        "unk_token": vocabulary.token("unknown_token_id", 0 if sentencepiece else None),
        "pad_token": vocabulary.token("padding_token_id"),
    }
    named = {name: token for name, token in found.items() if token is not None}
    _add_tokens(backend, vocabulary, named)
    ends = {}
    for end, default in (("bos", add_bos), ("eos", False)):
        ends[end] = vocabulary.flag(f"add_{end}_token", default and f"{end}_token" in named)
        if ends[end] and f"{end}_token" not in named:
            vocabulary.fail(f"tokenizer.ggml.add_{end}_token is set but there is no {end}_token_id")
    _add_ends(backend, [named["bos_token"]] if ends["bos"] else [], [named["eos_token"]] if ends["eos"] else [])
    template = file.metadata.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        vocabulary.fail("tokenizer.chat_template is not a string")
    flags = {f"add_{end}_token": given for end, given in ends.items()}
    return Tokenizer(backend, named, template, functools.partial(_transformers, backend, template, {**named, **flags}))


def _transformers(backend: Any, template: str | None, options: dict[str, Any]) -> Any:
    """The same tokenizer as an object of transformers."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=backend, chat_template=template, clean_up_tokenization_spaces=False, **options
    )


def _add_ends(backend: Any, first: list[str], last: list[str]) -> None:
    """What texts begin and end with where special tokens are asked for."""
    from tokenizers import processors

    single = [*(f"{token}:0" for token in first), "$A:0", *(f"{token}:0" for token in last)]
    second = [*(f"{token}:1" for token in first), "$B:1", *(f"{token}:1" for token in last)]
    ids = [(token, backend.token_to_id(token)) for token in {*first, *last}]
    backend.post_processor = processors.TemplateProcessing(single=single, pair=single + second, special_tokens=ids)


def _add_tokens(backend: Any, vocabulary: _Vocabulary, named: dict[str, str]) -> None:
    """Make control, named and user-defined tokens match as written, before any merging; their ids stay as listed."""
    from tokenizers import AddedToken

    listed = [(t, kind) for t, kind in zip(vocabulary.tokens, vocabulary.types) if kind != _NORMAL]
    special = (_CONTROL, _UNKNOWN)
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t, kind in listed if kind in special])
    backend.add_tokens([AddedToken(t, special=False, normalized=False) for t, kind in listed if kind == _USER])
    added = {token.content for token in backend.get_added_tokens_decoder().values()}
    missing = [token for token in dict.fromkeys(named.values()) if token not in added]
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in missing])


def _bpe(vocabulary: _Vocabulary, merges: list[tuple[str, str]], **options: Any) -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import BPE

    try:
        return Tokenizer(BPE(vocab=vocabulary.ids, merges=merges, **options))
    except Exception as error:  # the library raises bare Exception for merges that do not fit the vocabulary
        vocabulary.fail(f"tokenizer.ggml.merges do not fit the tokens ({error})")


def _byte_level(vocabulary: _Vocabulary) -> tuple[Any, bool]:
    """A byte-level BPE tokenizer, and whether its family begins texts with the BOS token."""
    from tokenizers import Regex, decoders, pre_tokenizers

    name = vocabulary.get("pre")
    if name is not None and not isinstance(name, str):
        vocabulary.fail("tokenizer.ggml.pre is not a word")
    pre = _PRE.get("default" if name is None else name)
    if pre is None:
        vocabulary.fail(f"tokenizer.ggml.pre is {name!r}; can read {', '.join(sorted(_PRE))}")
    lines = vocabulary.strings("merges")
    merges = [(left, right) for left, _, right in (line.partition(" ") for line in lines) if left and right]
    if len(merges) != len(lines):
        wrong = next(line for line in lines if not all(line.partition(" ")))
        vocabulary.fail(f"tokenizer.ggml.merges holds {wrong!r}, which is not two tokens")
    backend = _bpe(vocabulary, merges, ignore_merges=pre.whole_words)
    # No normalizer, not even the NFC of the original Qwen tokenizer: the text of a prompt is never altered.
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.patterns]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*cuts, to_bytes])
    backend.decoder = decoders.ByteLevel()
    return backend, pre.add_bos


def _sentencepiece(vocabulary: _Vocabulary) -> Any:
    """SentencePiece BPE: spaces become a visible mark, and unknown characters fall back to byte tokens."""
    from tokenizers import decoders, normalizers

    has_bytes = all(f"<0x{byte:02X}>" in vocabulary.ids for byte in range(256))
    unknown = vocabulary.token("unknown_token_id", 0)
    backend = _bpe(vocabulary, _scored_merges(vocabulary), unk_token=unknown, fuse_unk=True, byte_fallback=has_bytes)
    prefix = vocabulary.flag("add_space_prefix", True)
    marked = normalizers.Replace(" ", _SPACE)
    # The prefix goes before every stretch of plain text, so after each special token too, as llama.cpp does it.
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), marked]) if prefix else marked
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return backend


def _scored_merges(vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """The merges that scores imply: any two pieces that join into a third, best-scored result first.

    SentencePiece takes the leftmost of equal scores; a merge list cannot say that across different results, so those
    tie by token id. Trained vocabularies score each piece differently. Nor can a merge start from a character that has
    no piece of its own, because it is spelled as bytes by then.
    """
    scores = vocabulary.array("scores", "f")
    if scores is None:
        vocabulary.fail("tokenizer.ggml.scores is missing")
    pieces = {token: index for token, index in vocabulary.ids.items() if vocabulary.types[index] in (_NORMAL, _USER)}
    ranked: list[tuple[float, int, int]] = []
    for token, index in pieces.items():
        for cut in range(1, len(token)):
            if token[:cut] in pieces and token[cut:] in pieces:
                # Among the ways to make one piece the longer left part first: text is merged from the left.
                ranked.append((-scores[index], index, -cut))
    tokens = vocabulary.tokens
    return [(tokens[index][:-minus_cut], tokens[index][-minus_cut:]) for _, index, minus_cut in sorted(ranked)]
