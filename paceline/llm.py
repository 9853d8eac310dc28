"""The user's object: `LLM(model, drafter=…)`, then `.generate`, `.chat` or `.stream`."""

from __future__ import annotations

import itertools
import secrets
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any

import torch

from paceline import compat
from paceline.cache.kv import KVCache
from paceline.cache.pages import PagePool
from paceline.cache.slots import Slots
from paceline.drafters.base import Target
from paceline.engine import sequence as sequences
from paceline.engine.detokenizer import Detokenizer
from paceline.engine.engine import Engine, Update
from paceline.engine.memory import count_pages
from paceline.engine.options import EngineOptions
from paceline.engine.scheduler import Scheduler
from paceline.errors import OptionError
from paceline.models import loader
from paceline.models.catalog import DEFAULT_MODEL
from paceline.outputs import Chunk, RequestOutput, completion
from paceline.params import SamplingParams, stop_at_special
from paceline.prompts import Prompt, check_params, find_words, read_prompts
from paceline.templates import Message, PromptTemplate

__all__ = ["LLM", "EngineOptions"]


class _Unsaid(str):
    """A default that can be told from the same word said by a user."""


UNSAID = _Unsaid(DEFAULT_MODEL)


class LLM:
    """A model, and the drafter that rides ahead of it.

    model: an alias, a folder, a hub id, a .gguf file, or a transformers model object (then give its tokenizer too).
    drafter: None, "ngram", "suffix", a draft model's name, path or object, or NGram(…), Suffix(…), DraftModel(…),
    FirstOf(…). num_draft_tokens: the draft length of a drafter without its own.
    Further options: see EngineOptions. The spellings of vLLM, LMFlow, Colossal-Inference and PaddleNLP are understood.
    """

    def __init__(self, model: Any = UNSAID, drafter: Any = None, tokenizer: Any = None, **options: Any) -> None:
        known = ["model", "drafter", "num_draft_tokens", *(item.name for item in fields(EngineOptions))]
        self._notices = compat.Notices()
        given = {"drafter": drafter, **({} if model is UNSAID else {"model": model}), **options}
        translated = compat.translate(given, known, self._notices)
        model = translated.pop("model", model)
        self._num_draft_tokens: int | None = translated.pop("num_draft_tokens", None)
        config = compat.make(translated.pop("drafter", None), self._num_draft_tokens)
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
        rows = options.max_batched_tokens or (256 if device.type == "cpu" else 2048)
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
        config = compat.make(drafter, self._num_draft_tokens)
        self.engine.set_drafter(None if config is None else config.create())

    def generate(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        progress: bool = False,
        **spellings: Any,
    ) -> list[RequestOutput]:
        """Complete one prompt or many. A prompt is a string, a list of token ids, or a dictionary with either.

        Instead of sampling_params their fields may be given, also as other systems call them (max_new_tokens,
        do_sample, generation_config, …); the same holds for chat and stream.
        """
        read = read_prompts(prompts, self.tokenizer, self.template if self.options.prompt_template else None)
        return self._run(read, self._params(sampling_params, spellings, read), progress)

    def chat(
        self,
        messages: list[Message] | list[list[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        progress: bool = False,
        **spellings: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation or many, put into the model's chat template."""
        conversations: Any = messages if messages and isinstance(messages[0], list) else [messages]
        read = [self.read_chat(conversation) for conversation in conversations]
        return self._run(read, self._params(sampling_params, spellings, read), progress)

    def read_chat(self, messages: list[Message]) -> Prompt:
        """A conversation as a prompt."""
        text = self.template.render(messages)
        ids = self.tokenizer.encode(text, add_special_tokens=not self.template.own)
        return Prompt(text, list(ids))

    def stream(self, prompt: Any, sampling_params: SamplingParams | None = None, **spellings: Any) -> Iterator[Chunk]:
        """Complete one prompt (or a conversation: a list of messages) and yield its text as it comes."""
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], dict) and "role" in prompt[0]:
            read = self.read_chat(prompt)
        else:
            listed = read_prompts(prompt, self.tokenizer, self.template if self.options.prompt_template else None)
            if len(listed) != 1:
                raise OptionError(f"stream takes one prompt, but {len(listed)} were given")
            read = listed[0]
        request_id = self.add(read, self._params(sampling_params, spellings, [read])[0])
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
        longest = self.options.max_prompt_len
        if longest is not None and len(prompt.ids) > longest:
            raise OptionError(f"the prompt has {len(prompt.ids)} tokens; max_prompt_len={longest} allows no more")
        params = stop_at_special(params, self.tokenizer)
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
        """One round of the engine; returns the updates of rounds that have completed, possibly none."""
        return self.engine.step()

    def abort(self, request_id: str) -> None:
        """End a request now; unknown or finished ones are left alone."""
        for sample in self._live.pop(request_id, []):
            self.engine.abort(sample)

    def _params(self, given: Any, spellings: dict[str, Any], prompts: list[Prompt]) -> list[SamplingParams]:
        """Sampling parameters for each prompt."""
        default, count = self.options.default_max_tokens, len(prompts)
        if given is not None and spellings:
            raise OptionError(f"sampling_params and {', '.join(spellings)} were both given; put everything into one")
        if given is None:
            own = {} if default is None else {"max_tokens": default}
            read = [compat.read_request(spellings, len(prompt.ids), self._notices) for prompt in prompts]
            given = [SamplingParams(**{**own, **options}) for options in read]
        if not isinstance(given, SamplingParams | Sequence):
            raise OptionError(f"sampling_params must be SamplingParams, not {type(given).__name__}")
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
