"""`mini-vllm chat`: a conversation in the terminal.

    a line  ->  the conversation so far, through the chat template  ->  step, step, ...  ->  the answer joins it

Each turn sends the whole conversation again; the prefix cache makes that cheap.

Ctrl-C during an answer is not the usual exception, which could strike in the middle of a step: it sets a flag that is
read between two steps, and the request is aborted in good order.

In vLLM: `ChatCommand` in `vllm/entrypoints/cli/openai.py`, a client of a server.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mini_vllm.commands.dataclass_flags import FlagGroup, flags_from
from mini_vllm.commands.figures import figures_of
from mini_vllm.commands.start_engine import start_engine
from mini_vllm.commands.terminal import Quiet, Terminal, Verbose, open_terminal
from mini_vllm.config import EngineConfig
from mini_vllm.errors import InvalidRequestError
from mini_vllm.outputs import FinishReason, RequestOutput
from mini_vllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from mini_vllm.engine.llm_engine import LLMEngine

HELP = """\
/reset         forget the conversation, keep the system prompt
/system TEXT   set the system prompt; /system alone shows it
/help          this
/quit, /exit   leave, as Ctrl-D does
Ctrl-C stops an answer. A line that begins with a space is never a command."""

COMMANDS = ("/reset", "/system", "/help", "/quit", "/exit")
_NOT_IN_A_CHAT = frozenset({"n", "best_of", "logprobs", "prompt_logprobs", "structured_outputs"})


@flags_from(
    sampling=FlagGroup(SamplingParams, without=_NOT_IN_A_CHAT),
    engine=FlagGroup(EngineConfig, without=frozenset({"seed"})),
)
def chat(
    system: Annotated[str | None, typer.Option(help="The system prompt.")] = None,
    verbose: Verbose = False,
    quiet: Quiet = False,
    *,
    sampling: SamplingParams,
    engine: EngineConfig,
) -> None:
    """Talk with a model.

    /help shows the commands inside. Ctrl-C stops an answer, Ctrl-D leaves. From a pipe, each line is a message.

    Examples:

      mini-vllm chat

      mini-vllm chat --model TinyLlama/TinyLlama-1.1B-Chat-v1.0 --system "You are a pirate." --temperature 0.7

    The flags come in three groups: of this command, from --temperature on of sampling, from --model on of the engine.
    None in their texts means that the flag is not given.
    """
    terminal = open_terminal(verbose=verbose, quiet=quiet)
    alone = dataclasses.replace(engine, max_num_seqs=1)  # so that no memory is kept for others
    session = ChatSession(start_engine(alone, terminal), sampling, terminal, system)
    terminal.note(f"{session.model_name}, {session.context_size} tokens of context. /help for help, Ctrl-D leaves.")
    session.run(line_reader())


def line_reader() -> Callable[[], str]:
    """A function that reads the next message: with a prompt and line editing on a terminal, else plainly."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return lambda: input()
    if importlib.util.find_spec("readline") is not None:  # absent on Windows, which edits lines by itself
        importlib.import_module("readline")  # from now on input() edits lines and remembers them
    return lambda: input("\n> ")


