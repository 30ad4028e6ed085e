"""Nobody waits for somebody else's megabytes: while a large body is read, checked and refused, others are answered.

The server is a process of its own, as the test's own work would otherwise hold it up. What is measured is the longest
that /health took meanwhile. The machine may be busy, so of three tries the best one counts, and where even reading the
JSON takes long, four times as long is allowed; what these tests are there to find takes seconds.
"""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from cli_helpers import build_cli_model
from server_process import server_process

MAX_DELAY, MAX_READINGS = 0.2, 4  # seconds, and times that `json.loads` of the body takes at this moment
MILLION = 1_000_000
BODIES: dict[str, tuple[str, Any, int]] = {
    "text": ("/v1/completions", {"prompt": "hello world " * 420_000}, 400),
    "token ids": ("/v1/completions", {"prompt": [97] * 520_000}, 400),
    "too many token ids": ("/v1/completions", {"prompt": [97] * 1_250_000}, 400),
    "lists": ("/v1/completions", {"prompt": [[]] * 400_000}, 400),
    "wrong ids": ("/v1/completions", {"prompt": [97] + ["x"] * MILLION}, 400),
    "message": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello world " * 420_000}]}, 400),
    "messages": ("/v1/chat/completions", {"messages": [1] * MILLION}, 400),
    "stops": ("/v1/completions", {"prompt": "a", "stop": [1] * MILLION}, 400),
    "biases": ("/v1/completions", {"prompt": "a", "logit_bias": {str(i): "x" for i in range(300_000)}}, 400),
    "unknown fields": ("/v1/completions", {"prompt": "a", **{f"f{i}": 1 for i in range(300_000)}}, 400),
    "text to tokenize": ("/tokenize", {"prompt": "hello world " * 40_000}, 200),
    "ids to detokenize": ("/detokenize", {"tokens": [97] * 300_000}, 200),
}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    model = build_cli_model(tmp_path_factory.mktemp("models") / "tiny")
    with server_process(model, {"dtype": "float32", "max-model-len": 256, "num-kv-blocks": 64}) as (_, address):
        yield address.removeprefix("http://")


class Pulse:
    """Asks /health all the time while it is open; `longest` is the longest that an answer took."""

    def __init__(self, url: str) -> None:
        self._connection = http.client.HTTPConnection(url, timeout=60)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.longest = 0.0

    def _run(self) -> None:
        while not self._stopped.wait(0.002):
            start = time.perf_counter()
            self._connection.request("GET", "/health")
            self._connection.getresponse().read()
            self.longest = max(self.longest, time.perf_counter() - start)

    def __enter__(self) -> Pulse:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()
        self._connection.close()


def test_a_small_answer_does_not_wait_for_a_receipt(url: str) -> None:
    """Head and body are two packets; where the second waits for the first one's delayed receipt, it takes 40 ms."""
    connection = http.client.HTTPConnection(url, timeout=60)
    seconds = []
    for _ in range(50):
        start = time.perf_counter()
        connection.request("GET", "/health")
        connection.getresponse().read()
        seconds.append(time.perf_counter() - start)
    connection.close()
    assert sorted(seconds)[10] < 0.035


@pytest.mark.parametrize("name", BODIES)
def test_a_large_body_delays_nobody(url: str, name: str) -> None:
    path, value, status = BODIES[name]
    body = json.dumps(value).encode()
    delays = []
    for _ in range(3):
        connection = http.client.HTTPConnection(url, timeout=60)
        with Pulse(url) as pulse:
            connection.request("POST", path, body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            answer.read()
        connection.close()
        assert answer.status == status
        start = time.perf_counter()
        json.loads(body)
        delays.append(pulse.longest)
        if pulse.longest < max(MAX_DELAY, MAX_READINGS * (time.perf_counter() - start)):
            return
    raise AssertionError(f"/health took {min(delays):.3f} s meanwhile, in the best of {len(delays)} tries")
