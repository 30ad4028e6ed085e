"""A server under a random mixture of requests, for as long as one likes; then everything must add up.

    python tests/soak/soak.py --seconds 600 --seed 1

A tiny random model in a tiny pool, so that sequences are preempted all the time; the engine checks its invariants at
each step. The clients stream or not, leave at random times, read slowly, and send nonsense (`traffic.py`). At the end:

- every answer had a right status and a whole body, and texts that were known beforehand came out as they were known;
- nothing runs or waits, no block is in use, and a fresh request is answered as at the beginning;
- the counters of /metrics add up, and agree with what the clients saw;
- as many sequences as the server has room for are let in: no place was lost;
- memory, threads and open files are what they were after the warm-up.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import os
import random
import re
import socket
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).parents[1]))  # when it runs as a program

from cli_helpers import build_cli_model
from server_process import server_process
from soak_checks import check_counters, check_exact_counters, check_text_answer, samples
from traffic import COMPLETIONS, CONTEXT, TEXT_PATHS, Plan, Traffic

MAX_NUM_SEQS, MAX_QUEUE_SIZE = 12, 36
ROOM = MAX_NUM_SEQS + MAX_QUEUE_SIZE
NUM_CLIENTS = 24
WARM_UP = 0.3  # of the time
MAX_GROWTH = 0.02  # of resident memory, after the warm-up
# Some things are opened once, at a first use that may come late, and caches take ten thousand requests to fill. A short
# run can only find what grows with each of its few thousand requests.
SHORT, SHORT_MAX_GROWTH, SHORT_ROOM = 300.0, 0.05, 8  # seconds; of resident memory; threads and open files
ANSWER_LIMIT = 300.0  # seconds that any request may take; generous, as the machine may be busy
POLITE_REQUESTS = 60  # of the last phase, whose counters are compared exactly


@dataclass
class Seen:
    """What the clients saw."""

    statuses: Counter[int] = field(default_factory=Counter)
    finished: Counter[str] = field(default_factory=Counter)  # engine's requests by the reason that counts
    num_left: int = 0  # engine's requests whose client went away
    num_requests: int = 0
    num_unanswered: int = 0  # of these the client left before it knew their status
    prompt_tokens: int = 0
    completion_tokens: int = 0
    choices_with_tokens: int = 0
    problems: list[str] = field(default_factory=list)


@dataclass
class Report:
    """What a run came to."""

    seconds: float
    seed: int
    seen: Seen
    metrics: dict[str, float]
    rss: list[tuple[float, float]]  # seconds since the start, MiB
    growth: float
    problems: list[str]

    def __str__(self) -> str:
        counted = self.metrics
        by_reason = {
            reason: int(counted[f'request_success_total{{finished_reason="{reason}"}}'])
            for reason in ("stop", "length", "abort", "error")
        }
        return "\n".join(
            [
                f"soak: {self.seconds:.0f} s, seed {self.seed}, {NUM_CLIENTS} clients, "
                f"{self.seen.num_requests} requests",
                f"  statuses      {dict(sorted(self.seen.statuses.items()))}; {self.seen.num_left} prompts left behind",
                f"  finished      {by_reason}",
                f"  tokens        {counted['prompt_tokens_total']:.0f} + {counted['generation_tokens_total']:.0f}",
                f"  preemptions   {counted['num_preemptions_total']:.0f}",
                f"  memory        {self.rss[0][1]:.1f} MiB at first, {self.rss[-1][1]:.1f} MiB at the end; "
                f"{self.growth:+.2%} after the warm-up",
                f"                {' '.join(f'{size:.0f}' for _, size in self.rss[:: max(1, len(self.rss) // 20)])}",
                *(f"  PROBLEM       {problem}" for problem in self.problems),
            ]
        )


def run_soak(seconds: float, seed: int) -> Report:
    """One run. `problems` of the report is empty if all is well."""
    with tempfile.TemporaryDirectory() as folder:
        model = build_cli_model(Path(folder) / "tiny")
        with server_process(model, OPTIONS) as (pid, url):
            return asyncio.run(Soak(pid, url, seconds, seed).run())


OPTIONS = {
    "dtype": "float32",
    "max-model-len": CONTEXT,
    "num-kv-blocks": 80,
    "block-size": 8,
    "max-num-seqs": MAX_NUM_SEQS,
    "max-num-batched-tokens": 64,
    "max-queue-size": MAX_QUEUE_SIZE,
    "max-body-size": 200_000,
    "heartbeat": 0.2,
    "shutdown-timeout": 5,
}


class Soak:
    """One run against a server."""

    def __init__(self, pid: int, url: str, seconds: float, seed: int) -> None:
        self._pid = pid
        self._url = url
        self._seconds = seconds
        self._seed = seed
        self._seen = Seen()
        self._known: list[tuple[dict[str, Any], str]] = []

    async def run(self) -> Report:
        # A small window for what has not been read, so that a slow reader really holds the server up.
        transport = httpx.AsyncHTTPTransport(
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
            socket_options=[(socket.SOL_SOCKET, socket.SO_RCVBUF, 16_384)],
        )
        problems, seen = self._seen.problems, self._seen
        async with httpx.AsyncClient(base_url=self._url, transport=transport, timeout=ANSWER_LIMIT) as self._http:
            await self._metrics()  # the first answers open what stays open
            self._known = await self._known_answers()
            before, sockets = await self._metrics(), num_sockets(self._pid)
            rss, threads, pipes = await self._under_load()
            await self._until_quiet()
            metrics = await self._metrics()
            problems += check_counters(before, metrics, seen)
            problems += await self._polite_phase()
            problems += await self._every_place_is_there()
            await self._until_quiet()
        gc.collect()  # connections that the HTTP client has lost sight of, where it was interrupted
        await self._until_closed(sockets)
        growth = memory_growth(rss, self._seconds)
        problems += self._left_in_the_process(sockets, threads, pipes, growth)
        return Report(self._seconds, self._seed, seen, metrics, rss, growth, problems)

    async def _under_load(self) -> tuple[list[tuple[float, float]], int, int]:
        """Resident memory over time; and of the warm-up the most threads, and open files that are no sockets."""
        rss: list[tuple[float, float]] = []
        threads = pipes = 0  # libraries open some of both at their first use
        start = time.monotonic()
        end = start + self._seconds
        clients = [asyncio.create_task(self._client(number, end)) for number in range(NUM_CLIENTS)]
        while time.monotonic() < end:
            await asyncio.sleep(min(1.0, self._seconds / 40))
            rss.append((time.monotonic() - start, resident_mib(self._pid)))
            if rss[-1][0] < WARM_UP * self._seconds:
                threads = max(threads, num_threads(self._pid))
                pipes = max(pipes, num_files_that_are_no_sockets(self._pid))
        await asyncio.gather(*clients)
        return rss, threads, pipes

    def _left_in_the_process(self, sockets: int, threads: int, pipes: int, growth: float) -> list[str]:
        """What the server has more of than at the start, or than after the warm-up."""
        problems = []
        is_short = self._seconds < SHORT
        room = SHORT_ROOM if is_short else 0
        if num_sockets(self._pid) > sockets:
            problems.append(f"{num_sockets(self._pid)} open sockets, {sockets} at the start")
        if num_files_that_are_no_sockets(self._pid) > pipes + room:
            problems.append(f"open files: {open_files(self._pid)}, {pipes} of them after the warm-up")
        if num_threads(self._pid) > threads + room:
            problems.append(f"{num_threads(self._pid)} threads, {threads} after the warm-up")
        if growth > (SHORT_MAX_GROWTH if is_short else MAX_GROWTH):
            problems.append(f"memory has grown by {growth:.1%} after the warm-up")
        return problems

    # ---- clients ----------------------------------------------------------------------------------------------

    async def _client(self, number: int, end: float) -> None:
        traffic, draw = Traffic(self._seed, number), random.Random(f"{self._seed}/{number}/known")
        while time.monotonic() < end:
            if draw.random() < 0.1:
                await self._ask_known(*draw.choice(self._known))
            else:
                await self._send(traffic.next(), self._seen)

    async def _send(self, plan: Plan, seen: Seen) -> None:
        """Send one request as its client does, and check what comes back."""
        seen.num_requests += 1
        seen.num_unanswered += 1
        try:
            left = await asyncio.wait_for(self._exchange(plan, seen), ANSWER_LIMIT)
        except Exception as error:
            seen.problems.append(f"{plan.path} {str(plan.body)[:200]}: {type(error).__name__}: {error}")
            return
        if left:
            seen.num_left += plan.num_prompts

    async def _exchange(self, plan: Plan, seen: Seen) -> bool:
        """True if the client left before the end."""
        if plan.leaves_after is not None and not isinstance(plan.leaves_after, int):
            try:
                await asyncio.wait_for(self._read(plan, seen), plan.leaves_after)
            except asyncio.TimeoutError:
                return True
            return False
        return await self._read(plan, seen)

    async def _read(self, plan: Plan, seen: Seen) -> bool:
        async with self._http.stream(**self._arguments(plan)) as response:
            seen.statuses[response.status_code] += 1
            seen.num_unanswered -= 1
            expected = plan.expected | ({429} if plan.path in TEXT_PATHS else set())  # a full server looks no further
            if response.status_code not in expected:
                text = (await response.aread()).decode("utf-8", "replace")
                raise AssertionError(f"status {response.status_code}: {text[:300]}")
            lines: list[str] = []
            async for line in lines_of(response.aiter_text()):
                lines.append(line)
                if isinstance(plan.leaves_after, int) and len(lines) // 2 >= plan.leaves_after:
                    return True
                if plan.pause and len(lines) % 8 == 0:
                    await asyncio.sleep(plan.pause)
        if response.status_code == 429:
            assert int(response.headers["retry-after"]) >= 1
        elif response.status_code == 200 and plan.num_prompts:
            check_text_answer(plan, lines, seen)
        elif response.status_code >= 400:
            assert json.loads("\n".join(lines))["error"]["message"]
        return False

    @staticmethod
    def _arguments(plan: Plan) -> dict[str, Any]:
        if plan.body is None:
            return {"method": "GET", "url": plan.path}
        content = {"content": plan.body} if isinstance(plan.body, bytes) else {"json": plan.body}
        return {"method": "POST", "url": plan.path, "headers": plan.headers, **content}

    # ---- texts that are known ---------------------------------------------------------------------------------

    async def _known_answers(self) -> list[tuple[dict[str, Any], str]]:
        """Greedy answers, made alone, of prompts where no two tokens are nearly as likely."""
        known = []
        for number in range(60):
            body = {"prompt": f"{number}: what is known", "max_tokens": 24, "temperature": 0, "ignore_eos": True}
            answer = (await self._http.post(COMPLETIONS, json={**body, "logprobs": 2})).json()["choices"][0]
            best_two = [sorted(one.values()) for one in answer["logprobs"]["top_logprobs"]]
            if all(len(two) == 2 and two[1] - two[0] > 1e-3 for two in best_two):
                known.append((body, answer["text"]))
        assert len(known) >= 5, "this model has too many near ties"
        return known

    async def _ask_known(self, body: dict[str, Any], text: str) -> None:
        self._seen.num_requests += 1
        response = await self._http.post(COMPLETIONS, json=body)
        self._seen.statuses[response.status_code] += 1
        if response.status_code == 200:
            self._seen.finished["length"] += 1
            if response.json()["choices"][0]["text"] != text:
                self._seen.problems.append(f"{body['prompt']!r} had another answer than when it was alone")
        elif response.status_code != 429:
            self._seen.problems.append(f"{body['prompt']!r}: status {response.status_code}")

    # ---- the end ----------------------------------------------------------------------------------------------

    async def _metrics(self) -> dict[str, float]:
        return samples((await self._http.get("/metrics")).text)

    async def _until_quiet(self) -> None:
        """Nothing runs or waits, no block is in use, and a known text comes out."""
        end = time.monotonic() + 10
        while True:
            now = await self._metrics()
            if not (now["num_requests_running"] or now["num_requests_waiting"] or now["kv_cache_usage_perc"]):
                break
            assert time.monotonic() < end, f"not quiet after 10 s: {now}"
            await asyncio.sleep(0.02)
        await self._ask_known(*self._known[0])

    async def _until_closed(self, sockets: int) -> None:
        """A connection is closed a moment after its client has gone."""
        for _ in range(100):
            if num_sockets(self._pid) <= sockets:
                return
            await asyncio.sleep(0.05)

    async def _polite_phase(self) -> list[str]:
        """Requests that are all read to their end; now the counters are known exactly."""
        before, seen = await self._metrics(), Seen()
        traffic = Traffic(self._seed, NUM_CLIENTS)
        plans = [traffic.next(polite=True) for _ in range(POLITE_REQUESTS)]
        for first in range(0, len(plans), 5):
            await asyncio.gather(*(self._send(plan, seen) for plan in plans[first : first + 5]))
        await self._until_quiet_gauges()
        return seen.problems + check_exact_counters(before, await self._metrics(), seen)

    async def _until_quiet_gauges(self) -> None:
        while (await self._metrics())["num_requests_running"]:
            await asyncio.sleep(0.02)

    async def _every_place_is_there(self) -> list[str]:
        """So many requests as there is room for, at once: a place that was lost would be missing now."""
        body = {"prompt": "x", "max_tokens": 120, "ignore_eos": True}
        answers = await asyncio.gather(*(self._http.post(COMPLETIONS, json=body) for _ in range(ROOM)))
        refused = sum(answer.status_code != 200 for answer in answers)
        return [f"{refused} of {ROOM} requests were refused by an idle server"] if refused else []


async def lines_of(pieces: AsyncIterator[str]) -> AsyncIterator[str]:
    """Lines as JSON and event streams have them, which end at a line feed only.

    `aiter_lines` of httpx also breaks at U+0085, U+2028 and others, which may stand within a string of JSON.
    """
    rest = ""
    async for piece in pieces:
        *lines, rest = (rest + piece).split("\n")
        for line in lines:
            yield line
    if rest:
        yield rest


# ---- the process --------------------------------------------------------------------------------------------------


def _status(pid: int, name: str) -> int:
    match = re.search(rf"^{name}:\s+(\d+)", Path(f"/proc/{pid}/status").read_text(), re.M)
    assert match is not None
    return int(match.group(1))


def resident_mib(pid: int) -> float:
    return _status(pid, "VmRSS") / 1024


def num_threads(pid: int) -> int:
    return _status(pid, "Threads")


def open_files(pid: int) -> list[str]:
    """What the file descriptors stand for, but for those that are closed while we look."""
    names = []
    for number in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            names.append(os.readlink(f"/proc/{pid}/fd/{number}").split("[")[0])
    return sorted(names)


def num_sockets(pid: int) -> int:
    return open_files(pid).count("socket:")


def num_files_that_are_no_sockets(pid: int) -> int:
    return len(open_files(pid)) - num_sockets(pid)


def memory_growth(rss: list[tuple[float, float]], seconds: float) -> float:
    """From the quarter after the warm-up to the last quarter of the time, by medians."""
    early = [size for at, size in rss if WARM_UP * seconds <= at < (WARM_UP + 0.2) * seconds]
    late = [size for at, size in rss if at >= 0.8 * seconds]
    return statistics.median(late) / statistics.median(early) - 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    report = run_soak(arguments.seconds, arguments.seed)
    print(report)
    sys.exit(1 if report.problems else 0)
