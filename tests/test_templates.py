"""Conversations as prompts: the tokenizer's own template, ours, strings and Jinja files."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import pytest

from paceline import LLM, SamplingParams
from paceline.errors import OptionError
from paceline.templates import Message, PromptTemplate
from tests.fakes import tiny_llm, tiny_model
from tests.tokens import NUM_IDS, tokenizer

OWN = (
    "{{ bos_token }}{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
REFUSING = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system message') }}{% endif %}ok"


def say(*turns: str, first: str = "user") -> list[Message]:
    other = {"user": "assistant", "assistant": "user", "system": "user"}
    roles = [first]
    for _ in turns[1:]:
        roles.append(other[roles[-1]])
    return [{"role": role, "content": text} for role, text in zip(roles, turns)]


@functools.cache
def with_template(template: str | None) -> Any:
    import copy

    own = copy.deepcopy(tokenizer())
    own.chat_template = template
    return own


def render(given: str | None, messages: list[Message], own: str | None = None) -> str:
    return PromptTemplate(given, with_template(own)).render(messages)


def test_the_tokenizers_own_template_is_used_and_brings_its_special_tokens() -> None:
    template = PromptTemplate(None, with_template(OWN))
    assert template.own
    assert template.render(say("hi", "yes?", "ride")) == "<s><user>hi<assistant>yes?<user>ride<assistant>"


@pytest.mark.parametrize(
    "messages, expected",
    [
        (say("hi"), "[INST] hi [/INST]"),
        (say("be brief", "hi", first="system"), "<<SYS>>\nbe brief\n<</SYS>>\n\n[INST] hi [/INST]"),
        (say("hi", "hello", "bye"), "[INST] hi [/INST] hello [INST] bye [/INST]"),
    ],
)
def test_the_llama_template(messages: list[Message], expected: str) -> None:
    assert render("llama", messages) == expected
    assert not PromptTemplate("llama", tokenizer()).own


VICUNA = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions. "
)


@pytest.mark.parametrize(
    "messages, expected",
    [
        (say("hi"), VICUNA + "USER: hi ASSISTANT:"),
        (say("be brief", "hi", first="system"), "be brief USER: hi ASSISTANT:"),
        (say("hi", "hello", "bye"), VICUNA + "USER: hi ASSISTANT: hello</s>USER: bye ASSISTANT:"),
    ],
)
def test_the_vicuna_template(messages: list[Message], expected: str) -> None:
    assert render("vicuna", messages) == expected


def test_a_named_template_goes_before_the_tokenizers_own() -> None:
    assert render("llama", say("hi"), own=OWN) == "[INST] hi [/INST]"


@pytest.mark.parametrize("content", ["hi", "{input_text}", "{{ braces }} {0} %s"])
def test_a_template_string_takes_the_message_as_it_is(content: str) -> None:
    assert render("Q: {input_text}\nA:", say(content)) == f"Q: {content}\nA:"


def test_a_template_string_refuses_a_conversation_of_several_turns() -> None:
    with pytest.raises(OptionError, match="one message, but the conversation has 3"):
        render("Q: {input_text}", say("a", "b", "c"))


def test_a_jinja_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "chat.jinja"
    path.write_text("{{ bos_token }}{% for m in messages %}[{{ m.role }}|{{ m.content }}]{% endfor %}")
    template = PromptTemplate(str(path), tokenizer())
    assert template.own
    assert template.render(say("hi", "yes?")) == "<s>[user|hi][assistant|yes?]"
    path.write_text("{% for m in %}")
    with pytest.raises(OptionError, match="refused") as caught:
        render(str(path), say("hi"))
    assert "\n" not in str(caught.value)


def test_a_file_that_is_no_text_or_cannot_be_read_is_refused_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "some.bin"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(OptionError, match=r"the template file .*some\.bin cannot be read: it is not UTF-8 text"):
        PromptTemplate(str(path), tokenizer())

    def refuse(*ignored: Any, **more: Any) -> str:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_text", refuse)
    with pytest.raises(OptionError, match=r"the template file .*some\.bin cannot be read: Permission denied"):
        PromptTemplate(str(path), tokenizer())


def test_an_unknown_template_is_refused_naming_what_is_allowed() -> None:
    with pytest.raises(OptionError) as caught:
        PromptTemplate("lama", tokenizer())
    assert all(part in str(caught.value) for part in ("'lama'", "llama, vicuna", "{input_text}", "Jinja file"))


@pytest.mark.parametrize("given", [None, "llama", "Q: {input_text}"])
def test_an_empty_conversation_is_refused(given: str | None) -> None:
    with pytest.raises(OptionError, match="empty; it needs at least one message"):
        render(given, [], own=OWN)


@pytest.mark.parametrize("message", [{"role": "user"}, {"content": "hi"}, "hi", None])
def test_a_message_needs_a_role_and_a_content(message: Any) -> None:
    with pytest.raises(OptionError, match="'role' and 'content'"):
        render("llama", [message])


def test_a_model_without_a_template_says_what_to_give() -> None:
    with pytest.raises(OptionError, match="no chat template; give prompt_template="):
        render(None, say("hi"))
    with pytest.raises(OptionError, match="no chat template"):
        tiny_llm().chat(say("hi"))


def test_what_a_template_refuses_is_said_in_its_own_words() -> None:
    with pytest.raises(OptionError, match="refused the conversation: no system message"):
        render(None, say("be brief", "hi", first="system"), own=REFUSING)
    assert render(None, say("hi"), own=REFUSING) == "ok"


def test_a_template_may_refuse_without_a_word() -> None:
    with pytest.raises(OptionError, match="refused"):
        render(None, say("hi"), own="{{ raise_exception('') }}")


# Content as OpenAI writes it, and tools.

TOOLED = "{% if tools %}{{ tools[0].name }}: {% endif %}" + OWN
CALLING = (
    "{% for m in messages %}{{ m.role }} {{ m.content }}"
    "{% if m.tool_calls %}{{ m.tool_calls[0].function.arguments.at }}{% endif %};{% endfor %}"
)
BELL = {"name": "ring", "description": "Ring the bell."}


def part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


@pytest.mark.parametrize("given", [None, "llama", "Q: {input_text}"])
def test_content_may_be_a_list_of_texts_which_stand_below_each_other(given: str | None) -> None:
    listed = [{"role": "user", "content": [part("the rider"), part("in front")]}]
    assert render(given, listed, own=OWN) == render(given, say("the rider\nin front"), own=OWN)
    assert render(given, [{"role": "user", "content": [part("hi")]}], own=OWN) == render(given, say("hi"), own=OWN)


@pytest.mark.parametrize(
    "content, said",
    [
        ([{"type": "image_url", "image_url": {"url": "x"}}], "a content part of type 'image_url' is not allowed"),
        ([part("look"), {"type": "input_audio"}], "a content part of type 'input_audio' is not allowed"),
        ([{"type": "text"}], "a content part of {'type': 'text'} is not allowed"),
        (["hi"], "a content part of 'hi' is not allowed"),
        (None, "content must be a text or a list of text parts, not None"),
        (5, "content must be a text or a list of text parts, not 5"),
    ],
)
def test_other_content_is_refused_by_name(content: Any, said: str) -> None:
    with pytest.raises(OptionError, match=re.escape(said)):
        render("llama", [{"role": "user", "content": content}])


def test_tools_are_given_to_the_template() -> None:
    template = PromptTemplate(None, with_template(TOOLED))
    assert template.render(say("hi"), [BELL]) == "ring: <s><user>hi<assistant>"
    assert template.render(say("hi"), []) == template.render(say("hi")) == "<s><user>hi<assistant>"


@pytest.mark.parametrize("given, own", [(None, OWN), ("llama", TOOLED), ("Q: {input_text}", TOOLED)])
def test_tools_that_a_template_would_drop_are_refused(given: str | None, own: str) -> None:
    with pytest.raises(OptionError, match="tools were given, but the chat template has no place for them"):
        PromptTemplate(given, with_template(own)).render(say("hi"), [BELL])


@pytest.mark.parametrize("tools", ["ring", {"name": "ring"}, [5]])
def test_tools_that_are_no_list_of_descriptions_are_refused(tools: Any) -> None:
    with pytest.raises(OptionError, match="a list of dictionaries or functions"):
        PromptTemplate(None, with_template(TOOLED)).render(say("hi"), tools)


def test_a_message_that_calls_a_tool_needs_no_content_and_its_arguments_may_be_json() -> None:
    call = {"type": "function", "function": {"name": "ring", "arguments": '{"at": 7}'}}
    asked: list[Message] = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": [part("done")]},
    ]
    assert render(None, asked, own=CALLING) == "assistant 7;tool done;"
    del asked[0]["content"]
    call["function"] = {"name": "ring", "arguments": {"at": 8}}
    assert render(None, asked, own=CALLING) == "assistant 8;tool done;"
    assert asked[0]["tool_calls"] == [call], "what was given is left as it was"


# Through the engine.


def chatting(own: str | None, template: str | None = None) -> LLM:
    return LLM(
        tiny_model(vocab=NUM_IDS),
        None,
        with_template(own),
        kernels="reference",
        max_model_len=128,
        prompt_template=template,
    )


FEW = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)


def test_chat_takes_one_conversation_or_many_and_generates_from_the_rendered_text() -> None:
    llm = chatting(OWN)
    first, second = say("hi"), say("the", "END", "é")
    one, (two, three) = llm.chat(first, FEW), llm.chat([first, second], FEW)
    assert one[0].prompt == two.prompt == "<s><user>hi<assistant>"
    assert one[0].outputs[0].token_ids == two.outputs[0].token_ids
    assert three.prompt == "<s><user>the<assistant>END<user>é<assistant>"
    ids = tokenizer().encode(two.prompt, add_special_tokens=False)
    assert two.prompt_token_ids == ids and ids.count(tokenizer().bos_token_id) == 1
    assert two.outputs[0].token_ids == llm.generate([ids], FEW)[0].outputs[0].token_ids


def test_a_stream_takes_a_conversation() -> None:
    llm = chatting(OWN)
    whole = llm.chat(say("hi"), FEW)[0].outputs[0]
    assert "".join(chunk.text for chunk in llm.stream(say("hi"), FEW)) == whole.text


def test_a_prompt_template_wraps_plain_prompts_and_none_leaves_them() -> None:
    assert chatting(None, "Q: {input_text} A:").generate("hi", FEW)[0].prompt == "Q: hi A:"
    assert chatting(None, "llama").generate(["hi"], FEW)[0].prompt == "[INST] hi [/INST]"
    assert chatting(OWN).generate(["hi"], FEW)[0].prompt == "hi"


def test_a_refused_conversation_leaves_the_engine_working() -> None:
    llm = chatting(REFUSING)
    with pytest.raises(OptionError, match="no system message"):
        llm.chat([say("hi"), say("be brief", first="system")], FEW)
    assert not llm.engine.has_work
    assert len(llm.chat(say("hi"), FEW)[0].outputs[0].token_ids) == 3


def test_chat_and_stream_take_tools_and_content_lists() -> None:
    llm = chatting(TOOLED)
    messages = [{"role": "user", "content": [part("hi")]}]
    (output,) = llm.chat(messages, FEW, tools=[BELL])
    assert output.prompt == llm.read_chat(messages, [BELL]).text == "ring: <s><user>hi<assistant>"
    text = "".join(chunk.text for chunk in llm.stream(messages, FEW, tools=[BELL]))
    assert text == output.outputs[0].text
    with pytest.raises(OptionError, match="tools belong to a conversation"):
        next(iter(llm.stream("hi", FEW, tools=[BELL])))
