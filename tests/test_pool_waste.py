"""What blocks buy, and that a month of requests leaves nothing behind."""

from __future__ import annotations

import gc
import random
from typing import Any

from engine_doubles import ScriptedModel, assert_quiet, make_engine, run_to_end

MAX_MODEL_LEN = 1024


def alphabet(token: int, position: int) -> dict[int, float]:
    return {97 + position % 26: 9.0}


def waste_of(**options: Any) -> float:
    """The share of allocated token slots that hold nothing, over 200 requests with lengths as in chat logs."""
    draw = random.Random(5)
    engine = make_engine(
        ScriptedModel(alphabet), parts={"max_model_len": MAX_MODEL_LEN}, debug_checks=False, max_num_seqs=32, **options
    )
    for _ in range(200):
        prompt_len = min(600, max(8, round(draw.lognormvariate(5.0, 0.8))))
        answer_len = min(400, max(4, round(draw.lognormvariate(5.0, 0.7))))
        engine.add_request([1 + prompt_len % 200] * prompt_len, max_tokens=answer_len, temperature=0, ignore_eos=True)
    wasted = held = 0
    while engine.has_unfinished_requests():
        engine.step()
        stats = engine.stats
        wasted += stats.num_wasted_slots
        held += stats.blocks.used * engine.scheduler.block_manager.block_size
    assert_quiet(engine)
    return wasted / held


def test_paged_memory_wastes_under_4_percent_where_contiguous_slots_waste_most_of_theirs() -> None:
    paged = waste_of(block_size=16, num_kv_blocks=2048, enable_prefix_caching=False)
    contiguous = waste_of(cache="contiguous", num_kv_blocks=32)
    assert paged < 0.04, paged
    assert contiguous > 0.6, contiguous


def test_a_thousand_requests_of_all_kinds_leave_no_container_larger() -> None:
    engine = make_engine(ScriptedModel(alphabet), block_size=4, num_kv_blocks=64, debug_checks=False)

    def some_requests(first: int, count: int) -> None:
        draw = random.Random(first)
        for i in range(first, first + count):
            prompt = [draw.randrange(256) for _ in range(draw.randrange(1, 40))]
            engine.add_request(prompt, max_tokens=draw.randrange(1, 9), n=1 + i % 3, logprobs=1, cache_salt=f"salt {i}")
            doomed = engine.add_request("waits, and is aborted")
            engine.step()
            engine.abort_request(doomed)
        run_to_end(engine)

    def containers() -> int:
        gc.collect()
        return sum(len(thing) for thing in gc.get_objects() if type(thing) in (dict, list, set))

    some_requests(0, 300)  # fills the pool, so that the prefix cache is as large as it gets
    before = containers()
    some_requests(1000, 1000)
    assert_quiet(engine)
    assert containers() - before < 1000, "less than one entry a request"
