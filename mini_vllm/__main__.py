"""`python -m mini_vllm`, and what the command `mini-vllm` runs.

Where it stands: before everything else, so that Ctrl-C has no traceback even while the command line is being imported.

In vLLM: nothing; its command is `vllm/entrypoints/cli/main.py`.
"""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line; 130 is the exit code of Ctrl-C."""
    try:
        from mini_vllm.cli import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
