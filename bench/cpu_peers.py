"""paceline on a CPU beside llama.cpp and transformers: the same files, the same tokens, runs in turn.

    python bench/cpu_peers.py [--only decode-small rows …] [--repeat 7] [--peer-python PATH] [--dataset-path FILE …]

Every side is a process of its own that is kept open and asked in JSON lines, so that runs alternate (A B A B) on one
machine state. llama.cpp is measured through llama-cpp-python, in --peer-python where this one does not have it; a
peer that cannot be imported is reported as "not installed". --dataset-path: rows with `turns` are asked of the small
model (by category, Spec-Bench's form), rows with `prompt` of the large one (HumanEval's form); without any, built-in
prompts. Prints a table; all raw times go to bench/results/cpu_peers.json.

The upper half runs in the peers, so this file imports nothing but the standard library before it is needed.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import json
import math
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "cpu_peers.json"
PROSE = HERE / "data" / "prose.txt"
clock = time.perf_counter
Answer = dict[str, Any]  # first: seconds to the first token; rest: seconds after it; tokens

# The sides


class Side:
    """What every side can be asked, whatever runs behind it."""

    def memory(self) -> dict[str, int]:
        """Bytes now and at the peak. Not ru_maxrss where it can be avoided: that one begins with the parent's."""
        found = {"VmRSS": 0, "VmHWM": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
        with contextlib.suppress(OSError):
            for line in Path("/proc/self/status").read_text().splitlines():
                name, _, value = line.partition(":")
                if name in found:
                    found[name] = int(value.split()[0]) * 1024
        return {"now": found["VmRSS"] or found["VmHWM"], "peak": found["VmHWM"]}


class Paceline(Side):
    """Ours, one request at a time and without a prefix cache: every repetition computes everything."""

    def __init__(self) -> None:
        import torch
        import transformers  # the tokenizer's home: part of the imports, not of the model
        from transformers import PreTrainedTokenizerFast

        import paceline
        from paceline.llm import LLM

        self.torch, self._llm = torch, LLM
        self.llm: Any = None
        del PreTrainedTokenizerFast
        self.versions = {
            "paceline": paceline.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        }

    def load(self, model: str, length: int | None, threads: int, kernels: str = "auto") -> dict[str, Any]:
        from paceline.models import loader

        self.torch.set_num_threads(threads)
        options = {} if length is None else {"max_model_len": length, "max_num_seqs": 1, "prefix_caching": False}
        self.llm = None  # the former one goes before the next comes
        self.llm = self._llm(model, kernels=kernels, **options)
        library = getattr(self.llm.model.ops, "library", None)
        if library is not None:
            library.paceline_threads(threads)
        path, config = loader.locate(model), self.llm.config
        files = [path] if path.is_file() else list(path.iterdir())
        return {
            "path": str(path),
            "file_bytes": sum(file.stat().st_size for file in files),
            "cache_bytes_per_token": 8 * config.num_layers * config.num_kv_heads * config.head_dim,
            "end_ids": sorted(self.llm.engine.end_ids),
            "kernels": self.llm.model.ops.name,
            "path_name": None if library is None else library.paceline_path().decode(),
        }

    def tokenize(self, text: str, chat: bool = False) -> list[int]:
        if self.llm.tokenizer is None:
            most = self.llm.config.vocab_size - 3
            return [3 + byte % most for byte in text.encode()]
        if chat:
            return self.llm.read_chat([{"role": "user", "content": text}]).ids
        return list(self.llm.tokenizer.encode(text, add_special_tokens=False))

    def answers(
        self, prompts: list[list[int]], new: int, stop: list[int], drafter: list[Any] | None = None
    ) -> list[Answer]:
        """A fresh drafter, then one prompt after the other; an empty `stop` means exactly `new` tokens."""
        import paceline

        self.llm.set_drafter(None if drafter is None else getattr(paceline, drafter[0])(*drafter[1:]))
        params = paceline.SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=not stop)
        return [self._answer(ids, params) for ids in prompts]

    def _answer(self, ids: list[int], params: Any) -> Answer:
        from paceline.prompts import Prompt

        tokens: list[int] = []
        stats, first, finished = None, 0.0, False
        start = clock()
        request = self.llm.add(Prompt(None, ids), params)
        while not finished:
            for update in self.llm.step():
                tokens += update.tokens
                finished, stats = update.finished, update.sequence.stats
            first = first or (clock() - start if tokens else 0.0)
        rest = clock() - start - first
        self.llm.abort(request)
        assert stats is not None
        counts = {"rounds": stats.rounds, "proposed": sum(stats.proposed), "accepted": sum(stats.accepted)}
        return {"first": first, "rest": rest, "tokens": tokens, **counts}

    def rows(self, ids: list[int], context: int, counts: list[int], runs: int) -> dict[str, list[float]]:
        """Seconds of a forward with logits over the next k tokens after `context` cached ones."""
        from paceline.models.batch import Work, pack

        engine, model = self.llm.engine, self.llm.model
        size = engine.cache.pool.block_size
        slot, pages = engine.table.take(), engine.cache.pool.take(-(-len(ids) // size))
        engine.table.begin(slot, ids, len(ids))
        engine.table.pages.write(slot, 0, pages)
        engine.table.flush()
        times: dict[str, list[float]] = {str(count): [] for count in counts}
        with self.torch.inference_mode():
            model.forward(pack([Work(slot, 0, context)], engine.table, size), engine.cache.layers)
            for count in counts * (runs + 1):  # in turn; the first turn is not counted
                batch = pack([Work(slot, context, count)], engine.table, size)
                start = clock()
                model.logits(model.forward(batch, engine.cache.layers).final)
                times[str(count)].append(clock() - start)
        engine.table.give_back(slot)
        engine.cache.pool.release(pages)
        return {count: taken[1:] for count, taken in times.items()}

    def overhead(self, ids: list[int], new: int) -> list[list[float]] | None:
        """For every decoding step, seconds in all and seconds inside the library; None without native kernels."""
        import paceline
        from paceline.prompts import Prompt

        ops = self.llm.model.ops
        if getattr(ops, "library", None) is None:
            return None
        plain, ops.library = ops.library, TimedLibrary(ops.library)
        try:
            self.llm.set_drafter(None)
            params = paceline.SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True)
            request = self.llm.add(Prompt(None, ids), params)
            while not self.llm.step()[-1].tokens:
                pass
            steps, finished = [], False
            while not finished:
                before, start = ops.library.seconds, clock()
                finished = self.llm.step()[-1].finished
                steps.append([clock() - start, ops.library.seconds - before])
            self.llm.abort(request)
        finally:
            ops.library = plain
        return steps

    def losses(self, chunks: list[list[int]]) -> list[float]:
        """Minus the log-probability of every token but the first, summed by chunk."""
        import paceline

        self.llm.set_drafter(None)
        params = paceline.SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
        sums = []
        for ids in chunks:
            told = self.llm.generate([ids], params)[0].prompt_logprobs
            assert told is not None and len(told) == len(ids)
            sums.append(-sum(entry[token].logprob for entry, token in zip(told[1:], ids[1:]) if entry is not None))
        return sums

    def first(self, model: str, threads: int, text: str) -> None:
        """From nothing to a first token, with the options anybody gets."""
        self.load(model, None, threads)
        self.answers([self.tokenize(text)], 1, [])


class TimedLibrary:
    """The compiled library with the time spent inside it."""

    def __init__(self, library: Any) -> None:
        self._library, self.seconds = library, 0.0

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._library, name)

        def timed(*given: Any) -> Any:
            start = clock()
            result = function(*given)
            self.seconds += clock() - start
            return result

        setattr(self, name, timed)
        return timed


