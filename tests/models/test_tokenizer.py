"""Our tokenizer beside transformers' object around the same backend: the same ids, texts and prompts."""

from __future__ import annotations

import copy
import functools
import pickle
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from paceline.models.tokenizer import Tokenizer
from tests import tokens

NAMED = {"bos_token": "<s>", "eos_token": "</s>"}
TEXTS = ["", " ", "the rider", "naïve café – 日本語 😀", "<s>the</s> END", "a\n\n\tb  c", "</s", "1234 don't \r\n"]
CHATML = (
    "{%- for message in messages %}\n    {%- if loop.first and message.role != 'system' %}\n"
    "        {{- bos_token + 'system\\nYou ride.' + eos_token }}\n    {%- endif %}\n"
    "{{ message['role'] + '\\n' + message.content | trim }}\n{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant\\n' }}{% endif %}"
)
TEMPLATES = {
    "chatml": CHATML,
    "tools": (
        "{%- if tools %}{%- for tool in tools %}{{ tool | tojson }}\n{{ tool | tojson(indent=2) }}{% endfor %}"
        "{% endif %}{{ tools is none }}{{ documents is none }}{{ messages | length }}"
    ),
    "names": (
        "{% set ns = namespace(last=-1, found=false) %}{% for m in messages %}{% if m.role == 'stop' %}{% break %}"
        "{% endif %}{% set ns.last = loop.index0 %}{% endfor %}{{ ns.last }}{{ dict(a=1) }}{{ dict.fromkeys('ab', 2) }}"
    ),
    "marked": "{% for m in messages %}{% generation %}{{ m.content }}{{ m.role }}{% endgeneration %}\n{% endfor %}",
    "thoughts": "{% for m in messages %}{{ m.reasoning_content }}/{{ m.thinking }}/{{ m.kind }};{% endfor %}",
    "html": "{{ messages | tojson }} {{ messages[0].content }} {{ extra }} {{ odd | tojson }}",
    "dated": "{{ strftime_now('%Y') }}{{ messages[-1]['content'][:3] }}",
}
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": " who <rides> & 'why'? 日本 "}],
    [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "ho", "reasoning": "hm"},
        {"role": "stop", "content": "x", "thinking": "h"},
    ],
]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "x": ["é", "<a>", None]}}}]


@dataclass
class Odd:
    size: int
    data: Any


def wrap(template: Any = None) -> Any:
    return PreTrainedTokenizerFast(
        tokenizer_object=copy.deepcopy(tokens.tokenizer().backend_tokenizer), chat_template=template, **NAMED
    )


@functools.cache
def both(template: str | None = None) -> tuple[Tokenizer, Any]:
    theirs = wrap(template)
    return Tokenizer(theirs.backend_tokenizer, NAMED, template, functools.partial(wrap, template)), theirs


@given(st.one_of(st.text(max_size=40), st.sampled_from(TEXTS)), st.booleans())
@settings(max_examples=150, deadline=None)
def test_any_text_has_the_ids_and_tokens_that_transformers_gives_it(text: str, special: bool) -> None:
    ours, theirs = both()
    ids = theirs.encode(text, add_special_tokens=special)
    assert ours.encode(text, add_special_tokens=special) == ids
    assert ours(text, add_special_tokens=special) == dict(theirs(text, add_special_tokens=special))
    assert ours.tokenize(text) == theirs.tokenize(text)
    assert ours.convert_ids_to_tokens(ids, special) == theirs.convert_ids_to_tokens(ids, special)
    assert ours.decode(ids, skip_special_tokens=special) == theirs.decode(ids, skip_special_tokens=special)


def test_several_texts_and_every_shape_of_ids_go_as_with_transformers() -> None:
    ours, theirs = both()
    encoded = ours(TEXTS)
    assert encoded == dict(theirs(TEXTS)) and encoded.input_ids == encoded["input_ids"]
    ids = encoded.input_ids[4]
    for given_ids in (ids, tuple(ids), ids[0], [], torch.tensor(ids), np.array(ids), [ids, ids[:1]], encoded.input_ids):
        assert ours.decode(given_ids) == theirs.decode(given_ids)
    assert ours.batch_decode(encoded.input_ids, skip_special_tokens=True) == theirs.batch_decode(
        encoded.input_ids, skip_special_tokens=True
    )


