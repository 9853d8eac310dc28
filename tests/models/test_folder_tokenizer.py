"""Tokenizers of folders: ours where tokenizer.json is the whole truth, transformers' elsewhere, the same ids always."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, GPT2Config, LlamaConfig, MistralConfig, Qwen2Config

from paceline.models import loader
from paceline.models.tokenizer import Tokenizer
from tests import tokens

TEXTS = ["", "the rider in front", "<s>naïve café</s> END", "  日本語 😀\n", "</s></s>"]
CHAT = [{"role": "user", "content": "who rides?"}]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """As transformers saves it, with a chat template."""
    theirs = tokens.tokenizer()
    theirs.save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[0].content }}{{ add_generation_prompt }}")
    LlamaConfig().save_pretrained(tmp_path)
    return tmp_path


def change(folder: Path, name: str = "tokenizer_config.json", **values: Any) -> None:
    said = json.loads((folder / name).read_text())
    (folder / name).write_text(json.dumps({**said, **values}))


def compare(folder: Path) -> Any:
    """Ours, after it has been found to say what transformers says."""
    ours, theirs = loader.read_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        for special in (True, False):
            ids = theirs.encode(text, add_special_tokens=special)
            assert ours.encode(text, add_special_tokens=special) == ids
            assert ours.decode(ids, skip_special_tokens=special) == theirs.decode(ids, skip_special_tokens=special)
    assert ours.get_vocab() == theirs.get_vocab() and ours.special_tokens_map == theirs.special_tokens_map
    assert ours.eos_token_id == theirs.eos_token_id and ours.pad_token_id == theirs.pad_token_id
    assert {i: str(t) for i, t in ours.added_tokens_decoder.items()} == {
        i: str(t) for i, t in theirs.added_tokens_decoder.items()
    }
    if theirs.chat_template is not None:
        prompt = theirs.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
        assert ours.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True) == prompt
    return ours


def test_a_folder_that_transformers_saved_is_read_without_it(folder: Path) -> None:
    ours = compare(folder)
    assert isinstance(ours, Tokenizer)
    assert ours("the rider", return_tensors="pt")["input_ids"].tolist() == [ours.encode("the rider")]


def add_a_post_processor(folder: Path) -> None:
    saved = json.loads((folder / "tokenizer.json").read_text())
    saved["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}},
    }
    saved["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    (folder / "tokenizer.json").write_text(json.dumps(saved))
    change(folder, add_bos_token=False, clean_up_tokenization_spaces=True)


def list_the_added(folder: Path) -> None:
    """As version 4 saved it, with a file that is then not read."""
    ordinary = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False, "special": True}
    listed = {"0": {"content": "<s>", **ordinary}, "1": {"content": "</s>", **ordinary}}
    change(folder, added_tokens_decoder=listed, tokenizer_class="PreTrainedTokenizerFast", pad_token="</s>")
    (folder / "special_tokens_map.json").write_text('{"eos_token": "<s>"}')


def template_in_the_config(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    change(folder, chat_template="{{ messages[0].content }}{{ eos_token }}", model_max_length=64)


@pytest.mark.parametrize("edit", [add_a_post_processor, list_the_added, template_in_the_config])
def test_what_folders_commonly_say_is_understood(edit: Any, folder: Path) -> None:
    edit(folder)
    assert isinstance(compare(folder), Tokenizer)


def another_family(folder: Path) -> None:
    Qwen2Config().save_pretrained(folder)


def a_mistral(folder: Path) -> None:
    MistralConfig().save_pretrained(folder)


def another_class(folder: Path) -> None:
    GPT2Config().save_pretrained(folder)
    change(folder, tokenizer_class="GPT2Tokenizer")


def a_token_to_add(folder: Path) -> None:
    change(folder, pad_token="<pad>")


def an_ordinary_token_named(folder: Path) -> None:
    change(folder, unk_token="a")


def tokens_that_differ(folder: Path) -> None:
    other = {"lstrip": True, "rstrip": False, "single_word": False, "normalized": False, "special": True}
    change(folder, added_tokens_decoder={"1": {"content": "</s>", **other}})


def an_option_nobody_knows(folder: Path) -> None:
    change(folder, add_prefix_space=True)


def an_old_file(folder: Path) -> None:
    (folder / "special_tokens_map.json").write_text('{"eos_token": "<s>"}')


def several_templates(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    change(folder, chat_template=[{"name": "default", "template": "x"}, {"name": "tool_use", "template": "y"}])


LEFT = [another_family, a_mistral, another_class, a_token_to_add, an_ordinary_token_named]
LEFT += [tokens_that_differ, an_option_nobody_knows, an_old_file, several_templates]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("edit", LEFT)
def test_what_transformers_treats_in_its_own_way_is_left_to_it(edit: Any, folder: Path) -> None:
    edit(folder)
    assert not isinstance(compare(folder), Tokenizer)
