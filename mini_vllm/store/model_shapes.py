"""Models without weights, for `load_format="dummy"`: a configuration is enough to measure what a size costs.

Where it stands: beside `model_store.py`; `find_model` is the question that the engine asks with either.

    --load-format dummy -m llama-3-8b            one of the shapes that come along, `shapes/NAME/config.json`
    --load-format dummy -m path/config.json      any other configuration, or the directory that it lies in
    --load-format dummy -m MODEL                 a model of the store, whose own tokenizer is used then

In vLLM: `vllm/model_executor/model_loader/dummy_loader.py`.
"""

from __future__ import annotations

from pathlib import Path

from mini_vllm.config import EngineConfig
from mini_vllm.errors import ModelNotFoundError
from mini_vllm.store.model_store import ModelFiles, resolve_model

_CONFIG = "config.json"


def shape_names() -> list[str]:
    """The shapes that come with the package."""
    return sorted(path.parent.name for path in _folder().glob(f"*/{_CONFIG}"))


def find_model(config: EngineConfig) -> ModelFiles:
    """The files of a config's model; with `load_format="dummy"` a configuration alone will do.

    Raises:
        ModelNotFoundError: no such model, or a configuration under another name than config.json.
        Others: as `resolve_model`.
    """
    if config.load_format == "dummy" and config.revision is None:
        if config.model in shape_names():
            return ModelFiles(config.model, _folder() / config.model, "safetensors")
        path = Path(config.model).expanduser()
        if path.suffix == ".json" and path.name != _CONFIG:
            raise ModelNotFoundError(f"a configuration is read from a file called {_CONFIG}, got {path}; rename it")
        directory = path.parent if path.name == _CONFIG else path
        if (directory / _CONFIG).is_file():
            directory = directory.resolve()
            return ModelFiles(directory.name, directory, "safetensors")
    return resolve_model(config.model, revision=config.revision)


def _folder() -> Path:
    return Path(__file__).with_name("shapes")
