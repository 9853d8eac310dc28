"""A program on a pseudo-terminal: type to it, wait for what it says, look at its screen."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator

from tests.cli.screen import Screen

WIDTH, HEIGHT, PATIENCE = 80, 24, 60.0


class Terminal:
    def __init__(self, process: subprocess.Popen[bytes], master: int) -> None:
        self.process, self._master = process, master
        self.written = b""
        self._seen = 0

    def type(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def press(self, key: str, until: str) -> None:
        """A key that makes a signal, as often as it takes: readline forgets one that comes just as it goes to wait.

        Not sooner than a busy machine answers: a second Ctrl-C while the first is answered ends the program.
        """
        end = time.monotonic() + PATIENCE
        while self.written.find(until.encode(), self._seen) < 0:
            assert time.monotonic() < end, f"{until!r} was not written:\n{self.screen.text}"
            self.type(key)
            pause = time.monotonic() + 10.0
            while self.written.find(until.encode(), self._seen) < 0 and time.monotonic() < pause:
                assert self._read(0.1), f"the program ended before it wrote {until!r}:\n{self.screen.text}"
        self.wait_for(until)

    def wait_for(self, text: str) -> None:
        """Until the program writes `text`, after whatever was waited for before."""
        end = time.monotonic() + PATIENCE
        while (place := self.written.find(text.encode(), self._seen)) < 0:
            assert time.monotonic() < end, f"{text!r} was not written:\n{self.screen.text}"
            assert self._read(0.2), f"the program ended before it wrote {text!r}:\n{self.screen.text}"
        self._seen = place + len(text.encode())

    def wait(self) -> int:
        while self._read(0.2):
            pass
        return self.process.wait(PATIENCE)

    def _read(self, seconds: float) -> bool:
        """Take what there is; whether there may be more."""
        if not select.select([self._master], [], [], seconds)[0]:
            return True
        try:
            data = os.read(self._master, 65536)
        except OSError:  # on Linux the end of a terminal's other side
            return False
        self.written += data
        return bool(data)

    @property
    def screen(self) -> Screen:
        screen = Screen(WIDTH, HEIGHT)
        screen.feed(self.written.decode(errors="replace"))
        return screen


@contextlib.contextmanager
def on_terminal(*words: str) -> Iterator[Terminal]:
    """`paceline` with these words, alone in front of a terminal of 80 columns."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", HEIGHT, WIDTH, 0, 0))
    dropped = {"NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES"}
    env = {name: value for name, value in os.environ.items() if name not in dropped} | {"TERM": "xterm-256color"}
    # A shell's background jobs start with Ctrl-C ignored, and hand that on; a terminal's foreground does not.
    listen = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    code = listen + "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); from paceline.cli import main; main()"
    process = subprocess.Popen(
        [sys.executable, "-c", code, *words], stdin=slave, stdout=slave, stderr=slave, env=env, start_new_session=True
    )
    os.close(slave)
    try:
        yield Terminal(process, master)
    finally:
        process.kill()
        process.wait()
        os.close(master)