class LlamaCpp(Side):
    """llama.cpp, by its C interface: next to none of its own binding's Python is counted against it."""

    BATCH = 512

    def __init__(self) -> None:
        import llama_cpp
        import numpy

        self.c, self.numpy = llama_cpp, numpy
        self.versions = {"llama-cpp-python": llama_cpp.__version__}
        self.llm: Any = None

    def load(
        self, model: str, length: int, threads: int, model_params: dict[str, Any] | None = None, **options: Any
    ) -> dict[str, Any]:
        """`model_params` are fields of llama.cpp's own struct that its binding has no option for."""
        if not model.endswith(".gguf"):
            raise ValueError(f"llama.cpp reads .gguf files, not {Path(model).name}")
        defaults = self.c.llama_cpp.llama_model_default_params

        def changed() -> Any:
            params = defaults()
            for name, value in (model_params or {}).items():
                setattr(params, name, value)
            return params

        self.c.llama_cpp.llama_model_default_params = changed
        try:
            self._open(model, length, threads, options)
        finally:
            self.c.llama_cpp.llama_model_default_params = defaults
        self.context, self.vocabulary = self.llm.ctx, self.llm.n_vocab()
        self.memory_ = self.c.llama_get_memory(self.context)
        info = self.c.llama_print_system_info().decode()
        return {"system": info, "options": options, "model_params": model_params or {}}

    def _open(self, model: str, length: int, threads: int, options: dict[str, Any]) -> None:
        if self.llm is not None:
            self.llm.close()
        self.llm = self.c.Llama(
            model,
            n_ctx=length,
            n_batch=self.BATCH,
            n_ubatch=self.BATCH,
            n_threads=threads,
            n_threads_batch=threads,
            verbose=False,
            **options,
        )
        self.batch = self.c.llama_batch_init(self.BATCH, 0, 1)
        for row in range(self.BATCH):
            self.batch.n_seq_id[row], self.batch.seq_id[row][0] = 1, 0
        view = self.numpy.ctypeslib.as_array
        self.ids, self.positions, self.wanted = (
            view(getattr(self.batch, name), shape=(self.BATCH,)) for name in ("token", "pos", "logits")
        )

    def _forward(self, ids: list[int], past: int, every_row: bool = False) -> Any:
        """[rows, V] logits of all rows or of the last, after the first `past` tokens that are cached."""
        count = len(ids)
        self.c.llama_memory_seq_rm(self.memory_, -1, past, -1)
        self.ids[:count] = ids
        self.positions[:count] = range(past, past + count)
        self.wanted[:count] = every_row
        self.wanted[count - 1] = True
        self.batch.n_tokens = count
        code = self.c.llama_decode(self.context, self.batch)
        if code:
            raise RuntimeError(f"llama_decode answered {code}")
        shape = (count if every_row else 1, self.vocabulary)
        return self.numpy.ctypeslib.as_array(self.c.llama_get_logits(self.context), shape=shape)

    def _prompt(self, ids: list[int]) -> Any:
        for start in range(0, len(ids), self.BATCH):
            logits = self._forward(ids[start : start + self.BATCH], start)
        return logits

    def answers(self, prompts: list[list[int]], new: int, stop: list[int]) -> list[Answer]:
        return [self._answer(ids, new, set(stop)) for ids in prompts]

    def _answer(self, ids: list[int], new: int, stop: set[int]) -> Answer:
        start = clock()
        tokens = [int(self._prompt(ids)[0].argmax())]
        first = clock() - start
        while len(tokens) < new and tokens[-1] not in stop:
            tokens.append(int(self._forward(tokens[-1:], len(ids) + len(tokens) - 1)[0].argmax()))
        return {"first": first, "rest": clock() - start - first, "tokens": tokens}

    def rows(self, ids: list[int], context: int, counts: list[int], runs: int) -> dict[str, list[float]]:
        self._prompt(ids[:context])
        times: dict[str, list[float]] = {str(count): [] for count in counts}
        for count in counts * (runs + 1):
            start = clock()
            self._forward(ids[context : context + count], context, every_row=True)
            times[str(count)].append(clock() - start)
        return {count: taken[1:] for count, taken in times.items()}

    def losses(self, chunks: list[list[int]]) -> list[float]:
        sums = []
        for ids in chunks:
            logits = self._forward(ids, 0, every_row=True)[:-1].astype("float64")
            highest = logits.max(1)
            totals = highest + self.numpy.log(self.numpy.exp(logits - highest[:, None]).sum(1))
            sums.append(float((totals - logits[range(len(ids) - 1), ids[1:]]).sum()))
        return sums

    def first(self, model: str, threads: int, text: str, **options: Any) -> None:
        self.load(model, 0, threads, **options)  # 0: the model's own length, as ours
        self._prompt(self.llm.tokenize(text.encode(), add_bos=False)).argmax()


