"""`mini-vllm generate`: continue prompts, many at once.

    prompts.py -> the engine's requests -> step, step, ... -> answers.py

A prompt is continued as it stands: that is what *generate* means, and what a model without a chat template can do.
With --chat it is a user's message instead.

In vLLM: `CompleteCommand` in `vllm/entrypoints/cli/openai.py`, a client of a server.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mini_vllm.commands.answers import AnswerWriter, JsonWriter, TextWriter
from mini_vllm.commands.dataclass_flags import FlagGroup, flags_from
from mini_vllm.commands.prompts import GivenPrompt, as_chat, collect_prompts
from mini_vllm.commands.start_engine import start_engine
from mini_vllm.commands.terminal import Quiet, Verbose, open_terminal
from mini_vllm.config import EngineConfig
from mini_vllm.errors import InvalidRequestError
from mini_vllm.sampling_params import SamplingParams
from mini_vllm.structured_outputs import StructuredOutputsParams

if TYPE_CHECKING:
    from mini_vllm.engine.llm_engine import LLMEngine


@flags_from(
    sampling=FlagGroup(SamplingParams, without=frozenset({"best_of", "structured_outputs"})),
    engine=FlagGroup(EngineConfig, without=frozenset({"seed"})),
)
def generate(
    prompts: Annotated[
        list[str] | None, typer.Argument(metavar="PROMPT...", help="Prompts, answered together; - reads stdin.")
    ] = None,
    file: Annotated[
        Path | None, typer.Option("--file", "-f", help='Read a prompt a line, or of a .jsonl file its "prompt"s.')
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat/--no-chat", help="Send each prompt as a user's message (chat template).")
    ] = False,
    system: Annotated[str | None, typer.Option(help="With --chat: the system message.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Write a JSON object a line: text, finish reason, counts, times.")
    ] = False,
    json_schema: Annotated[
        Path | None, typer.Option(help="Answers are JSON of the schema in this file; --max-tokens may cut them.")
    ] = None,
    regex: Annotated[str | None, typer.Option(metavar="TEXT", help="Answers match this regular expression.")] = None,
    verbose: Verbose = False,
    quiet: Quiet = False,
    *,
    sampling: SamplingParams,
    engine: EngineConfig,
) -> None:
    """Answer one prompt or many, streaming to standard output.

    Examples:

      mini-vllm generate "The capital of France is" --temperature 0

      mini-vllm generate --chat --max-tokens 200 "Explain the KV cache."

      git diff | mini-vllm generate --chat --system "Describe this change." -

      mini-vllm generate --file prompts.txt --json > answers.jsonl

    A prompt is continued as it stands, without --max-tokens by 16 tokens; with --chat it is a user's message, and the
    answer may fill the context. A prompt that begins with a dash goes after --.

    The flags come in three groups: of this command, from --n on of sampling, from --model on of the engine. None in
    their texts means that the flag is not given. With --seed the same prompt gives the same text, whatever runs beside
    it.
    """
    given = collect_prompts(prompts or [], file)
    if system is not None and not chat:
        raise InvalidRequestError("--system is a chat message; add --chat", param="system")
    if not as_json and (sampling.logprobs is not None or sampling.prompt_logprobs is not None):
        raise InvalidRequestError("log-probabilities are shown in JSON only; add --json", param="logprobs")
    sampling = dataclasses.replace(sampling, structured_outputs=_form(json_schema, regex))
    sent = {place: as_chat(prompt, system, place) for place, prompt in given.items()} if chat else given
    terminal = open_terminal(verbose=verbose, quiet=quiet)
    writer: AnswerWriter = JsonWriter(list(given.values())) if as_json else TextWriter(len(given), sampling.n, terminal)
    # Memory for keys and values is kept for max_num_seqs sequences: for no more than there are.
    engine = dataclasses.replace(engine, max_num_seqs=min(engine.max_num_seqs, len(given) * sampling.n))
    errors = run_prompts(start_engine(engine, terminal), sent, sampling, writer)
    for error in errors:
        terminal.error(error)
    if errors:
        raise typer.Exit(1)


def _form(json_schema: Path | None, regex: str | None) -> StructuredOutputsParams | None:
    """The form that all answers must have."""
    if json_schema is not None and regex is not None:
        raise InvalidRequestError(
            "--json-schema and --regex both give the answers a form; leave one out", param="regex"
        )
    if regex is not None:
        return StructuredOutputsParams(regex=regex, origin="--regex")
    if json_schema is None:
        return None
    try:
        schema = json_schema.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequestError(
            f"--json-schema {json_schema} cannot be read: {error}", param="json_schema"
        ) from error
    return StructuredOutputsParams(json=schema, origin="--json-schema")


def run_prompts(
    engine: LLMEngine, prompts: Mapping[str, GivenPrompt], sampling: SamplingParams, writer: AnswerWriter
) -> list[str]:
    """Answer all prompts together.

    Args:
        prompts: by their places, which errors name.

    Returns:
        What went wrong with those whose computation failed.

    Raises:
        InvalidRequestError: a prompt is refused; then none is answered.
    """
    index_of: dict[str, int] = {}
    places = list(prompts)
    for index, (place, prompt) in enumerate(prompts.items()):
        try:
            index_of[engine.add_request(prompt, sampling)] = index
        except InvalidRequestError as error:
            where = f"{place}: " if len(prompts) > 1 else ""
            raise InvalidRequestError(f"{where}{error}", param=error.param) from error
    errors: list[str] = []
    while engine.has_unfinished_requests():
        for output in engine.step():
            writer.push(index_of[output.request_id], output)
            if output.error is not None and output.finished:
                errors.append(f"{places[index_of[output.request_id]]}: {output.error}")
    return errors
