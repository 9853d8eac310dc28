"""The routes. A handler reads a request, queues it, and tells what the engine's process sends back."""

from __future__ import annotations

import asyncio
import hmac
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastapi import Depends, FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, StreamingResponse

from paceline import __version__
from paceline.errors import EngineError, OptionError, PacelineError
from paceline.params import SamplingParams
from paceline.prompts import Prompt
from paceline.server.answers import Choice, Form, encode, error_body, usage
from paceline.server.engine import EngineProcess, Stream
from paceline.server.guards import Guards
from paceline.server.metrics import Metrics
from paceline.server.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Sampling,
    TokenizeRequest,
)
from paceline.server.reader import Reader

PAGE = Path(__file__).parent / "page"
PARTS = frozenset(path.name for path in PAGE.iterdir())
FRESH = {"Cache-Control": "no-cache"}  # parts of one page are of one version
ANY_MODEL = "default"  # a name that is always accepted
KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    413: "invalid_request_error",
}
KINDS |= {408: "timeout_error", 429: "rate_limit_error", 503: "engine_error", 500: "engine_error"}


@dataclass(frozen=True)
class Settings:
    """What the server itself is told; the rest is the engine's."""

    model: str
    served_names: tuple[str, ...]
    api_key: str | None = None
    max_waiting: int = 256  # requests that may be under way beside those the engine computes at once
    max_body: int = 8 * 2**20  # bytes
    body_seconds: float = 30.0  # in which a request's body has to arrive
    chat_template: str | None = None
    tokenizer: str | None = None


class Answer(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return encode(content)


class Mistake(Exception):
    """A request that is answered with an error."""

    def __init__(self, status: int, sentence: str, code: str | None = None, param: str | None = None) -> None:
        super().__init__(sentence)
        self.status, self.sentence, self.code, self.param = status, sentence, code, param

    def answer(self) -> Answer:
        headers = {"Retry-After": "1"} if self.status in (429, 503) else {}
        headers |= {"WWW-Authenticate": "Bearer"} if self.status == 401 else {}
        kind = KINDS.get(self.status, "invalid_request_error")
        return Answer(error_body(self.sentence, kind, self.param, self.code), self.status, headers)


@dataclass
class Asked:
    """A request under way: a stream and the choices of each prompt."""

    form: Form
    prompts: list[Prompt]
    streams: list[Stream]
    choices: list[list[Choice]] = field(default_factory=list)

    def usage(self) -> dict[str, Any]:
        tokens = sum(len(prompt.ids) for prompt in self.prompts)
        return usage(tokens, [choice.stats for listed in self.choices for choice in listed])

    def close(self) -> None:
        for stream in self.streams:
            stream.close()


class Server:
    """What the routes share."""

    def __init__(self, settings: Settings, engine: EngineProcess) -> None:
        self.settings, self.engine = settings, engine
        self.metrics = Metrics(engine)
        self._reader: Reader | None = None
        self.draining = False

    @property
    def reader(self) -> Reader:
        if self._reader is None:
            raise Mistake(503, "the server is starting")
        return self._reader

    async def start(self) -> None:
        ready = await self.engine.start()
        chosen = self.settings
        self._reader = await asyncio.to_thread(
            Reader.of, chosen.model, chosen.tokenizer, chosen.chat_template, ready.limits
        )

    def check_model(self, name: str | None) -> str:
        """The name an answer carries."""
        names = self.settings.served_names
        if name in (None, ANY_MODEL, *names):
            return names[0] if name in (None, ANY_MODEL) else str(name)
        known = ", ".join(names)
        raise Mistake(
            404, f"the model {name!r:.200} does not exist; this server has {known}", "model_not_found", "model"
        )

    async def ask(self, body: Sampling, chat: bool) -> Asked:
        """Read, check and queue."""
        model = self.check_model(body.model)
        read: Callable[[Any], tuple[list[Prompt], SamplingParams]] = (
            self.reader.chat if chat else self.reader.completion
        )
        try:
            prompts, params = await asyncio.to_thread(read, body)
        except OptionError as error:
            raise Mistake(400, str(error)) from None
        self._make_room(len(prompts) * params.n)
        form = Form(
            chat,
            model,
            f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}",
            echo=bool(getattr(body, "echo", False)),
            provenance=bool(body.return_provenance),
        )
        asked = Asked(form, prompts, [])
        try:
            for number, prompt in enumerate(prompts):
                asked.streams.append(self.engine.submit(prompt.ids, params))
                self.metrics.begun(asked.streams[-1].tag, len(prompt.ids))
                echo = self._echoed(prompt) if form.echo else ""
                asked.choices.append(
                    [
                        Choice(form, number * params.n + sample, prompt.ids, echo, self.reader.tokenizer)
                        for sample in range(params.n)
                    ]
                )
        except EngineError as error:
            asked.close()
            raise Mistake(503, str(error), "engine_unavailable") from None
        return asked

    def _echoed(self, prompt: Prompt) -> str:
        return prompt.text if prompt.text is not None else str(self.reader.tokenizer.decode(prompt.ids))

    def _make_room(self, samples: int) -> None:
        if self.draining:
            raise Mistake(503, "the server is stopping")
        if self.engine.ready is None:
            raise Mistake(503, self.engine.why_not(), "engine_unavailable")
        most = self.engine.ready.max_num_seqs + self.settings.max_waiting
        if samples > most:
            raise Mistake(400, f"a request for {samples} answers was given; this server takes {most} at once")
        if self.engine.num_samples + samples > most:
            raise Mistake(429, f"{self.engine.num_samples} answers are under way, of at most {most}; ask again later")


