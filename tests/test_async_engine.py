"""AsyncLLMEngine: one engine thread, many asyncio readers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
import torch
from engine_doubles import ScriptedModel, make_engine, tiny_transformer

from mini_vllm.engine.async_engine import AsyncLLMEngine
from mini_vllm.engine.output_stream import OutputStream
from mini_vllm.errors import EngineDeadError, InvalidRequestError
from mini_vllm.outputs import FinishReason, RequestOutput
from mini_vllm.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=20)


def alphabet(token: int, position: int) -> dict[int, float]:
    return {97 + position % 26: 9.0}


class GatedModel(ScriptedModel):
    """Computes a step only when it is let through, so that tests decide what happens between two steps."""

    def __init__(self) -> None:
        super().__init__(alphabet)
        self.gate = threading.Semaphore(0)
        self.is_open = False

    def open(self) -> None:
        self.is_open = True
        self.gate.release()

    def __call__(self, *args: Any) -> torch.Tensor:
        if not self.is_open:
            self.gate.acquire()
        return super().__call__(*args)


@pytest.fixture
def started() -> Iterator[Callable[..., AsyncLLMEngine]]:
    """Makes engines and shuts them down again."""
    engines: list[AsyncLLMEngine] = []

    def start(model: Any, **options: Any) -> AsyncLLMEngine:
        engines.append(AsyncLLMEngine(make_engine(model, **options)))
        return engines[-1]

    yield start
    for engine in engines:
        engine.shutdown(timeout=20)


def test_streams_that_begin_to_wait_together_are_not_woken_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand heartbeats at one moment would hold everybody up."""
    waits: list[float] = []

    async def run_out_of_patience() -> None:
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(loop, "call_later", lambda wait, call: waits.append(wait) or loop.call_soon(call))
        streams = [OutputStream(loop, frozenset({"one"}), only_final=False) for _ in range(100)]
        assert await asyncio.gather(*(stream.take(10.0) for stream in streams)) == [[]] * 100

    asyncio.run(run_out_of_patience())
    assert len(set(waits)) > 90 and 5.0 <= min(waits) < 6.0 and 9.0 < max(waits) <= 10.0


async def collect(engine: AsyncLLMEngine, prompt: Any, params: SamplingParams = GREEDY) -> list[RequestOutput]:
    return [output async for output in engine.generate(prompt, params)]


