"""The life of a request in the engine: what is refused, aborted, failed, and that nothing is left behind."""

from __future__ import annotations

import json
import logging
import os
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_doubles import (
    EOS,
    ScriptedModel,
    assert_quiet,
    byte_tokenizer,
    make_engine,
    parts_for,
    run_to_end,
    says,
    tiny_transformer,
)

from mini_vllm.config import EngineConfig
from mini_vllm.engine.llm import LLM
from mini_vllm.engine.llm_engine import LLMEngine
from mini_vllm.engine.sequence import Sequence
from mini_vllm.errors import EngineDeadError, InvalidConfigError, InvalidRequestError
from mini_vllm.outputs import FinishReason, RequestOutput
from mini_vllm.sampling_params import SamplingParams
from mini_vllm.worker.memory import plan_pool


def echo_engine(**options: Any) -> LLMEngine:
    """Answers with the alphabet, at any position."""
    return make_engine(ScriptedModel(lambda token, position: {97 + position % 26: 9.0}), **options)


def final_text(engine: LLMEngine, prompt: Any = "Hello", **params: Any) -> str:
    request_id = engine.add_request(prompt, **{"max_tokens": 5, "temperature": 0, **params})
    return run_to_end(engine)[request_id][-1].outputs[0].text


REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    ("", {}, "prompt"),
    ([], {}, "prompt"),
    ([259], {}, "prompt"),
    ([-1], {}, "prompt"),
    ([1, -1], {}, "prompt"),
    ([1.5], {}, "prompt"),
    ([2**63], {}, "prompt"),
    ([True], {}, "prompt"),
    ([1.0], {}, "prompt"),
    ([[1], [2]], {}, "prompt"),
    (np.array([1.0]), {}, "prompt"),
    (np.array(5), {}, "prompt"),
    (np.array([True]), {}, "prompt"),
    (None, {}, "prompt"),
    (b"abc", {}, "prompt"),
    ([{"role": "user", "content": 5}], {}, "messages[0].content"),
    ({}, {}, "prompt"),
    ({"text": "Hello"}, {}, "prompt"),
    ({"prompt": "Hello", "prompt_token_ids": [1]}, {}, "prompt"),
    ({"prompt": [1]}, {}, "prompt"),
    ({"prompt_token_ids": "Hello"}, {}, "prompt_token_ids"),
    ({"prompt_token_ids": [{"role": "user", "content": "Hello"}]}, {}, "prompt_token_ids"),
    ({"prompt_token_ids": [1.5]}, {}, "prompt"),
    ({"prompt_token_ids": []}, {}, "prompt"),
    ([1] * 257, {}, "prompt"),
    ([1] * 256, {}, "prompt"),
    ([1] * 256, {"max_tokens": 1}, "prompt"),
    ("Hello", {"max_tokens": 252}, "max_tokens"),
    ("Hello", {"max_tokens": -1}, "max_tokens"),
    ("Hello", {"max_tokens": 0}, "max_tokens"),
    ("Hello", {"min_tokens": 6, "max_tokens": 5}, "min_tokens"),
    ("Hello", {"min_tokens": 17}, "min_tokens"),
    ("Hello", {"n": 65}, "n"),
    ("Hello", {"temperature": -1}, "temperature"),
    ("Hello", {"logit_bias": {259: 1}}, "logit_bias"),
    ("Hello", {"allowed_token_ids": [259]}, "allowed_token_ids"),
    ("Hello", {"stop_token_ids": [-1]}, "stop_token_ids"),
    ("Hello", {"cache_salt": ""}, "cache_salt"),
    ("Hello", {"cache_salt": 5}, "cache_salt"),
    ("Hello", {"priority": "high"}, "priority"),
    ("Hello", {"no_such_field": 1}, "no_such_field"),
]


@pytest.mark.parametrize(("prompt", "params", "field"), REFUSED, ids=lambda value: str(value)[:30])
def test_a_bad_request_is_refused_with_its_field_and_never_harms_the_engine(
    prompt: Any, params: dict[str, Any], field: str
) -> None:
    engine = echo_engine()
    before = final_text(engine)
    with pytest.raises(InvalidRequestError) as error:
        engine.add_request(prompt, **params)
    assert error.value.param == field
    assert_quiet(engine)
    assert final_text(engine) == before