class Transformers(Side):
    """transformers' generate on the dequantised weights, with its prompt lookup."""

    def __init__(self) -> None:
        import torch
        import transformers

        self.torch, self.transformers = torch, transformers
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        self.versions = {"transformers": transformers.__version__, "torch": torch.__version__}

    def load(self, model: str, length: int, threads: int, dtype: str = "float32") -> dict[str, Any]:
        self.torch.set_num_threads(threads)
        path = Path(model)
        where = {"gguf_file": path.name} if path.is_file() else {}
        folder = path.parent if path.is_file() else path
        kind = self.transformers.AutoModelForCausalLM
        self.model: Any = None
        self.model = kind.from_pretrained(folder, dtype=getattr(self.torch, dtype), **where).eval()
        return {"dtype": dtype}

    def answers(self, prompts: list[list[int]], new: int, stop: list[int], lookup: int | None = None) -> list[Answer]:
        return [self._answer(ids, new, stop, lookup) for ids in prompts]

    def _answer(self, ids: list[int], new: int, stop: list[int], lookup: int | None) -> Answer:
        config = self.model.generation_config
        config.eos_token_id, config.pad_token_id = stop or None, 0
        config.temperature = config.top_p = config.top_k = None
        said = Listener()
        given = self.torch.tensor([ids])
        extra = {} if lookup is None else {"prompt_lookup_num_tokens": lookup}
        start = clock()
        with self.torch.inference_mode():
            out = self.model.generate(
                given,
                attention_mask=self.torch.ones_like(given),
                do_sample=False,
                max_new_tokens=new,
                streamer=said,
                **extra,
            )
        first = said.times[1] - start  # the first thing said is the prompt
        return {"first": first, "rest": clock() - start - first, "tokens": out[0, len(ids) :].tolist()}


