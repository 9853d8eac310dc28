"""A small byte-level tokenizer, the same wherever a test needs text."""

from __future__ import annotations

import functools
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CORPUS = [
    "the rider in front rides ahead, the others ride in the draft. END",
    "naïve café – 日本語 😀 ünïcode END. the END",
]
SPECIAL = ["<s>", "</s>"]
NUM_IDS = 320


@functools.cache
def tokenizer() -> Any:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=NUM_IDS, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(CORPUS * 4, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", eos_token="</s>")


@functools.cache
def id_of_byte(byte: int) -> int:
    """The token of a single byte."""
    letters = [token for token in tokenizer().get_vocab() if len(token) == 1]
    found = [token for token in letters if byte_of(token) == byte]
    return int(tokenizer().get_vocab()[found[0]])


@functools.cache
def byte_of(letter: str) -> int:
    """Byte-level BPE writes printable bytes as themselves and the rest from U+0100 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    if ord(letter) in printable:
        return ord(letter)
    return [byte for byte in range(256) if byte not in printable][ord(letter) - 256]
