"""Tokenizers rebuilt from GGUF metadata against the tokenizers they were written from."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import gguf
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

from paceline.errors import CheckpointError
from paceline.models import catalog, loader
from paceline.models.gguf import GGUFFile
from paceline.models.gguf_tokenizer import _PRE, tokenizer_from_gguf
from tests.fakes import tiny_model

CORPUS = [
    "The quick brown fox didn't jump; it's 1234 times 56.78 lazy, isn't it? WE'LL.\n\n    def f(x):\n\treturn x ** 2\n",
    "Größe, naïve café, Ελλάδα, Привет мир, 日本語のテキスト, 한국어 문장, العربية ١٢٣, 🎉👩‍👩‍👧 ½ ²\r\n",
    "hello hello hello world world 2024 2025 1999 10000 the the the then there these ...!!! ((a+b)) <x>=$5 don't",
]
TEXTS = [
    *CORPUS,
    "",
    " ",
    "  leading and   inner   spaces  ",
    "\n\n\r\n \t\u00a0\u3000x\n",
    "I'm you're HE'S they'VE we'll d'accord 'tis",
    "1 12 123 1234 12345 3.14159 ٣٤٥ Ⅷ x1y22z333",
    "naïve e\u0301 (combining), ﬁ ligature, 𝒳, \U0001f9d1\u200d\U0001f680",
    "camelCase HTTPServer snake_case CONST //comment\n/* x */",
    "<|im_start|>user\nhi<|im_end|>\n<|end",
]
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def split_by(pattern: str) -> Any:
    cut = pre_tokenizers.Split(Regex(pattern), "isolated")
    return pre_tokenizers.Sequence([cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def original_pre(name: str) -> Any:
    """The pre-tokenizers as the models' own tokenizer files state them."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if name == "gpt-2":
        return byte_level
    if name == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    return split_by(LLAMA3 if name == "llama-bpe" else LLAMA3.replace("{1,3}", ""))


@lru_cache
def trained(name: str) -> Tokenizer:
    tokenizer = Tokenizer(BPE(ignore_merges=name == "llama-bpe"))
    tokenizer.pre_tokenizer = original_pre(name)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=600, initial_alphabet=alphabet, special_tokens=SPECIALS, show_progress=False)
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    return tokenizer


def bpe_metadata(name: str) -> dict[str, Any]:
    model = json.loads(trained(name).to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    padding = [f"[PAD{len(tokens) + index}]" for index in range(5)]
    return {
        "model": "gpt2",
        "pre": name,
        "tokens": tokens + padding,
        "merges": [" ".join(pair) for pair in model["merges"]],
        "token_type": [3] * len(SPECIALS) + [1] * (len(tokens) - len(SPECIALS)) + [5] * len(padding),
    }


def write(path: Path, metadata: dict[str, Any], chat_template: str | None = None) -> Path:
    """A GGUF file that holds `tokenizer.ggml.*` entries alone."""
    writer = gguf.GGUFWriter(path, "test")
    for key, value in metadata.items():
        kinds = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string, list: writer.add_array}
        kinds[type(value)](f"tokenizer.ggml.{key}", value)
    if chat_template is not None:
        writer.add_chat_template(chat_template)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def reopen(metadata: dict[str, Any], chat_template: str | None = None) -> Any:
    """Build the tokenizer from what a file of these entries is read back as."""
    with TemporaryDirectory() as folder:
        return tokenizer_from_gguf(GGUFFile(write(Path(folder) / "t.gguf", metadata, chat_template)))


def test_a_tokenizer_goes_by_an_alias_or_a_gguf_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path / "t.gguf", bpe_metadata("qwen2"))
    monkeypatch.setattr(catalog, "ensure", lambda *given, **more: file)
    for named in ("smollm2-135m", "SmolLM2-135M", str(file), file):
        found = loader.find(tiny_model(), named).tokenizer
        assert found.encode("the rider") == rebuilt("qwen2").encode("the rider")


