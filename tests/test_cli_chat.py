"""`mini-vllm chat`: one conversation, its commands, Ctrl-C, and what happens when the context is full."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from cli_helpers import A, CommandLine, build_cli_model
from engine_doubles import EOS, ScriptedModel, assert_quiet, byte_tokenizer, make_engine

from mini_vllm.commands.chat import COMMANDS, ChatSession, StopSignal
from mini_vllm.commands.terminal import Terminal
from mini_vllm.engine.llm_engine import LLMEngine
from mini_vllm.errors import InvalidRequestError
from mini_vllm.sampling_params import SamplingParams

# The doubles' chat template: "<user>Hi\n<assistant>" for a first message "Hi".
FIRST_PROMPT_LENGTH = len("<user>Hi\n<assistant>")


def answers_with(text: bytes) -> Callable[[int, int], Mapping[int, float]]:
    """A model that says `text` after every "<assistant>", then <eos>."""

    def script(token_id: int, _: int) -> Mapping[int, float]:
        if token_id == ord(">"):
            return {text[0]: 1.0}
        place = text.find(token_id)
        return {text[place + 1] if 0 <= place < len(text) - 1 else EOS: 1.0}

    return script


def says_x(_: int, position: int) -> Mapping[int, float]:
    """A model that never ends."""
    return {ord("x"): 1.0}


def new_session(
    engine: LLMEngine, *, system: str | None = None, sampling: SamplingParams | None = None, notes: bool = False
) -> ChatSession:
    return ChatSession(engine, sampling or SamplingParams(), Terminal(notes, has_colour=False), system)


def lines(*given: str | type[BaseException]) -> Callable[[], str]:
    """A keyboard: texts are lines, exceptions are keys such as Ctrl-C; then Ctrl-D."""
    left: Iterator[str | type[BaseException]] = iter(given)

    def read_line() -> str:
        line = next(left, EOFError)
        if not isinstance(line, str):
            raise line
        return line

    return read_line


def contents(session: ChatSession) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in session.messages]


def test_each_answer_joins_the_conversation(capsys: pytest.CaptureFixture[str]) -> None:
    session = new_session(make_engine(ScriptedModel(answers_with(b"yes"))))
    session.run(lines("Hi", "", "  again  "))
    assert capsys.readouterr() == ("yes\nyes\n", "")
    assert contents(session) == [("user", "Hi"), ("assistant", "yes"), ("user", "again"), ("assistant", "yes")]


def test_a_message_without_an_answer_leaves_no_trace() -> None:
    session = new_session(make_engine(ScriptedModel(lambda token_id, position: {EOS: 1.0})))
    session.run(lines("Hi"))
    assert contents(session) == []


def test_reset_forgets_the_conversation_and_keeps_the_system_prompt() -> None:
    session = new_session(make_engine(ScriptedModel(answers_with(b"yes"))), system="be brief")
    session.run(lines("Hi", "/reset"))
    assert contents(session) == [("system", "be brief")]


def test_system_sets_and_shows_the_system_prompt(capsys: pytest.CaptureFixture[str]) -> None:
    session = new_session(make_engine(ScriptedModel(answers_with(b"yes"))))
    session.run(lines("/system", "Hi", "/system  talk like a pirate ", "/system"))
    assert capsys.readouterr() == ("yes\n", "no system prompt\ntalk like a pirate\n")
    assert contents(session) == [("system", "talk like a pirate"), ("user", "Hi"), ("assistant", "yes")]


@pytest.mark.parametrize("word", ["/quit", "/exit"])
def test_quit_leaves_at_once(word: str) -> None:
    session = new_session(make_engine(ScriptedModel(answers_with(b"yes"))))
    session.run(lines(word, "Hi"))
    assert contents(session) == []


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    new_session(make_engine(ScriptedModel(says_x))).run(lines("/help"))
    shown = capsys.readouterr().err
    assert all(command in shown for command in (*COMMANDS, "/system TEXT", "Ctrl-C"))


def test_an_unknown_command_is_no_message_unless_a_space_stands_before_it(capsys: pytest.CaptureFixture[str]) -> None:
    session = new_session(make_engine(ScriptedModel(answers_with(b"yes"))))
    session.run(lines("/etc"))
    assert contents(session) == []
    assert capsys.readouterr().err.startswith("error: no command /etc; there are /reset, /system, /help,")
    session.run(lines(" /etc"))
    assert contents(session) == [("user", "/etc"), ("assistant", "yes")]


def test_figures_come_after_each_answer(capsys: pytest.CaptureFixture[str]) -> None:
    new_session(make_engine(ScriptedModel(answers_with(b"yes"))), notes=True).run(lines("Hi", "Hi"))
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith(f"{FIRST_PROMPT_LENGTH} tokens in, 4 out, first after ")
    assert second.startswith(f"{2 * FIRST_PROMPT_LENGTH + 4} tokens in (16 cached), 4 out, first after ")


# ---- Ctrl-C ----------------------------------------------------------------------------------------------------------


def test_ctrl_c_stops_the_answer_and_not_the_program(capsys: pytest.CaptureFixture[str]) -> None:
    """It comes in the middle of the step that computes the third token; what is there then stays."""

    def script(token_id: int, position: int) -> Mapping[int, float]:
        if position == FIRST_PROMPT_LENGTH + 1:
            signal.raise_signal(signal.SIGINT)
        return says_x(token_id, position) if position < 100 else {EOS: 1.0}

    engine = make_engine(ScriptedModel(script))
    session = new_session(engine, notes=True)
    session.run(lines("Hi"))
    assert contents(session) == [("user", "Hi"), ("assistant", "xxx")]
    shown = capsys.readouterr()
    assert shown.out == "xxx\n"
    assert shown.err.endswith("stopped; what is there of the answer stays in the conversation\n")
    assert_quiet(engine)
    session.run(lines("/reset", "Hi there, and so on"))  # the engine lives on
    assert contents(session)[1][1].startswith("xxxx")


def test_ctrl_c_at_the_prompt_says_how_to_leave(capsys: pytest.CaptureFixture[str]) -> None:
    session = new_session(make_engine(ScriptedModel(answers_with(b"yes"))), notes=True)
    session.run(lines(KeyboardInterrupt, "Hi"))
    assert contents(session) == [("user", "Hi"), ("assistant", "yes")]
    assert "Ctrl-D or /quit leaves" in capsys.readouterr().err


def test_a_second_ctrl_c_is_the_usual_exception_and_the_handler_goes_back() -> None:
    before = signal.getsignal(signal.SIGINT)
    with StopSignal() as stop:
        assert not stop.was_sent
        signal.raise_signal(signal.SIGINT)
        assert stop.was_sent
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


# ---- the context -----------------------------------------------------------------------------------------------------


def test_an_answer_that_fills_the_context_is_cut_and_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    session = new_session(make_engine(ScriptedModel(says_x), max_model_len=64))
    session.run(lines("Hi"))
    room = 64 - FIRST_PROMPT_LENGTH
    assert contents(session)[-1] == ("assistant", "x" * room)
    assert capsys.readouterr().err.startswith(
        "The answer was cut: the context of 64 tokens is full; /reset starts anew"
    )


def test_a_message_that_does_not_fit_is_refused_and_forgotten(capsys: pytest.CaptureFixture[str]) -> None:
    session = new_session(make_engine(ScriptedModel(answers_with(b"yes")), max_model_len=64))
    session.run(lines("Hi", "x" * 40, "Hi"))
    assert contents(session) == [("user", "Hi"), ("assistant", "yes")] * 2
    used = FIRST_PROMPT_LENGTH + len("yes\n") + len("<user>\n<assistant>") + 40
    error = f"error: the conversation has {used} tokens with this message: the context of 64 tokens is full; /reset"
    assert capsys.readouterr().err.startswith(error)


def test_max_tokens_gives_way_to_what_is_left_of_the_context() -> None:
    session = new_session(make_engine(ScriptedModel(says_x), max_model_len=64), sampling=SamplingParams(max_tokens=50))
    session.run(lines("Hi"))
    assert contents(session)[-1] == ("assistant", "x" * (64 - FIRST_PROMPT_LENGTH))


def test_an_answer_cut_by_max_tokens_is_no_full_context(capsys: pytest.CaptureFixture[str]) -> None:
    session = new_session(make_engine(ScriptedModel(says_x)), sampling=SamplingParams(max_tokens=5))
    session.run(lines("Hi"))
    assert capsys.readouterr() == ("xxxxx\n", "")


def test_a_model_without_a_chat_template_is_refused_at_once() -> None:
    engine = make_engine(ScriptedModel(says_x), parts={"tokenizer": byte_tokenizer(None)})
    with pytest.raises(InvalidRequestError, match="no chat template"):
        new_session(engine)


# ---- the command itself ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_cli_model(tmp_path_factory.mktemp("models") / "tiny")


def test_lines_of_a_pipe_are_messages_and_only_answers_come_out(
    monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes], model: Path
) -> None:
    flags = ["chat", "-m", str(model), "--max-tokens", "2", "--allowed-token-ids", str(A)]
    result = CommandLine(monkeypatch, capfdbinary)(*flags, stdin=b"one\n/reset\ntwo")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "aa\naa\n", "")
