"""`paceline bench serve` against our server, plain and with n-gram drafts, and against llama-cpp-python's.

    python bench/serving.py [--peer-python PATH] [--num-prompts 12] [--output-len 64] [--threads 2]

Each server is started in turn on the default model, asked the same by the same command, and stopped. --peer-python: a
Python that has llama-cpp-python with its server. Writes bench/results/serve_NAME.json, a file a server.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from paceline.models import catalog

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
DEMO = ROOT / "paceline" / "bench" / "demos" / "edit.jsonl"  # answers that repeat their prompts
PATIENCE = 180.0  # seconds for a server to come up
PACELINE = [sys.executable, "-m", "paceline"]


def find_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@contextlib.contextmanager
def running(command: list[str], port: int, folder: Path, threads: int) -> Iterator[None]:
    """A server, from its first answer to its end."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(threads)}
    said = (folder / "server.log").open("w+")
    process = subprocess.Popen([*command, "--port", str(port)], cwd=folder, env=env, stdout=said, stderr=said)
    try:
        end = time.monotonic() + PATIENCE
        while not is_up(port):
            if process.poll() is not None or time.monotonic() > end:
                said.seek(0)
                raise SystemExit(f"{' '.join(command[1:])} does not answer: {said.read()[-500:]}")
            time.sleep(0.2)
        yield
    finally:
        process.terminate()
        process.wait(PATIENCE)
        said.close()


def is_up(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=5):
            return True
    except OSError:
        return False


def measure(name: str, command: list[str], folder: Path, given: argparse.Namespace) -> None:
    """Where it was measured is no business of the results': files have their bare names in a folder of their own."""
    port, file = find_port(), f"serve_{name}.json"
    sizes = ["--num-prompts", str(given.num_prompts), "--output-len", str(given.output_len), "--max-concurrency", "1"]
    data = ["--dataset-name", "jsonl", "--dataset-path", DEMO.name, "--tokenizer", catalog.DEFAULT_MODEL]
    asked = ["--backend", "openai-chat", *data, *sizes]
    words = ["bench", "serve", "--port", str(port), *asked, "--save-result", "--result-filename", file]
    print(f"== {name}", flush=True)
    with running(command, port, folder, given.threads):
        subprocess.run([*PACELINE, *words], cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True)
    shutil.copy(folder / file, RESULTS / file)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--peer-python", help="a Python with llama-cpp-python[server]")
    parser.add_argument("--num-prompts", type=int, default=12)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="of each server")
    given = parser.parse_args()
    serve = [*PACELINE, "serve", catalog.DEFAULT_MODEL]
    servers = {"plain": serve, "ngram": [*serve, "--drafter", "ngram"]}
    if given.peer_python:
        threads = ["--n_threads", str(given.threads), "--n_threads_batch", str(given.threads)]
        named = ["--model", str(catalog.ensure(catalog.DEFAULT_MODEL)), "--model_alias", catalog.DEFAULT_MODEL]
        command = [given.peer_python, "-m", "llama_cpp.server", *named, "--n_ctx", "2048", *threads]
        servers["llama_cpp_python"] = command
    with TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copy(DEMO, folder)
        for server, words in servers.items():
            measure(server, words, folder, given)


if __name__ == "__main__":
    main()
