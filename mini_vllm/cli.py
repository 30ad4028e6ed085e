"""`mini-vllm`: the command line.

Where it stands: the outermost layer. Here the commands are put together and errors become exit codes; what a command
does is in `commands/`, one file each.

    exit code   0    done
                1    it failed: a download, a load, a computation
                2    something that was given is wrong: a flag, a prompt, a model's name
                130  Ctrl-C

What always holds: an error that a user can cause is one line on stderr, without a traceback. Importing this module
loads no torch.

In vLLM: `vllm/entrypoints/cli/main.py`.
"""

from __future__ import annotations

import importlib.metadata
import sys
from typing import Annotated

import typer

from mini_vllm.commands.bench import bench
from mini_vllm.commands.chat import chat
from mini_vllm.commands.dataclass_flags import FLAGS_FROM_ENVIRONMENT
from mini_vllm.commands.doctor import doctor
from mini_vllm.commands.explain import explain
from mini_vllm.commands.generate import generate
from mini_vllm.commands.models import models
from mini_vllm.commands.pull import pull
from mini_vllm.commands.serve import serve
from mini_vllm.commands.terminal import drop_output, print_error, use_utf8, with_all_streams
from mini_vllm.errors import InvalidConfigError, InvalidRequestError, MiniVLLMError, ModelNotFoundError

_WRONG_INPUT = (InvalidRequestError, InvalidConfigError, ModelNotFoundError)

app = typer.Typer(
    name="mini-vllm",
    no_args_is_help=True,
    rich_markup_mode=None,  # boxes cut the names of long flags at 80 columns
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"]},
)
for command in (generate, chat, serve, explain, pull, models, doctor):
    app.command(context_settings=FLAGS_FROM_ENVIRONMENT)(command)
app.add_typer(bench, name="bench")


def _show_version(is_asked_for: bool) -> None:
    if is_asked_for:
        print(f"mini-vllm {importlib.metadata.version('mini-vllm')}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and leave.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """mini vLLM: an LLM inference engine to be read, changed and used.

    Start with:

      mini-vllm chat

      mini-vllm generate "The capital of France is"

    The first use of a model fetches it. `mini-vllm COMMAND --help` has examples and all flags.
    """


def main() -> None:
    """Run a command, and leave with its exit code."""
    with_all_streams()
    use_utf8(sys.stdin, sys.stdout, sys.stderr)
    try:
        try:
            app()
        finally:
            sys.stdout.flush()  # here, where a failure can still be told
    except MiniVLLMError as error:
        print_error(str(error))
        sys.exit(2 if isinstance(error, _WRONG_INPUT) else 1)
    except OSError as error:  # a full disk, a closed stdout; a reader such as `head` that has enough is no error
        drop_output()
        if not isinstance(error, BrokenPipeError):
            print_error(str(error))
        sys.exit(1)