class Listener:
    """A streamer that only notes when something was said."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Any) -> None:
        self.times.append(clock())

    def end(self) -> None:
        pass


SIDES: dict[str, Any] = {"paceline": Paceline, "llama.cpp": LlamaCpp, "transformers": Transformers}


def serve(kind: str) -> None:
    """Answer JSON lines until there are no more. What libraries print goes to stderr, not between the answers."""
    with os.fdopen(os.dup(1), "w", buffering=1) as out:
        os.dup2(2, 1)
        try:
            side = SIDES[kind]()
        except ImportError as error:
            print(json.dumps({"missing": str(error)}), file=out)
            return
        print(json.dumps({"result": side.versions}), file=out)
        for line in sys.stdin:
            asked = json.loads(line)
            try:
                answer = {"result": getattr(side, asked.pop("do"))(**asked)}
            except Exception as error:
                answer = {"error": f"{type(error).__name__}: {error}"}
            print(json.dumps(answer), file=out)


# The asking half


class PeerError(Exception):
    """A side that is missing or that failed; the sentence says which and why."""


class Peer:
    """A side's process."""

    def __init__(self, kind: str, python: str) -> None:
        self.kind = kind
        self._process = subprocess.Popen(
            [python, str(Path(__file__).resolve()), "--serve", kind],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            self.versions = self._read()
        except PeerError:
            self.close()
            raise

    def __call__(self, do: str, **given: Any) -> Any:
        assert self._process.stdin is not None
        try:
            print(json.dumps({"do": do, **given}), file=self._process.stdin, flush=True)
        except BrokenPipeError:
            raise PeerError(f"{self.kind}'s process has ended") from None
        return self._read()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        told = json.loads(line) if line else {"error": f"its process ended with code {self._process.wait()}"}
        if "missing" in told:
            raise PeerError("not installed")
        if "error" in told:
            raise PeerError(f"{self.kind}: {told['error']}")
        return told["result"]

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def close(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        self._process.wait()


@dataclass(frozen=True)
class Sizes:
    """Tokens and prompts of the figures."""

    prompt: int = 64
    new: int = 64
    new_large: int = 32
    prefill: int = 512
    context: int = 256
    counts: tuple[int, ...] = (1, 2, 4, 8, 16)
    total: int = 2048
    answer: int = 128
    length: int = 4096
    num_prompts: int = 5  # a category
    num_prompts_large: int = 3
    num_prompts_slow: int = 2  # of these, for transformers


QUICK = Sizes(8, 6, 4, 16, 16, (1, 2, 4), 64, 8, 128, 1, 1, 1)
DRAFTERS: dict[str, list[Any] | None] = {
    "plain": None,
    "ngram 5, 1–3": ["NGram", 5, 1, 3],
    "ngram 8, 2–4": ["NGram", 8, 2, 4],
    "suffix": ["Suffix"],
}
LOOKUP = 10
OPENING = "The first thing that I noticed was"
SLOW_REPEATS = 3
WIDTH = 140  # of the table, at least
CATEGORIES = ("summarization", "rag")
# What each ratio should reach, by the figure's name in the table: ("≥" or "≤", number).
REACH: dict[str, tuple[str, float]] = {}


@dataclass
class Row:
    """One line of the table. `ratio` is always ours over the other's."""

    figure: str
    unit: str
    ours: float | None
    against: str
    peer: float | None = None
    note: str = ""
    ratio: float | None = field(init=False)

    def __post_init__(self) -> None:
        self.ratio = self.ours / self.peer if self.ours is not None and self.peer else None


@dataclass
class Bench:
    """What the figures share: options, and the processes they ask."""

    options: argparse.Namespace
    sizes: Sizes
    versions: dict[str, str] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)  # what each side said when it loaded
    peers: dict[str, Peer] = field(default_factory=dict)  # kept open from figure to figure

    def python(self, kind: str) -> str:
        return self.options.peer_python if kind == "llama.cpp" and self.options.peer_python else sys.executable

    def start(self, kind: str) -> Peer:
        peer = Peer(kind, self.python(kind))
        self.versions |= peer.versions
        return peer

    @contextlib.contextmanager
    def fresh(self, kind: str) -> Iterator[Peer]:
        """A process for one measurement."""
        peer = self.start(kind)
        try:
            yield peer
        finally:
            peer.close()

    def load(self, model: str, length: int, *kinds: str) -> dict[str, Peer | str]:
        """The sides asked for, loaded, or why not; ours first, because it knows where the file is."""
        path, sides = model, {}
        for kind in ("paceline", *kinds):
            extra = {
                "llama.cpp": self.options.llama_options,
                "transformers": {"dtype": self.options.transformers_dtype},
            }
            try:
                if kind in self.peers and self.peers[kind].ended:
                    self.peers.pop(kind).close()
                if kind not in self.peers:
                    self.peers[kind] = self.start(kind)
                about = self.peers[kind](
                    "load", model=path, length=length, threads=self.options.threads, **extra.get(kind, {})
                )
            except PeerError as error:
                if kind == "paceline":
                    raise
                sides[kind] = str(error)
                continue
            self.settings[f"{kind} {model}"] = about
            sides[kind], path = self.peers[kind], about.get("path", path)
        return sides

    def close(self) -> None:
        for peer in self.peers.values():
            peer.close()

    def prose(self, ours: Peer, count: int) -> list[int]:
        """`count` tokens of the fixed text, from its start again where it is too short."""
        ids = ours("tokenize", text=PROSE.read_text())
        return (ids * -(-count // len(ids)))[:count]

    def end_ids(self, model: str) -> list[int]:
        return self.settings[f"paceline {model}"]["end_ids"]


def in_turn(repeat: int, runs: dict[str, Callable[[], Any]]) -> dict[str, list[Any]]:
    """A B A B …, after one run of each that is not counted."""
    taken: dict[str, list[Any]] = {name: [] for name in runs}
    for turn in range(repeat + 1):
        for name, run in runs.items():
            result = run()
            if turn:
                taken[name].append(result)
    return taken


def median(values: list[float]) -> float:
    return float(statistics.median(values))


def present(sides: dict[str, Peer | str]) -> dict[str, Peer]:
    return {kind: side for kind, side in sides.items() if isinstance(side, Peer)}


def compare_speed(
    bench: Bench, name: str, model: str, sizes: tuple[int, int], seconds: Callable[[Answer], tuple[float, int]]
) -> dict[str, Any]:
    """The same prompt on both sides; `seconds` answers what to count: a time and a number of tokens."""
    prompt, new = sizes
    sides = bench.load(model, prompt + new, "llama.cpp")
    found = present(sides)
    ids = bench.prose(found["paceline"], prompt)
    runs = {kind: lambda p=peer: p("answers", prompts=[ids], new=new, stop=[])[0] for kind, peer in found.items()}
    taken = in_turn(bench.options.repeat, runs)
    speeds = {}
    for kind, answers in taken.items():
        speeds[kind] = median([count / spent for spent, count in map(seconds, answers)])
    missing = sides["llama.cpp"] if isinstance(sides["llama.cpp"], str) else ""
    row = Row(name, "tokens/s", speeds["paceline"], "llama.cpp", speeds.get("llama.cpp"), missing)
    same = [a["tokens"] == b["tokens"] for a, b in zip(taken["paceline"], taken.get("llama.cpp", []))]
    return {"rows": [row], "raw": taken, "same_tokens": same}


def decode(bench: Bench, name: str, model: str, new: int) -> dict[str, Any]:
    """Greedy tokens after a short prompt, the prompt's own time left out."""
    return compare_speed(
        bench, name, model, (bench.sizes.prompt, new), lambda answer: (answer["rest"], len(answer["tokens"]) - 1)
    )


def decode_small(bench: Bench) -> dict[str, Any]:
    return decode(bench, "decode, small", bench.options.small, bench.sizes.new)


def decode_large(bench: Bench) -> dict[str, Any]:
    return decode(bench, "decode, large", bench.options.large, bench.sizes.new_large)


def prefill(bench: Bench) -> dict[str, Any]:
    """From the request to its first token, a prompt of one batch."""
    count = bench.sizes.prefill
    sizes = (count, 1)
    return compare_speed(bench, "prefill, small", bench.options.small, sizes, lambda answer: (answer["first"], count))


def rows(bench: Bench) -> dict[str, Any]:
    """One forward over k rows against one row."""
    sizes = bench.sizes
    length = sizes.context + max(sizes.counts) + 1
    sides = bench.load(bench.options.small, length, "llama.cpp")
    found = present(sides)
    ids = bench.prose(found["paceline"], length - 1)
    asked = {"ids": ids, "context": sizes.context, "counts": list(sizes.counts), "runs": 3}
    taken = in_turn(bench.options.repeat, {kind: lambda p=p: p("rows", **asked) for kind, p in found.items()})
    costs = {
        kind: {count: median([s for turn in turns for s in turn[str(count)]]) * 1e3 for count in sizes.counts}
        for kind, turns in taken.items()
    }
    ours, theirs = costs["paceline"], costs.get("llama.cpp")
    missing = sides["llama.cpp"] if isinstance(sides["llama.cpp"], str) else ""
    shown = [Row("1 row", "ms", ours[1], "llama.cpp", theirs and theirs[1], missing)]
    for count in sizes.counts[1:]:
        shown.append(Row(f"{count} rows", "ms", ours[count], "1 row", ours[1]))
        if theirs is not None:
            relative = ours[count] / ours[1], theirs[count] / theirs[1]
            shown.append(Row(f"{count} rows over 1", "×", relative[0], "llama.cpp", relative[1]))
    return {"rows": shown, "raw": taken}


# Speculation


def read_questions(paths: list[Path], wanted: str) -> dict[str, list[str]]:
    """Category → texts, of rows that have the field; the categories named above, where there are any of them."""
    found: dict[str, list[str]] = {}
    for path in paths:
        opened: Any = gzip.open if path.suffix == ".gz" else open
        with opened(path, "rt", encoding="utf-8") as lines:
            for line in filter(str.strip, lines):
                row = json.loads(line)
                if wanted in row:
                    text = row[wanted][0] if isinstance(row[wanted], list) else row[wanted]
                    found.setdefault(row.get("category", path.name.partition(".")[0]), []).append(text)
    chosen = {category: found[category] for category in CATEGORIES if category in found}
    return chosen or found


def built_in() -> dict[str, list[str]]:
    from paceline.bench.prompts import BUILT_IN

    return {"built-in": [question.text for question in BUILT_IN]}


def speculative_small(bench: Bench) -> dict[str, Any]:
    return speculate(bench, bench.options.small, "turns", bench.sizes.num_prompts)


def speculative_large(bench: Bench) -> dict[str, Any]:
    return speculate(bench, bench.options.large, "prompt", bench.sizes.num_prompts_large)


def speculate(bench: Bench, model: str, wanted: str, limit: int) -> dict[str, Any]:
    """Every drafter against plain decoding, llama.cpp and transformers, category by category."""
    asked = read_questions(bench.options.dataset_path, wanted) if bench.options.dataset_path else built_in()
    if not asked:
        raise PeerError(f"no dataset given has the field {wanted!r}")
    shown: list[Row] = []
    raw: dict[str, Any] = {}
    sides = bench.load(model, bench.sizes.length, "llama.cpp", "transformers")
    ours = present(sides)["paceline"]
    for category, texts in asked.items():
        most = bench.sizes.length - bench.sizes.answer
        prompts = [ours("tokenize", text=text, chat=True) for text in texts[: 4 * limit]]
        if bench.options.quick:
            prompts = [ids[: most // 2] for ids in prompts]
        fitting = [ids for ids in prompts if len(ids) <= most][:limit]
        if not fitting:
            raise PeerError(f"no prompt of {category} fits into {most} tokens")
        taken = ask_all(bench, sides, fitting, bench.end_ids(model))
        raw[category] = {"prompt_tokens": [len(ids) for ids in fitting], "runs": taken}
        shown += judge(f"{'small' if wanted == 'turns' else 'large'}, {category}", taken, sides)
    return {"rows": shown, "raw": raw}


def ask_all(
    bench: Bench, sides: dict[str, Peer | str], prompts: list[list[int]], stop: list[int]
) -> dict[str, list[list[Answer]]]:
    found, new = present(sides), bench.sizes.answer
    ways: dict[str, tuple[Peer, int, dict[str, Any]]] = {
        name: (found["paceline"], len(prompts), {"drafter": drafter}) for name, drafter in DRAFTERS.items()
    }
    if "llama.cpp" in found:
        ways["llama.cpp"] = (found["llama.cpp"], len(prompts), {})
    if "transformers" in found:
        ways["transformers"] = (found["transformers"], bench.sizes.num_prompts_slow, {"lookup": LOOKUP})
    for peer, _, extra in ways.values():
        peer("answers", prompts=prompts[:1], new=min(new, 8), stop=stop, **extra)
    taken: dict[str, list[list[Answer]]] = {name: [] for name in ways}
    for turn in range(bench.options.repeat):
        for name, (peer, limit, extra) in ways.items():
            if name != "transformers" or turn < SLOW_REPEATS:
                taken[name].append(peer("answers", prompts=prompts[:limit], new=new, stop=stop, **extra))
    return taken


def whole_speed(turns: list[list[Answer]], limit: int) -> float:
    """Tokens per second of the first `limit` answers, prompts included."""
    return median(
        [
            sum(len(a["tokens"]) for a in turn[:limit]) / sum(a["first"] + a["rest"] for a in turn[:limit])
            for turn in turns
        ]
    )


def decode_speed(turns: list[list[Answer]]) -> float:
    """Tokens per second after each answer's first token."""
    return median([sum(len(a["tokens"]) - 1 for a in turn) / max(sum(a["rest"] for a in turn), 1e-9) for turn in turns])


def judge(where: str, taken: dict[str, list[list[Answer]]], sides: dict[str, Peer | str]) -> list[Row]:
    """Rows for every drafter and the best one. Whether the text is plain's is part of the note."""
    count = len(taken["plain"][0])
    plain = whole_speed(taken["plain"], count)
    reference = [answer["tokens"] for answer in taken["plain"][0]]
    shown, speeds = [], {}
    for name in DRAFTERS:
        turns = taken[name]
        if name != "plain":
            same = sum(all(turn[i]["tokens"] == reference[i] for turn in turns) for i in range(count))
            rounds = sum(a["rounds"] for a in turns[0])
            per = sum(len(a["tokens"]) for a in turns[0]) / max(rounds, 1)
            note = f"{same}/{count} identical, {per:.2f} tokens per forward"
            speeds[name] = whole_speed(turns, count)
            shown.append(Row(f"{where}: {name}", "tokens/s", speeds[name], "plain", plain, note))
            after = decode_speed(turns), decode_speed(taken["plain"])
            shown.append(Row(f"{where}: {name}, decoding alone", "tokens/s", after[0], "plain", after[1]))
    best = max(speeds, key=lambda name: speeds[name])
    shown.append(Row(f"{where}: best", "tokens/s", speeds[best], "plain", plain, best))
    for kind in ("llama.cpp", "transformers"):
        side = sides[kind]
        label = "llama.cpp plain" if kind == "llama.cpp" else f"transformers, lookup {LOOKUP}"
        few = len(taken[kind][0]) if kind in taken else count
        theirs = whole_speed(taken[kind], few) if kind in taken else None
        note = side if isinstance(side, str) else f"{best}, {few} prompts"
        shown.append(Row(f"{where}: best", "tokens/s", whole_speed(taken[best], few), label, theirs, note))
    return shown


# Memory, overhead, start


def memory_small(bench: Bench) -> dict[str, Any]:
    return memory(bench, "memory, small", bench.options.small)


def memory_large(bench: Bench) -> dict[str, Any]:
    return memory(bench, "memory, large", bench.options.large)


def memory(bench: Bench, name: str, model: str) -> dict[str, Any]:
    """The peak of a fresh process after one request, less what it had after its imports."""
    total, raw, about, ids = bench.sizes.total, {}, {}, []
    new = min(64, total // 4)
    missing = ""
    for kind in ("paceline", "llama.cpp"):
        raw[kind] = []
        try:
            for _ in range(1 if bench.options.quick else SLOW_REPEATS):
                with bench.fresh(kind) as peer:
                    before = peer("memory")
                    where = model if kind == "paceline" else about["path"]
                    extra = bench.options.llama_options if kind == "llama.cpp" else {}
                    told = peer("load", model=where, length=total, threads=bench.options.threads, **extra)
                    loaded = peer("memory")
                    about = about or told
                    ids = ids or bench.prose(peer, total - new)
                    peer("answers", prompts=[ids], new=new, stop=[])
                    raw[kind].append({"imported": before, "loaded": loaded, "answered": peer("memory")})
        except PeerError as error:
            if kind == "paceline":
                raise
            missing = str(error)
    grown = {k: median([r["answered"]["peak"] - r["imported"]["now"] for r in v]) / 1e6 for k, v in raw.items() if v}
    least = (about["file_bytes"] + total * about["cache_bytes_per_token"]) / 1e6
    shown = [
        Row(name, "MB", grown["paceline"], "file + cache", least),
        Row(name, "MB", grown["paceline"], "llama.cpp", grown.get("llama.cpp"), missing),
    ]
    return {"rows": shown, "raw": raw}


def overhead(bench: Bench) -> dict[str, Any]:
    """Of a decoding step, what is not spent inside the compiled library."""
    sizes = bench.sizes
    sides = bench.load(bench.options.small, sizes.prompt + sizes.new)
    ours = present(sides)["paceline"]
    ids = bench.prose(ours, sizes.prompt)
    turns = in_turn(bench.options.repeat, {"paceline": lambda: ours("overhead", ids=ids, new=sizes.new)})
    steps = [step for turn in turns["paceline"] for step in turn or []]
    if not steps:
        row = Row("outside the library, small", "µs/step", None, "step", None, "the native kernels are not in use")
        return {"rows": [row], "raw": turns}
    spent = median([(whole - inside) * 1e6 for whole, inside in steps])
    whole = median([whole * 1e6 for whole, _ in steps])
    return {"rows": [Row("outside the library, small", "µs/step", spent, "step", whole)], "raw": turns}


def start(bench: Bench) -> dict[str, Any]:
    """From starting a process to its first token, the model's file in the cache."""
    bench.load(bench.options.small, bench.sizes.length)
    about = bench.settings[f"paceline {bench.options.small}"]

    def run(kind: str) -> float:
        began = clock()
        with bench.fresh(kind) as peer:
            where = bench.options.small if kind == "paceline" else about["path"]
            extra = bench.options.llama_options if kind == "llama.cpp" else {}
            peer("first", model=where, threads=bench.options.threads, text=OPENING, **extra)
            return clock() - began

    raw: dict[str, list[float]] = {"paceline": [], "llama.cpp": []}
    missing = ""
    for turn in range(bench.options.repeat + 1):
        for kind in raw:
            try:
                spent = run(kind) if not (missing and kind == "llama.cpp") else math.nan
            except PeerError as error:
                if kind == "paceline":
                    raise
                missing = str(error)
                continue
            if turn and not math.isnan(spent):
                raw[kind].append(spent)
    theirs = median(raw["llama.cpp"]) if raw["llama.cpp"] else None
    row = Row("start to first token, small", "s", median(raw["paceline"]), "llama.cpp", theirs, missing)
    return {"rows": [row], "raw": raw}


FIGURES: dict[str, Callable[[Bench], dict[str, Any]]] = {
    "decode-small": decode_small,
    "decode-large": decode_large,
    "prefill": prefill,
    "rows": rows,
    "speculative-small": speculative_small,
    "speculative-large": speculative_large,
    "memory-small": memory_small,
    "memory-large": memory_large,
    "overhead": overhead,
    "start": start,
}


def show(shown: list[Row]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False)
    table.add_column("figure", overflow="fold")
    for name in ("ours", "peer", "ratio", "reach"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("against", overflow="fold")
    for row in shown:
        sign, reach = REACH.get(f"{row.figure} / {row.against}", ("", None))
        figures = [f"{value:.4g} {row.unit}" if value is not None else "–" for value in (row.ours, row.peer)]
        ratio = "–" if row.ratio is None else f"{row.ratio:.2f}"
        note = f"{row.against} ({row.note})" if row.note else row.against
        table.add_row(row.figure, *figures, ratio, "–" if reach is None else f"{sign} {reach:g}", note)
    console = Console()
    Console(width=max(console.width, WIDTH)).print(table)


def read_options(given: list[str] | None) -> argparse.Namespace:
    names = ", ".join(FIGURES)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=FIGURES, default=list(FIGURES), metavar="NAME", help=names)
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="few tokens: whether it runs, not how fast")
    parser.add_argument("--peer-python", help="a Python that has llama_cpp")
    parser.add_argument("--dataset-path", type=Path, action="append", default=[])
    parser.add_argument("--num-prompts", type=int, help="a category")
    parser.add_argument("--small", default="smollm2-135m", help="the small model")
    parser.add_argument("--large", default="qwen2.5-coder-1.5b", help="the large model")
    parser.add_argument("--llama-options", type=json.loads, default={}, help='such as {"flash_attn": true}')
    parser.add_argument("--transformers-dtype", default="float32")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--serve", choices=SIDES, help=argparse.SUPPRESS)
    options = parser.parse_args(given)
    if options.repeat < 1 or options.threads < 1:
        parser.error("--repeat and --threads need 1 or more")
    return options


def main(given: list[str] | None = None) -> None:
    options = read_options(given)
    if options.serve:
        serve(options.serve)
        return
    sizes = QUICK if options.quick else Sizes()
    if options.num_prompts:
        sizes = replace(sizes, num_prompts=options.num_prompts, num_prompts_large=options.num_prompts)
    bench = Bench(options, sizes)
    figures: dict[str, Any] = {}
    failures = 0
    for name in options.only:
        print(f"{name} …", file=sys.stderr, flush=True)
        began, load = clock(), os.getloadavg()
        try:
            figures[name] = FIGURES[name](bench) | {"seconds": clock() - began, "load_before": load}
        except PeerError as error:
            print(f"{name} failed: {error}", file=sys.stderr)
            figures[name], failures = {"rows": [], "error": str(error)}, failures + 1
        save(bench, figures, given)  # after each: whoever stops this keeps what was measured
    bench.close()
    show([row for figure in figures.values() for row in figure["rows"]])
    sys.exit(1 if failures else 0)


def save(bench: Bench, figures: dict[str, Any], given: list[str] | None) -> None:
    from paceline.bench import machine, report

    told = machine.record()
    words = sys.argv[1:] if given is None else given
    data = {
        "command": " ".join(["python", "bench/cpu_peers.py", *(Path(w).name if "/" in w else w for w in words)]),
        **told,
        "versions": told["versions"] | bench.versions,
        "threads": bench.options.threads,
        "repeat": bench.options.repeat,
        "sizes": asdict(bench.sizes),
        "settings": {
            name: {key: Path(v).name if key == "path" else v for key, v in about.items()}
            for name, about in bench.settings.items()
        },
        "figures": {n: f | {"rows": [asdict(row) for row in f["rows"]]} for n, f in figures.items()},
    }
    report.write_json(bench.options.output, data)


if __name__ == "__main__":
    main()
