"""A server as a process of its own, for tests that must not share its interpreter: memory, threads, response times."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import httpx


@contextmanager
def server_process(model: Path, options: Mapping[str, Any]) -> Iterator[tuple[int, str]]:
    """`mini-vllm serve MODEL` with the options as flags, ready: its process id and its address.

    At the end it must leave with 0 after SIGTERM, and without an error in its log.
    """
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    port = sock.getsockname()[1]
    sock.close()
    flags = [part for name, value in {"port": port, **options}.items() for part in (f"--{name}", str(value))]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "mini_vllm", "serve", str(model), "--debug-checks", *flags],
            stdin=subprocess.DEVNULL,
            stderr=log,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        try:
            url = f"http://127.0.0.1:{port}"
            _wait_for_health(process, url, log)
            yield process.pid, url
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0, "the server did not end with 0"
            log.seek(0)
            bad = [line for line in log if " ERROR " in line or line.startswith("Traceback")]
            assert not bad, f"the server's log has errors: {bad[:5]}"
        finally:
            process.kill()
            process.wait()


def _wait_for_health(process: subprocess.Popen[str], url: str, log: IO[str]) -> None:
    end = time.monotonic() + 120
    while time.monotonic() < end:
        if process.poll() is not None:
            log.seek(0)
            raise AssertionError(f"the server ended at its start: {log.read()[-2000:]}")
        try:
            if httpx.get(f"{url}/health", trust_env=False).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    raise AssertionError("the server did not become ready")
