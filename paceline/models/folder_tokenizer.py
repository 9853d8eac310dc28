"""The tokenizer of a Hugging Face folder, straight from its tokenizer.json where transformers would do no more.

transformers rebuilds many tokenizers after its own classes, and knows of old files beside tokenizer.json. All that is
left to it: `find_tokenizer` answers only for folders whose tokenizer.json is the whole truth.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from paceline.errors import CheckpointError
from paceline.models.json_file import read_object
from paceline.models.tokenizer import NAMES, Tokenizer

PLAIN_CLASSES = ("TokenizersBackend", "PreTrainedTokenizerFast")  # those that take the file as it is
FAMILIES = ("llama", "gpt2", "opt", "qwen3")  # of the others transformers doubts what the folder says
# What may stand in tokenizer_config.json without changing what the file says.
UNDERSTOOD = {
    *("tokenizer_class", "backend", "model_max_length", "clean_up_tokenization_spaces", "added_tokens_decoder"),
    *("add_bos_token", "add_eos_token", "chat_template", "is_local", "local_files_only", *NAMES),
}
OLD_FILES = ("special_tokens_map.json", "added_tokens.json")  # read where no added_tokens_decoder is given


def find_tokenizer(folder: Path) -> Tokenizer | None:
    """None: ask transformers."""
    from tokenizers import Tokenizer as Backend

    try:
        said = read_object(folder / "tokenizer_config.json")
        if not _is_plain(folder, said):
            return None
        backend = Backend.from_file(str(folder / "tokenizer.json"))
        template = folder / "chat_template.jinja"
        chat = template.read_text(encoding="utf-8") if template.is_file() else said.get("chat_template")
        named = {name: said[name] for name in NAMES if said.get(name) is not None}
        if not _is_whole(backend, named, said) or not isinstance(chat, str | None):
            return None
    except Exception:  # the library raises bare Exception; transformers then says what is wrong
        return None
    backend.no_truncation()
    backend.no_padding()
    return Tokenizer(backend, named, chat, functools.partial(_transformers, folder))


def _transformers(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)


def _is_plain(folder: Path, said: dict[str, Any]) -> bool:
    try:
        family = read_object(folder / "config.json").get("model_type")
    except (OSError, CheckpointError):
        return False
    old = [] if "added_tokens_decoder" in said else [name for name in OLD_FILES if (folder / name).exists()]
    return (
        family in FAMILIES
        and said.get("tokenizer_class") in PLAIN_CLASSES
        and said.keys() <= UNDERSTOOD
        and not old
        and not (folder / "additional_chat_templates").exists()
    )


def _is_whole(backend: Any, named: dict[str, Any], said: dict[str, Any]) -> bool:
    """Whether there is nothing to add to what the file has, and nothing to clean up after it."""
    added = backend.get_added_tokens_decoder()
    special = [token.content for token in added.values() if token.special]
    if not all(token in special for token in named.values()):
        return False
    fields = ("content", "special", "lstrip", "rstrip", "single_word", "normalized")
    for index, token in (said.get("added_tokens_decoder") or {}).items():
        if [getattr(added.get(int(index)), field, None) for field in fields] != [token[field] for field in fields]:
            return False
    return type(backend.model).__name__ == "BPE" or not said.get("clean_up_tokenization_spaces")