def test_the_message_names_the_numbers() -> None:
    with pytest.raises(InvalidRequestError, match=r"max_tokens=300 .* 5 tokens .* 256 tokens; ask for at most 251"):
        echo_engine().add_request("Hello", max_tokens=300)
    with pytest.raises(InvalidRequestError, match=r"257 tokens.* holds 256"):
        echo_engine().add_request([1] * 257)


def test_a_tokenizer_id_outside_the_embedding_is_refused() -> None:
    engine = echo_engine(parts={"vocab_size": 100})
    with pytest.raises(InvalidRequestError, match="token id 122"):
        engine.add_request("z")


def test_max_tokens_defaults_to_16_for_completions_and_to_the_rest_of_the_context_for_chat() -> None:
    engine = echo_engine()
    completion = engine.add_request("Hello", temperature=0)
    nearly_full = engine.add_request([1] * 255, temperature=0)
    chat = engine.add_request([{"role": "user", "content": "Hi"}], temperature=0)
    outputs = run_to_end(engine)
    counts = {request_id: len(outputs[request_id][-1].outputs[0].token_ids) for request_id in outputs}
    assert counts == {completion: 16, nearly_full: 1, chat: 256 - len("<user>Hi\n<assistant>")}


def test_chat_goes_through_the_template_and_nothing_is_added() -> None:
    engine = echo_engine()
    request_id = engine.add_request([{"role": "user", "content": "Hi"}], max_tokens=1)
    assert bytes(run_to_end(engine)[request_id][-1].prompt_token_ids).decode() == "<user>Hi\n<assistant>"


def test_a_model_without_a_chat_template_refuses_messages_and_still_completes() -> None:
    engine = echo_engine(parts={"tokenizer": byte_tokenizer(chat_template=None)})
    with pytest.raises(InvalidRequestError, match="--chat-template"):
        engine.add_request([{"role": "user", "content": "Hi"}])
    assert final_text(engine)


def test_generation_defaults_count_where_the_request_is_silent() -> None:
    script = lambda token, position: {97: 1.0, 98: 0.9, 99: 0.8}  # noqa: E731
    engine = make_engine(ScriptedModel(script), parts={"generation_defaults": {"top_k": 1}})
    silent = {engine.add_request("x", seed=seed, max_tokens=1): seed for seed in range(20)}
    outputs = run_to_end(engine)
    assert {outputs[i][-1].outputs[0].text for i in silent} == {"a"}
    explicit = [engine.add_request("x", seed=seed, max_tokens=1, top_k=0) for seed in range(20)]
    outputs = run_to_end(engine)
    assert {outputs[i][-1].outputs[0].text for i in explicit} == {"a", "b", "c"}


def test_a_default_max_tokens_is_cut_to_the_room_and_an_explicit_one_is_refused() -> None:
    engine = echo_engine(parts={"generation_defaults": {"max_tokens": 200}})
    ids = [engine.add_request([1] * length, temperature=0) for length in (10, 250)]
    outputs = run_to_end(engine)
    assert [len(outputs[i][-1].outputs[0].token_ids) for i in ids] == [200, 6]
    with pytest.raises(InvalidRequestError, match="at most 6"):
        engine.add_request([1] * 250, max_tokens=200)


# ---- abort --------------------------------------------------------------------------------------------------------


def test_abort_while_waiting_running_prefilling_preempted_finished_and_unknown() -> None:
    engine = echo_engine(max_num_seqs=2, max_num_batched_tokens=8, block_size=4, num_kv_blocks=30)
    running = engine.add_request("abc", max_tokens=50)
    prefilling = engine.add_request("p" * 40, max_tokens=50)
    waiting = engine.add_request("www", max_tokens=50)
    for _ in range(3):
        engine.step()
    for request_id in (waiting, prefilling, running):
        engine.abort_request(request_id)
        assert not engine.is_finished(request_id)  # its final output is still to be taken
    assert engine.stats.blocks.used == 0
    finals = engine.step()
    assert {o.request_id: o.outputs[0].finish_reason for o in finals} == dict.fromkeys(
        (running, prefilling, waiting), FinishReason.ABORT
    )
    assert all(output.finished for output in finals)
    assert engine.is_finished(running)
    engine.abort_request(running)
    engine.abort_request("never heard of")
    assert engine.step() == []
    assert_quiet(engine)


