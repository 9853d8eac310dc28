"""The script that measures servers in turn: what it starts, it waits for and ends."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.bench.scripts import load

SERVER = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[2])), Handler).serve_forever()
"""


@pytest.fixture
def script() -> Any:
    return load("bench/serving.py")


def test_a_server_is_there_until_it_is_no_longer_needed(script: Any, tmp_path: Path) -> None:
    port = script.find_port()
    with script.running([sys.executable, "-c", SERVER], port, tmp_path, 1):
        assert script.is_up(port)
    assert not script.is_up(port)


def test_a_server_that_ends_is_reported_with_what_it_said(script: Any, tmp_path: Path) -> None:
    ending = script.running([sys.executable, "-c", "print('no such model')"], script.find_port(), tmp_path, 1)
    with pytest.raises(SystemExit, match="does not answer: no such model"), ending:
        pass
