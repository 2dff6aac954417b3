"""The routes."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from ..errors import InferflowError
from .answer import EventStream
from .body import read_body
from .chat import chat
from .completions import completions
from .errors import ApiError, error_response, refusal
from .guard import Guard
from .service import Service, while_connected
from .tokens import detokenize, tokenize

__all__ = ["make_app"]

METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]
PAGE = Path(__file__).with_name("page.html")
Handler = Callable[[Request, Service], Coroutine[Any, Any, Response]]


def make_app(service: Service) -> ASGIApp:
    """The ASGI application."""

    def route(path: str, handler: Handler, method: str = "GET") -> Route:
        async def endpoint(request: Request) -> Response:
            request.state.route = path
            try:
                if request.method != method and (request.method, method) != ("HEAD", "GET"):
                    raise ApiError(405, f"{path} takes {method}", headers={"Allow": method})
                if method == "GET":
                    return await handler(request, service)
                request.state.body = await read_body(request, service.settings.max_body)
                return await while_connected(request.receive, handler(request, service))
            except InferflowError as error:
                told = refusal(error, {})
            except ApiError as error:
                told = error
            request.state.note = f"error={told.message}"
            return error_response(told)

        return Route(path, endpoint, methods=METHODS)

    routes = [
        route("/v1/completions", completions, "POST"), route("/v1/chat/completions", chat, "POST"),
        route("/tokenize", tokenize, "POST"), route("/detokenize", detokenize, "POST"), route("/v1/models", models),
        route("/v1/models/{name:path}", model), route("/metrics", metrics), route("/health", health),
        route("/ready", ready), route("/live", live), route("/", page),
    ]  # fmt: skip
    app: ASGIApp = Guard(Router(routes, redirect_slashes=False, default=no_route), service)
    origins = service.settings.origins
    return CORSMiddleware(app, origins, allow_methods=["*"], allow_headers=["*"]) if origins else app


async def no_route(scope: Scope, receive: Receive, send: Send) -> None:
    raise ApiError(404, f"there is no route {scope['path'][:200]} (there is /v1/chat/completions)", None, "no_route")


async def models(http: Request, service: Service) -> Response:
    return JSONResponse({"object": "list", "data": [_model(service, name) for name in service.settings.names]})


async def model(http: Request, service: Service) -> Response:
    name = http.path_params["name"]
    if name not in service.settings.names:
        raise ApiError(404, f"there is no model '{name[:200]}' here", "model", "model_not_found")
    return JSONResponse(_model(service, name))


def _model(service: Service, name: str) -> dict[str, Any]:
    length = service.llm.llm.max_model_len
    return {
        "id": name, "object": "model", "created": service.started, "owned_by": "inferflow", "root": service.settings.names[0],
        "max_model_len": length,
    }  # fmt: skip


async def metrics(http: Request, service: Service) -> Response:
    text = service.metrics.text(service.llm.llm.engine, service.llm.failure is None)
    return PlainTextResponse(text, media_type="text/plain; version=0.0.4")


async def health(http: Request, service: Service) -> Response:
    """Whether the engine lives."""
    if service.llm.failure is not None:
        raise ApiError(503, "the engine has died", None, "dead")
    return JSONResponse({"status": "ok"})


async def ready(http: Request, service: Service) -> Response:
    """Whether it can generate."""
    trouble = service.trouble
    if trouble is not None:
        raise ApiError(503, trouble, None, "not_ready")
    return JSONResponse({"status": "ready"})


async def live(http: Request, service: Service) -> Response:
    """The step loop as it runs, as server-sent events."""
    if http.method != "GET":
        raise ApiError(405, "/live takes GET", headers={"Allow": "GET"})
    engine = service.llm.llm.engine
    totals, pool = engine.scheduler.totals, engine.pool

    def state() -> dict[str, Any]:
        return {
            "running": len(engine.running), "waiting": len(engine.waiting), "queue": engine.scheduler.waiting_tokens,
            "blocks_used": pool.blocks - len(pool.free), "blocks": pool.blocks,
            "prefix_hit_rate": round(totals.cached / totals.asked, 4) if totals.asked else 0.0,
        }  # fmt: skip

    return EventStream(service.live.events(state, lambda: service.draining or service.llm.failure is not None))


async def page(http: Request, service: Service) -> Response:
    """The page, which may run its own script and style, and speak with us, and nothing else."""
    text = PAGE.read_text("utf-8")
    policy = (
        f"default-src 'none'; script-src {_digest(text, 'script')}; style-src {_digest(text, 'style')}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    headers = {
        "Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }  # fmt: skip
    return HTMLResponse(text, headers=headers)


def _digest(page: str, tag: str) -> str:
    """What a policy calls the page's one element of that kind."""
    inside = page.partition(f"<{tag}>")[2].partition(f"</{tag}>")[0]
    return f"'sha256-{base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()}'"
