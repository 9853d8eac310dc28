"""A tiny checkpoint to talk to, a chat on it, and the same conversation through the library."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner, Result

from paceline import LLM, SamplingParams
from paceline.cli import app
from tests.cli.checkpoints import LINES, SPECIAL, make_model

RUNNER = CliRunner()
FIRST, SECOND, THIRD = "the rider in front", "and the riders behind", "then the line"
MOST = 24


def write_printable(folder: Path, template: str | None) -> Path:
    """A tiny checkpoint that knows letters, no control codes and no end: every answer is one line of known length."""
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    alphabet = [letter for letter in pre_tokenizers.ByteLevel.alphabet() if letter <= "~" or letter == "Ġ"]
    trainer = trainers.BpeTrainer(
        vocab_size=160, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    raw.train_from_iterator(LINES, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|im_end|>", pad_token="<|im_end|>")
    tokenizer.chat_template = template
    model = make_model(len(tokenizer))
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def talk(checkpoint: Path, *lines: str | bytes, options: tuple[str, ...] = ()) -> Result:
    given = b"".join((line.encode() if isinstance(line, str) else line) + b"\n" for line in lines)
    words = ["chat", "--model", str(checkpoint), *options]
    words += [] if "--max-tokens" in options else ["--max-tokens", str(MOST)]
    result = RUNNER.invoke(app, words, input=given)
    assert result.exit_code == 0, result.output
    assert "\x1b" not in result.stdout + result.stderr
    return result


def answers(llm: LLM, *questions: str, **params: Any) -> list[str]:
    """The same conversation through the library, plainly decoded."""
    chosen = SamplingParams(**{"temperature": 0.0, "max_tokens": MOST, **params})
    messages: list[dict[str, str]] = []
    for question in questions:
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": llm.chat(messages, chosen)[0].outputs[0].text})
    return [message["content"] for message in messages[1::2]]


def shown(texts: list[str]) -> str:
    return "".join(text + "\n" for text in texts)
