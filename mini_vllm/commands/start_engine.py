"""From the options of the command line to a running engine.

Where it stands: first thing in every command that runs a model. The model is fetched before the spinner starts, since
a pull has a progress bar of its own.

In vLLM: nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mini_vllm.commands.terminal import Terminal
from mini_vllm.config import EngineConfig

if TYPE_CHECKING:
    from mini_vllm.engine.events import EventListener
    from mini_vllm.engine.llm_engine import LLMEngine


def start_engine(config: EngineConfig, terminal: Terminal, listener: EventListener | None = None) -> LLMEngine:
    """Fetch the model if it is not here, load it, and make an engine over it.

    Args:
        listener: called with every event of the engine.

    Raises:
        InvalidConfigError, ModelNotFoundError, DownloadError, ModelLoadError: the start is refused.
    """
    from mini_vllm.store.model_shapes import find_model

    files = find_model(config)
    with terminal.busy(f"Loading {files.name}"):
        from mini_vllm.engine.llm_engine import LLMEngine

        return LLMEngine(config=config, listener=listener)