def test_abort_of_a_preempted_request() -> None:
    engine = echo_engine(block_size=1, num_kv_blocks=30, enable_prefix_caching=False)
    ids = [engine.add_request("abcdefgh", max_tokens=20) for _ in range(2)]
    while engine.scheduler.num_running != 1 or engine.scheduler.num_waiting != 1:
        engine.step()
    engine.abort_request(ids[1])
    outputs = run_to_end(engine)
    assert outputs[ids[1]][-1].outputs[0].finish_reason is FinishReason.ABORT
    assert len(outputs[ids[0]][-1].outputs[0].token_ids) == 20
    assert_quiet(engine)


def test_abort_before_the_fork_ends_all_n() -> None:
    engine = echo_engine(max_num_batched_tokens=4)
    request_id = engine.add_request("a long prompt", n=3)
    engine.step()
    engine.abort_request(request_id)
    final = engine.step()[-1]
    assert [choice.finish_reason for choice in final.outputs] == [FinishReason.ABORT] * 3
    assert_quiet(engine)


def test_a_request_id_can_be_used_again_and_not_twice_at_once() -> None:
    engine = echo_engine()
    engine.add_request("a", request_id="mine")
    with pytest.raises(InvalidRequestError, match="mine"):
        engine.add_request("b", request_id="mine")
    run_to_end(engine)
    assert engine.add_request("b", request_id="mine") == "mine"
    run_to_end(engine)
    assert_quiet(engine)


# ---- failures -----------------------------------------------------------------------------------------------------


def test_nan_logits_fail_that_request_alone() -> None:
    def script(token: int, position: int) -> Any:
        return torch.full((259,), torch.nan) if token == ord("!") else {97 + position % 26: 9.0}

    engine = make_engine(ScriptedModel(script))
    expected = final_text(engine, "good")
    bad = engine.add_request("bad!", max_tokens=5, temperature=0, n=2)
    good = engine.add_request("good", max_tokens=5, temperature=0)
    outputs = run_to_end(engine)
    assert [choice.finish_reason for choice in outputs[bad][-1].outputs] == [FinishReason.ERROR] * 2
    assert "NaN" in (outputs[bad][-1].error or "")
    assert outputs[good][-1].outputs[0].text == expected
    assert_quiet(engine)


@pytest.mark.parametrize("max_tokens", [0, 3])
def test_prompt_logprobs_that_are_no_numbers_fail_that_request_alone(max_tokens: int) -> None:
    def script(token: int, position: int) -> Any:
        return torch.full((259,), torch.nan) if token == ord("!") else {97 + position % 26: 9.0}

    engine = make_engine(ScriptedModel(script))
    bad = engine.add_request("b!d", max_tokens=max_tokens, temperature=0, prompt_logprobs=1, n=2)
    good = engine.add_request("good", max_tokens=max_tokens, temperature=0, prompt_logprobs=1)
    outputs = run_to_end(engine)
    assert [choice.finish_reason for choice in outputs[bad][-1].outputs] == [FinishReason.ERROR] * 2
    assert outputs[bad][-1].prompt_logprobs == [None]
    assert outputs[good][-1].outputs[0].finish_reason is FinishReason.LENGTH
    assert_quiet(engine)


class FailingModel(ScriptedModel):
    """Raises when it meets the token '!'."""

    def __call__(self, input_ids: torch.Tensor, *args: Any) -> torch.Tensor:
        if (input_ids == ord("!")).any():
            raise RuntimeError("out of memory, say")
        return super().__call__(input_ids, *args)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("budget", [4, 64])
