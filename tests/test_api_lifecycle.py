"""Clients that leave, a full server, time limits, an engine that dies or hangs, loading, shutting down."""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import httpx
import pytest
from api_helpers import DEADLINE, Gate, Served, Streamed, read_stream, serving, until
from engine_doubles import ScriptedModel, make_engine

from mini_vllm.api.lifecycle import Phase
from mini_vllm.api.process import GC_THRESHOLDS, calm_collector_after
from mini_vllm.errors import ModelLoadError

LONG = {"prompt": "ab", "max_tokens": 200, "temperature": 0}


@pytest.fixture
def gate() -> Iterator[Gate]:
    one = Gate()
    yield one
    one.opened.set()


@pytest.fixture
def served() -> Iterator[Served]:
    with serving() as server:
        yield server


def leave(served: Served, body: dict[str, Any], gate: Gate) -> None:
    """Send a request and close the connection while its first token is being computed."""
    with closing(HTTPConnection(served.url.removeprefix("http://"))) as connection:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        assert gate.reached.wait(DEADLINE)
        time.sleep(0.2)  # where another request has reached the gate, this one gets time to be let in


LEFT: list[dict[str, Any]] = [
    *({}, {"stream": True}, {"n": 3, "temperature": 1}, {"prompt": ["a", "b"]}),
    *({"stream": True, "logprobs": 3, "stop": ["zz"]}, {"structured_outputs": {"regex": "[a-z]{200}"}}),
]


@pytest.mark.parametrize("fields", LEFT, ids=str)
def test_a_client_that_leaves_ends_its_request(gate: Gate, fields: dict[str, Any]) -> None:
    """Streaming or not, in the middle of the first step: the rest is never computed."""
    model = ScriptedModel(gate)
    with serving(model, max_num_seqs=8) as served:
        if fields.get("stream"):
            with served.http.stream("POST", "/v1/completions", json={**LONG, **fields}):
                assert gate.reached.wait(DEADLINE)
        else:
            leave(served, {**LONG, **fields}, gate)
        gate.opened.set()
        served.wait_until_quiet()
        samples = served.metrics()
        assert samples['request_success_total{finished_reason="abort"}'] == len(fields.get("prompt", "a"))
        assert samples["request_started_total"] == len(fields.get("prompt", "a"))
        assert model.num_logits_rows < 100
        assert served.complete("ab", max_tokens=3)["choices"][0]["text"] == "cde"


def test_a_client_that_leaves_while_it_waits(gate: Gate) -> None:
    with serving(ScriptedModel(gate), max_num_seqs=1) as served, ThreadPoolExecutor() as pool:
        first = pool.submit(served.complete, "ab", max_tokens=3)
        assert gate.reached.wait(DEADLINE)
        leave(served, LONG, gate)
        gate.opened.set()
        assert first.result(DEADLINE)["choices"][0]["text"] == "cde"
        served.wait_until_quiet()
        assert served.metrics()['request_success_total{finished_reason="abort"}'] == 1


def test_a_client_that_leaves_in_a_long_prefill(gate: Gate) -> None:
    """A prompt of 200 tokens in chunks of 16: the chunks after the client's leaving are not computed."""
    model = ScriptedModel(gate)
    with serving(model, max_num_batched_tokens=16, max_num_seqs=2, enable_prefix_caching=False) as served:
        with ThreadPoolExecutor() as pool:
            blocker = pool.submit(served.complete, "ab", max_tokens=1)
            assert gate.reached.wait(DEADLINE)
            leave(served, {"prompt": "x" * 200}, gate)
            gate.opened.set()
            blocker.result(DEADLINE)
        served.wait_until_quiet()
        assert model.num_computed_tokens < 200


def test_a_client_that_leaves_in_the_middle_of_its_body_has_sent_nothing_wrong(served: Served) -> None:
    """It is counted as gone, and not as a refused request."""
    address = served.url.removeprefix("http://").split(":")
    with socket.create_connection((address[0], int(address[1]))) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b'Content-Length: 100\r\n\r\n{"prompt": "ab"'
        )
    counted = 'http_requests_total{handler="/v1/completions",method="POST",status="499"}'
    until(lambda: served.metrics().get(counted) == 1, "its place in the counts")
    assert not [name for name in served.metrics() if 'status="400"' in name]