@lru_cache
def rebuilt(name: str) -> Any:
    """The qwen2 vocabulary behind any pre-tokenizer, or a family's own where one is trained."""
    own = name if name in ("gpt-2", "smollm", "llama-bpe") else "qwen2"
    return reopen(bpe_metadata(own) | {"pre": name, "add_bos_token": False})


@pytest.mark.parametrize("name", ["gpt-2", "smollm", "qwen2", "llama-bpe"])
def test_ids_match_the_original(name: str) -> None:
    ours, original = rebuilt(name), trained(name)
    for text in TEXTS:
        assert ours(text)["input_ids"] == original.encode(text).ids, text


@given(st.sampled_from(["gpt-2", "smollm", "qwen2", "llama-bpe"]), st.text(max_size=60))
@settings(max_examples=200, deadline=None)
def test_any_text_gets_the_ids_of_the_original(name: str, text: str) -> None:
    assert rebuilt(name)(text)["input_ids"] == trained(name).encode(text).ids


@given(st.sampled_from(sorted(_PRE)), st.text(max_size=60))
@settings(max_examples=300, deadline=None)
def test_any_text_survives_the_round_trip(name: str, text: str) -> None:
    assert rebuilt(name).decode(rebuilt(name)(text)["input_ids"]) == text


PIECES = {
    "default": ("hi!! 12345 don't", ["hi", "!!", " ", "123", "45", " don", "'", "t"]),
    "falcon": ("a`b 12345", ["a", "`", "b", " ", "123", "45"]),
    "gpt-2": ("it's 12345  x", ["it", "'s", " 12345", " ", " x"]),
    "smollm": ("it's 123  x", ["it", "'s", " ", "1", "2", "3", " ", " x"]),
    "qwen2": ("IT'S 123!\n\n x", ["IT", "'S", " ", "1", "2", "3", "!\n\n", " x"]),
    "llama-bpe": ("IT'S 12345\n", ["IT", "'S", " ", "123", "45", "\n"]),
    "tekken": ("camelCase IT's 12/\n", ["camel", "Case", " IT", "'s", " ", "1", "2", "/\n"]),
    "gpt-4o": ("camelCase IT's 1234", ["camel", "Case", " IT's", " ", "123", "4"]),
    "deepseek-coder": ("x\n\ny 1, 漢字", ["x", "\n", "\n", "y", " ", "1", ",", " ", "漢字"]),
}


@pytest.mark.parametrize("name", PIECES)
def test_text_is_cut_where_expected(name: str) -> None:
    text, pieces = PIECES[name]
    cut = rebuilt(name).backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)
    assert [text[start:end] for _, (start, end) in cut] == pieces


def test_ids_are_list_positions_up_to_the_padding() -> None:
    metadata = bpe_metadata("qwen2")
    tokenizer = reopen(metadata)
    assert len(tokenizer) == len(metadata["tokens"])
    assert tokenizer.convert_ids_to_tokens(list(range(len(tokenizer)))) == metadata["tokens"]
    assert tokenizer.chat_template is None and tokenizer.bos_token is None
    assert tokenizer.clean_up_tokenization_spaces is False


def test_special_tokens_and_template() -> None:
    metadata = bpe_metadata("qwen2") | {"bos_token_id": 1, "eos_token_id": 2, "padding_token_id": 0}
    metadata |= {"unknown_token_id": 0, "add_bos_token": True, "add_eos_token": True}
    metadata["token_type"][len(metadata["tokens"]) - 1] = 4  # one token matched as written, though not special
    tokenizer = reopen(metadata, chat_template="{{ messages[0]['content'] }}")
    plain = trained("qwen2").encode("hello").ids
    assert tokenizer("hello")["input_ids"] == [1, *plain, 2]
    assert tokenizer("hello", add_special_tokens=False)["input_ids"] == plain
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 0)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi"
    last = len(tokenizer) - 1
    ids = tokenizer("hello" + metadata["tokens"][last], add_special_tokens=False)["input_ids"]
    assert ids == [*plain, last]
    assert tokenizer.decode([1, *ids, 2], skip_special_tokens=True) == "hello" + metadata["tokens"][last]
    assert len(tokenizer) == last + 1


