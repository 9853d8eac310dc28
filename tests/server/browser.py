"""A real Chromium without a window, driven over the two pipes of its DevTools protocol: no package is needed for it.

Messages are JSON, each ended by a zero byte; Chromium reads them at file descriptor 3 and writes its own to 4.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
    *("--disable-extensions", "--disable-background-networking", "--disable-component-update", "--hide-scrollbars"),
    *("--remote-debugging-pipe", "--force-color-profile=srgb"),
)
PATIENCE = 120.0  # seconds after which something is wrong, not slow
LAUNCH = """
import os, sys
reads, writes = (os.dup(int(one)) for one in sys.argv[1:3])
reads, writes = os.dup2(reads, 20), os.dup2(writes, 21)
os.dup2(reads, 3); os.dup2(writes, 4)
os.execvp(sys.argv[3], sys.argv[3:])
"""


def find() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Failed(AssertionError):
    """The page, or the browser, said so."""


class Browser:
    """One page. `evaluate` runs JavaScript in it, `wait` until an expression is true."""

    def __init__(self, process: subprocess.Popen[bytes], reads: int, writes: int) -> None:
        self._process, self._reads, self._writes = process, reads, writes
        self._held, self._number = b"", 0
        self._session: str | None = None
        self.said: list[str] = []  # exceptions, and what the console calls an error
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.asked: list[str] = []  # addresses the page asked for

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._writes, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + PATIENCE
        while True:
            answer = self._read(deadline)
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise Failed(f"{method}: {answer['error']['message']}")
                result: dict[str, Any] = answer["result"]
                return result

    def _read(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._held:
            if not select.select([self._reads], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise Failed("Chromium does not answer")
            more = os.read(self._reads, 1 << 16)
            if not more:
                raise Failed("Chromium has ended")
            self._held += more
        first, self._held = self._held.split(b"\0", 1)
        message: dict[str, Any] = json.loads(first)
        self._note(message.get("method"), message.get("params", {}))
        return message

    def _note(self, method: str | None, params: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            self.said.append(json.dumps(params["exceptionDetails"])[:500])
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.said.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
        elif method == "Network.requestWillBeSent":
            self.asked.append(params["request"]["url"])

    def evaluate(self, expression: str) -> Any:
        """Its value; a promise's, where it is one."""
        told = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in told:
            raise Failed(json.dumps(told["exceptionDetails"])[:500])
        return told["result"].get("value")

    def wait(self, expression: str) -> Any:
        deadline = time.monotonic() + PATIENCE
        while not (value := self.evaluate(expression)):
            if time.monotonic() > deadline:
                raise Failed(f"never true: {expression}; the page shows {self.evaluate('document.body.innerText')!r}")
            time.sleep(0.02)
        return value

    def open(self, address: str) -> None:
        self.call("Page.navigate", url=address)
        self.wait("document.readyState === 'complete'")

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def press(self, key: str, **more: Any) -> None:
        codes = {"Enter": 13, "Escape": 27, "Tab": 9, "Home": 36, "ArrowLeft": 37, "ArrowRight": 39, "End": 35, " ": 32}
        held = {"key": key, "code": key, "windowsVirtualKeyCode": codes[key], **more}
        text = {"Enter": "\r", " ": " "}.get(key)
        self.call("Input.dispatchKeyEvent", type="keyDown", **held, **({"text": text} if text else {}))
        self.call("Input.dispatchKeyEvent", type="keyUp", **held)

    def point(self, selector: str, click: bool = False) -> None:
        """The mouse over an element's middle, or a click there."""
        at = self.evaluate(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            " e.scrollIntoView({block: 'nearest'}); const r = e.getClientRects()[0];"
            " return [r.x + r.width / 2, r.y + r.height / 2]; })()"
        )
        where = {"x": at[0], "y": at[1]}
        self.call("Input.dispatchMouseEvent", type="mouseMoved", **where)
        for kind in ("mousePressed", "mouseReleased") if click else ():
            self.call("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **where)

    def look(self, width: int, height: int, dark: bool = False) -> None:
        """The window's size and the user's taste."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def picture(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))


@contextlib.contextmanager
def browse(folder: Path) -> Iterator[Browser]:
    """folder: for its profile."""
    path = find()
    assert path is not None
    ours_in, theirs_out = os.pipe()
    theirs_in, ours_out = os.pipe()
    command = [sys.executable, "-c", LAUNCH, str(theirs_in), str(theirs_out), path, *FLAGS, f"--user-data-dir={folder}"]
    process = subprocess.Popen(
        command, pass_fds=(theirs_in, theirs_out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    os.close(theirs_in)
    os.close(theirs_out)
    try:
        yield Browser(process, ours_in, ours_out)
    finally:
        process.terminate()
        process.wait(PATIENCE)
        os.close(ours_in)
        os.close(ours_out)