@pytest.mark.parametrize("sent", [b"GARBAGE\r\n\r\n", b"GET /heal", b"\x16\x03\x01\x02\x00\x01", b"\r\n" * 1000])
def test_what_is_no_request_hurts_nobody(served: Served, sent: bytes) -> None:
    host, port = served.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(sent)
    served.wait_until_quiet()
    assert served.complete("ab", max_tokens=3)["choices"][0]["text"] == "cde"


def test_while_the_engine_computes_everything_else_is_answered_and_the_gauges_are_live(gate: Gate) -> None:
    with serving(ScriptedModel(gate), max_num_seqs=2) as served, ThreadPoolExecutor() as pool:
        answers = [pool.submit(served.complete, "n" * 40, max_tokens=3) for _ in range(3)]
        assert gate.reached.wait(DEADLINE)
        for path in ("/health", "/v1/models", "/version"):
            assert served.http.get(path).status_code == 200
        assert served.ok("/tokenize", {"prompt": "ab"})["count"] == 2
        until(lambda: served.metrics()["num_requests_running"] + served.metrics()["num_requests_waiting"] == 3)
        gate.opened.set()
        assert {answer.result(DEADLINE)["usage"]["completion_tokens"] for answer in answers} == {3}


def test_metrics_are_quiet_after_a_mass_abort(gate: Gate) -> None:
    with serving(ScriptedModel(gate), max_num_seqs=8) as served:
        with ThreadPoolExecutor(20) as pool:
            list(pool.map(lambda _: leave(served, LONG, gate), range(20)))
        gate.opened.set()
        served.wait_until_quiet()
        samples = served.metrics()
        finished = sum(value for name, value in samples.items() if name.startswith("request_success_total"))
        assert finished == samples["request_started_total"] == 20


def test_a_full_server_says_429_and_when_to_come_again(gate: Gate) -> None:
    with serving(ScriptedModel(gate), max_num_seqs=1, server={"max_queue_size": 4}) as served:
        with ThreadPoolExecutor(40) as pool:
            body = {"prompt": "ab", "max_tokens": 2, "temperature": 0}
            futures = [pool.submit(served.post, "/v1/completions", body) for _ in range(40)]
            until(lambda: sum(future.done() for future in futures) == 35, "the refusals")
            assert served.http.get("/health").status_code == 200
            gate.opened.set()
            answers = [future.result(DEADLINE) for future in futures]
        refused = [answer for answer in answers if answer.status_code == 429]
        assert len(refused) == 35 and all(int(answer.headers["retry-after"]) >= 1 for answer in refused)
        assert refused[0].json()["error"]["code"] == "queue_full"
        assert [answer.json()["choices"][0]["text"] for answer in answers if answer.status_code == 200] == ["cd"] * 5
        served.wait_until_quiet()


def test_a_request_over_the_time_limit_is_ended(gate: Gate) -> None:
    with serving(ScriptedModel(gate), server={"request_timeout": 0.2}) as served:
        timer = threading.Timer(0.4, gate.opened.set)
        timer.start()
        response = served.post("/v1/completions", LONG)
        assert response.status_code == 504 and "0.2 s" in response.json()["error"]["message"]
        served.wait_until_quiet()


def test_a_stream_over_the_time_limit_ends_with_what_it_has_and_an_error(gate: Gate) -> None:
    with serving(ScriptedModel(gate), server={"request_timeout": 0.2}) as served:
        threading.Timer(0.4, gate.opened.set).start()
        streamed = served.stream("/v1/completions", LONG)
        assert streamed.finish_reasons() == ["abort"] and streamed.num_done == 1
        assert "0.2 s" in streamed.chunks[-1]["error"]["message"]
        served.wait_until_quiet()


def test_a_stream_gets_comments_while_nothing_comes(gate: Gate) -> None:
    with serving(ScriptedModel(gate), server={"heartbeat": 0.02}) as served:
        body = {"prompt": "ab", "max_tokens": 2, "temperature": 0, "stream": True}
        with served.http.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            assert next(lines) == ": still working"
            gate.opened.set()
            streamed = read_stream(lines, Streamed(200, response.headers))
    assert streamed.text() == "cd" and streamed.num_done == 1