@pytest.mark.parametrize("bos, eos", [(True, True), (True, False), (False, True), (False, False)])
def test_named_tokens_are_treated_as_transformers_treats_them(bos: bool, eos: bool) -> None:
    """Named ones of an ordinary type too: transformers, told their names, makes them special."""
    bare = bpe_metadata("gpt-2")
    bare["token_type"] = [1] * len(bare["tokens"])
    ends = {"add_bos_token": bos, "add_eos_token": eos}
    ids = {"bos_token_id": 300, "eos_token_id": 301, "unknown_token_id": 302, "padding_token_id": 301}
    ours = reopen(bare | ids | ends)
    names = {"bos_token": 300, "eos_token": 301, "unk_token": 302, "pad_token": 301}
    named = {name: bare["tokens"][index] for name, index in names.items()}
    unnamed = reopen(bare).backend_tokenizer
    theirs = PreTrainedTokenizerFast(tokenizer_object=unnamed, **named, **ends)
    for text in [*TEXTS, "".join(named.values()), f" {named['bos_token']} x"]:
        for special in (True, False):
            ids_of = theirs.encode(text, add_special_tokens=special)
            assert ours.encode(text, add_special_tokens=special) == ids_of
            assert ours.decode(ids_of, skip_special_tokens=special) == theirs.decode(ids_of, special)
    assert ours.special_tokens_map == theirs.special_tokens_map
    assert (ours.bos_token_id, ours.eos_token_id, ours.pad_token_id) == (300, 301, 301)
    assert ours.added_tokens_decoder == theirs.added_tokens_decoder
    whole = ours._transformers()
    assert whole.encode("the cat") == ours.encode("the cat") == theirs.encode("the cat")


def test_llama_three_begins_with_bos_unless_told_otherwise() -> None:
    metadata = bpe_metadata("llama-bpe") | {"bos_token_id": 0}
    assert reopen(metadata)("hello")["input_ids"][0] == 0
    assert reopen(metadata | {"add_bos_token": False})("hello")["input_ids"][0] != 0
    assert reopen(bpe_metadata("smollm") | {"bos_token_id": 0})("hello")["input_ids"][0] != 0


def test_nameless_tokens_keep_their_place() -> None:
    metadata = bpe_metadata("qwen2")
    metadata["tokens"][-2:] = ["", ""]
    tokenizer = reopen(metadata)
    assert len(tokenizer) == len(metadata["tokens"])
    assert tokenizer("hello")["input_ids"] == trained("qwen2").encode("hello").ids


def damaged(case: str) -> dict[str, Any]:
    good = bpe_metadata("qwen2")
    changes: dict[str, dict[str, Any]] = {
        "pre is 'klingon'; can read": {"pre": "klingon"},
        "model is 'bert'; can read gpt2, llama": {"model": "bert"},
        "listed twice": {"tokens": [*good["tokens"][:-1], good["tokens"][5]]},
        "one number for each": {"token_type": [1, 2]},
        "not two tokens": {"merges": ["abc"]},
        "do not fit": {"merges": ["zzz yyy"]},
        "outside of the": {"eos_token_id": 10**6},
        "no bos_token_id": {"add_bos_token": True},
        "not true or false": {"add_bos_token": 1},
        "scores is missing": {"model": "llama"},
        "not a list of strings": {"tokens": [1, 2]},
    }
    return good | changes[case]


@pytest.mark.parametrize(
    "reason",
    [
        "pre is 'klingon'; can read",
        "model is 'bert'; can read gpt2, llama",
        "listed twice",
        "one number for each",
        "not two tokens",
        "do not fit",
        "outside of the",
        "no bos_token_id",
        "not true or false",
        "scores is missing",
        "not a list of strings",
    ],
)
def test_damage_is_named(reason: str) -> None:
    with pytest.raises(CheckpointError, match=reason) as caught:
        reopen(damaged(reason))
    assert "t.gguf: " in str(caught.value)


