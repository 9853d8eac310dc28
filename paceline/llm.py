"""The user's object: `LLM(model, drafter=…)`, then `.generate`, `.chat` or `.stream`. Threads share it: `Shared`."""

from __future__ import annotations

import gc
import itertools
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import fields
from typing import Any, NamedTuple, Self

import torch

from paceline import compat
from paceline.cache.kv import KVCache
from paceline.cache.pages import PagePool
from paceline.cache.slots import SPREAD, Slots
from paceline.cache.windowed import WindowPages
from paceline.drafters import formats
from paceline.drafters.base import Drafter, Needs, Target
from paceline.engine import sequence as sequences
from paceline.engine.capture import CudaCapture
from paceline.engine.device import DeviceRunner
from paceline.engine.engine import Engine
from paceline.engine.memory import Room, check_room, page_bytes, size_cache, working_bytes
from paceline.engine.options import EngineOptions
from paceline.engine.replaying import ReplayingRunner
from paceline.engine.runner import Runner
from paceline.engine.scheduler import Scheduler
from paceline.engine.update import Update
from paceline.engine.windowed import WindowedScheduler
from paceline.errors import OptionError, not_an_object
from paceline.kernels import FAST
from paceline.models import catalog, loader
from paceline.models.catalog import DEFAULT_MODEL
from paceline.outputs import Chunk, RequestOutput, Score, completion
from paceline.params import SamplingParams
from paceline.prompts import Prompt, read_prompts
from paceline.requests import Limits, check, find_seed, prepare
from paceline.sampling.rules import find_rule
from paceline.shared import Shared
from paceline.templates import Message, PromptTemplate, Tools

__all__ = ["LLM", "EngineOptions"]


log = logging.getLogger("paceline")


class _Unsaid(str):
    """A default that can be told from the same word said by a user."""


UNSAID = _Unsaid(DEFAULT_MODEL)
YOUNG = 64  # turns after which young garbage is collected
SCORING = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)


class Asked(NamedTuple):
    """A request, checked and ready; nothing is queued yet."""

    prompt: Prompt
    samples: list[sequences.Sequence]

    def output(self) -> RequestOutput:
        first = self.samples[0]
        told = first.prompt_logprobs if first.params.prompt_logprobs is not None else None
        outputs = [completion(sample) for sample in self.samples]
        return RequestOutput(first.request_id, self.prompt.text, self.prompt.ids, outputs, told)

    def chunk(self, update: Update) -> Chunk:
        output = completion(self.samples[update.index]) if update.finished else None
        return Chunk(update.index, update.text, update.tokens, update.provenance, output, update.request_id)