async def until(condition: Callable[[], bool]) -> None:
    """Wait for something that another thread does; fails after 20 seconds."""
    for _ in range(4000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("waited for 20 seconds")


def idle(engine: AsyncLLMEngine) -> bool:
    stats = engine.stats
    return (stats.num_running, stats.num_waiting, stats.blocks.used) == (0, 0, 0)


def run(coroutine: Awaitable[Any]) -> Any:
    async def with_limit() -> Any:
        return await asyncio.wait_for(coroutine, 60)

    return asyncio.run(with_limit())


def test_many_readers_get_what_they_would_get_alone(started: Callable[..., AsyncLLMEngine]) -> None:
    model = tiny_transformer()
    prompts = [f"prompt number {i}" for i in range(12)]

    async def together() -> list[list[int]]:
        engine = started(model)
        all_outputs = await asyncio.gather(*(collect(engine, prompt) for prompt in prompts))
        await until(lambda: idle(engine))
        for outputs in all_outputs:
            joined = [token for output in outputs for token in output.token_ids]
            assert joined == outputs[-1].outputs[0].token_ids
            assert [output.finished for output in outputs].count(True) == 1
        return [outputs[-1].outputs[0].token_ids for outputs in all_outputs]

    async def alone() -> list[list[int]]:
        engine = started(model, scheduling="sequential", enable_prefix_caching=False)
        return [(await collect(engine, prompt))[-1].outputs[0].token_ids for prompt in prompts]

    assert run(together()) == run(alone())


def test_a_slow_reader_gets_merged_deltas_and_loses_nothing(started: Callable[..., AsyncLLMEngine]) -> None:
    async def scenario() -> None:
        engine = started(ScriptedModel(alphabet))
        params = SamplingParams(temperature=0, max_tokens=100, logprobs=1, n=2)
        slow = engine.generate("Hello", params)
        first = await anext(slow)
        fast = await collect(engine, "Hello", params)
        await until(lambda: idle(engine))  # the slow one is finished in the engine, and unread
        rest = [output async for output in slow]
        assert len(rest) == 1, "everything since the first output is one merged output"
        for index in range(2):
            deltas = [o.outputs[index].delta_text for o in (first, *rest) if len(o.outputs) > index]
            assert "".join(deltas) == fast[-1].outputs[index].text
            tokens = [t for o in (first, *rest) for t in o.outputs[index].delta_token_ids]
            assert tokens == fast[-1].outputs[index].token_ids
            logprobs = [e for o in (first, *rest) for e in o.outputs[index].delta_logprobs or []]
            assert logprobs == fast[-1].outputs[index].logprobs

    run(scenario())


@pytest.mark.parametrize("how", ["break", "cancel"])
def test_leaving_the_loop_ends_the_request_in_the_engine(started: Callable[..., AsyncLLMEngine], how: str) -> None:
    async def scenario() -> None:
        model = GatedModel()
        engine = started(model)
        arrived = asyncio.Event()

        async def read_one() -> None:
            stream = engine.generate("Hello", SamplingParams(temperature=0, max_tokens=200))
            async for _ in stream:
                arrived.set()
                if how == "break":
                    break
            await stream.aclose()

        task = asyncio.create_task(read_one())
        await until(lambda: engine.seconds_in_step > 0)
        model.gate.release()
        await arrived.wait()
        if how == "cancel":
            task.cancel()
        await asyncio.wait([task])
        model.open()
        await until(lambda: idle(engine))
        assert model.num_computed_tokens < 5 + 10

    run(scenario())


def test_a_request_that_is_cancelled_while_it_waits_leaves_nothing(started: Callable[..., AsyncLLMEngine]) -> None:
    async def scenario() -> None:
        model = GatedModel()
        engine = started(model, max_num_seqs=1)
        first = asyncio.create_task(collect(engine, "first", SamplingParams(temperature=0, max_tokens=200)))
        await until(lambda: engine.seconds_in_step > 0)
        second = asyncio.create_task(collect(engine, "second"))

        def second_waits() -> bool:
            model.gate.release()  # one more step, in which the second request may arrive
            return engine.engine.scheduler.num_waiting == 1

        await until(second_waits)
        second.cancel()
        await asyncio.wait([second])
        model.open()
        assert (await first)[-1].outputs[0].finish_reason is FinishReason.LENGTH
        await until(lambda: idle(engine))

    run(scenario())


def test_a_bad_request_is_refused_and_the_engine_goes_on(started: Callable[..., AsyncLLMEngine]) -> None:
    async def scenario() -> None:
        engine = started(ScriptedModel(alphabet))
        with pytest.raises(InvalidRequestError):
            await collect(engine, "")
        assert (await collect(engine, "Hello"))[-1].finished

    run(scenario())


def test_the_death_of_the_engine_reaches_every_waiter_and_every_later_call(
    started: Callable[..., AsyncLLMEngine],
) -> None:
    async def scenario() -> None:
        model = GatedModel()
        engine = started(model, max_num_seqs=1)

        def broken(*args: Any) -> None:
            raise RuntimeError("the scheduler broke")

        tasks = [asyncio.create_task(collect(engine, "Hello")) for _ in range(4)]
        await until(lambda: engine.seconds_in_step > 0)
        engine.engine.scheduler.commit = broken  # type: ignore[method-assign]
        model.open()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, EngineDeadError) for result in results)
        assert "the scheduler broke" in str(results[0])
        with pytest.raises(EngineDeadError, match="the scheduler broke"):
            await collect(engine, "Hello")
        with pytest.raises(EngineDeadError):
            engine.check_health()

    run(scenario())


def test_after_shutdown_every_call_is_refused(started: Callable[..., AsyncLLMEngine]) -> None:
    async def scenario() -> None:
        engine = started(ScriptedModel(alphabet))
        request = await engine.make_request("Hello", GREEDY)
        engine.shutdown()
        with pytest.raises(EngineDeadError, match="shut down"):
            await engine.make_request("Hello", GREEDY)
        with pytest.raises(EngineDeadError, match="shut down"):
            await anext(engine.run([request]))
        with pytest.raises(EngineDeadError, match="shut down"):
            await collect(engine, "Hello")

    run(scenario())


def test_shutdown_tells_those_who_still_wait(started: Callable[..., AsyncLLMEngine]) -> None:
    async def scenario() -> None:
        model = GatedModel()
        engine = started(model)
        waiting = asyncio.create_task(collect(engine, "Hello"))
        await until(lambda: engine.seconds_in_step > 0)
        stopping = asyncio.get_running_loop().run_in_executor(None, engine.shutdown)
        model.open()
        await stopping
        with pytest.raises(EngineDeadError, match="shut down"):
            await waiting

    run(scenario())
