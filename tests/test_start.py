"""What a command imports before it answers: no more than it needs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import gguf
import pytest

from tests.models.gguf_files import write

HEAVY = {
    *("torch", "numpy", "transformers", "tokenizers", "jinja2", "matplotlib", "huggingface_hub", "gguf", "http.client"),
    *("safetensors", "datasets", "scipy", "sklearn", "pandas", "accelerate"),
}
RUN = "import sys; from paceline.cli import main\ntry: main()\nexcept SystemExit as end: code = end.code or 0"
TELL = "print('modules', *sorted(sys.modules)); sys.exit(code)"


def modules(*words: str) -> set[str]:
    """What a command has imported when it is done."""
    told = subprocess.run([sys.executable, "-c", f"{RUN}\n{TELL}", *words], capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stderr
    return set(told.stdout.splitlines()[-1].split()[1:])


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A GGUF file with a tokenizer and a chat template."""
    letters = [chr(code) for code in (*range(33, 127), 0x120)]  # 0x120: a space, in byte-level spelling
    changes = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": ["<s>", *letters, "he"],
        "tokenizer.ggml.merges": ["h e"],
        "tokenizer.ggml.token_type": [3, *[1] * (len(letters) + 1)],
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}",
    }
    write(tmp_path / "model.gguf", "llama", gguf.GGMLQuantizationType.Q4_1, **changes)
    return tmp_path / "model.gguf"


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["generate", "--help"], ["models"]])
def test_what_needs_no_model_imports_nothing_heavy(words: list[str]) -> None:
    assert not modules(*words) & HEAVY


def test_an_answer_from_a_gguf_file_needs_torch_and_a_tokenizer_and_nothing_else(model: Path) -> None:
    found = modules("generate", "he", "--model", str(model), "--max-tokens", "2", "--drafter", "ngram")
    assert found & HEAVY <= {"torch", "numpy", "tokenizers", "jinja2", "http.client"}  # the last is torch's
    unasked = ("transformers", "paceline.bench", "paceline.models.fetch")
    told = {"paceline.bench", "paceline.bench.prompts"}  # what help says of them
    assert not {name for name in found if name.startswith(unasked)} - told


def test_the_library_needs_no_more(model: Path) -> None:
    code = (
        "import sys, paceline; llm = paceline.LLM(sys.argv[1]);"
        "llm.chat([{'role': 'user', 'content': 'he'}], max_tokens=2); llm.tokenizer.decode([1]);"
        "sys.exit('transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(model)], check=False).returncode == 0
