"""`mini-vllm serve`: the HTTP server.

flags -> ServerConfig, EngineConfig -> api/process.py, which loads the model while it already listens

In vLLM: `vllm/entrypoints/cli/serve.py`.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from mini_vllm.api.server_config import ServerConfig
from mini_vllm.commands.dataclass_flags import FlagGroup, flags_from
from mini_vllm.config import DEFAULT_MODEL, EngineConfig
from mini_vllm.errors import InvalidConfigError


@flags_from(server=FlagGroup(ServerConfig), engine=FlagGroup(EngineConfig))
def serve(
    served: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="What to serve; the same as --model.", show_default=False)
    ] = None,
    *,
    server: ServerConfig,
    engine: EngineConfig,
) -> None:
    """Serve a model over HTTP, as OpenAI's API does.

    Examples:

      mini-vllm serve

      mini-vllm serve TinyLlama/TinyLlama-1.1B-Chat-v1.0 --port 8080 --api-key secret

      curl localhost:8000/v1/completions -H 'Content-Type: application/json' -d '{"prompt": "The capital of France is"}'

    Its pages are at http://127.0.0.1:8000/docs. Every flag can come from the environment as well, as with all commands:
    --max-queue-size is MINI_VLLM_MAX_QUEUE_SIZE.

    Ctrl-C (or SIGTERM) lets running requests finish; a second one does not.
    """
    if served is not None and engine.model not in (DEFAULT_MODEL, served):
        raise InvalidConfigError(f"two models are given, {served!r} and --model {engine.model!r}", field="model")
    config = engine if served is None else dataclasses.replace(engine, model=served)

    # Late: the command line starts without FastAPI, and the server without PyTorch, which is loaded beside it.
    from mini_vllm.api.process import run_server
    from mini_vllm.engine.llm_engine import LLMEngine

    raise typer.Exit(run_server(server, lambda: LLMEngine(config=config)))
