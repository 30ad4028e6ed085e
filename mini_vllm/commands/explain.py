"""`mini-vllm explain`: watch the engine work, step by step, with a pool so small that something happens.

    flags -> LLMEngine with the observer as its listener -> explain/narrator.py, which runs and tells

This is the real engine with the real model; only the pool is small. What is printed goes to standard output: in colour
on a terminal, plain in a pipe or with NO_COLOR set.

In vLLM: nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from mini_vllm.commands.dataclass_flags import FlagGroup, flags_from
from mini_vllm.commands.start_engine import start_engine
from mini_vllm.commands.terminal import Terminal, Verbose, open_terminal
from mini_vllm.config import EngineConfig
from mini_vllm.errors import InvalidConfigError, InvalidRequestError
from mini_vllm.sampling_params import SamplingParams


@flags_from(
    sampling=FlagGroup(
        SamplingParams,
        without=frozenset({"best_of", "max_tokens", "temperature", "seed", "logprobs", "structured_outputs"}),
    ),
    engine=FlagGroup(EngineConfig, without=frozenset({"block_size", "num_kv_blocks", "seed", "trace"})),
)
def explain(
    prompts: Annotated[list[str], typer.Argument(metavar="PROMPT...", help="One request each: A, B, C and so on.")],
    stagger: Annotated[int, typer.Option(min=0, help="Steps between the arrivals of two prompts.")] = 1,
    step: Annotated[bool, typer.Option("--step", help="Wait for Enter after every step.")] = False,
    trace: Annotated[
        Path | None, typer.Option(help="Write a timeline for https://ui.perfetto.dev to this file.")
    ] = None,
    block_size: Annotated[int, typer.Option(help="Tokens in a block.")] = 4,
    num_kv_blocks: Annotated[int, typer.Option(help="Blocks in the pool.")] = 12,
    max_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.")] = 8,
    temperature: Annotated[
        float | None, typer.Option(help="0 takes the best token; 0 unless --n asks for several answers, then 1.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the random draws.")] = 0,
    verbose: Verbose = False,
    *,
    sampling: SamplingParams,
    engine: EngineConfig,
) -> None:
    """Show what the engine does, step by step: queues, blocks, block tables, prefill, decode, preemption.

    Examples:

      mini-vllm explain "The capital of France is" "The capital of France was once"

      mini-vllm explain --num-kv-blocks 5 "One two three four five" "Red green blue yellow"

      mini-vllm explain --n 3 "Once upon a time there"

      mini-vllm explain --step --max-num-batched-tokens 4 "A prompt that is computed in several chunks"

    The first one shows a prefix hit, the second a preemption, the third copy on write, the fourth a chunked prefill.
    """
    if temperature is None:
        temperature = 0.0 if sampling.n in (None, 1) else 1.0
    params = replace(sampling, max_tokens=max_tokens, temperature=temperature, seed=seed)
    if engine.cache == "none":
        raise InvalidConfigError("cache='none' has no pool to show; choose paged or contiguous", field="cache")
    config = replace(engine, block_size=block_size, num_kv_blocks=num_kv_blocks)
    if config.max_model_len is None:
        # What the pool holds: the engine would lower it to that by itself, with a warning.
        config = replace(config, max_model_len=num_kv_blocks * block_size)
    terminal = open_terminal(verbose=verbose, quiet=False)
    explain_prompts(config, prompts, params, terminal, stagger=stagger, waits=step, trace=trace)


def explain_prompts(
    config: EngineConfig,
    prompts: list[str],
    params: SamplingParams,
    terminal: Terminal,
    *,
    stagger: int,
    waits: bool,
    trace: Path | None,
) -> None:
    """Load the model, explain every step, and put everything away again.

    Args:
        stagger: steps between the arrivals of two prompts.
        waits: for Enter, after every step.
        trace: file for the timeline.
    """
    # Late: the command line starts without Rich and without the engine.
    from rich.console import Console

    from mini_vllm.engine.events import fan_out
    from mini_vllm.engine.trace import TraceWriter
    from mini_vllm.explain.narrator import Narrator
    from mini_vllm.explain.observer import Observer

    observer, console = Observer(), Console()
    with ExitStack() as cleanup:
        writer = None if trace is None else cleanup.enter_context(TraceWriter(trace))
        engine = start_engine(config, terminal, fan_out(observer, writer))
        cleanup.callback(engine.shutdown)
        observer.attach(engine.scheduler)
        narrator = Narrator(engine, observer, console, _enter_key() if waits else _no_pause)
        try:
            narrator.run(prompts, params, stagger=stagger)
        except InvalidRequestError as error:
            raise InvalidRequestError(
                f"{error}; explain has a small pool, {config.num_kv_blocks} blocks of {config.block_size} tokens, and "
                "--num-kv-blocks makes it larger",
                param=error.param,
            ) from error
    if trace is not None:
        terminal.note(f"the timeline is in {trace}; open it at https://ui.perfetto.dev")


def _no_pause() -> None:
    pass


def _enter_key() -> Callable[[], None]:
    """Waits for Enter, until standard input ends."""
    has_ended = False

    def wait() -> None:
        nonlocal has_ended
        if not has_ended:
            try:
                input("\n  Enter for the next step, Ctrl-D for all the others ")
            except EOFError:
                has_ended = True

    return wait
