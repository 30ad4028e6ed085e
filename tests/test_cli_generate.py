"""`mini-vllm generate`, and what all commands have in common: stdout, stderr, exit codes."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from cli_helpers import EOS, A, B, CommandLine, build_cli_model, start_process
from engine_doubles import ScriptedModel, make_engine, says

from mini_vllm import __main__ as entrance
from mini_vllm.commands.answers import AnswerWriter, JsonWriter, TextWriter
from mini_vllm.commands.generate import run_prompts
from mini_vllm.commands.terminal import Terminal
from mini_vllm.sampling_params import SamplingParams


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_cli_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def mini_vllm(monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]) -> CommandLine:
    return CommandLine(monkeypatch, capfdbinary)


def only(*token_ids: int) -> list[str]:
    """Flags under which the model can say these tokens alone."""
    return [part for token_id in token_ids for part in ("--allowed-token-ids", str(token_id))]


# ---- what is on stdout -----------------------------------------------------------------------------------------------


def test_in_a_pipe_there_is_the_answer_and_nothing_else(mini_vllm: CommandLine, model: Path) -> None:
    result = mini_vllm("generate", "-m", model, "hi", "--max-tokens", "5", *only(A))
    assert (result.exit_code, result.stdout, result.stderr) == (0, "aaaaa\n", "")


def test_verbose_adds_the_log_and_the_figures_on_stderr_only(mini_vllm: CommandLine, model: Path) -> None:
    result = mini_vllm("generate", "-m", model, "hi", "--max-tokens", "5", *only(A), "-v")
    assert result.stdout == "aaaaa\n"
    assert "model tiny: LlamaForCausalLM in" in result.stderr
    assert result.stderr.splitlines()[-1].startswith("2 tokens in, 5 out, first after ")
    assert result.stderr.endswith(" tokens/s, cut by max_tokens\n")


def test_quiet_shows_no_warnings(mini_vllm: CommandLine, model: Path) -> None:
    flags = ["generate", "-m", str(model), "hi", "--max-tokens", "5", "--num-kv-blocks", "4", *only(A)]
    assert mini_vllm(*flags).stderr.startswith("warning: max_model_len")
    quiet = mini_vllm(*flags, "-q")
    assert (quiet.exit_code, quiet.stdout, quiet.stderr) == (0, "aaaaa\n", "")


def test_more_and_less_at_once_is_refused(mini_vllm: CommandLine, model: Path) -> None:
    result = mini_vllm("generate", "-m", model, "hi", "-q", "-v")
    assert result.exit_code == 2
    assert result.stderr == "error: --verbose shows more and --quiet shows less; leave one out\n"


def test_without_max_tokens_a_prompt_is_continued_by_16(mini_vllm: CommandLine, model: Path) -> None:
    assert mini_vllm("generate", "-m", model, "hi", *only(A)).stdout == "a" * 16 + "\n"


def test_answers_come_in_the_order_of_the_prompts(mini_vllm: CommandLine, model: Path) -> None:
    flags = ["-m", str(model), "--temperature", "0", "--max-tokens", "6"]
    prompts = ["one", "two", "three"]
    alone = [mini_vllm("generate", *flags, prompt).stdout for prompt in prompts]
    assert len(set(alone)) > 1
    assert mini_vllm("generate", *flags, *prompts).stdout == "".join(alone)


def test_n_gives_so_many_answers(mini_vllm: CommandLine, model: Path) -> None:
    result = mini_vllm("generate", "-m", model, "x", "y", "--n", "2", "--max-tokens", "1", *only(A))
    assert result.stdout == "a\n" * 4


def test_an_empty_answer_is_an_empty_line(mini_vllm: CommandLine, model: Path) -> None:
    assert mini_vllm("generate", "-m", model, "x", *only(EOS)).stdout == "\n"


def test_a_stop_string_may_be_given_several_times(mini_vllm: CommandLine, model: Path) -> None:
    result = mini_vllm("generate", "-m", model, "x", *only(A), "--stop", "zz", "--stop", "aaa")
    assert result.stdout == "\n"


def test_a_seed_repeats_the_answer(mini_vllm: CommandLine, model: Path) -> None:
    flags = ["generate", "-m", str(model), "x", "--max-tokens", "24", *only(A, B), "--seed"]
    first, again, other = (mini_vllm(*flags, seed).stdout for seed in ("1", "1", "2"))
    assert first == again
    assert first != other


# ---- where prompts come from -----------------------------------------------------------------------------------------


def test_a_dash_reads_stdin_without_its_last_line_break(mini_vllm: CommandLine, model: Path) -> None:
    flags = ["generate", "-m", str(model), "-", "--json", "--max-tokens", "1", *only(A)]
    (line,) = mini_vllm(*flags, stdin="é\nb\n".encode()).lines
    assert (line["prompt"], line["num_prompt_tokens"]) == ("é\nb", 4)


def test_a_file_has_a_prompt_a_line(mini_vllm: CommandLine, model: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_bytes("first line\r\n\n  second \u2028 line\n".encode())
    result = mini_vllm("generate", "-m", model, "--file", file, "--json", "--max-tokens", "1")
    assert [line["prompt"] for line in result.lines] == ["first line", "  second \u2028 line"]
    assert len(result.stdout.splitlines()) == 2, "also for those who count more line breaks than \\n"


def test_a_jsonl_file_has_texts_token_ids_and_messages(mini_vllm: CommandLine, model: Path, tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hey"}]
    entries = [{"prompt": "hey", "id": 7}, {"prompt": [1, 2, 3, 4]}, {"messages": messages}]
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(json.dumps(entry) for entry in entries))
    result = mini_vllm("generate", "-m", model, "-f", file, "--json", "--max-tokens", "1")
    assert [line["prompt"] for line in result.lines] == ["hey", [1, 2, 3, 4], messages]
    assert [line["num_prompt_tokens"] for line in result.lines] == [3, 4, len("[user]hey[assistant]")]


def test_chat_sends_each_prompt_as_a_users_message(mini_vllm: CommandLine, model: Path) -> None:
    flags = ["generate", "-m", str(model), "hey", "--json", "--max-tokens", "1"]
    (plain,) = mini_vllm(*flags).lines
    (chat,) = mini_vllm(*flags, "--chat").lines
    (system,) = mini_vllm(*flags, "--chat", "--system", "be brief").lines
    assert plain["num_prompt_tokens"] == len("hey")
    assert chat["num_prompt_tokens"] == len("[user]hey[assistant]")
    assert system["num_prompt_tokens"] == len("[system]be brief[user]hey[assistant]")
    assert [line["prompt"] for line in (plain, chat, system)] == ["hey"] * 3


# ---- JSON ------------------------------------------------------------------------------------------------------------


def test_json_lines_hold_text_counts_reason_and_times(mini_vllm: CommandLine, model: Path) -> None:
    result = mini_vllm("generate", "-m", model, "世界", "--json", "--max-tokens", "3", *only(A), "--n", "2")
    assert "世界" in result.stdout
    for choice, line in enumerate(result.lines):
        metrics = line.pop("metrics")
        assert isinstance(metrics, dict)
        assert metrics["total_time"] >= metrics["time_to_first_token"] >= metrics["queue_time"] >= 0
        assert metrics["tokens_per_second"] > 0
        assert line == {
            "index": 0,
            "prompt": "世界",
            "choice": choice,
            "text": "aaa",
            "finish_reason": "length",
            "stop_reason": None,
            "num_prompt_tokens": 6,
            "num_cached_tokens": 0,
            "num_output_tokens": 3,
        }
    assert len(result.lines) == 2


def test_json_holds_logprobs_when_they_are_asked_for(mini_vllm: CommandLine, model: Path) -> None:
    flags = ["--json", "--max-tokens", "2", "--logprobs", "3", "--prompt-logprobs", "0"]
    (line,) = mini_vllm("generate", "-m", model, "hey", *flags, *only(A)).lines
    assert line["token_ids"] == [A, A]
    assert isinstance(line["logprobs"], list)
    assert [entry["token_id"] for entry in line["logprobs"]] == [A, A]
    assert all(len(entry["top_token_ids"]) == 3 and entry["logprob"] < 0 for entry in line["logprobs"])
    assert isinstance(line["prompt_logprobs"], list)
    assert [entry and entry["token_id"] for entry in line["prompt_logprobs"]] == [None, *line["prompt_token_ids"][1:]]


# ---- what goes wrong -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate"], "no prompt"),
        (["generate", "a", "-"], "'-' reads standard input"),
        (["generate", "a", "--file", "b"], "not both"),
        (["generate", "--file", "absent.txt"], "absent.txt cannot be read"),
        (["generate", "a", "--system", "b"], "add --chat"),
        (["generate", "a", "--logprobs", "1"], "add --json"),
        (["generate", "a", "--temperature", "-1"], "temperature must be a number"),
        (["generate", "a", "--logit-bias", "5"], "logit_bias takes ID=BIAS"),
        (["generate", "a", "--dtype", "int8"], "dtype must be one of auto, float32"),
        (["generate", "a", "--cache", "none", "--scheduling", "static"], "cache='none'"),
        (["generate", "a", "--model", "no-such-model"], "No model 'no-such-model'"),
        (["chat", "--model", "./absent"], "No such file or directory"),
        (["pull", "./absent"], "No such file or directory"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(mini_vllm: CommandLine, arguments: list[str], message: str) -> None:
    result = mini_vllm(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_prompt_over_the_context_is_refused_with_its_number(mini_vllm: CommandLine, model: Path) -> None:
    result = mini_vllm("generate", "-m", model, "short", "x" * 3000)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("error: prompt 2 of 2: the prompt has 3000 tokens, and the context holds 2048")


@pytest.mark.parametrize(
    ("line", "flags", "message"),
    [
        ('{"prompt": [5, 999]}', (), "prompt holds token id 999, but the model's ids go from 0 to 256"),
        (f'{{"prompt": "{"x" * 3000}"}}', (), "the prompt has 3000 tokens, and the context holds 2048"),
        ('{"prompt": [5]}', ("--chat",), "token ids cannot be sent as a chat message"),
    ],
)
def test_a_prompt_of_a_file_that_is_refused_is_named_by_its_line(
    mini_vllm: CommandLine, model: Path, tmp_path: Path, line: str, flags: tuple[str, ...], message: str
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a"}\n\n' + line)
    result = mini_vllm("generate", "-m", model, "--file", file, *flags)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"error: line 3 of {file}: {message}")


@pytest.mark.parametrize("line", ["{", '"text"', '{"text": "a"}', '{"prompt": ["a"]}', '{"prompt": ""}'])
def test_a_line_that_is_no_prompt_is_named(mini_vllm: CommandLine, tmp_path: Path, line: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a"}\n' + line)
    result = mini_vllm("generate", "--file", file)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: line 2 of {file} ")


def test_stdin_that_is_no_text_is_refused(mini_vllm: CommandLine) -> None:
    result = mini_vllm("generate", "-", stdin=b"\xff\xfe")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: standard input is not UTF-8 text")


def test_a_damaged_model_is_exit_code_1(mini_vllm: CommandLine, model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "damaged")
    weights = tmp_path / "damaged" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    result = mini_vllm("generate", "-m", tmp_path / "damaged", "hi")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1


def test_a_failed_computation_is_told_and_the_others_are_answered(capsys: pytest.CaptureFixture[str]) -> None:
    """The prompt "bad" meets a model that gives NaN; "ok" is answered with "yes"."""
    answer = says(list(b"yes"), prompt_len=2)

    def script(token_id: int, position: int) -> object:
        return torch.full((259,), float("nan")) if token_id == ord("d") else answer(token_id, position)

    def run(writer: AnswerWriter) -> str:
        engine = make_engine(ScriptedModel(script))  # type: ignore[arg-type]
        (error,) = run_prompts(engine, {"line 3": "bad", "line 5": "ok"}, SamplingParams(temperature=0), writer)
        assert error.startswith("line 3: ")
        return capsys.readouterr().out

    assert run(TextWriter(2, 1, Terminal(shows_notes=False, has_colour=False))) == "\nyes\n"
    bad, ok = map(json.loads, run(JsonWriter(["bad", "ok"])).splitlines())
    assert (bad["index"], bad["finish_reason"], bad["text"]) == (0, "error", "")
    assert "NaN" in bad["error"]
    assert (ok["index"], ok["finish_reason"], ok["text"]) == (1, "stop", "yes")


def test_a_later_answer_waits_for_the_earlier_one_and_is_not_held_longer(capsys: pytest.CaptureFixture[str]) -> None:
    """Both run at once; the second, shorter one is shown when the first has ended."""
    engine = make_engine(ScriptedModel(lambda token_id, position: {97 + position: 1.0}))
    writer = TextWriter(2, 1, Terminal(shows_notes=False, has_colour=False))
    shown: list[str] = []
    ids = [engine.add_request(prompt, max_tokens=count) for prompt, count in (("__", 3), ("____", 2))]
    while engine.has_unfinished_requests():
        for output in engine.step():
            writer.push(ids.index(output.request_id), output)
        shown.append(capsys.readouterr().out)
    assert shown == ["b", "c", "d\nde\n"]


# ---- processes -------------------------------------------------------------------------------------------------------


def test_ctrl_c_ends_with_130_and_without_a_traceback(model: Path) -> None:
    process = start_process("generate", "-m", model, "hi", "--max-tokens", "2000", *only(A))
    assert process.stdout is not None
    first = process.stdout.read(1)  # it streams: the first letter is here long before the last
    process.send_signal(signal.SIGINT)
    rest, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (130, b"")
    assert set(first + rest) == {ord("a")}
    assert len(first + rest) < 2000


def test_ctrl_c_while_the_command_line_is_being_imported_is_130_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(name: str) -> None:
        raise KeyboardInterrupt

    half_imported = types.ModuleType("mini_vllm.cli")
    half_imported.__getattr__ = interrupt  # type: ignore[method-assign]
    monkeypatch.setitem(sys.modules, "mini_vllm.cli", half_imported)
    with pytest.raises(SystemExit) as leaving:
        entrance.main()
    assert leaving.value.code == 130


def run_in_shell(command: str) -> tuple[int, str]:
    """Exit code and stderr of a shell command in which `$CLI` is `mini-vllm`."""
    cli = f"{shlex.quote(sys.executable)} -m mini_vllm"
    done = subprocess.run(
        ["sh", "-c", command.replace("$CLI", cli)], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60
    )
    return done.returncode, done.stderr


@pytest.mark.skipif(os.name != "posix", reason="the ways to close a stream are those of a POSIX shell")
@pytest.mark.parametrize(
    ("command", "code", "error"),
    [
        ("$CLI models >&-", 1, "cannot write to standard output: Bad file descriptor"),
        ("$CLI generate - <&-", 2, "prompt is empty"),
        ("$CLI generate 2>&-", 2, ""),
        pytest.param(
            "$CLI models >/dev/full",
            1,
            "No space left on device",
            marks=pytest.mark.skipif(not os.path.exists("/dev/full"), reason="only Linux has /dev/full"),
        ),
    ],
)
def test_a_stream_that_is_closed_or_full_is_at_most_one_line(command: str, code: int, error: str) -> None:
    returncode, stderr = run_in_shell(command)
    assert returncode == code
    assert error in stderr and stderr.count("\n") <= 1


def test_a_closed_pipe_ends_quietly(model: Path) -> None:
    process = start_process("generate", "-m", model, "hi", "--max-tokens", "2000", *only(A))
    assert process.stdout is not None
    assert process.stdout.read(1) == b"a"
    process.stdout.close()
    assert process.wait(timeout=60) == 1
    assert process.stderr is not None
    assert process.stderr.read() == b""
    process.stderr.close()


def test_help_loads_no_torch() -> None:
    code = "import sys; from mini_vllm import cli\ntry: cli.main()\nfinally: print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code, "generate", "--help"], capture_output=True, text=True, check=True
    )
    assert done.stdout.endswith("\nFalse\n")


def test_version(mini_vllm: CommandLine) -> None:
    result = mini_vllm("--version")
    assert result.exit_code == 0
    assert result.stdout.startswith("mini-vllm ")


# ---- answers that have a form ----------------------------------------------------------------------------------------


def test_answers_can_be_held_to_a_regex_or_a_schema(mini_vllm: CommandLine, model: Path, tmp_path: Path) -> None:
    assert mini_vllm("generate", "-m", model, "hi", "--regex", "ab{3}").stdout == "abbb\n"
    schema = tmp_path / "schema.json"
    schema.write_text('{"const": 5}')
    assert mini_vllm("generate", "-m", model, "hi", "--json-schema", schema).stdout == "5\n"


def test_a_form_that_cannot_be_had_is_told_in_one_line(mini_vllm: CommandLine, model: Path, tmp_path: Path) -> None:
    missing = tmp_path / "missing.json"
    schema = tmp_path / "schema.json"
    schema.write_text('{"not": {}}')
    for flags, text in (
        (["--regex", "(["], "--regex: "),
        (["--json-schema", missing], "cannot be read"),
        (["--json-schema", schema], "--json-schema: "),
        (["--json-schema", schema, "--regex", "a"], "leave one out"),
    ):
        result = mini_vllm("generate", "-m", model, "hi", *flags)
        assert result.exit_code != 0 and text in result.stderr and "Traceback" not in result.stderr
