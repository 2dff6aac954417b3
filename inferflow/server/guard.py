"""What stands before every route: the name we are called by, pages of other sites, the key, the end of the service, the log.

A request is refused unless it passes; only ``/health`` needs no key.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import sys
import time
import traceback
from collections.abc import Mapping

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import ApiError, ClientGoneError, error_response
from .service import Service

__all__ = ["Guard"]

OPEN = "/health"
GONE = 499  # the status, in the log, of what nobody waited for


class Guard:
    """The outermost ASGI application."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self.app = app
        self.service = service
        self.settings = service.settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        start, status = time.monotonic(), 0
        scope.setdefault("state", {})
        works = scope["method"] == "POST"
        self.service.active += works

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            self.check(scope, Headers(scope=scope))
            await self.app(scope, receive, sending)
        except ApiError as error:
            await error_response(error)(scope, receive, sending)
        except ClientGoneError:
            status = GONE
        except Exception:
            if status:
                raise  # the server logs it and breaks the connection off
            traceback.print_exc(file=sys.stderr)
            await error_response(ApiError(500, "an error of ours: it is in the log"))(scope, receive, sending)
        except BaseException:
            status = status or GONE
            raise
        finally:
            self.service.active -= works
            self.note(scope, status, time.monotonic() - start)

    def check(self, scope: Scope, headers: Mapping[str, str]) -> None:
        """Raises ApiError."""
        host, origin = headers.get("host", ""), headers.get("origin")
        if self.settings.hosts is not None and hostname(host) not in self.settings.hosts:
            raise ApiError(403, f"we are not called '{host[:200]}' (see --allowed-host)", None, "wrong_host")
        ours = {f"http://{host}", f"https://{host}", *self.settings.origins}
        if origin is not None and origin not in ours and "*" not in ours:
            raise ApiError(403, f"pages of '{origin[:200]}' may not ask here (see --cors-origin)", None, "wrong_origin")
        if scope["path"] != OPEN and not self.knows(headers.get("authorization", "")):
            challenge = 'Basic realm="inferflow"' if scope["path"] == "/" else "Bearer"
            reason = "the API key is missing or wrong (send it as Authorization: Bearer KEY)"
            raise ApiError(401, reason, None, "invalid_api_key", headers={"WWW-Authenticate": challenge})
        if self.service.draining and scope["method"] == "POST":
            raise ApiError(
                503, "the service is ending: ask another one", None, "draining", headers={"Retry-After": "5"}
            )

    def knows(self, authorization: str) -> bool:
        """Whether that is the key; as the password of a browser, too, which asks for one when it opens the page."""
        key = self.settings.api_key
        if key is None:
            return True
        scheme, _, given = authorization.partition(" ")
        if scheme.lower() == "basic":
            try:
                secret = base64.b64decode(given, validate=True).partition(b":")[2]
            except (binascii.Error, ValueError):
                return False
        elif scheme.lower() == "bearer":
            secret = given.strip().encode("latin-1")
        else:
            return False
        return hmac.compare_digest(_digest(secret), _digest(key.encode()))

    def note(self, scope: Scope, status: int, seconds: float) -> None:
        route = scope["state"].get("route", "other")
        self.service.metrics.requests[route, status] += 1
        client = (scope.get("client") or ("-",))[0]
        more = scope["state"].get("note", "")
        self.service.log(f"{client} {scope['method']} {scope['path']} {status} {seconds:.3f}s {more}".rstrip())


def hostname(host: str) -> str:
    """A Host header without the port."""
    name, _, port = host.lower().rpartition(":")
    return name if name and (port.isdigit() or not port) and not host.endswith("]") else host.lower()


def _digest(secret: bytes) -> bytes:
    return hashlib.sha256(secret).digest()
