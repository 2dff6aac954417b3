"""Refusals as HTTP has them: a status, and OpenAI's ``{"error": {"message", "type", "param", "code"}}``."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from starlette.responses import JSONResponse, Response

from ..errors import (
    ArgumentError,
    ClosedError,
    DeadlineError,
    InferflowError,
    QueueFullError,
    TextError,
    UnsupportedError,
    one_line,
)

__all__ = ["ApiError", "ClientGoneError", "bad", "error_response", "refusal", "refusing"]

TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    405: "invalid_request_error", 408: "timeout_error", 413: "invalid_request_error", 429: "rate_limit_error",
    500: "server_error", 503: "service_unavailable_error",
}  # fmt: skip


class ClientGoneError(Exception):
    """The client hung up: nobody reads the answer."""


@dataclass(eq=False)
class ApiError(Exception):
    """`status` and the error's entries; `numbers` go beside them, `headers` with the response."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    numbers: Mapping[str, int] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.message

    def body(self) -> dict[str, object]:
        error = {"message": one_line(self.message), "type": TYPES[self.status], "param": self.param, "code": self.code}
        return {"error": {**error, **self.numbers}}


def bad(param: str | None, reason: str, fix: str = "", code: str | None = None) -> ApiError:
    """A 400 that names the field."""
    head = f"{param}: " if param else ""
    return ApiError(400, f"{head}{reason}{f' ({fix})' if fix else ''}", param, code)


def refusal(error: InferflowError, names: Mapping[str, str], wait: float = 1.0) -> ApiError:
    """What the engine says. `names`: the request's own words for fields of the Python surface; `wait`: seconds after which a
    full queue is worth another try."""
    if isinstance(error, QueueFullError):
        return ApiError(429, str(error), None, "queue_full", headers={"Retry-After": str(max(1, math.ceil(wait)))})
    if isinstance(error, ClosedError):
        return ApiError(503, str(error), None, "closed")
    if isinstance(error, DeadlineError):
        return ApiError(408, str(error), "timeout", "deadline_exceeded")
    if isinstance(error, ArgumentError | TextError | UnsupportedError):
        param = names.get(error.where, error.where)
        code = "unsupported" if isinstance(error, UnsupportedError) else None
        return bad(param.split("[")[0].split(" ")[0] or None, error.reason, error.fix, code)
    return ApiError(500, str(error), None, "engine_error")


@contextmanager
def refusing(names: Mapping[str, str], wait: float = 1.0) -> Iterator[None]:
    """Inside, what the engine refuses becomes an ApiError."""
    try:
        yield
    except InferflowError as error:
        raise refusal(error, names, wait) from None


def error_response(error: ApiError) -> Response:
    return JSONResponse(error.body(), error.status, dict(error.headers))
