"""The package index pip uses: one wheel from it to a file, resumed where an earlier try ended.

Knows: pip's settings, simple-index pages, ranges, retries, checksums of wheels. Must not know what is inside a wheel or
what it is for (that is `fetch`).
"""

from __future__ import annotations

import base64
import contextlib
import errno
import hashlib
import http.client
import importlib.util
import json
import os
import re
import ssl
import subprocess
import sys
import time
from ast import literal_eval
from collections.abc import Callable
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from urllib.error import HTTPError, URLError
from urllib.parse import unquote, urljoin, urlsplit, urlunsplit
from urllib.request import HTTPSHandler, OpenerDirector, ProxyHandler, Request, build_opener

if TYPE_CHECKING:
    from paceline.models.catalog import Part

BACKOFF_SECONDS: tuple[float, ...] = (0.5, 1.0, 2.0)
TIMEOUT_SECONDS = 30.0
CHUNK = 1 << 20
ACCEPT = "application/vnd.pypi.simple.v1+json, text/html;q=0.5"
LOCAL_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.EFBIG, errno.ENOTDIR}

T = TypeVar("T")
Report = Callable[[float], None]


class SourceError(Exception):
    """One source could not deliver; the text is a clause of the sentence the user may read."""


class Link(NamedTuple):
    """A file that an index page offers."""

    filename: str
    url: str
    sha256: str | None


@dataclass(frozen=True)
class PipSettings:
    """What pip is set up to use: the indexes to ask in order, its certificate bundle, its proxy."""

    indexes: tuple[str, ...]
    cert: str | None = None
    proxy: str | None = None


class Index:
    """The simple indexes pip would ask, and the one way to get a wheel from them."""

    def __init__(self, settings: PipSettings) -> None:
        if not settings.indexes:
            raise SourceError("pip names no index to ask")
        self._indexes = sorted(settings.indexes, key=lambda url: not url.startswith("file:"))  # local ones are free
        self._opener = make_opener(settings)
        self._logins: dict[str, str] = {}

    def download(self, part: Part, wheel: Path, report: Report) -> None:
        """Bring the part's wheel to `wheel`, continuing what is there; SourceError when no index has it."""
        refusals = []
        for index in list(self._indexes):
            shown = self._without_login(index)
            try:
                self._bring(self._find(shown, part), wheel, report)
            except (OSError, http.client.HTTPException, SourceError) as error:
                if is_local(error):
                    raise
                refusals.append(f"{shown}: {reason(error)}")
                continue
            self._indexes.remove(index)
            self._indexes.insert(0, index)  # the next part is likely there too
            return
        raise SourceError("; ".join(refusals))

    def _find(self, index: str, part: Part) -> Link:
        page = f"{index.rstrip('/')}/{_normal(part.package)}/"
        if page.startswith("file:"):
            page += "index.html"
        try:
            links = _retrying(lambda: self._links(page))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise SourceError(f"its page for {part.package} is not a simple-index page") from error
        for link in links:
            if _is_wheel_of(link.filename, part):
                return link
        raise SourceError(f"it has no wheel of {part.package} {part.version}")

    def _links(self, page: str) -> list[Link]:
        with self._open(page, {"Accept": ACCEPT}) as answer:
            return read_page(answer.read(), answer.headers.get("Content-Type", ""), answer.geturl() or page)

    def _bring(self, link: Link, wheel: Path, report: Report) -> None:
        resumed = _size(wheel) > 0
        _retrying(lambda: self._continue(link, wheel, report), lambda: _size(wheel))
        if link.sha256 and sha256_of(wheel) != link.sha256:
            wheel.unlink()
            if not resumed:
                raise SourceError(f"{link.filename} does not have the checksum the index gives")
            self._bring(link, wheel, report)  # the bytes an earlier fetch left may have been the bad ones

    def _continue(self, link: Link, wheel: Path, report: Report) -> None:
        """One attempt: ask for what is missing, and append it; a server that ignores Range starts it over."""
        held = _size(wheel)
        try:
            answer = self._open(link.url, {"Range": f"bytes={held}-"} if held else {})
        except HTTPError as error:
            if error.code != 416 or not held:
                raise
            if error.headers.get("Content-Range", "").endswith(f"/{held}"):
                return  # all of it is here already
            wheel.unlink()
            held, answer = 0, self._open(link.url, {})
        with answer:
            ranged = answer.status == 206 and answer.headers.get("Content-Range", "").startswith(f"bytes {held}-")
            if answer.status == 206 and not ranged:
                raise SourceError("it answered with another range than was asked for")
            held = held if ranged else 0
            length = answer.headers.get("Content-Length", "")
            total = held + int(length) if length.isdecimal() else None
            with wheel.open("ab" if ranged else "wb") as out:
                while block := answer.read(CHUNK):
                    out.write(block)
                    held += len(block)
                    report(held / total if total else 0.0)
        if total is not None and held < total:
            raise ConnectionError(f"the connection closed after {held} of {total} bytes")

    def _open(self, url: str, headers: dict[str, str]) -> Any:
        request = Request(url, headers={"User-Agent": "paceline", "Accept-Encoding": "identity", **headers})
        if login := self._logins.get(urlsplit(url).netloc):
            request.add_unredirected_header("Authorization", login)
        try:
            return self._opener.open(request, timeout=TIMEOUT_SECONDS)
        except HTTPError as error:
            error.close()
            raise

    def _without_login(self, url: str) -> str:
        """Take user:password out of the address (it must not be shown), and keep it for that host."""
        split = urlsplit(url)
        login, at, host = split.netloc.rpartition("@")
        if at:
            pair = unquote(login) if ":" in login else unquote(login) + ":"
            self._logins[host] = "Basic " + base64.b64encode(pair.encode()).decode()
        return urlunsplit(split._replace(netloc=host))


