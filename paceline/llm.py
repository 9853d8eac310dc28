"""The user's object: `LLM(model, drafter=…)`, then `.generate`, `.chat` or `.stream`."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any

from paceline import compat
from paceline.cache.kv import KVCache
from paceline.cache.pages import PagePool
from paceline.cache.slots import Slots
from paceline.drafters.base import Needs, Target
from paceline.engine import sequence as sequences
from paceline.engine.engine import Engine
from paceline.engine.memory import check_room, count_pages, page_bytes
from paceline.engine.options import EngineOptions
from paceline.engine.scheduler import Scheduler
from paceline.engine.update import Update
from paceline.errors import OptionError
from paceline.models import loader
from paceline.models.catalog import DEFAULT_MODEL
from paceline.outputs import Chunk, RequestOutput, completion
from paceline.params import SamplingParams
from paceline.prompts import Prompt, read_prompts
from paceline.requests import Limits, check, find_seed, prepare
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
        drafter = None if config is None else config.create()
        target = Target(
            loaded.model,
            self.tokenizer,
            device,
            loaded.dtype,
            max_model_len,
            self.options.max_num_seqs,
            self.options.kernels,
        )
        self.engine = self._build_engine(target, Needs() if drafter is None else drafter.plan(target))
        end_ids = tuple(sorted(self.engine.end_ids))
        self.limits = Limits(self.config.vocab_size, max_model_len, self.options.max_prompt_len, end_ids)
        self._ids = itertools.count()
        self._live: dict[str, list[sequences.Sequence]] = {}
        self._boxes: dict[str, deque[Update]] = {}  # where a request's updates go
        self._mail: deque[Update] = deque()  # of those that were added
        self._lock = threading.RLock()
        self.engine.set_drafter(drafter)

    def _find_length(self, most: int) -> int:
        asked = self.options.max_model_len
        if asked is not None and asked > most:
            raise OptionError(f"max_model_len={asked} is more than the model's {most} positions")
        if asked is not None and asked < 2:
            raise OptionError(f"max_model_len={asked} leaves no room for a token of prompt and one of output")
        return asked or most

    def _build_engine(self, target: Target, needs: Needs) -> Engine:
        """Size the cache by what target and drafter keep of every page, and put an engine around it."""
        options, device = self.options, target.device
        specs = target.model.layer_specs(target.dtype)
        kept = page_bytes([*specs, *needs.layers], options.block_size, needs.tail_width * target.dtype.itemsize)
        num_pages = count_pages(kept, needs.bytes, device, self.max_model_len, options)
        cache = KVCache(PagePool(num_pages, options.block_size), device)
        cache.layers = cache.add_layers(specs)
        pages = -(-self.max_model_len // options.block_size) + 1
        table = Slots(options.max_num_seqs, self.max_model_len, pages, device)
        rows = options.max_batched_tokens or (256 if device.type == "cpu" else 2048)
        scheduler = Scheduler(cache.pool, table, rows, options.prefix_caching)
        # On a device of its own the next round is launched while the host reads the last.
        return Engine(target, cache, table, scheduler, options.acceptance, depth=int(table.apart))

    def set_drafter(self, drafter: Any) -> None:
        """Turn speculation on, off (None) or over to another drafter; running requests go on."""
        config = compat.make(drafter, self._num_draft_tokens)
        made = None if config is None else config.create()
        if made is not None:
            engine = self.engine
            needs, pool = made.plan(engine.target), engine.cache.pool
            tails = needs.tail_width * engine.target.dtype.itemsize
            check_room(
                page_bytes(needs.layers, pool.block_size, tails) * pool.num_pages + needs.bytes, engine.target.device
            )
        self.engine.set_drafter(made)

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
            read = self._read_one(prompt, "stream")
        samples = self._prepare(read, self._params(sampling_params, spellings, [read])[0])
        updates: deque[Update] = deque()
        left = len(samples)
        try:
            self._queue(samples, updates)
            while left:
                while updates:
                    update = updates.popleft()
                    left -= update.finished
                    output = completion(samples[update.index]) if update.finished else None
                    yield Chunk(update.index, update.text, update.tokens, update.provenance, output)
                if left:
                    self._pump()
        finally:
            self._drop(samples)

    # The engine's own pace, for servers and tests: add, step, abort.

    def add(self, prompt: Any, params: SamplingParams) -> str:
        """Queue a request and answer its id; `step` brings its updates. What is refused is not queued."""
        if not isinstance(prompt, Prompt):
            prompt = self._read_one(prompt, "add")
        samples = self._prepare(prompt, params)
        self._queue(samples, self._mail)
        return samples[0].request_id

    def step(self) -> list[Update]:
        """One round of the engine; returns what completed rounds brought the added requests, possibly nothing.

        Whoever else asks for rounds meanwhile, nothing is lost: it is returned by the next step. If several threads
        take steps, each update goes to one of them.
        """
        self._pump()
        updates = []
        while self._mail:
            updates.append(self._mail.popleft())
        return updates

    def abort(self, request_id: str) -> None:
        """End a request now; unknown or finished ones are left alone."""
        with self._lock:
            for sample in self._live.pop(request_id, []):
                self.engine.abort(sample)

    def _queue(self, samples: list[sequences.Sequence], box: deque[Update] | None) -> None:
        """box: where its updates go."""
        with self._lock:
            request_id = samples[0].request_id
            self._live[request_id] = samples
            if box is not None:
                self._boxes[request_id] = box
            for sample in samples:
                self.engine.add(sample)

    def _pump(self) -> None:
        """One round; every update into the box it belongs to, in the order of rounds, whoever asked for it."""
        with self._lock:
            updates = self.engine.step()
            for update in updates:
                box = self._boxes.get(update.request_id)
                if box is not None:
                    box.append(update)
            for request_id in {update.request_id for update in updates if update.finished}:
                if all(sample.end_told for sample in self._live.get(request_id, ())):
                    self._live.pop(request_id, None)
                    self._boxes.pop(request_id, None)

    def _drop(self, samples: list[sequences.Sequence]) -> None:
        """Whoever asked for these has gone."""
        with self._lock:
            self._live.pop(samples[0].request_id, None)
            self._boxes.pop(samples[0].request_id, None)
            for sample in samples:
                self.engine.abort(sample, tell=False)

    def _read_one(self, prompt: Any, where: str) -> Prompt:
        listed = read_prompts(prompt, self.tokenizer, self.template if self.options.prompt_template else None)
        if len(listed) != 1:
            raise OptionError(f"{where} takes one prompt, but {len(listed)} were given")
        return listed[0]

    def _prepare(self, prompt: Prompt, params: SamplingParams) -> list[sequences.Sequence]:
        """A request's samples, checked and ready; nothing is queued yet. A refused request has no number in the run."""
        check(prompt, params, self.tokenizer, self.limits)
        number = next(self._ids)
        seed = find_seed(params.seed, self.options.seed, number)
        return prepare(prompt, params, self.tokenizer, self.limits, str(number), seed)

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
        left = [sample for samples in prepared for sample in samples]
        try:
            for samples in prepared:
                self._queue(samples, None)
            with _progress(len(left), progress) as advance:
                while left:
                    self._pump()
                    running = [sample for sample in left if not sample.end_told]
                    advance(len(left) - len(running))
                    left = running
            return [self._output(samples, prompt) for samples, prompt in zip(prepared, prompts)]
        finally:
            for samples in prepared:
                self._drop(samples)

    @staticmethod
    def _output(samples: list[sequences.Sequence], prompt: Prompt) -> RequestOutput:
        first = samples[0]
        asked = first.params.prompt_logprobs is not None
        outputs = [completion(sample) for sample in samples]
        return RequestOutput(
            first.request_id, prompt.text, prompt.ids, outputs, first.prompt_logprobs if asked else None
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