def test_a_step_that_raises_ends_only_the_request_that_fails_alone(
    n: int, budget: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    engine = make_engine(FailingModel(lambda token, position: {97 + position % 26: 9.0}), max_num_batched_tokens=budget)
    expected = final_text(engine, "good", prompt_logprobs=1)
    good = engine.add_request("good", max_tokens=5, temperature=0, prompt_logprobs=1)
    bad = engine.add_request("b! and more text", max_tokens=5, temperature=0, n=n)
    outputs = run_to_end(engine)
    assert [choice.finish_reason for choice in outputs[bad][-1].outputs] == [FinishReason.ERROR] * n
    assert "out of memory, say" in (outputs[bad][-1].error or "")
    assert outputs[good][-1].outputs[0].text == expected
    assert_quiet(engine)
    assert final_text(engine, "good") == expected


def test_an_interrupted_step_leaves_the_engine_usable() -> None:
    class Interrupted(ScriptedModel):
        interrupt = False

        def __call__(self, *args: Any) -> torch.Tensor:
            if self.interrupt:
                self.interrupt = False
                raise KeyboardInterrupt
            return super().__call__(*args)

    model = Interrupted(lambda token, position: {97 + position % 26: 9.0})
    engine = make_engine(model, block_size=2)
    request_id = engine.add_request("Hello", max_tokens=9, temperature=0, n=2)
    engine.step()
    model.interrupt = True
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    final = run_to_end(engine)[request_id][-1]
    assert [choice.text for choice in final.outputs] == ["efghijklm"] * 2
    assert_quiet(engine)


# ---- n ------------------------------------------------------------------------------------------------------------


def test_n_samples_have_streams_of_their_own_and_come_out_again_with_the_seed() -> None:
    engine = make_engine(tiny_transformer())
    ids = [engine.add_request("Hello", n=4, seed=7, temperature=1, max_tokens=8) for _ in range(2)]
    unseeded = [engine.add_request("Hello", temperature=1, max_tokens=8) for _ in range(2)]
    outputs = run_to_end(engine)
    first, second = ([choice.token_ids for choice in outputs[i][-1].outputs] for i in ids)
    assert first == second and len({tuple(tokens) for tokens in first}) == 4
    a, b = (outputs[i][-1].outputs[0].token_ids for i in unseeded)
    assert a != b


def test_each_of_n_stops_by_itself() -> None:
    def script(token: int, position: int) -> dict[int, float]:
        return {97: 1.0, EOS: 0.0}

    engine = make_engine(ScriptedModel(script))
    request_id = engine.add_request("x", n=3, seed=11, temperature=1, max_tokens=30)
    outputs = run_to_end(engine)[request_id]
    lengths = [len(choice.token_ids) for choice in outputs[-1].outputs]
    assert len(set(lengths)) > 1
    for index in range(3):
        deltas = [t for o in outputs for c in o.outputs if c.index == index for t in c.delta_token_ids]
        assert deltas == outputs[-1].outputs[index].token_ids


def test_the_prompt_of_n_is_computed_once() -> None:
    model = ScriptedModel(says([97] * 5, 10))
    engine = make_engine(model)
    engine.add_request("0123456789", n=4, max_tokens=5, temperature=0)
    run_to_end(engine)
    assert model.num_computed_tokens == 10 + 4 * 4
    assert model.num_logits_rows == 1 + 4 * 4


def test_a_listener_that_fails_disturbs_nobody(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)

    def broken(event: object) -> None:
        raise RuntimeError("a listener's fault")

    config = EngineConfig(num_kv_blocks=64)
    model = ScriptedModel(lambda token, position: {97 + position % 26: 9.0})
    engine = LLMEngine(config=config, parts=parts_for(model, config), listener=broken)
    assert final_text(engine) == final_text(echo_engine())
    assert_quiet(engine)


def test_arrays_and_their_numbers_are_token_ids() -> None:
    engine = echo_engine()
    expected = final_text(engine, [72, 105])
    for prompt in (
        np.array([72, 105]),
        np.array([72, 105], dtype=np.uint8),
        list(np.array([72, 105])),
        torch.tensor([72, 105]),
    ):
        assert final_text(engine, prompt) == expected
    llm, params = llm_over(engine), SamplingParams(temperature=0, max_tokens=5)
    assert len(llm.generate(np.array([72, 105]), params)) == 1
    assert len(llm.generate(list(np.array([72, 105])), params)) == 1
    rows = llm.generate(np.array([[72, 105], [72, 106], [1, 2]]), params)
    assert [output.prompt_token_ids for output in rows] == [[72, 105], [72, 106], [1, 2]]


def test_after_shutdown_requests_are_refused_and_a_step_returns_nothing() -> None:
    engine = echo_engine()
    request = engine.make_request("a", SamplingParams())
    engine.add_request("Hello")
    engine.shutdown()
    for _ in range(2):
        assert engine.step() == []
    with pytest.raises(EngineDeadError, match="shut down"):
        engine.add_request("Hello")
    with pytest.raises(EngineDeadError, match="shut down"):
        engine.enqueue(request)
    engine.shutdown()


def policy_of(monkeypatch: pytest.MonkeyPatch, key: Callable[[Any], Any]) -> str:
    """The name of a policy with this key."""
    policies = types.ModuleType("policies_of_a_test")
    policies.Policy = type("Policy", (), {"key": lambda self, sequence: key(sequence)})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "policies_of_a_test", policies)
    return "policies_of_a_test:Policy"


