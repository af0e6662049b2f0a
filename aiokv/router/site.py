"""What a router serves over HTTP: the calls of clients, and what an operator looks at."""

from __future__ import annotations

import hmac
import logging
from collections.abc import Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import msgspec
import prometheus_client as prometheus
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from aiokv.router.faults import Fault, unavailable

if TYPE_CHECKING:
    from aiokv.router.feed import Feed
    from aiokv.router.forward import Forwarder
    from aiokv.router.registry import Registry

__all__ = ["apart", "clients", "operators"]

_log = logging.getLogger("aiokv")

_FILES = MappingProxyType(
    {
        "/": ("index.html", "text/html"),
        "/page.css": ("page.css", "text/css"),
        "/page.js": ("page.js", "text/javascript"),
        "/icon.svg": ("icon.svg", "image/svg+xml"),
    }
)
#: The page takes nothing from elsewhere, and nobody else shows it in a frame.
_SAFE = MappingProxyType(
    {
        "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
        "connect-src 'self'; img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-store",
    }
)


def clients(forwarder: Forwarder, registry: Registry, keys: Collection[str], most: int) -> web.Application:
    """The application that clients talk to.

    Args:
        forwarder: Answers requests.
        registry: Whose models are shown.
        keys: API keys; empty: nobody is asked for one.
        most: Bytes of a request, at most.
    """

    async def models(request: web.Request) -> web.Response:
        data = [
            {"id": name, "object": "model", "created": 0, "owned_by": "aiokv"} for name in registry.models()
        ]
        return _json({"object": "list", "data": data})

    async def model(request: web.Request) -> web.Response:
        name = request.match_info["model"]
        if name not in registry.models():
            raise Fault(404, f"no instance serves the model {name!r}", "model_not_found", param="model")
        return _json({"id": name, "object": "model", "created": 0, "owned_by": "aiokv"})

    application = web.Application(client_max_size=most, middlewares=[_answering(keys)])
    application.add_routes(
        [
            web.post("/v1/completions", forwarder.completions),
            web.post("/v1/chat/completions", forwarder.chat_completions),
            web.get("/v1/models", models),
            web.get("/v1/models/{model:.+}", model),
            *_health(forwarder, registry),
        ]
    )
    return application


def operators(forwarder: Forwarder, registry: Registry, feed: Feed) -> list[web.RouteDef]:
    """What an operator looks at: the page, its feed, and the metrics."""

    async def show(request: web.Request) -> web.StreamResponse:
        name, kind = _FILES[request.path]
        # aiohttp reads it in a thread of its own.
        return web.FileResponse(
            Path(__file__).with_name("page") / name,
            headers={**_SAFE, "Content-Type": f"{kind}; charset=utf-8"},
        )

    async def tell(request: web.Request) -> web.Response:
        return _json(feed.now(), _SAFE)

    async def metrics(request: web.Request) -> web.Response:
        feed.measure()
        data = prometheus.generate_latest(feed.figures.registry)
        return web.Response(body=data, headers={"Content-Type": prometheus.CONTENT_TYPE_LATEST})

    return [
        *(web.get(path, show) for path in _FILES),
        web.get("/feed.json", tell),
        web.get("/metrics", metrics),
    ]


def apart(forwarder: Forwarder, registry: Registry, feed: Feed) -> web.Application:
    """The operators' part at an address of its own."""
    application = web.Application(middlewares=[_answering(())])
    application.add_routes([*operators(forwarder, registry, feed), *_health(forwarder, registry)])
    return application


def _health(forwarder: Forwarder, registry: Registry) -> list[web.RouteDef]:
    async def healthz(request: web.Request) -> web.Response:
        return _json({"status": "ok"})

    async def readyz(request: web.Request) -> web.Response:
        if forwarder.closing:
            raise unavailable(forwarder.closing, "closing")
        models = registry.models()
        ready = [name for name in models if registry.groups(name)]
        if not ready:
            raise unavailable(registry.lacking(models[0]) if models else "no instance is here")
        return _json({"status": "ready", "models": ready})

    return [web.get("/healthz", healthz), web.get("/readyz", readyz)]


def _answering(keys: Collection[str]) -> Middleware:
    known = [f"Bearer {key}".encode() for key in keys]

    @web.middleware
    async def answer(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            if known and request.path.startswith("/v1/") and not _shown(request, known):
                raise Fault(401, "the API key is missing or wrong", "invalid_api_key")
            return await handler(request)
        except Fault as fault:
            return _told(fault)
        except web.HTTPException as error:
            return _foreign(error)
        except (ConnectionError, web.RequestPayloadError):
            raise  # the client is gone
        except Exception:  # noqa: BLE001 - it ends this request, not the router
            _log.exception("router: %s %s failed", request.method, request.path)
            return _told(Fault(500, "the router failed; its log says why", "internal_error"))

    return answer


def _told(fault: Fault, headers: Mapping[str, str] = MappingProxyType({})) -> web.Response:
    return web.Response(status=fault.status, body=fault.body, headers={**headers, **fault.headers})


def _shown(request: web.Request, known: list[bytes]) -> bool:
    header = request.headers.get("Authorization", "").encode(errors="replace")
    # All are compared, so that the time tells nothing of which one it nearly was.
    return any([hmac.compare_digest(header, each) for each in known])  # noqa: C419


def _foreign(error: web.HTTPException) -> web.Response:
    """What aiohttp answers by itself, in OpenAI's shape."""
    words = {404: "there is no such page", 405: "this method is not allowed here"}
    codes = {404: "not_found", 405: "method_not_allowed", 413: "request_too_large"}
    fault = Fault(error.status, words.get(error.status, error.reason), codes.get(error.status, "http_error"))
    kept = {name: error.headers[name] for name in ("Allow",) if name in error.headers}
    return _told(fault, kept)


def _json(data: object, headers: Mapping[str, str] = MappingProxyType({})) -> web.Response:
    kind = {"Content-Type": "application/json"}
    return web.Response(body=msgspec.json.encode(data), headers={**headers, **kind})
