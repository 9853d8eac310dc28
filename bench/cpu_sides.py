"""The programs that bench/cpu_peers.py compares, each a process that answers JSON lines: `python cpu_sides.py KIND`.

Runs in whatever Python a peer is installed in, so nothing but the standard library is imported before it is needed.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

clock = time.perf_counter
Answer = dict[str, Any]  # first: seconds to the first token; rest: seconds after it; tokens


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

    def load(self, model: str, length: int, threads: int, kernels: str = "auto", at_once: int = 1) -> dict[str, Any]:
        from paceline.models import loader

        self.torch.set_num_threads(threads)
        options = {"max_model_len": length, "max_num_seqs": at_once, "prefix_caching": False}
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
                finished, stats = update.finished, update.stats
            first = first or (clock() - start if tokens else 0.0)
        rest = clock() - start - first
        self.llm.abort(request)
        assert stats is not None
        counts = {"rounds": stats.rounds, "proposed": sum(stats.proposed), "accepted": sum(stats.accepted)}
        return {"first": first, "rest": rest, "tokens": tokens, **counts}

    def rows(self, ids: list[int], context: int, counts: list[int], runs: int) -> dict[str, list[float]]:
        """Seconds of a forward with logits over the next k tokens after `context` cached ones."""
        from paceline.kernels.ops import see_windows
        from paceline.models.batch import Work, pack

        engine, model = self.llm.engine, self.llm.model
        size = engine.cache.pool.block_size
        slot, pages = engine.table.take(), engine.cache.pool.take(-(-len(ids) // size))
        engine.table.begin(slot, ids, len(ids))
        engine.table.pages.write(slot, 0, pages)
        windowed = engine.table.windowed
        if windowed is not None and not windowed.enter(slot, [], len(ids)):
            raise ValueError(f"the pages under windows do not hold {len(ids)} positions; give a larger length")
        every = self.torch.arange(max(counts))
        times: dict[str, list[float]] = {str(count): [] for count in counts}

        def packed(start: int, count: int) -> Any:
            batch = pack([Work(slot, start, count)], engine.table, size)
            if windowed is not None:
                see_windows(batch.layout, windowed.table.tensor)
            return batch

        with self.torch.inference_mode():
            model.forward(packed(0, context), engine.cache.layers)
            for count in counts * (runs + 1):  # in turn; the first turn is not counted
                batch = packed(context, count)
                start = clock()
                model.forward(batch, engine.cache.layers, rows=every[:count])
                times[str(count)].append(clock() - start)
        engine.table.give_back(slot)
        engine.cache.pool.release(pages)
        if windowed is not None:
            windowed.leave(slot)
        return {count: taken[1:] for count, taken in times.items()}

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

    def greedy(self, prompts: list[list[int]], new: int) -> list[list[int]]:
        """The tokens alone, of all prompts at once."""
        import paceline

        self.llm.set_drafter(None)
        params = paceline.SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True)
        return [output.outputs[0].token_ids for output in self.llm.generate(prompts, params)]

    def agrees(self, texts: list[list[int]], new: int) -> list[list[bool]]:
        """Whether each of a text's last `new` tokens is the likeliest after those before it."""
        import paceline

        self.llm.set_drafter(None)
        params = paceline.SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
        told = [output.prompt_logprobs[-new:] for output in self.llm.generate(texts, params)]
        return [[e[token].rank == 1 for e, token in zip(entries, ids[-new:])] for entries, ids in zip(told, texts)]


class LlamaCpp(Side):
    """llama.cpp, by its C interface: next to none of its own binding's Python is counted against it."""

    BATCH = 512

    def __init__(self) -> None:
        import llama_cpp
        import numpy

        self.c, self.numpy = llama_cpp, numpy
        self.versions = {"llama-cpp-python": llama_cpp.__version__}
        self.llm: Any = None

    def load(self, model: str, length: int, threads: int, **options: Any) -> dict[str, Any]:
        """`options` are those of llama-cpp-python's own class."""
        if not model.endswith(".gguf"):
            raise ValueError(f"llama.cpp reads .gguf files, not {Path(model).name}")
        self._open(model, length, threads, options)
        self.context, self.vocabulary = self.llm.ctx, self.llm.n_vocab()
        self.memory_ = self.c.llama_get_memory(self.context)
        info = self.c.llama_print_system_info().decode()
        return {"system": info, "options": options}

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