def test_a_policy_whose_keys_tie_goes_by_arrival(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = echo_engine(policy=policy_of(monkeypatch, lambda sequence: ()), max_num_seqs=2)
    ids = [engine.add_request("Hello", n=2, temperature=0, max_tokens=3) for _ in range(4)]
    outputs = run_to_end(engine)
    finished = sorted(ids, key=lambda one: outputs[one][-1].metrics.arrival_time)
    assert finished == ids and list(outputs) == ids


def key_that_fails(prompt_length: int) -> tuple[int, ...]:
    raise RuntimeError("no idea")


@pytest.mark.parametrize("wrong_key", [key_that_fails, lambda length: ("text",), lambda length: None, lambda length: 5])
def test_a_policy_without_a_key_refuses_the_request_and_the_queue_stays_as_it_was(
    monkeypatch: pytest.MonkeyPatch, wrong_key: Callable[[int], Any]
) -> None:
    def key(sequence: Sequence) -> Any:
        length = sequence.num_prompt_tokens
        return wrong_key(length) if length == 3 else (length,)

    engine = echo_engine(policy=policy_of(monkeypatch, key))
    ids = [engine.add_request(prompt, temperature=0, max_tokens=3) for prompt in ("Hello", "Hi")]
    with pytest.raises(InvalidConfigError, match=r"policies_of_a_test:Policy' has no key for a sequence: .*Error"):
        engine.add_request("odd")
    assert set(run_to_end(engine)) == set(ids)
    assert_quiet(engine)


def test_a_refused_request_does_not_move_the_seeds_of_the_next_one() -> None:
    texts = []
    for refusals in (0, 2):
        engine = make_engine(tiny_transformer(), seed=5)
        for _ in range(refusals):
            with pytest.raises(InvalidRequestError):
                engine.add_request("Hello", max_tokens=10**6)
        texts.append(final_text(engine, temperature=1.0, max_tokens=12))
    assert texts[0] == texts[1]


def test_two_requests_made_with_one_id_are_not_both_taken() -> None:
    engine = echo_engine()
    requests = [engine.make_request("a", SamplingParams(), request_id="mine") for _ in range(2)]
    engine.enqueue(requests[0])
    with pytest.raises(InvalidRequestError, match="mine"):
        engine.enqueue(requests[1])
    assert len(run_to_end(engine)["mine"]) > 0
    assert_quiet(engine)


# ---- times --------------------------------------------------------------------------------------------------------


def test_times_are_those_of_the_steps() -> None:
    """A clock that only the model moves: every step takes as long as it computes tokens."""
    now = [100.0]

    class Timed(ScriptedModel):
        def __call__(self, input_ids: torch.Tensor, *args: Any) -> torch.Tensor:
            now[0] += len(input_ids)
            return super().__call__(input_ids, *args)

    config = EngineConfig(num_kv_blocks=64, max_num_batched_tokens=4, max_num_seqs=1)
    parts = parts_for(Timed(lambda token, position: {97: 9.0}), config)
    engine = LLMEngine(config=config, parts=parts, clock=lambda: now[0])
    first = engine.add_request("0123456789", max_tokens=3, temperature=0)  # prefilled in steps of 4, 4 and 2
    second = engine.add_request("ab", max_tokens=2, temperature=0)
    outputs = run_to_end(engine)
    metrics, choice = outputs[first][-1].metrics, outputs[first][-1].outputs[0]
    assert (metrics.queue_time, metrics.time_to_first_token, metrics.finished_time) == (0, 10, 112)
    assert (choice.token_times, choice.inter_token_times) == ([110, 111, 112], [1, 1])
    metrics, choice = outputs[second][-1].metrics, outputs[second][-1].outputs[0]
    assert (metrics.arrival_time, metrics.queue_time, metrics.time_to_first_token) == (100, 12, 14)
    assert (choice.token_times, metrics.last_token_time, metrics.finished_time) == ([114, 115], 115, 115)


def test_the_trace_option_writes_a_timeline_that_is_whole_after_shutdown(tmp_path: Path) -> None:
    engine = echo_engine(trace=str(tmp_path / "trace.json"))
    final_text(engine)
    engine.shutdown()
    names = {event.get("name") for event in json.loads((tmp_path / "trace.json").read_text())}
    assert {"prefill", "decode"} <= {str(name).split()[0] for name in names}
    with pytest.raises(InvalidConfigError) as error:
        echo_engine(trace=str(tmp_path / "no such folder" / "trace.json"))
    assert error.value.field == "trace"


# ---- LLM ----------------------------------------------------------------------------------------------------------


def llm_over(engine: LLMEngine) -> LLM:
    llm = object.__new__(LLM)
    llm.engine = engine
    return llm


def test_generate_answers_in_the_order_of_the_prompts_and_can_be_called_again() -> None:
    llm = llm_over(make_engine(tiny_transformer()))
    prompts = ["one", [1, 2, 3], [{"role": "user", "content": "hi"}]]
    params = [SamplingParams(temperature=0, max_tokens=count) for count in (9, 3, 6)]
    first = llm.generate(prompts, params)
    assert [len(output.outputs[0].token_ids) for output in first] == [9, 3, 6]
    with pytest.raises(InvalidRequestError):
        llm.generate(["fine", ""], SamplingParams(temperature=0))
    assert_quiet(llm.engine)
    again = llm.generate(prompts, params)
    assert [o.outputs[0].token_ids for o in again] == [o.outputs[0].token_ids for o in first]


def test_a_request_of_which_only_the_end_is_wanted_gives_one_output_the_same_as_the_last_of_another() -> None:
    engine = make_engine(tiny_transformer())
    fields = {"temperature": 0, "max_tokens": 8, "logprobs": 1, "n": 2, "seed": 3}
    every = engine.add_request("Hello", **fields)
    final = engine.add_request("Hello", only_final=True, **fields)
    aborted = engine.add_request("Hello", only_final=True, **fields)
    engine.step()
    engine.abort_request(aborted)
    outputs = run_to_end(engine)
    assert (len(outputs[every]), len(outputs[final])) == (8 - 1, 1)
    assert [output.outputs[0].finish_reason for output in outputs[aborted]] == [FinishReason.ABORT]
    for one, other in zip(outputs[every][-1].outputs, outputs[final][-1].outputs, strict=True):
        assert one.text == other.text == other.delta_text
        assert (one.token_ids, one.logprobs) == (other.token_ids, other.logprobs)
    assert_quiet(engine)


def test_generate_waits_for_its_own_answers_beside_a_request_of_the_engine() -> None:
    """Those of the engine's own requests come from the next steps, as if `generate` had not been there."""
    lengths = {"first to end": 3, "goes on": 12}
    engine = make_engine(tiny_transformer())
    expected = {prompt: final_text(engine, prompt, max_tokens=count) for prompt, count in lengths.items()}
    llm = llm_over(make_engine(tiny_transformer()))
    own = {prompt: llm.engine.add_request(prompt, temperature=0, max_tokens=n) for prompt, n in lengths.items()}
    (output,) = llm.generate("Hello", SamplingParams(temperature=0, max_tokens=6))
    assert len(output.outputs[0].token_ids) == 6
    assert not llm.engine.is_finished(own["first to end"])
    outputs = run_to_end(llm.engine)
    assert list(outputs) == list(own.values())
    for prompt, request_id in own.items():
        assert outputs[request_id][-1].outputs[0].text == expected[prompt]
        assert "".join(output.text for output in outputs[request_id]) == expected[prompt]
        ends = [output.outputs[0].end for output in outputs[request_id]]
        assert ends == sorted(ends) and [output.finished for output in outputs[request_id]].count(True) == 1
    assert_quiet(llm.engine)


@pytest.mark.parametrize("failing_step", [1, 4])
def test_an_exception_out_of_generate_leaves_the_outputs_of_others(
    monkeypatch: pytest.MonkeyPatch, failing_step: int
) -> None:
    llm = llm_over(make_engine(tiny_transformer()))
    own = llm.engine.add_request("first to end", temperature=0, max_tokens=2)
    step, steps = llm.engine.step, iter(range(1, failing_step + 1))

    def interrupted() -> list[RequestOutput]:
        if next(steps) == failing_step:
            raise KeyboardInterrupt
        return step()

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate("Hello", SamplingParams(temperature=0, max_tokens=6))
    outputs = run_to_end(llm.engine)
    assert list(outputs) == [own] and outputs[own][-1].finished
    assert "".join(output.text for output in outputs[own]) == outputs[own][-1].outputs[0].text
    assert_quiet(llm.engine)


def test_generate_takes_one_prompt_of_each_kind() -> None:
    llm = llm_over(make_engine(tiny_transformer()))
    params = SamplingParams(temperature=0, max_tokens=2)
    for prompt in ("text", [1, 2, 3], [{"role": "user", "content": "hi"}]):
        assert len(llm.generate(prompt, params)) == 1
    assert len(llm.chat([{"role": "user", "content": "hi"}], params)) == 1
    assert len(llm.chat([[{"role": "user", "content": "hi"}]] * 2, params)) == 2
    assert llm.generate([], params) == []


def test_prompts_may_be_objects_as_vllm_has_them() -> None:
    llm, params = llm_over(echo_engine()), SamplingParams(temperature=0, max_tokens=5)
    text, ids = llm.generate(["Hi", [72, 105]], params)
    objects: list[Any] = [{"prompt": "Hi"}, {"prompt_token_ids": [72, 105]}, {"prompt_token_ids": np.array([1])}]
    again = llm.generate(objects, params)
    assert [output.prompt for output in again] == ["Hi", None, None]
    assert [output.text for output in again[:2]] == [text.text, ids.text]
    assert llm.generate({"prompt": "Hi"}, params)[0].prompt_token_ids == text.prompt_token_ids
    assert llm.generate(["Hi", {"prompt_token_ids": [1, 2]}], params)[1].prompt_token_ids == [1, 2]


@pytest.mark.parametrize("prompts", [{"promt": "Hi"}, [{"promt": "Hi"}], ["Hi", {"promt": "Hi"}]], ids=str)
def test_the_key_that_an_object_should_not_have_is_named(prompts: Any) -> None:
    with pytest.raises(InvalidRequestError, match="one of prompt and prompt_token_ids and nothing else; got 'promt'"):
        llm_over(make_engine(tiny_transformer())).generate(prompts)


@pytest.mark.parametrize("prompts", [5, None, 1.5])
def test_generate_refuses_what_is_no_prompt(prompts: Any) -> None:
    with pytest.raises(InvalidRequestError):
        llm_over(make_engine(tiny_transformer())).generate(prompts)


@pytest.mark.parametrize("params", [3, {"max_tokens": 3}, "greedy", [3, 3]], ids=str)
def test_generate_refuses_what_are_no_sampling_params(params: Any) -> None:
    llm = llm_over(make_engine(tiny_transformer()))
    with pytest.raises(InvalidRequestError) as error:
        llm.generate(["a", "b"], params)
    assert error.value.param == "sampling_params"
    assert_quiet(llm.engine)


def test_a_wrong_number_of_sampling_params_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="2 prompts and 1"):
        llm_over(make_engine(tiny_transformer())).generate(["a", "b"], [SamplingParams()])


