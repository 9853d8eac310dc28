"""From a command line to its first token: paceline beside `import torch` alone and llama.cpp, in turn.

    python bench/startup.py [--repeat 9] [--before CHECKOUT] [--peer-python PATH]

Every run is a process of its own that says one token of the default model, which is fetched and packed before. Four
figures of each: seconds until the first byte of output and until the process has ended, by the clock and of processor
time, which counts least what else a machine is doing. Linux only. --before: another checkout of paceline, measured too.
--peer-python: a Python that has llama.cpp (llama-cpp-python or xllamacpp). Writes bench/results/startup.json.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from paceline.bench import machine, results
from paceline.models import catalog

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "startup.json"
PROMPT = "Name three fruits."
FIGURES = ("first", "whole", "first, processor", "whole, processor")
TORCH = "import torch; print('x', flush=True)"
PACELINE = "from paceline.cli import main; main()"
LLAMA = """
import importlib.metadata, sys
model, prompt, threads = sys.argv[1], sys.argv[2], int(sys.argv[3])
messages = [{"role": "user", "content": prompt}]
try:
    import llama_cpp
    llm = llama_cpp.Llama(model, n_ctx=2048, n_threads=threads, n_threads_batch=threads, verbose=False)
    answer = llm.create_chat_completion(messages, max_tokens=1, temperature=0)
except ImportError:
    import xllamacpp
    given = xllamacpp.CommonParams()
    given.model.path, given.n_ctx, given.n_parallel, given.warmup, given.fit_params = model, 2048, 1, False, False
    for part in (given.cpuparams, given.cpuparams_batch):
        part.n_threads, part.poll = threads, 0
    server = xllamacpp.Server(given)
    answer = server.handle_chat_completions({"messages": messages, "max_tokens": 1, "temperature": 0})
print(answer["choices"][0]["message"]["content"], flush=True)
"""
VERSION = (
    "import importlib.metadata as m; print(*(f'{d.name} {d.version}' for d in m.distributions()"
    " if d.name in ('llama_cpp_python', 'llama-cpp-python', 'xllamacpp')))"
)


class Side:
    """A command, and what its runs took."""

    def __init__(self, python: str, code: str, *words: str, checkout: Path | None = None) -> None:
        self.command = [python, "-c", code, *words]
        self.folder = HERE.parent if checkout is None else checkout  # where Python looks for modules first
        self.environment = {**os.environ, "PYTHONPATH": str(self.folder)}
        self.runs: list[tuple[float, ...]] = []

    def run(self) -> None:
        before, start = _processor_time(), time.perf_counter()
        quiet = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        with subprocess.Popen(self.command, cwd=self.folder, env=self.environment, **quiet) as process:
            assert process.stdout is not None
            os.read(process.stdout.fileno(), 1)
            first = time.perf_counter() - start, _used_by(process.pid)
            process.stdout.read()
        if process.returncode:
            raise SystemExit(
                f"{self.command[0]} ended with code {process.returncode}: {self.command[2].strip()[:60]} …"
            )
        self.runs.append((first[0], time.perf_counter() - start, first[1], _processor_time() - before))

    def figures(self) -> dict[str, Any]:
        columns = dict(zip(FIGURES, zip(*self.runs)))
        return {
            name: {"least": min(runs), "median": statistics.median(runs), "runs": [round(run, 4) for run in runs]}
            for name, runs in columns.items()
        }


def _used_by(pid: int) -> float:
    """Processor time of a process so far, all its threads."""
    ticks = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")


def _processor_time() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def make_sides(before: Path | None, peer: str | None) -> dict[str, Side]:
    model = str(catalog.ensure(catalog.DEFAULT_MODEL))
    words = ("generate", PROMPT, "--max-tokens", "1")
    sides = {
        "import torch": Side(sys.executable, TORCH),
        "paceline": Side(sys.executable, PACELINE, *words, checkout=HERE.parent),
    }
    if before is not None:
        sides["paceline before"] = Side(sys.executable, PACELINE, *words, checkout=before)
    if peer is not None:
        sides["llama.cpp"] = Side(peer, LLAMA, model, PROMPT, str(len(os.sched_getaffinity(0))))
    return sides


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument("--before", type=Path, metavar="CHECKOUT")
    parser.add_argument("--peer-python", metavar="PATH")
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    sides = make_sides(arguments.before, arguments.peer_python)
    for side in sides.values():
        side.run()  # files into memory, weights into their tiles
        side.runs.clear()
    load = [os.getloadavg()[0]]
    for _ in range(arguments.repeat):
        for side in sides.values():
            side.run()
        load.append(os.getloadavg()[0])
    told = {name: side.figures() for name, side in sides.items()}
    print(f"{'seconds, least / median':24}" + "".join(f"{name:>18}" for name in FIGURES))
    for name, figures in told.items():
        shown = (f"{figures[figure]['least']:.2f} / {figures[figure]['median']:.2f}" for figure in FIGURES)
        print(f"{name:24}" + "".join(f"{value:>18}" for value in shown))
    command = f"python bench/startup.py --repeat {arguments.repeat}"
    command += " --before CHECKOUT" * (arguments.before is not None)
    command += " --peer-python PATH" * (arguments.peer_python is not None)
    data = {"command": command, **machine.record()}
    if arguments.peer_python is not None:
        asked = subprocess.run([arguments.peer_python, "-c", VERSION], capture_output=True, text=True, check=True)
        data["versions"]["llama.cpp"] = asked.stdout.strip()
    data |= {"model": catalog.DEFAULT_MODEL, "prompt": PROMPT, "load": [min(load), max(load)], "starts": told}
    results.write(arguments.output, data)


if __name__ == "__main__":
    main()
