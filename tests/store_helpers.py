"""A package index and a model hub on loopback, for the tests of the model store.

Both are real HTTP servers that the real pip and the real `huggingface_hub` talk to. What a test wants to go wrong is
said in `Faults`; each request is noted, so that a test can see that there was none.
"""

from __future__ import annotations

import hashlib
import io
import json
import random
import threading
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

from mini_vllm.store.pypi_wheel import WheelSource

COMMIT = "c0ffee" * 6 + "c0de"
MODEL_BYTES = b"GGUF" + random.Random(0).randbytes(
    150_000
)  # random, so that the wheel is as large and cut in its middle


@dataclass
class Faults:
    """What goes wrong at a server.

    Args:
        status: answer everything with this HTTP status.
        error_code: and this `X-Error-Code`, as the hub has it.
        cut_after: send only so many bytes of each file's body, then close the connection.
        before_rest: called after half of a file was sent.
    """

    status: int | None = None
    error_code: str | None = None
    cut_after: int | None = None
    before_rest: Callable[[], object] = lambda: None


@dataclass
class LoopbackServer:
    """A running server: its address, what goes wrong, and what it was asked."""

    url: str
    faults: Faults = field(default_factory=Faults)
    requests: list[str] = field(default_factory=list)
    tokens: set[str | None] = field(default_factory=set)


@dataclass(frozen=True)
class Reply:
    body: bytes
    content_type: str = "application/octet-stream"
    headers: tuple[tuple[str, str], ...] = ()
    is_file: bool = False


@contextmanager
def serve(answer: Callable[[str], Reply | None]) -> Iterator[LoopbackServer]:
    """Serve what `answer` gives for a path (None: 404) on a free port until the block ends."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            state.requests.append(f"{self.command} {self.path}")
            state.tokens.add(self.headers.get("Authorization"))
            reply = answer(unquote(urlsplit(self.path).path))
            status = state.faults.status or (404 if reply is None else 200)
            if reply is None or status != 200:
                reply = Reply(b"{}", headers=(("X-Error-Code", state.faults.error_code or "EntryNotFound"),))
            self.send_response(status)
            for name, value in (*reply.headers, ("Content-Type", reply.content_type)):
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(reply.body)))
            self.end_headers()
            if self.command == "GET":
                self._send(reply)

        do_HEAD = do_GET

        def _send(self, reply: Reply) -> None:
            self.close_connection = True
            try:
                if not reply.is_file:
                    self.wfile.write(reply.body)
                    return
                half = len(reply.body) // 2
                cut = len(reply.body) if state.faults.cut_after is None else state.faults.cut_after
                self.wfile.write(reply.body[: min(half, cut)])
                self.wfile.flush()
                state.faults.before_rest()
                self.wfile.write(reply.body[half : max(half, cut)])
            except ConnectionError:
                pass  # the client was killed by the test

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state = LoopbackServer(f"http://127.0.0.1:{server.server_address[1]}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def tiny_source(wheel: bytes) -> WheelSource:
    """What is expected of `tiny_wheel()`."""
    digest = hashlib.sha256(MODEL_BYTES).hexdigest()
    return WheelSource("tiny-model-wheel", "1.0", len(wheel), "tiny_model_wheel/tiny.gguf", len(MODEL_BYTES), digest)


def tiny_wheel(member: str = "tiny_model_wheel/tiny.gguf", content: bytes = MODEL_BYTES) -> bytes:
    """A wheel that pip accepts, with one model file in it."""
    files = {
        member: content,
        "tiny_model_wheel-1.0.dist-info/METADATA": b"Metadata-Version: 2.1\nName: tiny-model-wheel\nVersion: 1.0\n",
        "tiny_model_wheel-1.0.dist-info/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "tiny_model_wheel-1.0.dist-info/RECORD": b"",
    }
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return buffer.getvalue()


def package_index(wheel: bytes) -> Callable[[str], Reply | None]:
    """A simple repository (PEP 503) with one package of one wheel."""
    name = "tiny_model_wheel-1.0-py3-none-any.whl"

    def answer(path: str) -> Reply | None:
        if path == "/simple/tiny-model-wheel/":
            return Reply(f'<!DOCTYPE html><html><body><a href="/{name}">{name}</a></body></html>'.encode(), "text/html")
        return Reply(wheel, is_file=True) if path == f"/{name}" else None

    return answer


def model_hub(repo_id: str, files: dict[str, bytes], *, large: str = ".safetensors") -> Callable[[str], Reply | None]:
    """A hub with one repository at one commit; files whose name ends with `large` are kept with their SHA-256."""

    def answer(path: str) -> Reply | None:
        if path.startswith(f"/api/models/{repo_id}/revision/"):
            siblings = [_listing(name, body, name.endswith(large)) for name, body in files.items()]
            description = {"id": repo_id, "modelId": repo_id, "sha": COMMIT, "private": False, "siblings": siblings}
            return Reply(json.dumps(description).encode(), "application/json")
        name = path.removeprefix(f"/{repo_id}/resolve/{COMMIT}/")
        if name not in files:
            return None
        etag = (
            hashlib.sha256(files[name]).hexdigest() if name.endswith(large) else hashlib.sha1(files[name]).hexdigest()
        )
        headers = (("ETag", f'"{etag}"'), ("X-Repo-Commit", COMMIT), ("X-Linked-Size", str(len(files[name]))))
        return Reply(files[name], headers=headers, is_file=True)

    return answer


def _listing(name: str, body: bytes, is_large: bool) -> dict[str, object]:
    entry: dict[str, object] = {"rfilename": name, "size": len(body), "blobId": hashlib.sha1(body).hexdigest()}
    if is_large:
        entry["lfs"] = {"sha256": hashlib.sha256(body).hexdigest(), "size": len(body), "pointerSize": 130}
    return entry


def everything_below(folder: Path) -> list[str]:
    """All files and folders below, also hidden ones, as relative paths."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