# ---- config -------------------------------------------------------------------------------------------------------

TEXTS = (
    "revision",
    "served_model_name",
    "device",
    "policy",
    "attention_backend",
    "chat_template",
    "trace",
    "model_impl",
)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"cache": "none", "scheduling": "continuous"}, "scheduling"),
        ({"cache": "contiguous", "enable_prefix_caching": True}, "enable_prefix_caching"),
        ({"block_size": 12}, "block_size"),
        ({"max_model_len": 257}, "max_model_len"),
        ({"max_model_len": 1}, "max_model_len"),
        ({"threads": 100_000}, "threads"),
        ({"num_kv_blocks": 10**12}, "num_kv_blocks"),
        ({"enable_prefix_caching": "no"}, "enable_prefix_caching"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"max_num_seqs": True}, "max_num_seqs"),
        (
            {"enable_chunked_prefill": False, "max_num_batched_tokens": 10, "max_model_len": 11},
            "max_num_batched_tokens",
        ),
        ({"kv_cache_memory": "lots"}, "kv_cache_memory"),
        ({"kv_cache_memory": "9" * 400}, "kv_cache_memory"),
        ({"kv_cache_memory_fraction": 0}, "kv_cache_memory_fraction"),
        ({"dtype": "int3"}, "dtype"),
        ({"scheduling": "random"}, "scheduling"),
        ({"policy": "no_such"}, "policy"),
        ({"policy": "no_such_module:Class"}, "policy"),
        ({"attention_backend": "warp"}, "attention_backend"),
        ({"attention_backend": "cpu", "kernels": "none"}, "attention_backend"),
        *(({name: 5}, name) for name in TEXTS),
        *(({name: ""}, name) for name in TEXTS),
        ({"device": None}, "device"),
        ({"seed": 2**64}, "seed"),
        ({"seed": -(2**63) - 1}, "seed"),
        ({"seed": 1.0}, "seed"),
        ({"cache": ["paged"]}, "cache"),
        ({"generation_config": {}}, "generation_config"),
        ({"enable_chunked_prefill": False, "max_num_batched_tokens": 100}, "max_num_batched_tokens"),
    ],
    ids=str,
)
def test_options_that_cannot_work_are_refused_at_start(options: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidConfigError) as error:
        make_engine(tiny_transformer(), **options)
    assert error.value.field == field


