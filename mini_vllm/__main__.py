"""`python -m mini_vllm`: the same as the command `mini-vllm`."""

from __future__ import annotations

from mini_vllm.cli import main

if __name__ == "__main__":
    main()
