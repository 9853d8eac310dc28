"""The routes. A handler reads a request, queues it, and tells what the engine's process sends back."""

from __future__ import annotations

import asyncio
import hmac
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastapi import Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, StreamingResponse
from starlette.exceptions import HTTPException

from paceline import __version__
from paceline.errors import EngineError, OptionError, PacelineError
from paceline.params import SamplingParams
from paceline.prompts import Prompt
from paceline.server.answers import Choice, Form
from paceline.server.engine import EngineProcess
from paceline.server.guards import Guards
from paceline.server.metrics import Metrics
from paceline.server.mistakes import KINDS, Answer, Mistake, mistake_of
from paceline.server.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    ErrorAnswer,
    Sampling,
    TokenizeRequest,
)
from paceline.server.reader import Reader
from paceline.server.telling import Asked, tell_stream, tell_whole, unless_left

PAGE = Path(__file__).parent / "page"
PARTS = frozenset(path.name for path in PAGE.iterdir())
FRESH = {"Cache-Control": "no-cache"}  # parts of one page are of one version
ANY_MODEL = "default"  # a name that is always accepted
BUSY = (400, 401, 404, 408, 413, 429, 500, 503)  # what a request with a body may be answered with, beside 200


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
    trust_remote_code: bool = False
    load_format: str = "auto"


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
        """Load the model; once."""
        if self._reader is not None:
            return
        ready = await self.engine.start()
        chosen = self.settings
        self._reader = await asyncio.to_thread(
            Reader.of, chosen.model, chosen.chat_template, ready.limits, chosen.trust_remote_code, chosen.load_format
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
            silent=bool(getattr(body, "silent", False)),
            prompt_logprobs=body.prompt_logprobs is not None,
            provenance=bool(body.return_provenance),
            top=params.logprobs or 0,
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
        return _invalid(error.errors()[0], request.headers.get("content-type", "")).answer()

    @app.exception_handler(HTTPException)
    async def on_http(request: Request, error: HTTPException) -> Answer:
        told = {404: f"there is no {request.url.path}", 405: f"{request.method} is not for {request.url.path}"}
        answer = Mistake(error.status_code, told.get(error.status_code, str(error.detail))).answer()
        answer.headers.update(error.headers or {})
        return answer

    @app.exception_handler(PacelineError)
    async def on_refusal(request: Request, error: PacelineError) -> Answer:
        return mistake_of(error).answer()

    @app.exception_handler(Exception)
    async def on_other(request: Request, error: Exception) -> Answer:
        return Mistake(500, f"the server made a mistake of its own: {type(error).__name__}").answer()


def _add_routes(app: FastAPI, server: Server) -> None:
    def check_key(request: Request) -> None:
        key = server.settings.api_key
        if key is None:
            return
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(given.encode("latin-1"), key.encode()):
            raise Mistake(
                401, "the API key is missing or wrong; send it as 'Authorization: Bearer KEY'", "invalid_api_key"
            )

    keyed = [Depends(check_key)]
    _add_generation(app, server, keyed)
    _add_lookups(app, server, keyed)
    _add_watching(app, server)


def _add_generation(app: FastAPI, server: Server, keyed: list[Any]) -> None:
    """Routes that ask the engine."""
    busy = _told_errors(*BUSY)
    streamed: dict[int | str, dict[str, Any]] = {
        200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}
    }

    async def answer(request: Request, body: Sampling, chat: bool) -> Response:
        asked = await server.ask(body, chat)
        if body.stream:
            with_usage = body.stream_options is not None and body.stream_options.include_usage
            return StreamingResponse(tell_stream(asked, with_usage), media_type="text/event-stream")
        try:
            return Answer(await unless_left(request, tell_whole(asked)))
        finally:
            asked.close()

    @app.post("/v1/completions", dependencies=keyed, responses={**streamed, **busy})
    async def completions(request: Request, body: CompletionRequest) -> Response:
        """Complete prompts."""
        return await answer(request, body, chat=False)

    @app.post("/v1/chat/completions", dependencies=keyed, responses={**streamed, **busy})
    async def chat_completions(request: Request, body: ChatRequest) -> Response:
        """Answer a conversation."""
        return await answer(request, body, chat=True)

    # Clients whose base address is a route's own.
    app.post("/v1/chat/completions/completions", dependencies=keyed, include_in_schema=False)(completions)
    app.post("/v1/chat/completions/chat/completions", dependencies=keyed, include_in_schema=False)(chat_completions)


def _add_lookups(app: FastAPI, server: Server, keyed: list[Any]) -> None:
    """Routes that the server answers by itself."""
    errors, busy = _told_errors(400, 401, 404), _told_errors(*BUSY)

    @app.get("/v1/models", dependencies=keyed, responses=errors)
    async def models() -> Answer:
        """The names this server answers to."""
        limits = server.reader.limits
        return Answer(
            {"object": "list", "data": [_model(name, limits.max_model_len) for name in server.settings.served_names]}
        )

    @app.get("/v1/models/{name:path}", dependencies=keyed, responses=errors)
    async def model(name: str) -> Answer:
        return Answer(_model(server.check_model(name), server.reader.limits.max_model_len))

    @app.post("/tokenize", dependencies=keyed, responses=busy)
    async def tokenize(body: TokenizeRequest) -> Answer:
        """A prompt or a conversation as token ids."""
        server.check_model(body.model)
        ids = await _judged(server.reader.tokenize, body)
        return Answer({"tokens": ids, "count": len(ids), "max_model_len": server.reader.limits.max_model_len})

    @app.post("/detokenize", dependencies=keyed, responses=busy)
    async def detokenize(body: DetokenizeRequest) -> Answer:
        """Token ids as text."""
        server.check_model(body.model)
        return Answer({"prompt": await _judged(server.reader.detokenize, body)})


def _add_watching(app: FastAPI, server: Server) -> None:
    """Routes for whoever looks after it, open to all."""

    @app.get("/health", responses=_told_errors(503))
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


def _invalid(first: dict[str, Any], media_type: str) -> Mistake:
    """The first thing that is wrong with a body, as pydantic tells it, in a sentence."""
    if first["type"] == "json_invalid":
        return Mistake(400, f"the body is not JSON: {first['ctx']['error']}, at character {first['loc'][-1]}")
    where = ".".join(str(part) for part in first["loc"] if part != "body")
    if not where and "json" not in media_type:
        return Mistake(400, f"the body came as {media_type[:100]!r}; send it as application/json")
    if first["type"] == "extra_forbidden":
        return Mistake(400, f"{where} is not a field of this request", param=where)
    said = str(first["ctx"]["error"]) if first["type"] == "value_error" else first["msg"]
    return Mistake(400, f"{where or 'the body'}: {said}", param=where or None)


def _told_errors(*listed: int) -> dict[int | str, dict[str, Any]]:
    """For the OpenAPI document."""
    return {code: {"model": ErrorAnswer, "description": KINDS[code]} for code in listed} | {
        "4XX": {"model": ErrorAnswer, "description": "What the request got wrong."}
    }


def _model(name: str, length: int) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "paceline", "max_model_len": length}


async def _judged(function: Callable[[Any], Any], body: Any) -> Any:
    try:
        return await asyncio.to_thread(function, body)
    except OptionError as error:
        raise Mistake(400, str(error)) from None
