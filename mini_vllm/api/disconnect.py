"""Noticing that a client has closed its connection.

Where it stands: around whatever works for a client. Frameworks cancel a stream whose client leaves, but not a handler
that is still computing its answer; here both are the same.

In vLLM: `with_cancellation` in `vllm/entrypoints/utils.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

_Result = TypeVar("_Result")


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, _Result]) -> _Result | None:
    """Run something for a client, and stop when it closes the connection; then the result is None."""
    task, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_client_leaves(receive))
    try:
        await asyncio.wait({task, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        await _cancel(task, leaving)


async def _client_leaves(receive: Receive) -> None:
    """Returns when the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(*tasks: asyncio.Future[Any]) -> None:
    """Cancel tasks and wait for their clean-up."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