async def tell_whole(asked: Asked) -> dict[str, Any]:
    async def take(stream: Stream, choices: list[Choice]) -> None:
        async for update in stream:
            choices[update.index].take(update)

    await asyncio.gather(*map(take, asked.streams, asked.choices))
    listed = [choice for choices in asked.choices for choice in choices]
    wrong = next((choice.error for choice in listed if choice.finish == "error"), None)
    if wrong is not None:
        raise Mistake(400, wrong)
    return {**asked.form.head(False), "choices": [choice.whole() for choice in listed], "usage": asked.usage()}


async def tell_stream(asked: Asked, with_usage: bool) -> AsyncIterator[bytes]:
    """Server-sent events. Whoever stops reading closes it, and what is under way is aborted."""
    head = asked.form.head(True)
    more = {"usage": None} if with_usage else {}
    try:
        async for number, update in merged(asked.streams):
            choice = asked.choices[number][update.index]
            told = choice.take(update)
            if choice.finish == "error":
                raise Mistake(400, choice.error or "the request ended with an error")
            yield event({**head, "choices": [told], **more})
        if with_usage:
            yield event({**head, "choices": [], "usage": asked.usage()})
    except (Mistake, PacelineError) as error:
        status = error.status if isinstance(error, Mistake) else 500
        yield event(error_body(str(error), KINDS[status]))
    finally:
        asked.close()
    yield b"data: [DONE]\n\n"


def event(content: Any) -> bytes:
    return b"data: " + encode(content) + b"\n\n"


