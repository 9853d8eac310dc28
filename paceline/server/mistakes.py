"""What is answered with an error: its status, OpenAI's word for it, and a sentence."""

from __future__ import annotations

from typing import Any

from fastapi.responses import JSONResponse

from paceline.errors import EngineError, PacelineError
from paceline.server.answers import encode, error_body

KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    500: "engine_error",
    503: "engine_error",
}


class Answer(JSONResponse):
    def render(self, content: Any) -> bytes:
        return encode(content)


class Mistake(Exception):
    """A request that is answered with an error."""

    def __init__(self, status: int, sentence: str, code: str | None = None, param: str | None = None) -> None:
        super().__init__(sentence)
        self.status, self.sentence, self.code, self.param = status, sentence, code, param

    def body(self) -> dict[str, Any]:
        return error_body(self.sentence, KINDS.get(self.status, KINDS[400]), self.param, self.code)

    def answer(self) -> Answer:
        headers = {"Retry-After": "1"} if self.status in (429, 503) else {}
        headers |= {"WWW-Authenticate": "Bearer"} if self.status == 401 else {}
        return Answer(self.body(), self.status, headers)


def mistake_of(error: PacelineError) -> Mistake:
    """What the library refuses is the client's; the rest is the engine's."""
    if isinstance(error, EngineError):
        return Mistake(500, str(error), "engine_error")
    return Mistake(400, str(error))