class ChatSession:
    """One conversation with one engine.

    Args:
        engine: nothing else uses it.
        sampling: of every answer.
        terminal: where notes and errors go; answers go to stdout.
        system: the system prompt, None for what the chat template does without one.

    Raises:
        InvalidRequestError: the model has no chat template.
    """

    def __init__(self, engine: LLMEngine, sampling: SamplingParams, terminal: Terminal, system: str | None) -> None:
        self._engine = engine
        self._sampling = sampling
        self._terminal = terminal
        self._system = system
        self._turns: list[dict[str, Any]] = []
        engine.chat_template.render([{"role": "user", "content": "Hello"}])  # a model that cannot chat is refused now

    @property
    def model_name(self) -> str:
        return self._engine.model_name

    @property
    def context_size(self) -> int:
        """The most tokens that conversation and answer may have together."""
        return self._engine.pool.max_model_len

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The conversation as the model is given it."""
        system = [] if self._system is None else [{"role": "system", "content": self._system}]
        return system + self._turns

    def run(self, read_line: Callable[[], str]) -> None:
        """Go on until the input ends or the user leaves."""
        while True:
            try:
                line = read_line()
            except EOFError:
                return
            except KeyboardInterrupt:
                self._terminal.note("\nCtrl-D or /quit leaves")
                continue
            if line.startswith("/"):
                name, _, rest = line.partition(" ")
                if name in ("/quit", "/exit"):
                    return
                self._command(name, rest.strip())
            elif line.strip():
                self._take_turn(line.strip())

    def _command(self, name: str, text: str) -> None:
        if name == "/help":
            self._terminal.show(HELP)
        elif name == "/reset":
            self._turns.clear()
            self._terminal.note("the conversation starts anew")
        elif name == "/system" and text:
            self._system = text
            self._terminal.note("the system prompt is set; the conversation goes on, /reset starts it anew")
        elif name == "/system":
            self._terminal.show("no system prompt" if self._system is None else self._system)
        else:
            known = ", ".join(COMMANDS)
            self._terminal.error(f"no command {name}; there are {known}; a space in front makes it a message")

    def _take_turn(self, text: str) -> None:
        """Answer one message. A message that gets no answer leaves no trace in the conversation."""
        self._turns.append({"role": "user", "content": text})
        answer = ""
        try:
            answer = self._answer()
        except InvalidRequestError as error:
            self._terminal.error(str(error))
        if answer:
            self._turns.append({"role": "assistant", "content": answer})
        else:
            self._turns.pop()

    def _answer(self) -> str:
        """Stream the answer to the conversation so far; what there is of it if Ctrl-C came."""
        room = self._room()
        params = self._sampling
        if params.max_tokens is not None and params.max_tokens > room:
            params = dataclasses.replace(params, max_tokens=room)
        final = self._stream(params)
        answer = final.outputs[0] if final.outputs else None
        print(flush=True)
        if final.error is not None:
            self._terminal.error(final.error)
        if answer is None:
            return ""
        self._terminal.note(figures_of(final).line())
        if answer.finish_reason == FinishReason.ABORT:
            self._terminal.note("stopped; what is there of the answer stays in the conversation")
        elif answer.finish_reason == FinishReason.LENGTH and len(answer.token_ids) >= room:
            self._terminal.show(f"The answer was cut: {self._full()}.")
        return answer.text

    def _room(self) -> int:
        """Tokens that are left for the answer."""
        text = self._engine.chat_template.render(self.messages)
        used = len(self._engine.tokenizer.encode(text, add_special_tokens=False))
        if used >= self.context_size:
            raise InvalidRequestError(f"the conversation has {used} tokens with this message: {self._full()}")
        return self.context_size - used

    def _full(self) -> str:
        return (
            f"the context of {self.context_size} tokens is full; /reset starts anew (a larger --max-model-len, "
            "where the model allows it, holds more)"
        )

    def _stream(self, params: SamplingParams) -> RequestOutput:
        """Run one request to its end, printing the text as it comes."""
        request_id = self._engine.add_request(self.messages, params)
        with StopSignal() as stop:
            while True:
                for output in self._engine.step():
                    print(output.text, end="", flush=True)
                    if output.finished:
                        return output
                if stop.was_sent:
                    self._engine.abort_request(request_id)  # the next step returns the final output


class StopSignal:
    """While it is open, Ctrl-C only sets `was_sent`; a second Ctrl-C raises KeyboardInterrupt as usual."""

    def __init__(self) -> None:
        self.was_sent = False

    def __enter__(self) -> StopSignal:
        self._before = signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.was_sent:
            raise KeyboardInterrupt
        self.was_sent = True