class LLM(Shared):
    """A model, and the drafter that rides ahead of it.

    model: an alias, a folder, a hub id, a .gguf file, or a transformers model object (then give its tokenizer too).
    drafter: None, a word ("ngram", "suffix"), a draft model's name or object, the path of any drafter, or a config:
    NGram(…), Eagle(…), FirstOf(…). num_draft_tokens: the draft length of a drafter without its own.
    It may be called from several threads at once; `close()`, or the end of a `with` block, frees its memory.
    Further options: see EngineOptions. The spellings of vLLM, LMFlow, Colossal-Inference and PaddleNLP are understood.
    """

    def __init__(self, model: Any = UNSAID, drafter: Any = None, tokenizer: Any = None, **options: Any) -> None:
        super().__init__()
        known = ["model", "drafter", "num_draft_tokens", *(item.name for item in fields(EngineOptions))]
        self._notices = compat.Notices()
        given = {"drafter": drafter, **({} if model is UNSAID else {"model": model}), **options}
        translated = compat.translate(given, known, self._notices)
        model = translated.pop("model", model)
        self._num_draft_tokens: int | None = translated.pop("num_draft_tokens", None)
        config = compat.make(translated.pop("drafter", None), self._num_draft_tokens)
        self.options = EngineOptions(**translated)
        device = loader.find_device(self.options.device)
        if self.options.enforce_eager and device.type != "cuda":
            self._notices.say([f"enforce_eager has no effect on {device.type}: rounds are captured on a GPU alone"])
        if self.options.accept_licence and isinstance(model, str) and model in catalog.ALIASES:
            catalog.accept(model)
        with formats.explaining(model):
            found = self._find(model, tokenizer)
            if not self.options.mla_use_matrix_absorption:
                found.config = found.config.naive()
            dtype = loader.find_dtype(self.options.dtype, found.config, device)
            max_model_len = self._find_length(found.config.max_position)
            kernels = self.options.kernels if self.options.exact_kernels else FAST
            loaded = loader.build(found, dtype, device, kernels, max_model_len, self.options.quantization)
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
            loaded.kernels,
            found.source.label,
            self.options.load_format,
        )
        needs = Needs() if drafter is None else drafter.plan(target)
        self.engine = self._build_engine(target, needs, 0 if drafter is None else drafter.max_nodes)
        end_ids = tuple(sorted(self.engine.end_ids))
        self.limits = Limits(self.config.vocab_size, max_model_len, self.options.max_prompt_len, end_ids)
        self._ids = itertools.count()
        self.engine.set_drafter(drafter)
        self._warm_up()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *ignored: object) -> None:
        self.close()

    def _find(self, model: Any, tokenizer: Any) -> loader.Found:
        options = self.options
        if options.skip_tokenizer_init and tokenizer is not None:
            raise OptionError("tokenizer and skip_tokenizer_init=True were both given; give one")
        found = loader.find(model, tokenizer, options.model_impl, options.trust_remote_code, options.load_format)
        if options.skip_tokenizer_init:
            found.tokenizer = None
        return found

    def _find_length(self, most: int) -> int:
        asked = self.options.max_model_len
        if asked is not None and asked > most:
            raise OptionError(f"max_model_len={asked} is more than the model's {most} positions")
        if asked is not None and asked < 2:
            raise OptionError(f"max_model_len={asked} leaves no room for a token of prompt and one of output")
        return asked or most

    def _usual_rows(self, device: torch.device) -> int:
        """Of a round, at most: nobody waits for a token of a text that comes as a whole."""
        return 256 if device.type == "cpu" else 8192

    def _build_engine(self, target: Target, needs: Needs, num_nodes: int) -> Engine:
        """Size the cache by what target and drafter keep of every page, and put an engine around it.

        num_nodes: the most that are drafted for a sequence.
        """
        options, device, size = self.options, target.device, self.options.block_size
        specs = target.model.layer_specs(target.dtype)
        forms = [f"{size} bytes a token as {name}" for name, size in target.model.cache_bytes(target.dtype).items()]
        log.info("the cache takes %s", ", where it would take ".join(forms))
        rows = options.max_batched_tokens or self._usual_rows(device)
        pages = -(-(self.max_model_len + SPREAD) // size)
        table = Slots(options.max_num_seqs, self.max_model_len, pages, device)
        room = Room(device, self.max_model_len, rows, needs.bytes + working_bytes(target, rows, num_nodes))
        sizes = size_cache(specs, needs.layers, needs.tail_width * target.dtype.itemsize, room, options)
        if sizes.width is not None:
            table.windowed = WindowPages(table, PagePool(sizes.num_windowed, size), sizes.width)
        cache = KVCache(PagePool(sizes.num_pages, size), device)
        cache.add_target(specs, None if table.windowed is None else table.windowed.pool)
        kind = Scheduler if table.windowed is None else WindowedScheduler
        scheduler = kind(cache.pool, table, rows, options.prefix_caching)
        runner = self._build_runner(target, cache, table)
        # On a device of its own the next round is launched while the host reads the last.
        engine = Engine(target, runner, scheduler, depth=int(table.apart))
        measured = table.apart and engine.rule.follows  # else the text of a seed would depend on seconds
        engine.budget_kind = options.budget if options.budget != "auto" else "measured" if measured else "fixed"
        return engine

    def _warm_up(self) -> None:
        """Capture rounds before the first request, where rounds are captured; shown where somebody looks."""
        steps = self.engine.warm_up()
        first = next(steps, None)
        if first is None:
            return
        with _bar(first[1], "capturing rounds") as advance:
            for _ in steps:
                advance(1)

    def _build_runner(self, target: Target, cache: KVCache, table: Slots) -> Runner:
        rule = find_rule(self.options.acceptance)
        if not table.apart:
            return Runner(target, cache, table, rule)
        captured = target.device.type == "cuda" and target.model.ops.captures and not self.options.enforce_eager
        if captured:
            return ReplayingRunner(target, cache, table, rule, CudaCapture())
        return DeviceRunner(target, cache, table, rule)

    def set_drafter(self, drafter: Any) -> None:
        """Turn speculation on, off (None) or over to another drafter; running requests go on."""
        self._check_open()
        config = compat.make(drafter, self._num_draft_tokens)
        made = None if config is None else config.create()
        if made is not None:
            engine = self.engine
            needs, pool = made.plan(engine.target), engine.cache.pool
            tails = needs.tail_width * engine.target.dtype.itemsize
            check_room(
                page_bytes(needs.layers, pool.block_size, tails) * pool.num_pages + needs.bytes, engine.target.device
            )
        self._do(lambda: self._set_drafter(made), wait_for_it=True)

    def _set_drafter(self, drafter: Drafter | None) -> None:
        self._check_open()
        self.engine.set_drafter(drafter)

    def get_tokenizer(self) -> Any:
        """The model's tokenizer; None if it has none."""
        return self.tokenizer

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
        if spellings:
            progress, _ = compat.read_call(spellings, progress)
        return self._run(self._ask(prompts, sampling_params, spellings), progress)

    def chat(
        self,
        messages: list[Message] | list[list[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        progress: bool = False,
        tools: Tools | None = None,
        **spellings: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation or many, put into the model's chat template.

        A message's content is a string, or a list of text parts as OpenAI writes them. tools: descriptions for the
        template, as it wants them. chat_template, add_generation_prompt, continue_final_message and
        chat_template_kwargs may be given as to transformers' apply_chat_template, also to stream.
        """
        progress, how = compat.read_call(spellings, progress, chat=True)
        return self._run(self._ask_chat(messages, sampling_params, {"tools": tools, **how}, spellings), progress)

    def read_chat(
        self, messages: list[Message], tools: Tools | None = None, chat_template: str | None = None, **how: Any
    ) -> Prompt:
        """A conversation as a prompt. how: of transformers' apply_chat_template."""
        template = self.template
        if chat_template is not None:
            template = PromptTemplate(chat_template, self.tokenizer, "chat_template")
        text = template.render(messages, tools, **how)
        ids = self.tokenizer.encode(text, add_special_tokens=not template.own)
        return Prompt(text, list(ids))

    def stream(
        self, prompt: Any, sampling_params: SamplingParams | None = None, tools: Tools | None = None, **spellings: Any
    ) -> Iterator[Chunk]:
        """Complete one prompt (or a conversation: a list of messages) and yield its text as it comes."""
        asked = self._ask_one(prompt, sampling_params, tools, spellings)
        updates: deque[Update] = deque()
        left = len(asked.samples)
        try:
            self._queue(asked.samples, updates.append)
            while left:
                while updates:
                    update = updates.popleft()
                    left -= update.finished
                    yield asked.chunk(update)
                if left:
                    self._take_turn()
        finally:
            self._drop(asked.samples)

    def score(self, texts: Any) -> list[Score]:
        """How likely the model finds given texts: the log-probability of every token but the first."""
        return [Score.of(output) for output in self._run(self._ask_score(texts))]

    def add(self, prompt: Any, params: SamplingParams) -> str:
        """Queue a request and answer its id; `step` brings its updates. What is refused is not queued."""
        if not isinstance(prompt, Prompt):
            prompt = self._read_one(prompt, "add")
        samples = self._prepare([prompt], [params])[0].samples
        self._queue(samples, self._mail.append)
        return samples[0].request_id

    # Requests, read and checked; also for callers who do not wait in a thread. Nothing is queued yet.

    def _ask(self, prompts: Any, given: Any, spellings: dict[str, Any]) -> list[Asked]:
        read = read_prompts(prompts, self.tokenizer, self.template if self.options.prompt_template else None)
        return self._prepare(read, self._params(given, spellings, read))

    def _ask_chat(self, messages: Any, given: Any, how: dict[str, Any], spellings: dict[str, Any]) -> list[Asked]:
        if not isinstance(messages, list | tuple):
            raise OptionError(f"messages must be a list of messages, or of such lists, not {messages!r:.60}")
        conversations: Any = messages if messages and isinstance(messages[0], list) else [messages]
        read = [self.read_chat(conversation, **how) for conversation in conversations]
        return self._prepare(read, self._params(given, spellings, read))

    def _ask_one(self, prompt: Any, given: Any, tools: Tools | None, spellings: dict[str, Any]) -> Asked:
        """A prompt or a conversation."""
        chat = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], dict) and "role" in prompt[0]
        _, how = compat.read_call(spellings, chat=chat)
        if chat:
            read = self.read_chat(prompt, tools, **how)
        elif tools is not None:
            raise OptionError("tools belong to a conversation, but a prompt was given; give a list of messages")
        else:
            read = self._read_one(prompt, "stream")
        return self._prepare([read], self._params(given, spellings, [read]))[0]

    def _ask_score(self, texts: Any) -> list[Asked]:
        read = read_prompts(texts, self.tokenizer, None)
        return self._prepare(read, [SCORING] * len(read))

    def _read_one(self, prompt: Any, where: str) -> Prompt:
        listed = read_prompts(prompt, self.tokenizer, self.template if self.options.prompt_template else None)
        if len(listed) != 1:
            raise OptionError(f"{where} takes one prompt, but {len(listed)} were given")
        return listed[0]

    def _prepare(self, prompts: list[Prompt], params: list[SamplingParams]) -> list[Asked]:
        """Where one of a call's requests is refused, none of them has a number in the run."""
        self._check_open()
        for pair in zip(prompts, params):
            check(*pair, self.tokenizer, self.limits)
        asked = []
        for prompt, own in zip(prompts, params):
            number = next(self._ids)
            seed = find_seed(own.seed, self.options.seed, number)
            asked.append(Asked(prompt, prepare(prompt, own, self.tokenizer, self.limits, str(number), seed)))
        return asked

    def _params(self, given: Any, spellings: dict[str, Any], prompts: list[Prompt]) -> list[SamplingParams]:
        """Sampling parameters for each prompt."""
        if given is None:
            return self._spelled_params(spellings, prompts)
        if spellings and any(compat.read_request(spellings, len(prompt.ids), self._notices) for prompt in prompts):
            raise OptionError(f"sampling_params and {', '.join(spellings)} were both given; put everything into one")
        return [given] * len(prompts) if isinstance(given, SamplingParams) else _listed(given, len(prompts))

    def _spelled_params(self, spellings: dict[str, Any], prompts: list[Prompt]) -> list[SamplingParams]:
        default = self.options.default_max_tokens
        own = {} if default is None else {"max_tokens": default}
        read = [compat.read_request(spellings, len(prompt.ids), self._notices) for prompt in prompts]
        return [SamplingParams(**{**own, **options}) for options in read]

    def _run(self, asked: list[Asked], progress: bool = False) -> list[RequestOutput]:
        left = [sample for one in asked for sample in one.samples]
        collects, turns = gc.isenabled(), itertools.count(1)
        try:
            gc.disable()  # to look for garbage among all that is loaded takes many rounds' time: only what is young is
            for one in asked:
                self._queue(one.samples)
            with _bar(len(left)) if progress else nullcontext(lambda count: None) as advance:
                while left:
                    self._take_turn()
                    if collects and next(turns) % YOUNG == 0:
                        gc.collect(1)
                    running = [sample for sample in left if not sample.end_told]
                    advance(len(left) - len(running))
                    left = running
            return [one.output() for one in asked]
        finally:
            if collects:
                gc.enable()
            for one in asked:
                self._drop(one.samples)

    def _free(self) -> None:
        """All that is large; the tokenizer and the template stay."""
        super()._free()
        del self.model
        gc.collect()  # an engine is full of circles
        torch.cuda.empty_cache()


def _listed(given: Any, count: int) -> list[SamplingParams]:
    """Sampling parameters that were given one each."""
    listed = list(given) if isinstance(given, Sequence) else [given]
    for params in listed:
        if not isinstance(params, SamplingParams):
            raise OptionError(f"sampling_params must be SamplingParams, {not_an_object(params)}")
    if len(listed) != count:
        raise OptionError(f"{len(listed)} sampling parameters were given for {count} prompts; give one, or one each")
    return listed


@contextmanager
def _bar(total: int, what: str = "generating") -> Iterator[Callable[[int], None]]:
    """A bar on the terminal; what is yielded takes it further."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda count: bar.advance(task, count)