def read_page(body: bytes, content_type: str, base: str) -> list[Link]:
    """The files a simple-index page offers, in either of its two formats."""
    if "json" in content_type:
        files = json.loads(body)["files"]
        return [Link(f["filename"], urljoin(base, f["url"]), f.get("hashes", {}).get("sha256")) for f in files]
    parser = _Anchors(base)
    parser.feed(body.decode("utf-8", "replace"))
    parser.close()
    return parser.links


class _Anchors(HTMLParser):
    def __init__(self, base: str) -> None:
        super().__init__()
        self.links: list[Link] = []
        self._base = base

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        href = dict(attrs).get("href")
        if href and tag == "base":
            self._base = urljoin(self._base, href)
        elif href and tag == "a":
            url, _, fragment = urljoin(self._base, href).partition("#")
            digest = re.search(r"sha256=([0-9a-f]{64})", fragment)
            self.links.append(Link(unquote(url.rsplit("/", 1)[-1]), url, digest[1] if digest else None))


def _normal(package: str) -> str:
    return re.sub(r"[-_.]+", "-", package).lower()


def _is_wheel_of(filename: str, part: Part) -> bool:
    pieces = filename.removesuffix(".whl").split("-")
    named = filename.endswith(".whl") and len(pieces) >= 5
    return named and _normal(pieces[0]) == _normal(part.package) and pieces[1] == part.version


# --- what pip is set up to use


def pip_settings() -> PipSettings:
    """pip's own answer, environment included; the default index is the one pip itself carries."""
    values: dict[str, str] = {}
    listed = [line.partition("=") for line in _pip("-m", "pip", "config", "list").splitlines()]
    for section in ("global.", "install.", ":env:."):  # the later the stronger, as in pip
        for key, _, value in listed:
            if key.startswith(section):
                with contextlib.suppress(ValueError, SyntaxError):
                    values[key.removeprefix(section)] = str(literal_eval(value))
    cert, proxy = values.get("cert"), values.get("proxy")
    if values.get("no-index", "").lower() in {"1", "true", "yes", "on"}:
        return PipSettings((), cert, proxy)
    first = values.get("index-url") or _pip("-c", "from pip._internal.models.index import PyPI; print(PyPI.simple_url)")
    return PipSettings((*first.split(), *values.get("extra-index-url", "").split()), cert, proxy)


def _pip(*arguments: str) -> str:
    """The output of Python with pip at hand: the installed one, or the one that Python ships for new venvs."""
    environment = dict(os.environ)
    if importlib.util.find_spec("pip") is None:
        with contextlib.suppress(ImportError):
            import ensurepip

            shipped = Path(ensurepip.__file__).parent.glob("_bundled/pip-*.whl")
            environment["PYTHONPATH"] = os.pathsep.join(str(wheel) for wheel in shipped)
    try:
        command = [sys.executable, *arguments]
        ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    except (subprocess.SubprocessError, OSError) as error:
        raise SourceError("pip could not be asked for its index") from error
    return ran.stdout


def make_opener(settings: PipSettings) -> OpenerDirector:
    """urllib with pip's certificates and proxy, or else the environment's (SSL_CERT_FILE, HTTPS_PROXY, ...)."""
    context = ssl.create_default_context()
    if settings.cert:
        folder = os.path.isdir(settings.cert)
        context.load_verify_locations(None if folder else settings.cert, settings.cert if folder else None)
    else:
        with contextlib.suppress(ImportError):
            import certifi

            context.load_verify_locations(certifi.where())
    proxies = {"http": settings.proxy, "https": settings.proxy} if settings.proxy else None
    return build_opener(HTTPSHandler(context=context), ProxyHandler(proxies))


# --- trouble, and what to do about it


def _retrying(action: Callable[[], T], moved: Callable[[], int] = lambda: 0) -> T:
    """Run the action again, after a pause, while it fails for a passing reason; progress earns fresh tries."""
    failures, mark = 0, moved()
    while True:
        try:
            return action()
        except (OSError, http.client.HTTPException) as error:
            if moved() - mark >= CHUNK:
                failures, mark = 0, moved()
            if failures == len(BACKOFF_SECONDS) or not _is_passing(error):
                raise
        time.sleep(BACKOFF_SECONDS[failures])
        failures += 1


def _is_passing(error: Exception) -> bool:
    if isinstance(error, HTTPError):
        return error.code in {408, 425, 429} or error.code >= 500
    cause = error.reason if isinstance(error, URLError) else error
    return not is_local(error) and not isinstance(cause, (str, ssl.SSLCertVerificationError, FileNotFoundError))


def is_local(error: BaseException) -> bool:
    """Whether the trouble is this machine's disk, so that another source would meet it too."""
    return isinstance(error, OSError) and not isinstance(error, URLError) and error.errno in LOCAL_ERRORS


def reason(error: BaseException) -> str:
    """The error as a clause: one line, no full stop."""
    if isinstance(error, HTTPError):
        return f"HTTP {error.code} {error.reason}".strip()
    cause = error.reason if isinstance(error, URLError) else error
    text = (getattr(cause, "strerror", None) or str(cause) or type(cause).__name__).strip()
    return text.splitlines()[0].split(". ")[0].rstrip(".")


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