async def merged(streams: list[Stream]) -> AsyncIterator[tuple[int, Any]]:
    """The updates of several streams as they come, each with its stream's number."""
    waiting = {asyncio.ensure_future(anext(stream, None)): number for number, stream in enumerate(streams)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                number = waiting.pop(task)
                update = task.result()
                if update is not None:
                    waiting[asyncio.ensure_future(anext(streams[number], None))] = number
                    yield number, update
    finally:
        for task in waiting:
            task.cancel()


async def unless_left(request: Request, work: Awaitable[Any]) -> Any:
    """The work's result; where the client goes away first, the work is cancelled."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, left = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait((task, left), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Mistake(499, "the client has gone")
        return task.result()
    finally:
        task.cancel()
        left.cancel()


def create(settings: Settings, engine: EngineProcess) -> FastAPI:
    """The application; its engine is started with it, and stopped."""
    server = Server(settings, engine)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await server.start()
        try:
            yield
        finally:
            server.draining = True
            await engine.stop()

    app = FastAPI(title="paceline", version=__version__, lifespan=lifespan, default_response_class=Answer)
    app.state.server = server
    app.add_middleware(Guards, max_body=settings.max_body, body_seconds=settings.body_seconds)
    _add_errors(app)
    _add_routes(app, server)
    return app


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(Mistake)
    async def on_mistake(request: Request, error: Mistake) -> Answer:
        return error.answer()

    @app.exception_handler(RequestValidationError)
    async def on_invalid(request: Request, error: RequestValidationError) -> Answer:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"] if part != "body")
        unknown = first["type"] == "extra_forbidden"
        told = f"{where} is not a field of this request" if unknown else f"{where or 'the body'}: {first['msg']}"
        return Mistake(400, told, param=where or None).answer()

    @app.exception_handler(HTTPException)
    @app.exception_handler(404)
    @app.exception_handler(405)
    async def on_http(request: Request, error: HTTPException) -> Answer:
        told = {404: f"there is no {request.url.path}", 405: f"{request.method} is not for {request.url.path}"}
        answer = Mistake(error.status_code, told.get(error.status_code, str(error.detail))).answer()
        answer.headers.update(error.headers or {})
        return answer

    @app.exception_handler(EngineError)
    async def on_engine(request: Request, error: EngineError) -> Answer:
        return Mistake(500, str(error), "engine_error").answer()


def _add_routes(app: FastAPI, server: Server) -> None:
    def check_key(request: Request) -> None:
        key = server.settings.api_key
        if key is None:
            return
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(given.encode(), key.encode()):
            raise Mistake(
                401, "the API key is missing or wrong; send it as 'Authorization: Bearer KEY'", "invalid_api_key"
            )

    keyed = [Depends(check_key)]

    async def answer(request: Request, body: Sampling, chat: bool) -> Response:
        asked = await server.ask(body, chat)
        if body.stream:
            with_usage = body.stream_options is not None and body.stream_options.include_usage
            return StreamingResponse(tell_stream(asked, with_usage), media_type="text/event-stream")
        try:
            return Answer(await unless_left(request, tell_whole(asked)))
        finally:
            asked.close()

    @app.post("/v1/completions", dependencies=keyed, response_class=Answer)
    async def completions(request: Request, body: CompletionRequest) -> Response:
        """Complete prompts."""
        return await answer(request, body, chat=False)

    @app.post("/v1/chat/completions", dependencies=keyed, response_class=Answer)
    async def chat_completions(request: Request, body: ChatRequest) -> Response:
        """Answer a conversation."""
        return await answer(request, body, chat=True)

    # Clients whose base address is a route's own.
    app.post("/v1/chat/completions/completions", dependencies=keyed, include_in_schema=False)(completions)
    app.post("/v1/chat/completions/chat/completions", dependencies=keyed, include_in_schema=False)(chat_completions)

    @app.get("/v1/models", dependencies=keyed)
    async def models() -> Answer:
        """The names this server answers to."""
        limits = server.reader.limits
        return Answer(
            {"object": "list", "data": [_model(name, limits.max_model_len) for name in server.settings.served_names]}
        )

    @app.get("/v1/models/{name:path}", dependencies=keyed)
    async def model(name: str) -> Answer:
        return Answer(_model(server.check_model(name), server.reader.limits.max_model_len))

    @app.post("/tokenize", dependencies=keyed)
    async def tokenize(body: TokenizeRequest) -> Answer:
        """A prompt or a conversation as token ids."""
        server.check_model(body.model)
        ids = await _judged(server.reader.tokenize, body)
        return Answer({"tokens": ids, "count": len(ids), "max_model_len": server.reader.limits.max_model_len})

    @app.post("/detokenize", dependencies=keyed)
    async def detokenize(body: DetokenizeRequest) -> Answer:
        """Token ids as text."""
        server.check_model(body.model)
        return Answer({"prompt": await _judged(server.reader.detokenize, body)})

    @app.get("/health")
    async def health() -> Answer:
        """200 while requests can be answered, else 503 with the reason."""
        if server.draining or server.engine.ready is None:
            raise Mistake(503, "the server is stopping" if server.draining else server.engine.why_not())
        return Answer({"status": "ok", "restarts": server.engine.num_restarts})

    @app.get("/version")
    async def version() -> Answer:
        return Answer({"version": __version__})

    @app.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        """Figures for Prometheus."""
        return Response(server.metrics.render(), media_type=server.metrics.media_type)

    @app.get("/stats")
    async def stats() -> Answer:
        """The page's own figures."""
        told = {"model": server.settings.served_names[0], "chat": server.reader.has_template}
        return Answer(told | server.metrics.summary())

    @app.get("/", include_in_schema=False)
    @app.get("/page/{name}", include_in_schema=False)
    async def page(name: str = "index.html") -> FileResponse:
        if name not in PARTS:
            raise Mistake(404, f"there is no /page/{name:.200}")
        return FileResponse(PAGE / name, headers=FRESH)


def _model(name: str, length: int) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "paceline", "max_model_len": length}


async def _judged(function: Callable[[Any], Any], body: Any) -> Any:
    try:
        return await asyncio.to_thread(function, body)
    except OptionError as error:
        raise Mistake(400, str(error)) from None