def test_a_slow_reader_gets_everything_and_slows_nobody_down() -> None:
    """Its answer is far larger than the socket's buffers; the engine finishes it while nobody reads."""
    with serving(max_num_seqs=4, num_kv_blocks=400, parts={"max_model_len": 2000}) as served:
        body = {"prompt": "ab", "max_tokens": 1500, "temperature": 0, "stream": True, "logprobs": 20}
        small_buffer = [(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)]
        with (
            httpx.Client(transport=httpx.HTTPTransport(socket_options=small_buffer), timeout=DEADLINE) as client,
            client.stream("POST", f"{served.url}/v1/completions", json=body) as response,
        ):
            until(lambda: served.engine.stats.num_running == 1 or served.metrics()["generation_tokens_total"] > 0)
            assert served.complete("ab", max_tokens=3)["choices"][0]["text"] == "cde"
            until(lambda: served.metrics()["num_requests_running"] == 0, "the slow reader's answer")
            streamed = read_stream(response.iter_lines(), Streamed(200, response.headers))
    assert streamed.text() == "".join(chr(97 + position % 26) for position in range(2, 1502))
    assert len(streamed.chunks) < 1500, "tokens that came while it did not read are merged"
    assert len([token for one in streamed.choices() for token in one["logprobs"]["tokens"]]) == 1500


def test_a_dead_engine_is_told_to_everyone(gate: Gate) -> None:
    with serving(ScriptedModel(gate)) as served, ThreadPoolExecutor() as pool:
        waiting = [
            pool.submit(served.post, "/v1/completions", LONG),
            pool.submit(served.stream, "/v1/completions", LONG),
        ]
        until(lambda: served.metrics()["request_started_total"] == 2)
        served.engine.scheduler.schedule = lambda: 1 / 0  # type: ignore[method-assign,assignment,return-value]
        gate.opened.set()
        response, streamed = waiting[0].result(DEADLINE), waiting[1].result(DEADLINE)
        assert response.status_code == 503 and "ZeroDivisionError" in response.json()["error"]["message"]
        assert streamed.chunks[-1]["error"]["code"] == "engine_dead" and streamed.num_done == 1
        health = served.http.get("/health")
        assert health.status_code == 503 and health.json()["status"] == "failed"
        assert served.post("/v1/completions", LONG).status_code == 503
        until(lambda: served.lifecycle.failure is not None, "the watcher")


def test_a_stuck_engine_is_given_up(gate: Gate) -> None:
    with serving(ScriptedModel(gate), server={"step_timeout": 0.2}) as served, ThreadPoolExecutor() as pool:
        waiting = pool.submit(served.post, "/v1/completions", LONG)
        assert waiting.result(DEADLINE).json()["error"]["code"] == "engine_dead"
        health = served.http.get("/health")
        assert health.status_code == 503 and "stuck" in health.json()["detail"]
        gate.opened.set()


def test_while_it_loads_a_server_is_alive_and_not_ready() -> None:
    loaded = threading.Event()

    def load() -> Any:
        assert loaded.wait(DEADLINE)
        return make_engine(ScriptedModel(lambda token_id, position: {97: 1.0}))

    with serving(load=load, waits=False) as served:
        health = served.http.get("/health")
        assert (health.status_code, health.json()) == (503, {"status": "loading", "detail": None})
        refused = served.post("/v1/completions", LONG)
        assert refused.status_code == 503 and "retry-after" in refused.headers
        assert served.http.get("/metrics").status_code == 200 and served.http.get("/version").status_code == 200
        loaded.set()
        until(lambda: served.http.get("/health").status_code == 200, "the engine")


def test_the_collector_looks_no_more_at_what_is_loaded_and_seldom_at_the_rest() -> None:
    """Full collections of hundreds of thousands of objects held everybody up for 0.2 s."""
    kept, thresholds = [[] for _ in range(1000)], gc.get_threshold()
    try:
        assert calm_collector_after(lambda: "the engine")() == "the engine"  # type: ignore[arg-type,return-value]
        assert gc.get_freeze_count() >= len(kept) and gc.get_threshold() == GC_THRESHOLDS
    finally:
        gc.unfreeze()
        gc.set_threshold(*thresholds)


def test_a_load_that_fails_ends_the_server() -> None:
    def load() -> Any:
        raise ModelLoadError("the file is damaged")

    with serving(load=load) as served:
        assert served.lifecycle.phase is Phase.FAILED
        assert served.http.get("/health").json() == {"status": "failed", "detail": "the file is damaged"}


