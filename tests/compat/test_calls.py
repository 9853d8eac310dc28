"""What vLLM's users give beside the requests of a call, and names that only the hub may know."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline import LLM, SamplingParams
from paceline.errors import CheckpointError, OptionError
from paceline.models import hub, loader
from tests.cli.checkpoints import make_model, make_tokenizer

ASKED = [{"role": "user", "content": "the rider"}]
SHORT = SamplingParams(temperature=0, max_tokens=3)
OTHER = "{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}{% if loud %}!{% endif %}"


@pytest.fixture(scope="module")
def llm() -> LLM:
    tokenizer = make_tokenizer()
    return LLM(make_model(len(tokenizer)), tokenizer=tokenizer, max_model_len=200)


def prompt_of(llm: LLM, **given: Any) -> str:
    (output,) = llm.chat(ASKED, SHORT, **given)
    streamed = [token for chunk in llm.stream(ASKED, SHORT, **given) for token in chunk.token_ids]
    assert streamed == output.outputs[0].token_ids
    assert output.prompt_token_ids == llm.tokenizer.encode(output.prompt)  # special tokens are the template's
    return str(output.prompt)


def test_a_conversation_is_put_into_a_prompt_as_the_call_says(llm: LLM, tmp_path: Path) -> None:
    asked, answered = "<|im_start|>user\nthe rider<|im_end|>\n", "<|im_start|>assistant\n"
    assert prompt_of(llm) == prompt_of(llm, chat_template=None, lora_request=None) == asked + answered
    assert prompt_of(llm, add_generation_prompt=False) == asked
    going_on = {"continue_final_message": True, "add_generation_prompt": False}
    assert prompt_of(llm, **going_on) == "<|im_start|>user\nthe rider"
    assert prompt_of(llm, chat_template=OTHER) == "<|im_start|>the rider"
    (tmp_path / "other.jinja").write_text(OTHER, encoding="utf-8")
    assert prompt_of(llm, chat_template=str(tmp_path / "other.jinja")) == "<|im_start|>the rider"
    loud = {"chat_template": OTHER, "chat_template_kwargs": {"loud": True}}
    assert prompt_of(llm, **loud) == "<|im_start|>the rider!"
    assert prompt_of(llm) == asked + answered  # each held for its call


def test_a_bar_is_shown_where_use_tqdm_asks_for_one(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[bool] = []
    real = llm._run
    monkeypatch.setattr(llm, "_run", lambda asked, progress: (shown.append(progress), real(asked, False))[1])
    for given in ({}, {"use_tqdm": False}, {"use_tqdm": True}, {"use_tqdm": print}, {"progress": True}):
        llm.generate(["the rider"], SHORT, **given)  # type: ignore[arg-type]
        llm.chat(ASKED, SHORT, **given)  # type: ignore[arg-type]
    assert shown == [False, False, False, False, True, True, True, True, True, True]


@pytest.mark.parametrize(
    "given, said",
    [
        ({"lora_request": object()}, "lora_request=object is not there yet; None is allowed; merge the adapter"),
        ({"chat_template": "x", "max_tokens": 3}, "chat_template: a prompt is taken as it is; give it to chat"),
        ({"use_tqdm": False, "max_new_tokens": 3}, "sampling_params and max_new_tokens were both given"),
        ({"use_tqdn": False}, "option 'use_tqdn' is not known; did you mean 'use_tqdm'?"),
    ],
)
def test_what_a_call_cannot_take_is_told_by_its_name(llm: LLM, given: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError, match=re.escape(said)):
        llm.generate(["the rider"], SHORT, **given)


def test_what_belongs_to_a_call_is_not_the_engines() -> None:
    with pytest.raises(
        OptionError, match=re.escape("chat_template='x' belongs to a request: give it to generate, chat")
    ):
        LLM("smollm2-135m", chat_template="x")
    with pytest.raises(OptionError, match="chat_template='x' is not known; allowed: llama, vicuna, "):
        LLM(make_model(300), tokenizer=make_tokenizer()).chat(ASKED, SHORT, chat_template="x")


# Names


def test_a_gpu_is_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "empty", lambda *sizes, device: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert loader.find_device("gpu") == torch.device("cuda")


@pytest.mark.parametrize(
    "name", ["gpt2", "gpt2-xl", "facebook/opt-125m", "Qwen/Qwen2.5-Coder-1.5B", "HuggingFaceTB/SmolLM2-135M"]
)
def test_a_name_that_the_hub_may_know_is_asked_of_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda asked, **more: str(tmp_path / asked))
    assert loader.locate(name) == tmp_path / name


@pytest.mark.parametrize("name", ["smolm2", "a/b/c", "./gpt2", "~/gpt2", "/gpt2", "model.gguf", "../gpt2", "two words"])
def test_what_cannot_be_a_hub_name_is_refused_unasked(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "download", lambda name: pytest.fail("asked"))
    with pytest.raises(CheckpointError, match=r"was not found: no such path, and not an alias .* or a hub id"):
        loader.locate(name)


@pytest.mark.parametrize(
    ("name", "meant"),
    [("smollm2-135", "smollm2-135m"), ("SmolLM2-135M", "smollm2-135m"), ("qwen2.5-coder", "qwen2.5-coder-1.5b")],
)
def test_a_name_nearly_an_aliass_is_answered_with_it(name: str, meant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "download", lambda name: pytest.fail("asked"))
    with pytest.raises(CheckpointError, match=rf"or a hub id; did you mean '{meant}'\?$"):
        loader.locate(name)


def test_a_name_that_the_hub_does_not_know_either_might_have_been_a_path(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(asked: str, **more: Any) -> str:
        raise OSError("no such repository")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    with pytest.raises(CheckpointError) as caught:
        loader.locate("my-model")
    names = "smollm2-135m, qwen2.5-coder-1.5b, gemma3-270m"
    missing = f"model 'my-model' was not found: no such path, and not an alias ({names}); "
    assert str(caught.value).startswith(missing + "the hub did not deliver 'my-model': ")
