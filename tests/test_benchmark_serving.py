"""The load generator: against the project's own server and against small servers that misbehave."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
from api_helpers import alphabet, serving
from cli_helpers import CommandLine, build_cli_model
from engine_doubles import ScriptedModel, byte_tokenizer, make_engine

from mini_vllm.benchmark.http_stream import HttpFailure, Server, get_json
from mini_vllm.benchmark.load_client import ServedRequest
from mini_vllm.benchmark.options import ServingOptions, WorkloadOptions
from mini_vllm.benchmark.records import BenchmarkError
from mini_vllm.benchmark.serving import arrival_times, bench_serving, serving_figures, serving_table
from mini_vllm.engine.llm_engine import LLMEngine
from mini_vllm.errors import InvalidConfigError

SMALL = WorkloadOptions(num_prompts=4, input_len="4-8", output_len="3-6")


# ---- arrivals and figures --------------------------------------------------------------------------------------------


def test_poisson_arrivals_have_their_rate_and_come_again_with_the_seed() -> None:
    times = arrival_times(4000, 5.0, ServingOptions(), seed=3)
    assert times[0] == 0.0 and times == sorted(times) == arrival_times(4000, 5.0, ServingOptions(), seed=3)
    gaps = [b - a for a, b in itertools.pairwise(times)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(1 / 5, rel=0.05)
    # The deviation of an exponential distribution is its mean: evenly spaced arrivals would have none.
    assert math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) == pytest.approx(mean, rel=0.1)


def test_bursts_come_together_and_keep_the_rate() -> None:
    options = ServingOptions(request_rate="2", arrivals="burst", burst_size=4)
    assert arrival_times(10, 2.0, options, seed=0) == [0.0] * 4 + [2.0] * 4 + [4.0] * 2


def test_an_infinite_rate_sends_all_at_once() -> None:
    assert arrival_times(3, math.inf, ServingOptions(), seed=0) == [0.0] * 3


def served(arrival: float, *times: float, error: str | None = None, wanted: int | None = None) -> ServedRequest:
    return ServedRequest(arrival, times, 5, len(times), 2, wanted or len(times), error)


def test_goodput_counts_what_is_within_both_limits() -> None:
    options = ServingOptions(ttft_limit=1.0, tpot_limit=0.5)
    good = served(0.0, 1.0, 1.5, 2.0)
    late = served(0.0, 1.25, 1.5)
    slow = served(1.0, 2.0, 2.5, 3.5, 4.0)
    figures = serving_figures([[good, late, slow, served(2.0, error="gone")]], options)
    assert figures["goodput"]["median"] == 1 / 4.0
    assert figures["good_share"] == 1 / 4
    assert figures["requests_per_second"]["median"] == 3 / 4.0
    assert figures["output_tokens_per_second"]["median"] == 9 / 4.0
    assert (figures["num_requests"], figures["num_failed"], figures["first_error"]) == (4, 1, "gone")
    assert figures["time_to_first_token"]["p50"] == 1.0
    assert figures["time_per_output_token"]["p50"] == 0.5


def test_answers_of_another_length_are_counted() -> None:
    figures = serving_figures([[served(0.0, 1.0, wanted=3), served(0.0, 1.0)]], ServingOptions())
    assert figures["num_short"] == 1


def test_a_run_in_which_all_failed_is_refused() -> None:
    with pytest.raises(BenchmarkError, match="every request of a run failed: gone"):
        serving_figures([[served(0.0, error="gone")]], ServingOptions())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("url", "ftp://x"),
        ("request_rate", "1,0"),
        ("request_rate", "fast"),
        ("endpoint", "both"),
        ("arrivals", "even"),
        ("burst_size", 0),
        ("max_concurrency", 0),
        ("ttft_limit", 0.0),
        ("tpot_limit", math.nan),
    ],
)
def test_wrong_options_are_named(field: str, value: Any) -> None:
    with pytest.raises(InvalidConfigError) as refused:
        ServingOptions(**{field: value})
    assert refused.value.field == field


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"burst_size": 4}, "burst_size=4 is of arrivals=burst, got arrivals=poisson"),
        ({"arrivals": "burst"}, "arrivals=burst is of a finite request_rate, and inf sends all at once"),
    ],
)
def test_options_that_mean_nothing_beside_another_are_refused_with_both_names(
    fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidConfigError, match=message):
        ServingOptions(**fields)


@pytest.mark.parametrize("url", ["http://exämple.org", "http://x/é", "http://x/a b", "http://x/a\nb"])
def test_a_url_that_cannot_be_sent_is_refused_with_what_to_write(url: str) -> None:
    with pytest.raises(InvalidConfigError, match=r"a URL is sent as ASCII without spaces, .*xn--"):
        bench_serving(ServingOptions(url=url), SMALL, byte_tokenizer())


@pytest.mark.parametrize("key", ["schlüssel", "key\n", "“key”"])
def test_a_key_that_cannot_be_sent_is_refused_and_not_shown(key: str) -> None:
    with pytest.raises(InvalidConfigError, match="api_key is sent in a header, as ASCII") as refused:
        bench_serving(ServingOptions(api_key=key), SMALL, byte_tokenizer())
    assert key not in str(refused.value)


# ---- against the project's own server --------------------------------------------------------------------------------


@pytest.mark.parametrize("fields", [{}, {"endpoint": "chat"}, {"max_concurrency": 1}, {"arrivals": "burst"}])
def test_every_token_of_the_server_is_counted(fields: dict[str, Any]) -> None:
    with serving() as server:
        options = ServingOptions(url=server.url, request_rate="200,inf", **fields)
        report = bench_serving(options, SMALL, byte_tokenizer(), repeats=2)
    assert [result["request_rate"] for result in report["results"]] == ["200.0", "inf"]
    for result in report["results"]:
        assert (result["num_requests"], result["num_failed"], result["num_short"]) == (8, 0, 0)
        assert 8 * 3 <= result["num_output_tokens"] <= 8 * 6
    assert report["header"]["model"] == "double"
    assert len(serving_table(report).rows) == 2


def test_no_run_meets_the_prompts_of_another_in_the_prefix_cache() -> None:
    long_prompts = WorkloadOptions(num_prompts=3, input_len="64", output_len="3")
    with serving(num_kv_blocks=200) as server:
        report = bench_serving(
            ServingOptions(url=server.url, request_rate="500,inf"), long_prompts, byte_tokenizer(), repeats=2
        )
    assert [result["num_cached_tokens"] for result in report["results"]] == [0, 0]


def test_with_a_limit_of_one_no_two_requests_are_open_at_once() -> None:
    with serving() as server:
        running: list[int] = []
        stats = type(server.engine).stats.fget
        assert stats is not None
        step = server.engine.step

        def watched() -> Any:
            outputs = step()
            running.append(stats(server.engine).num_running)
            return outputs

        server.engine.step = watched  # type: ignore[method-assign]
        bench_serving(ServingOptions(url=server.url, max_concurrency=1), SMALL, byte_tokenizer(), repeats=1)
        assert max(running) == 1
        running.clear()
        bench_serving(ServingOptions(url=server.url), SMALL, byte_tokenizer(), repeats=1)
        assert max(running) > 1


def test_plain_requests_hold_openais_own_fields_only() -> None:
    bodies: list[dict[str, Any]] = []
    good = stream({"choices": [{"text": "a"}]}, {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 3}})

    with answering(lambda body: bodies.append(json.loads(body)) or good) as url:
        options = ServingOptions(url=url, served_model="m", plain=True)
        report = bench_serving(options, WorkloadOptions(num_prompts=1, output_len="3"), byte_tokenizer(), repeats=1)
    assert set(bodies[0]) == {"model", "prompt", "max_tokens", "temperature", "stream", "stream_options"}
    assert report["results"][0]["num_output_tokens"] == 3  # the server's count, since it sends no ids


# ---- against servers that misbehave ----------------------------------------------------------------------------------


def stream(*chunks: dict[str, Any], done: bool = True) -> bytes:
    events = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks] + (["data: [DONE]\n\n"] if done else [])
    body = "".join(events).encode()
    return b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)


@contextmanager
def answering(answer: Callable[[bytes], bytes]) -> Iterator[str]:
    """A server that gives every request the same bytes and hangs up; its URL."""
    ready: list[int] = []
    loop = asyncio.new_event_loop()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        writer.write(answer(await reader.readexactly(length)))
        await writer.drain()
        writer.close()

    server = loop.run_until_complete(asyncio.start_server(handle, "127.0.0.1", 0))
    ready.append(server.sockets[0].getsockname()[1])
    thread = Thread(target=loop.run_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{ready[0]}"
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(30)
        server.close()
        loop.close()


TOKEN = {"choices": [{"text": "a", "token_ids": [97]}]}
USAGE = {"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": 1}}


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"HTTP/1.1 400 Bad\r\ncontent-length: 4\r\n\r\noops", "status 400: oops"),
        (stream(TOKEN, USAGE, done=False), r"the stream ended without \[DONE\]"),
        (stream(USAGE), "the answer had no tokens"),
        (stream(TOKEN), "the answer came without usage"),
        (stream({"error": {"message": "out of memory"}}), "out of memory"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 90\r\n\r\ndata: {}", "the connection broke"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 15\r\n\r\ndata: [1, 2\n\n\n\n", "an event that is none of OpenAI's"),
        (b"gibberish\r\n\r\n", "the connection broke"),
    ],
)
def test_an_answer_that_is_none_is_an_error_with_its_cause(answer: bytes, message: str) -> None:
    with answering(lambda _: answer) as url, pytest.raises(BenchmarkError, match=message):
        bench_serving(ServingOptions(url=url, served_model="m"), SMALL, byte_tokenizer(), repeats=1)


def test_a_failed_request_is_counted_and_its_error_shown() -> None:
    answers = iter([stream(TOKEN, USAGE), stream(TOKEN, USAGE), *[b"HTTP/1.1 500 X\r\ncontent-length: 0\r\n\r\n"] * 9])
    with answering(lambda _: next(answers)) as url:
        options = ServingOptions(url=url, served_model="m", max_concurrency=1)
        (result,) = bench_serving(options, SMALL, byte_tokenizer(), repeats=1)["results"]
    assert (result["num_requests"], result["num_failed"], result["first_error"]) == (4, 3, "status 500: ")


@pytest.mark.parametrize("served_model", [None, "m"])
def test_a_server_that_is_not_there_is_an_error_that_says_what_to_start(served_model: str | None) -> None:
    options = ServingOptions(url="http://127.0.0.1:9", served_model=served_model)
    with pytest.raises(
        BenchmarkError, match=r"no connection to 127.0.0.1:9 \(.*\); start the server \(mini-vllm serve"
    ):
        bench_serving(options, SMALL, byte_tokenizer())


@pytest.mark.parametrize("served_model", [None, "m"])
def test_a_server_that_is_loading_is_an_error_that_says_what_to_wait_for(served_model: str | None) -> None:
    go_on = Event()

    def load() -> LLMEngine:
        go_on.wait(30)
        return make_engine(ScriptedModel(alphabet))

    message = "status 503: the model is still loading; wait until /health answers 200, and try again"
    with serving(load=load, waits=False) as server:
        try:
            with pytest.raises(BenchmarkError, match=message):
                bench_serving(ServingOptions(url=server.url, served_model=served_model), SMALL, byte_tokenizer())
        finally:
            go_on.set()


def test_a_server_that_lists_no_model_wants_its_name() -> None:
    answer = b'HTTP/1.1 200 OK\r\ncontent-length: 12\r\n\r\n{"data": []}'
    with answering(lambda _: answer) as url, pytest.raises(BenchmarkError, match="lists no model; give its name with"):
        bench_serving(ServingOptions(url=url), SMALL, byte_tokenizer())


def test_a_url_may_have_a_path_and_v1_at_its_end() -> None:
    server = Server.at("https://example.org/api/v1/", "key")
    assert (server.host, server.port, server.is_secure, server.prefix) == ("example.org", 443, True, "/api")
    assert server.headers == {"Authorization": "Bearer key"}
    assert Server.at("http://localhost:8000/v1").prefix == ""


def test_something_else_than_json_is_a_failure() -> None:
    with answering(lambda _: b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi") as url, pytest.raises(HttpFailure):
        asyncio.run(get_json(Server.at(url), "/version"))


# ---- the command -----------------------------------------------------------------------------------------------------


def test_the_command_shows_a_table_and_writes_a_file(
    monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes], tmp_path: Path
) -> None:
    model, file = build_cli_model(tmp_path / "tiny"), tmp_path / "report.json"
    capfdbinary.readouterr()  # transformers shows how it writes the model
    with serving() as server:
        result = CommandLine(monkeypatch, capfdbinary)(
            *("bench", "serving", "--url", server.url, "--tokenizer", model, "--num-prompts", "3"),
            *("--input-len", "4", "--output-len", "3", "--repeats", "1", "--json", file),
        )
    assert (result.exit_code, result.stderr) == (0, "")
    assert "Serving" in result.stdout
    assert json.loads(file.read_text())["results"][0]["num_output_tokens"] == 9
