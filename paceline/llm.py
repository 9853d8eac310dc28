"""The user's object: `LLM(model, drafter=…)`, then `.generate`, `.chat` or `.stream`."""

from __future__ import annotations

import itertools
import secrets
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from paceline import compat
from paceline.cache.kv import KVCache
from paceline.cache.pages import PagePool
from paceline.cache.slots import Slots
from paceline.drafters import make
from paceline.drafters.base import Target
from paceline.engine import sequence as sequences
from paceline.engine.detokenizer import Detokenizer
from paceline.engine.engine import Engine, Update
from paceline.engine.memory import count_pages
from paceline.engine.scheduler import Scheduler
from paceline.errors import OptionError
from paceline.models import loader
from paceline.models.catalog import DEFAULT_MODEL
from paceline.outputs import Chunk, RequestOutput, completion
from paceline.params import SamplingParams
from paceline.prompts import Prompt, check_params, find_words, read_prompts
from paceline.templates import Message, PromptTemplate


@dataclass(frozen=True)
class EngineOptions:
    """Everything about an engine but its model and drafter.

    gpu_memory_utilization: the share of the accelerator's memory to use. On a CPU: of the memory that is free, and at
    most 4 GiB of cache unless it is given. max_model_len: by default the model's own. num_pages overrides both.
    kernels: auto, native (CPU), torch or reference. quantization: int8 or int4 packs float weights at load (native).
    acceptance: exact (default), rejection, block, or typical, which is lossy.
    """

    dtype: str = "auto"
    device: str = "auto"
    block_size: int = 16
    gpu_memory_utilization: float | None = None
    max_num_seqs: int = 64
    max_model_len: int | None = None
    max_batched_tokens: int | None = None
    num_pages: int | None = None
    prefix_caching: bool = True
    acceptance: str = "exact"
    kernels: str = "auto"
    quantization: str | None = None
    prompt_template: str | None = None
    tensor_parallel_size: int = 1
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.tensor_parallel_size != 1:
            raise OptionError(
                f"tensor_parallel_size={self.tensor_parallel_size!r} is not supported yet; allowed: 1 (one device)"
            )
        for name in ("block_size", "max_num_seqs", "max_model_len", "max_batched_tokens", "num_pages"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise OptionError(f"{name}={value!r} is not allowed; allowed: a whole number of 1 or more")
        if self.seed is not None and (not isinstance(self.seed, int) or isinstance(self.seed, bool)):
            raise OptionError(f"seed={self.seed!r} is not allowed; allowed: a whole number")
        share = self.gpu_memory_utilization
        if share is not None and not (isinstance(share, int | float) and 0 < share <= 1):
            raise OptionError(f"gpu_memory_utilization={share!r} is not allowed; allowed: above 0 up to 1")


class LLM:
    """A model, and the drafter that rides ahead of it.

    model: an alias, a folder, a hub id, a .gguf file, or a transformers model object (then give its tokenizer too).
    drafter: None, "ngram", "suffix", a draft model's name or path, or NGram(…), Suffix(…), DraftModel(…), FirstOf(…).
    Further options: see EngineOptions. vLLM's spellings are understood.
    """

    def __init__(self, model: Any = DEFAULT_MODEL, drafter: Any = None, tokenizer: Any = None, **options: Any) -> None:
        known = [item.name for item in fields(EngineOptions)]
        translated = compat.translate({"drafter": drafter, **options}, ["drafter", *known])
        config = make(translated.pop("drafter", None))
        self.options = EngineOptions(**translated)
        device = loader.find_device(self.options.device)
        found = loader.find(model, tokenizer)
        dtype = loader.find_dtype(self.options.dtype, found.config, device)
        max_model_len = self._find_length(found.config.max_position)
        loaded = loader.build(found, dtype, device, self.options.kernels, max_model_len, self.options.quantization)
        self.model, self.tokenizer, self.config = loaded.model, loaded.tokenizer, loaded.config
        self.max_model_len = max_model_len
        self.template = PromptTemplate(self.options.prompt_template, self.tokenizer)
        self.engine = self._build_engine(loaded, device)
        self._end_ids = sorted(self.engine.end_ids)
        self._ids = itertools.count()
        self._live: dict[str, list[sequences.Sequence]] = {}
        self._streams: dict[str, deque[Update]] = {}
        self.set_drafter(config)

    def _find_length(self, most: int) -> int:
        asked = self.options.max_model_len
        if asked is not None and asked > most:
            raise OptionError(f"max_model_len={asked} is more than the model's {most} positions")
        if asked is not None and asked < 2:
            raise OptionError(f"max_model_len={asked} leaves no room for a token of prompt and one of output")
        return asked or most

    def _build_engine(self, loaded: loader.Loaded, device: torch.device) -> Engine:
        options, shape = self.options, loaded.config
        num_pages = count_pages(
            shape,
            loaded.dtype,
            device,
            self.max_model_len,
            max_num_seqs=options.max_num_seqs,
            block_size=options.block_size,
            share=options.gpu_memory_utilization,
            asked=options.num_pages,
        )
        cache = KVCache(PagePool(num_pages, options.block_size), device)
        cache.layers = cache.add_layers(shape.num_layers, shape.num_kv_heads, shape.head_dim, loaded.dtype)
        table = Slots(
            options.max_num_seqs, self.max_model_len, -(-self.max_model_len // options.block_size) + 1, device
        )
        rows = options.max_batched_tokens or (512 if device.type == "cpu" else 2048)
        scheduler = Scheduler(cache.pool, table, rows, options.prefix_caching)
        target = Target(
            loaded.model,
            self.tokenizer,
            device,
            loaded.dtype,
            self.max_model_len,
            options.max_num_seqs,
            options.kernels,
        )
        return Engine(target, cache, table, scheduler, options.acceptance)

    def set_drafter(self, drafter: Any) -> None:
        """Turn speculation on, off (None) or over to another drafter; running requests go on."""
        config = make(drafter)
        self.engine.set_drafter(None if config is None else config.create())

    def generate(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Complete one prompt or many. A prompt is a string, a list of token ids, or a dictionary with either."""
        read = read_prompts(prompts, self.tokenizer, self.template if self.options.prompt_template else None)
        return self._run(read, self._params(sampling_params, len(read)), progress)

    def chat(
        self,
        messages: list[Message] | list[list[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Answer one conversation or many, put into the model's chat template."""
        conversations: Any = messages if messages and isinstance(messages[0], list) else [messages]
        read = [self.read_chat(conversation) for conversation in conversations]
        return self._run(read, self._params(sampling_params, len(read)), progress)

    def read_chat(self, messages: list[Message]) -> Prompt:
        """A conversation as a prompt."""
        text = self.template.render(messages)
        ids = self.tokenizer.encode(text, add_special_tokens=not self.template.own)
        return Prompt(text, list(ids))

    def stream(self, prompt: Any, sampling_params: SamplingParams | None = None) -> Iterator[Chunk]:
        """Complete one prompt (or a conversation: a list of messages) and yield its text as it comes."""
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], dict) and "role" in prompt[0]:
            read = self.read_chat(prompt)
        else:
            listed = read_prompts(prompt, self.tokenizer, self.template if self.options.prompt_template else None)
            if len(listed) != 1:
                raise OptionError(f"stream takes one prompt, but {len(listed)} were given")
            read = listed[0]
        request_id = self.add(read, self._params(sampling_params, 1)[0])
        updates = self._streams[request_id] = deque()
        left = len(self._live[request_id])
        try:
            while left:
                self._pump()
                while updates:
                    update = updates.popleft()
                    left -= update.finished
                    yield self._chunk(update)
        finally:
            del self._streams[request_id]
            self.abort(request_id)

    def _pump(self) -> None:
        """One step; every update goes to the stream it belongs to, whoever asked for the step."""
        for update in self.step():
            stream = self._streams.get(update.sequence.request_id)
            if stream is not None:
                stream.append(update)

    @staticmethod
    def _chunk(update: Update) -> Chunk:
        sequence = update.sequence
        count = len(update.tokens)
        told = sequence.provenance[len(sequence.provenance) - count :] if count else []
        return Chunk(
            sequence.index, update.text, update.tokens, told, completion(sequence) if update.finished else None
        )

    # The engine's own pace, for servers and tests: add, step, abort.

    def add(self, prompt: Prompt, params: SamplingParams) -> str:
        """Queue a request; `step` brings its updates. Raises OptionError before anything is queued."""
        samples = self._prepare(prompt, params)
        return self._queue(samples)

    def _queue(self, samples: list[sequences.Sequence]) -> str:
        request_id = samples[0].request_id
        self._live[request_id] = samples
        for sample in samples:
            self.engine.add(sample)
        return request_id

    def _prepare(self, prompt: Prompt, params: SamplingParams) -> list[sequences.Sequence]:
        """A request's samples, checked and ready; nothing is queued yet."""
        check_params(params, prompt, self.config.vocab_size, self.max_model_len)
        request_id = str(next(self._ids))
        words = find_words(params, self.tokenizer, self._end_ids)
        base = params.seed if params.seed is not None else self.options.seed
        seed = secrets.randbits(63) if base is None else base
        most = self.max_model_len - len(prompt.ids) if params.max_tokens is None else params.max_tokens
        samples: list[sequences.Sequence] = []
        for index in range(params.n):
            detokenizer = Detokenizer(
                self.tokenizer,
                prompt.ids,
                params.stop_strings,
                include_stop=params.include_stop_str_in_output,
                skip_special=params.skip_special_tokens,
            )
            samples.append(
                sequences.Sequence(
                    request_id,
                    index,
                    list(prompt.ids),
                    len(prompt.ids),
                    params,
                    seed,
                    words,
                    detokenizer,
                    min(len(prompt.ids) + most, self.max_model_len),
                    leader=samples[0] if samples else None,
                )
            )
        return samples

    def step(self) -> list[Update]:
        return self.engine.step()

    def abort(self, request_id: str) -> None:
        """End a request now; unknown or finished ones are left alone."""
        for sample in self._live.pop(request_id, []):
            self.engine.abort(sample)

    def _params(self, given: Any, count: int) -> list[SamplingParams]:
        if given is None:
            given = SamplingParams()
        listed = [given] * count if isinstance(given, SamplingParams) else list(given)
        if len(listed) != count:
            raise OptionError(
                f"{len(listed)} sampling parameters were given for {count} prompts; give one, or one each"
            )
        for params in listed:
            if not isinstance(params, SamplingParams):
                raise OptionError(f"sampling_params must be SamplingParams, not {type(params).__name__}")
        return listed

    def _run(self, prompts: list[Prompt], params: list[SamplingParams], progress: bool) -> list[RequestOutput]:
        prepared = [self._prepare(prompt, own) for prompt, own in zip(prompts, params)]
        ids = [self._queue(samples) for samples in prepared]
        left = [sample for samples in prepared for sample in samples]
        try:
            with _progress(len(left), progress) as advance:
                while left:
                    self._pump()
                    running = [sample for sample in left if sample.finish_reason is None]
                    advance(len(left) - len(running))
                    left = running
            return [self._output(request_id, prompt) for request_id, prompt in zip(ids, prompts)]
        finally:
            for request_id in ids:
                self.abort(request_id)

    def _output(self, request_id: str, prompt: Prompt) -> RequestOutput:
        samples = self._live[request_id]
        asked = samples[0].params.prompt_logprobs is not None
        return RequestOutput(
            request_id,
            prompt.text,
            prompt.ids,
            [completion(sample) for sample in samples],
            samples[0].prompt_logprobs if asked else None,
        )


class _progress:
    """A bar on the terminal, or nothing."""

    def __init__(self, total: int, shown: bool) -> None:
        self._bar: Any = None
        if shown:
            from rich.console import Console
            from rich.progress import Progress

            self._bar = Progress(console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task("generating", total=total)

    def __enter__(self) -> Any:
        if self._bar is None:
            return lambda count: None
        self._bar.start()
        return lambda count: self._bar.advance(self._task, count)

    def __exit__(self, *ignored: object) -> None:
        if self._bar is not None:
            self._bar.stop()