def test_what_is_known_of_the_vocabulary_is_the_same() -> None:
    ours, theirs = both()
    for name in (
        *("bos_token", "eos_token", "pad_token", "unk_token", "bos_token_id", "eos_token_id", "pad_token_id"),
        *("unk_token_id", "special_tokens_map", "all_special_tokens", "all_special_ids", "vocab_size", "is_fast"),
        *("added_tokens_decoder", "clean_up_tokenization_spaces", "chat_template", "model_max_length", "padding_side"),
    ):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert ours.get_vocab() == theirs.get_vocab() and ours.get_added_vocab() == theirs.get_added_vocab()
    assert len(ours) == len(theirs) and bool(ours)
    for asked in ("the", "<s>", "no such token", ["</s>", "?"]):
        assert ours.convert_tokens_to_ids(asked) == theirs.convert_tokens_to_ids(asked)


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_chat_is_rendered_as_transformers_renders_it(name: str, chat: list[dict[str, Any]]) -> None:
    ours, theirs = both(TEMPLATES[name])
    odd = {"extra": np.float32(0.5), "odd": [Odd(1, object()), np.bool_(False), (1, 2), {1: None}, True]}
    for options in ({}, {"add_generation_prompt": True, "tools": TOOLS}, {"documents": [{"title": "a"}]}):
        asked = {**odd, **options}
        text = ours.apply_chat_template(chat, tokenize=False, **asked)
        assert text == theirs.apply_chat_template(chat, tokenize=False, **asked)
        assert ours.apply_chat_template(chat, **asked) == dict(theirs.apply_chat_template(chat, **asked))
        flat = theirs.apply_chat_template(chat, return_dict=False, **asked)
        assert ours.apply_chat_template(chat, return_dict=False, **asked) == flat
    named = TEMPLATES["chatml"]
    expected = theirs.apply_chat_template(chat, chat_template=named, tokenize=False)
    assert ours.apply_chat_template(chat, chat_template=named, tokenize=False) == expected


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('only two roles') }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{{ namespace(_a=1) }}",
        "{% for %}",
    ],
)
def test_a_template_that_refuses_or_reaches_too_far_fails_as_with_transformers(template: str) -> None:
    import jinja2

    ours, theirs = both(template)
    with pytest.raises(jinja2.TemplateError) as expected:
        theirs.apply_chat_template(CHATS[0], tokenize=False)
    with pytest.raises(type(expected.value)):
        ours.apply_chat_template(CHATS[0], tokenize=False)


def test_the_callers_messages_are_left_as_they_were() -> None:
    ours, _ = both(TEMPLATES["thoughts"])
    chat = copy.deepcopy(CHATS[1])
    ours.apply_chat_template(chat, tokenize=False)
    assert chat == CHATS[1]


def test_what_it_cannot_do_itself_is_asked_of_transformers_object() -> None:
    ours, theirs = both(CHATML)
    assert ours.encode("the rider", truncation=True, max_length=2) == theirs.encode(
        "the rider", truncation=True, max_length=2
    )
    assert torch.equal(ours("the", return_tensors="pt")["input_ids"], theirs("the", return_tensors="pt")["input_ids"])
    begun = [*CHATS[0], {"role": "assistant", "content": "It is"}]
    for asked in ({"continue_final_message": True}, {"tools": [_weather]}):
        text = ours.apply_chat_template(begun, tokenize=False, **asked)
        assert text == theirs.apply_chat_template(begun, tokenize=False, **asked)
    assert ours.encode("the rider") == theirs.encode("the rider"), "what was asked of it left nothing behind"
    assert ours.num_special_tokens_to_add() == theirs.num_special_tokens_to_add()
    for name in ("add_tokens", "add_special_tokens", "_hidden", "no_such_thing"):
        with pytest.raises(AttributeError, match=name):
            getattr(ours, name)


def _weather(place: str) -> str:
    """
    The weather at a place.

    Args:
        place: where
    """
    return place


@pytest.mark.parametrize("early", [True, False])
def test_what_is_set_is_set_for_good(early: bool) -> None:
    ours, theirs = copy.deepcopy(both(CHATML))
    if early:
        ours.num_special_tokens_to_add()  # the copy is there before, or comes after
    for one in (ours, theirs):
        one.pad_token = one.eos_token
        one.unk_token_id, one.padding_side, one.chat_template = 5, "left", "{{ pad_token }}{{ unk_token }}"
        one.bos_token = None
    for name in ("pad_token_id", "unk_token", "unk_token_id", "bos_token_id", "special_tokens_map", "padding_side"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert ours.apply_chat_template(CHATS[0]) == dict(theirs.apply_chat_template(CHATS[0]))
    assert ours(TEXTS, padding=True).input_ids == theirs(TEXTS, padding=True).input_ids
    assert ours.convert_tokens_to_ids("no such token") == theirs.convert_tokens_to_ids("no such token") == 5


def test_a_copy_is_the_same_tokenizer() -> None:
    ours, _ = both(CHATML)
    for other in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert other.encode("the rider") == ours.encode("the rider") and other.eos_token_id == ours.eos_token_id


def test_encoding_and_rendering_need_no_transformers() -> None:
    code = (
        "import sys; from tokenizers import Tokenizer as T, models; from paceline.models.tokenizer import Tokenizer;"
        "t = Tokenizer(T(models.BPE()), {}, '{{ messages[0].content }}', None); t('x'); t.decode([]);"
        "t.apply_chat_template([{'role': 'user', 'content': 'x'}]); t.get_vocab();"
        "sys.exit('transformers' in sys.modules or 'torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