# ---- the process -----------------------------------------------------------------------------------------------

PROGRAM = """
import sys, time
from engine_doubles import ScriptedModel, make_engine
from mini_vllm.api.process import run_server
from mini_vllm.api.server_config import ServerConfig
port, kind, timeout = int(sys.argv[1]), sys.argv[2], float(sys.argv[3])
def script(token_id, position):
    if kind == "slow":
        time.sleep(0.01)
    if kind == "dies" and position > 20:
        raise SystemExit
    return {97 + (position + 1) % 26: 10.0}
def load():
    if kind == "loading":
        time.sleep(60)
    return make_engine(ScriptedModel(script), parts={"max_model_len": 4000}, num_kv_blocks=300)
sys.exit(run_server(ServerConfig(port=port, shutdown_timeout=timeout), load))
"""


class Process:
    """A server in a process of its own."""

    def __init__(self, kind: str, shutdown_timeout: float = 30) -> None:
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            self.port = sock.getsockname()[1]
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
        arguments = [sys.executable, "-c", PROGRAM, str(self.port), kind, str(shutdown_timeout)]
        self.popen = subprocess.Popen(arguments, env=environment, stderr=subprocess.PIPE, text=True)
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=DEADLINE, trust_env=False)

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()
        self.popen.kill()
        self.popen.communicate()

    def health(self) -> int:
        try:
            return self.http.get("/health").status_code
        except httpx.TransportError:
            return 0

    def exit_code(self) -> int:
        return self.popen.wait(DEADLINE)


def test_sigterm_lets_running_requests_finish_and_exits_with_0() -> None:
    with Process("slow") as process, ThreadPoolExecutor() as pool:
        until(lambda: process.health() == 200, "the server")
        body = {"prompt": "ab", "max_tokens": 60, "temperature": 0}
        answers = [pool.submit(process.http.post, "/v1/completions", json=body) for _ in range(3)]
        until(lambda: 'num_requests_running{model_name="double"} 3' in process.http.get("/metrics").text)
        process.popen.send_signal(signal.SIGTERM)
        assert [answer.result(DEADLINE).json()["usage"]["completion_tokens"] for answer in answers] == [60] * 3
        assert process.exit_code() == 0
        assert process.health() == 0, "the port is free"


def test_sigterm_cuts_streams_at_the_timeout_with_a_proper_end() -> None:
    with Process("slow", shutdown_timeout=0.3) as process:
        until(lambda: process.health() == 200, "the server")
        body = {"prompt": "ab", "max_tokens": 3000, "temperature": 0, "stream": True}
        with process.http.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            assert next(lines).startswith("data: ")
            process.popen.send_signal(signal.SIGTERM)
            streamed = read_stream(lines, Streamed(200, response.headers))
        assert streamed.finish_reasons() == ["abort"] and streamed.num_done == 1
        assert "shutting down" in streamed.chunks[-1]["error"]["message"]
        assert process.exit_code() == 0


def test_a_second_signal_exits_at_once() -> None:
    with Process("slow") as process:
        until(lambda: process.health() == 200, "the server")
        body = {"prompt": "ab", "max_tokens": 3000, "stream": True}
        with process.http.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()  # kept, as httpx closes the connection of one that is forgotten
            next(lines)
            process.popen.send_signal(signal.SIGINT)
            time.sleep(0.3)  # two signals of one kind at the same moment are one
            assert process.popen.poll() is None
            process.popen.send_signal(signal.SIGINT)
            assert process.exit_code() == 130


@pytest.mark.parametrize("kind", ["loading", "idle"])
def test_sigterm_while_loading_or_idle(kind: str) -> None:
    with Process(kind) as process:
        until(lambda: process.health() == (503 if kind == "loading" else 200), "the server")
        process.popen.send_signal(signal.SIGTERM)
        assert process.exit_code() == 0


def test_a_dead_engine_ends_the_process_with_1() -> None:
    with Process("dies") as process:
        until(lambda: process.health() == 200, "the server")
        response = process.http.post("/v1/completions", json=LONG)
        assert response.status_code == 503 and response.json()["error"]["code"] == "engine_dead"
        assert process.exit_code() == 1
