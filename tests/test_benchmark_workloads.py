"""Workloads of the benchmarks: lengths, random prompts, and prompts out of files."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from engine_doubles import byte_tokenizer, parts_for, tiny_transformer

from mini_vllm.benchmark.options import WorkloadOptions
from mini_vllm.benchmark.throughput import bench_throughput
from mini_vllm.benchmark.workload import Lengths, WorkItem, synthetic_workload
from mini_vllm.benchmark.workload_files import make_workload, read_prompts_file
from mini_vllm.config import EngineConfig
from mini_vllm.errors import InvalidConfigError


def test_lengths_are_read_as_they_are_written() -> None:
    assert Lengths.parse("128") == Lengths("fixed", 128, 128)
    assert Lengths.parse("32-256") == Lengths("uniform", 32, 256)
    assert Lengths.parse("chat:100") == Lengths("lognormal", 100, 800, 0.8)
    assert Lengths.parse("chat:100,1.5") == Lengths("lognormal", 100, 800, 1.5)


@pytest.mark.parametrize(
    "text",
    ["", "0", "5-3", "chat", "chat:0", "-4", "1.5", "9" * 5000, "10000001", "1-10000001", "chat:4,99", "chat:99999999"],
)
def test_lengths_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(InvalidConfigError, match=r"output_len .*got") as refused:
        Lengths.parse(text, "output_len")
    assert refused.value.field == "output_len"


def test_lengths_stay_in_their_bounds_and_chats_have_their_median() -> None:
    source = random.Random(0)
    uniform = [Lengths.parse("3-5").draw(source) for _ in range(200)]
    assert set(uniform) == {3, 4, 5}
    chat = sorted(Lengths.parse("chat:100").draw(source) for _ in range(2000))
    assert 90 < chat[1000] < 110
    assert chat[0] >= 1 and chat[-1] <= 800
    assert sum(chat) / 2000 > 120  # a long tail: the mean of a log-normal is over its median


def test_synthetic_prompts_share_their_prefix_only_and_have_no_special_tokens() -> None:
    make = {"num_requests": 5, "input_len": Lengths.parse("20"), "output_len": Lengths.parse("3"), "seed": 7}
    workload = synthetic_workload(byte_tokenizer(), shared_prefix_len=16, **make)
    prompts = [item.prompt_token_ids for item in workload.items]
    assert {len(prompt) for prompt in prompts} == {36}
    assert len({prompt[:16] for prompt in prompts}) == 1
    assert len({prompt[16:] for prompt in prompts}) == 5
    assert max(map(max, prompts)) < 256
    assert workload == synthetic_workload(byte_tokenizer(), shared_prefix_len=16, **make)


def test_a_prompts_file_has_texts_or_token_ids(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "hi", "max_tokens": 5}\n\n{"prompt": [7, 8, 9]}\n')
    workload = read_prompts_file(file, byte_tokenizer(), Lengths.parse("4"), 9)
    assert workload.items == (WorkItem((104, 105), 5), WorkItem((7, 8, 9), 4))


@pytest.mark.parametrize(
    "line",
    [
        '{"prompt": [1, 999]}',
        '{"prompt": [-1, 5]}',
        "{",
        "[1]",
        '{"prompt": 3}',
        '{"prompt": []}',
        '{"prompt": "a", "max_tokens": 0}',
    ],
)
def test_a_wrong_line_of_a_prompts_file_is_named(tmp_path: Path, line: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "hi"}\n' + line + "\n")
    with pytest.raises(InvalidConfigError, match="prompts_file, line 2: "):
        read_prompts_file(file, byte_tokenizer(), Lengths.parse("4"), 9)


def test_a_request_of_a_file_that_is_too_long_is_named_by_its_line(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "hi"}\n\n{"prompt": "hi", "max_tokens": 5000}\n')
    with pytest.raises(InvalidConfigError, match=r"prompts_file, line 3: a prompt of 2 tokens and an answer of 5,000"):
        bench_throughput(
            EngineConfig(num_kv_blocks=8),
            lambda tokenizer: read_prompts_file(file, tokenizer, Lengths.parse("4"), 9),
            load=lambda config: parts_for(tiny_transformer(), config),
        )


def test_of_a_long_prompts_file_some_are_drawn_in_its_order(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(f'{{"prompt": [{n}], "max_tokens": 1}}\n' for n in range(1, 100)))
    drawn = [
        [item.prompt_token_ids[0] for item in read_prompts_file(file, byte_tokenizer(), Lengths.parse("4"), 7, s).items]
        for s in (0, 0, 1)
    ]
    assert len(drawn[0]) == 7 and drawn[0] == sorted(drawn[0]) == drawn[1] != drawn[2]


def conversation(question: str, answer: str) -> dict[str, Any]:
    return {
        "id": "x",
        "conversations": [{"from": "human", "value": question}, {"from": "gpt", "value": answer}],
    }


def test_of_a_sharegpt_file_the_question_is_the_prompt_and_the_answer_gives_the_length(tmp_path: Path) -> None:
    file = tmp_path / "sharegpt.json"
    usable = {"what?": 8, "how long": 20, "b" * 1024: 1024}
    unusable = [conversation("hi!", "long enough"), conversation("question", "no"), conversation("b" * 1025, "answer")]
    records = [*unusable, *(conversation(question, "a" * length) for question, length in usable.items())]
    records += [{"id": "one turn", "conversations": [{"from": "human", "value": "alone"}]}]
    file.write_text(json.dumps(records))
    items = read_prompts_file(file, byte_tokenizer(), None, 9).items
    assert {bytes(item.prompt_token_ids).decode(): item.num_output_tokens for item in items} == usable
    assert len(read_prompts_file(file, byte_tokenizer(), None, 2).items) == 2
    with pytest.raises(InvalidConfigError, match=r"output_len is of random prompts .* as prompts_file"):
        make_workload(WorkloadOptions(prompts_file=str(file), output_len="4"), byte_tokenizer())


@pytest.mark.parametrize("given", [{"input_len": "32-256"}, {"shared_prefix_len": 0}])
def test_what_is_of_random_prompts_is_refused_beside_a_file(given: dict[str, Any]) -> None:
    with pytest.raises(InvalidConfigError, match=f"{next(iter(given))} is of random prompts, and prompts_file has"):
        WorkloadOptions(prompts_file="prompts.jsonl", **given)


@pytest.mark.parametrize("entry", [3, {}, {"conversations": 3}, {"conversations": [{"value": 1}, {"value": "a"}]}])
def test_a_wrong_entry_of_a_sharegpt_file_is_named(tmp_path: Path, entry: Any) -> None:
    file = tmp_path / "sharegpt.json"
    file.write_text(json.dumps([entry]))
    with pytest.raises(InvalidConfigError, match=r"prompts_file, entry 1 of sharegpt\.json"):
        read_prompts_file(file, byte_tokenizer(), None, 9)