class LlamaServer(Side):
    """llama.cpp as xllamacpp has it, a wheel that needs no compiler: its server's own clock, answers alone.

    That clock leaves out all of Python: first is the prompt's time, rest that of the tokens after the first.
    """

    def __init__(self) -> None:
        import xllamacpp

        self.x = xllamacpp
        self.versions = {"llama.cpp": f"xllamacpp {xllamacpp.__version__}"}
        self.server: Any = None

    def load(self, model: str, length: int, threads: int, **options: Any) -> dict[str, Any]:
        """`options` are fields of xllamacpp's parameters."""
        if not model.endswith(".gguf"):
            raise ValueError(f"llama.cpp reads .gguf files, not {Path(model).name}")
        self.server = None  # the former one goes before the next comes
        given, batch = self.x.CommonParams(), LlamaCpp.BATCH
        given.model.path, given.n_ctx, given.n_batch, given.n_ubatch = model, length, batch, batch
        given.n_parallel, given.fit_params, given.n_ctx_checkpoints, given.verbosity = 1, False, 0, 0
        given.cpuparams.n_threads = given.cpuparams_batch.n_threads = threads
        for name, value in options.items():
            setattr(given, name, value)
        self.server, self._said = self.x.Server(given), {}
        return {"system": self.x.get_system_info(), "options": options}

    def answers(self, prompts: list[list[int]], new: int, stop: list[int]) -> list[Answer]:
        return [self._answer(ids, new, not stop) for ids in prompts]

    def _answer(self, ids: list[int], new: int, ignore_eos: bool) -> Answer:
        asked = {"prompt": ids, "n_predict": new, "temperature": 0, "cache_prompt": False, "ignore_eos": ignore_eos}
        key = (*ids, new, ignore_eos)
        if key not in self._said:  # ids come with probabilities alone, which cost time: asked for once
            told = self.server.handle_completions({**asked, "logprobs": 1})
            self._said[key] = [item["id"] for item in told["choices"][0]["logprobs"]["content"]]
        times = self.server.handle_completions(asked)["timings"]
        return {"first": times["prompt_ms"] / 1e3, "rest": times["predicted_ms"] / 1e3, "tokens": self._said[key]}

    def rows(self, **ignored: Any) -> Any:
        raise ValueError("xllamacpp answers requests alone; install llama-cpp-python for rows")

    def losses(self, **ignored: Any) -> Any:
        raise ValueError("xllamacpp answers requests alone; install llama-cpp-python for losses")


def llama() -> Side:
    """Whichever of its two packages is there."""
    try:
        return LlamaCpp()
    except ImportError:
        return LlamaServer()


class Transformers(Side):
    """transformers' generate on the dequantised weights, with its prompt lookup."""

    def __init__(self) -> None:
        import torch
        import transformers

        self.torch, self.transformers = torch, transformers
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        self.versions = {"transformers": transformers.__version__, "torch": torch.__version__}

    def load(self, model: str, length: int, threads: int) -> dict[str, Any]:
        self.torch.set_num_threads(threads)
        path = Path(model)
        where = {"gguf_file": path.name} if path.is_file() else {}
        folder = path.parent if path.is_file() else path
        kind = self.transformers.AutoModelForCausalLM
        self.model: Any = None
        self.model = kind.from_pretrained(folder, dtype=self.torch.float32, **where).eval()
        return {"dtype": "float32"}

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

    def greedy(self, prompts: list[list[int]], new: int) -> list[list[int]]:
        """The tokens alone, of prompts of one length, all at once."""
        given = self.torch.tensor(prompts)
        self.model.generation_config.eos_token_id, self.model.generation_config.pad_token_id = None, 0
        with self.torch.inference_mode():
            mask = self.torch.ones_like(given)
            out = self.model.generate(given, attention_mask=mask, do_sample=False, max_new_tokens=new)
        said: list[list[int]] = out[:, given.shape[1] :].tolist()
        return said


class Listener:
    """A streamer that only notes when something was said."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Any) -> None:
        self.times.append(clock())

    def end(self) -> None:
        pass


SIDES: dict[str, Any] = {"paceline": Paceline, "llama.cpp": llama, "transformers": Transformers}


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


if __name__ == "__main__":
    serve(sys.argv[1])