@pytest.mark.parametrize("key", ["model", "pre"])
def test_an_array_where_a_word_is_needed_is_named(key: str) -> None:
    with pytest.raises(CheckpointError, match=rf"t\.gguf: tokenizer\.ggml\.{key} is not a word") as caught:
        reopen(bpe_metadata("gpt-2") | {key: list(range(3000))})
    assert "\n" not in str(caught.value)


def test_no_tokenizer_at_all(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.ggml\.tokens is missing"):
        reopen({})


# SentencePiece: <unk> <s> </s>, the 256 bytes, then pieces whose score falls with the order they were learned in.
BYTES_AT = 3


@lru_cache
def learned_pieces() -> tuple[str, ...]:
    marked = [
        "▁" + line.replace(" ", "▁") for line in ("the cat sat on the mat", "aaaa aa aaa then there", "he  hates   tea")
    ]
    tokenizer = Tokenizer(BPE())
    trainer = BpeTrainer(vocab_size=80, show_progress=False, max_token_length=8)
    tokenizer.train_from_iterator(marked * 3, trainer)
    vocab = tokenizer.get_vocab()
    return tuple(sorted(vocab, key=vocab.__getitem__))


def spm_metadata() -> dict[str, Any]:
    pieces = learned_pieces()
    return {
        "model": "llama",
        "tokens": ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces],
        "scores": [0.0] * (BYTES_AT + 256) + [-float(index) for index in range(len(pieces))],
        "token_type": [2, 3, 3] + [6] * 256 + [1] * len(pieces),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }


@lru_cache
def spm(prefix: bool = True) -> Any:
    return reopen(spm_metadata() | {"add_space_prefix": prefix, "add_bos_token": False})


def merge_by_score(text: str) -> list[int]:
    """The definition: join the best-scored neighbouring pair, leftmost first, until none joins; then spell as bytes."""
    ids = {piece: BYTES_AT + 256 + index for index, piece in enumerate(learned_pieces())}
    symbols = list(text.replace(" ", "▁"))
    while True:
        joins = [(ids[a + b], at) for at, (a, b) in enumerate(pairwise(symbols)) if a + b in ids]
        if not joins:
            break
        at = min(joins)[1]  # a lower id is a better score here
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    spelled = [[ids[s]] if s in ids else [BYTES_AT + byte for byte in s.encode()] for s in symbols]
    return [index for part in spelled for index in part]


SPM_TEXT = st.text(st.sampled_from("aaathesmcon  é\n日"), max_size=40)


@given(SPM_TEXT, st.booleans())
@settings(max_examples=300, deadline=None)
def test_sentencepiece_merges_by_score(text: str, prefix: bool) -> None:
    ids = spm(prefix)(text)["input_ids"]
    assert ids == merge_by_score(" " + text if prefix and text else text)
    assert spm(prefix).decode(ids) == text


def test_sentencepiece_defaults() -> None:
    metadata = spm_metadata()
    tokenizer = reopen(metadata)
    body = merge_by_score(" the cat")
    assert tokenizer("the cat")["input_ids"] == [1, *body]
    assert tokenizer("the cat</s>the cat")["input_ids"] == [1, *body, 2, *body]
    assert tokenizer.decode([1, *body], skip_special_tokens=True) == "the cat"
    assert len(tokenizer) == len(metadata["tokens"])
    unnamed = {key: value for key, value in metadata.items() if not key.endswith("_id")}
    assert reopen(unnamed).special_tokens_map == tokenizer.special_tokens_map


def test_importing_stays_light() -> None:
    code = (
        "import sys, paceline.models.gguf_tokenizer; sys.exit(bool({'transformers', 'tokenizers'} & set(sys.modules)))"
    )
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    assert (
        subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": path}, check=False).returncode == 0
    )
