"""One chat: a model, what was said, and what may be changed on the way. Answers go to standard output as they come.

Must not know how lines are read, nor what commands are called.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any

from paceline.cli import loading, show
from paceline.cli.conversation import Conversation
from paceline.cli.figures import Figures, latest, measure_plain
from paceline.errors import OptionError
from paceline.outputs import CompletionOutput
from paceline.pieces import MEANINGS, Pieces
from paceline.prompts import Prompt

PATIENCE = 3  # presses of Ctrl-C after which the round is not waited for


class Talk:
    def __init__(self, chosen: dict[str, Any]) -> None:
        self._chosen, self.model = chosen, chosen["model"]
        self.params = loading.read_params(chosen)
        specs = chosen["drafter"] or ["suffix"]
        config = loading.read_drafter(specs, chosen)
        self.llm = loading.load({**chosen, "prompt_template": None}, None, max_num_seqs=1, prefix_caching=True)
        if self.llm.tokenizer is None:
            raise OptionError(f"{self.model} has no tokenizer, so it cannot chat; give a model that has one")
        self.conversation = Conversation(self.llm, chosen["prompt_template"], chosen["system"])
        self.painter = show.Painter(sys.stdout, chosen["color"])
        with loading.waiting("timing plain decoding", self.model):
            self.plain = measure_plain(self.llm)
        self.total, self._held = Figures(), 0  # _held: tokens of the latest prompt and its answer
        self.ended = False
        self._use(specs, config)

    def set_drafter(self, specs: list[str]) -> None:
        """From the next answer on; what cannot be had leaves the old one."""
        self._use(specs, loading.read_drafter(specs, self._chosen, quiet=True))

    def _use(self, specs: list[str], config: Any) -> None:
        loading.fetch_known(loading.draft_models(config), self._chosen["accept_licence"])
        with loading.waiting(f"loading {' '.join(specs)}", self.model):
            self.llm.set_drafter(config)
        self.drafter_name = " then ".join(specs)
        drafter: Any = self.llm.engine.drafter
        self._drafts = [] if drafter is None else [part.name for part in getattr(drafter, "drafters", [drafter])]
        self.painter.drafters += [name for name in self._drafts if name not in self.painter.drafters]

    def legend(self, kinds: Iterable[str] = tuple(MEANINGS)) -> list[str]:
        """What the styles mean, where there are any; of drafters only those that draft."""
        return self.painter.legend(kinds, self._drafts) if self.painter.coloured and self._drafts else []

    def report(self) -> list[str]:
        """What all answers took, and where the conversation stands."""
        length = self._held if self.conversation.messages else 0
        context = f"{'context':<12} {length} of {self.llm.max_model_len} tokens"
        return [*self.total.report(self.plain), context, f"{'drafter':<12} {self.drafter_name}"]

    def answer(self, text: str) -> None:
        """One turn. A question that got no answer leaves the conversation as it was, what did not fit included."""
        before = list(self.conversation.messages)
        self.conversation.add("user", text)
        said = ""
        try:
            prompt, dropped = self.conversation.fit(self.params.max_tokens or 0)
            if dropped:
                show.note(f"(the conversation is too long for the model: its {dropped} oldest messages were dropped)")
            said, output = self._stream(prompt)
            if output is not None and output.error is not None:
                raise OptionError(output.error)
        finally:
            if said:
                self.conversation.add("assistant", said)
            else:
                self.conversation.messages = before
        if not said:
            show.note("(no word was said, so the question is forgotten)")

    def _stream(self, prompt: Prompt) -> tuple[str, CompletionOutput | None]:
        """The answer as it comes, then what it took; what was said of it, and the whole output unless stopped."""
        params = dataclasses.replace(self.params, stop=[*self.params.stop_strings, *self.conversation.stops])
        pieces, taken, said, output = (
            Pieces(self.llm.tokenizer, prompt.ids, params.skip_special_tokens),
            Figures(),
            "",
            None,
        )
        drafting, before, start = self.llm.engine.drafter is not None, self.llm.engine.stats.rounds, time.perf_counter()
        answer: Any = self.llm.stream({"prompt": prompt.text, "prompt_token_ids": prompt.ids}, params)
        with contextlib.suppress(KeyboardInterrupt), contextlib.closing(answer), interruptible() as pressed, silent():
            self.painter.write([], f"reading {len(prompt.ids)} tokens")
            for chunk in answer:
                taken.add(chunk, time.perf_counter() - start)
                pieces.take(chunk.token_ids, chunk.provenance)
                said, output = said + chunk.text, chunk.output
                if output is not None:
                    pieces.finish()
                self.painter.write(pieces.show(chunk.text), taken.line(self.plain, drafting))
                if pressed:
                    break
        self.painter.end()
        records = latest(self.llm, self.llm.engine.stats.rounds - before)
        self.plain.learn(records)
        taken.close(records, len(prompt.ids), self.plain)
        self._held = len(prompt.ids) + taken.tokens
        self.total.include(taken)
        show.note(taken.line(self.plain, drafting) + remark(output))
        return said, output


def remark(output: CompletionOutput | None) -> str:
    """How an answer ended, where that was not by itself."""
    if output is None:
        return " · stopped"
    return " · cut short" if output.finish_reason == "length" else ""


@contextlib.contextmanager
def interruptible() -> Iterator[list[int]]:
    """Ctrl-C as a wish rather than an exception, so that no round is cut in half; the list says it was pressed."""
    pressed: list[int] = []

    def press(*ignored: object) -> None:
        pressed.append(1)
        if len(pressed) >= PATIENCE:
            raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield pressed
        return
    before = signal.signal(signal.SIGINT, press)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """What is typed meanwhile is kept for the next question and not written into the answer."""
    if os.name != "posix" or not sys.stdin.isatty():
        yield
        return
    import termios

    before = termios.tcgetattr(sys.stdin)
    quiet = [*before]
    quiet[3] = before[3] & ~termios.ECHO
    termios.tcsetattr(sys.stdin, termios.TCSANOW, quiet)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSANOW, before)
