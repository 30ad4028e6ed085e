"""The server: all routes, what stands around them, and the process that runs them.

    create_app     routes + error handlers + middleware over a Lifecycle; tests use it without a socket
    run_server     logging, uvicorn, signals; what `mini-vllm serve` calls

Where it stands: the outermost layer of the package but the command line.

What always holds: there is no state but the app's `Lifecycle`, so two servers can live in one process.

In vLLM: `vllm/entrypoints/openai/api_server.py`.
"""

from __future__ import annotations

import importlib.metadata
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

from mini_vllm.api import chat, completions, generate, tokens
from mini_vllm.api.answering import lifecycle_of
from mini_vllm.api.errors import install_error_handlers
from mini_vllm.api.json_body import JsonRoute
from mini_vllm.api.lifecycle import Lifecycle, Phase
from mini_vllm.api.metrics import CONTENT_TYPE, render
from mini_vllm.api.middleware import ApiKeys, BodyLimit, RequestRecord, WholeRequest
from mini_vllm.api.responses import ErrorAnswer, Health, Model, Models, Version
from mini_vllm.api.server_config import ServerConfig

_ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorAnswer, "description": "The request is refused; `param` names the field."},
    "5XX": {"model": ErrorAnswer, "description": "Loading, shutting down, or failed."},
}

router = APIRouter(route_class=JsonRoute)


def create_app(lifecycle: Lifecycle) -> FastAPI:
    """The application over a server's state. Its lifespan starts loading, and ends the engine."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        lifecycle.start()
        try:
            yield
        finally:
            await lifecycle.stop()

    app = FastAPI(
        title="mini vLLM",
        version=_version(),
        lifespan=lifespan,
        redirect_slashes=False,
        middleware=_middleware(lifecycle),
        responses=_ERRORS,
    )
    app.state.lifecycle = lifecycle
    for part in (completions, chat, generate, tokens):
        app.include_router(part.router)
    app.include_router(router)
    install_error_handlers(app)
    _describe_errors_once(app)
    return app


def _middleware(lifecycle: Lifecycle) -> list[Middleware]:
    """The first one is the outermost."""
    config: ServerConfig = lifecycle.config
    parts = [Middleware(WholeRequest), Middleware(RequestRecord, metrics=lifecycle.http_metrics)]
    if config.allowed_origins:
        origins = list(config.allowed_origins)
        parts.append(Middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"]))
    if config.api_key:
        parts.append(Middleware(ApiKeys, keys=config.api_key))
    return [*parts, Middleware(BodyLimit, limit=config.max_body_size)]


def _describe_errors_once(app: FastAPI) -> None:
    """FastAPI documents a 422 of its own form on every route with a body; here such a body is a 400 of ours."""
    describe = app.openapi

    def openapi() -> dict[str, Any]:
        document = describe()
        for operations in document["paths"].values():
            for operation in operations.values():
                operation["responses"].pop("422", None)
        return document

    app.openapi = openapi  # type: ignore[method-assign]


@router.get("/health", responses={503: {"model": Health, "description": "Not ready, or not any more."}})
async def health(request: Request) -> Response:
    """200 while the engine takes requests; 503 while it is loading, shutting down, dead or stuck."""
    lifecycle = lifecycle_of(request)
    phase = lifecycle.phase
    answer = Health(status=phase.value, detail=lifecycle.failure_text)
    return JSONResponse(answer.model_dump(), 200 if phase is Phase.READY else 503)


@router.get("/metrics", response_class=Response)
async def metrics(request: Request) -> Response:
    """Prometheus's text format; names are vLLM's, with the prefix mini_vllm."""
    lifecycle = lifecycle_of(request)
    return Response(render(lifecycle.metric_families()), media_type=CONTENT_TYPE)


@router.get("/v1/models")
async def models(request: Request) -> Models:
    """The one model that is served."""
    engine = lifecycle_of(request).engine().engine
    return Models(
        object="list",
        data=[
            Model(
                id=engine.model_name,
                object="model",
                created=int(time.time()),
                owned_by="mini-vllm",
                root=engine.config.model,
                max_model_len=engine.config.max_model_len or 0,
            )
        ],
    )


@router.get("/version")
async def version() -> Version:
    """The version of mini vLLM."""
    return Version(version=_version())


def _version() -> str:
    return importlib.metadata.version("mini-vllm")