@pytest.mark.parametrize("model", [5, "", None])
def test_a_model_that_is_no_name_is_refused(model: Any) -> None:
    with pytest.raises(InvalidConfigError) as error:
        EngineConfig(model=model)
    assert error.value.field == "model"


def test_a_path_is_as_good_as_its_text() -> None:
    config = EngineConfig(model=Path("some") / "model.gguf", trace=Path("trace.json"), seed=2**64 - 1)  # type: ignore[arg-type]
    assert (config.model, config.trace) == (os.path.join("some", "model.gguf"), "trace.json")


def test_an_unknown_option_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InvalidConfigError, match=r"max_sequences.*max_num_seqs"):
        LLMEngine("smollm2-135m-instruct", max_sequences=4)


@pytest.mark.parametrize(("field", "value"), [("num_kv_blocks", 100_000), ("kv_cache_memory", 10**15)])
def test_a_pool_that_the_machine_cannot_hold_is_refused(field: str, value: int) -> None:
    config = EngineConfig(model="tiny", **{field: value})
    with pytest.raises(
        InvalidConfigError, match=rf"{field} asks for a pool of \d+ blocks .* ask for at most"
    ) as caught:
        plan_pool(config, 8192, 10**12, torch.device("cpu"))
    assert caught.value.field == field


def test_max_model_len_is_lowered_to_what_the_pool_holds(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    engine = make_engine(tiny_transformer(), num_kv_blocks=3, block_size=16)
    assert engine.config.max_model_len == 48
    assert "lowered from 256 to 48" in caplog.text and "1.0 requests of the full 48 tokens" in caplog.text
    with pytest.raises(InvalidRequestError, match="48"):
        engine.add_request([1] * 49)


@pytest.mark.parametrize(("text", "size"), [("2GiB", 2**31), ("512 MB", 2**29), ("1.5k", 1536), ("7", 7)])
def test_memory_sizes_in_words(text: str, size: int) -> None:
    engine_bytes = make_engine(tiny_transformer(), num_kv_blocks=None, kv_cache_memory=2**20).stats.blocks.total
    assert engine_bytes > 0
    from mini_vllm.config import parse_memory_size

    assert parse_memory_size(text) == size
