"""Every error of ours that a user can meet.

A message always says what happened, with the numbers, and what to do. Anything a user, a client or a file can cause
raises one of these; an `AssertionError`, `KeyError` or the like that reaches a user is a bug in mini vLLM.

    MiniVLLMError
    |- InvalidRequestError      a request is wrong: the request is refused, the engine lives on   (HTTP 400)
    |- EngineDeadError          the engine has stopped: waiting callers get this                   (HTTP 503)
    |- InvalidConfigError       an engine option or a pair of options is wrong: the start is refused
    |- ModelNotFoundError       the model's name or path leads nowhere
    |- DownloadError            a model could not be fetched: network, hash, disk
    |- KernelBuildError         the fast kernels cannot be built or loaded: the engine runs without them, unless told to
    `- ModelLoadError           a model's files are damaged, incomplete or of the wrong shape
       `- UnsupportedModelError an architecture, rope type, activation or format that is not implemented

In vLLM: `vllm/v1/engine/exceptions.py`; elsewhere ValueError.
"""

from __future__ import annotations


class MiniVLLMError(Exception):
    """The base of all errors that mini vLLM raises on purpose."""


class InvalidRequestError(MiniVLLMError, ValueError):
    """A request that cannot be served as it stands.

    Args:
        message: what is wrong, with the numbers, and what would be right.
        param: the name of the field at fault (`error.param` over HTTP), or None if no single field is.
    """

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class InvalidConfigError(MiniVLLMError, ValueError):
    """An engine option, or a pair of options, that cannot work.

    Args:
        message: what is wrong and what would be right.
        field: the name of the option in `EngineConfig`.
    """

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class ModelNotFoundError(MiniVLLMError):
    """The model's name, path or Hugging Face id leads nowhere."""


class DownloadError(MiniVLLMError):
    """A model could not be fetched: no network, a wrong hash, a full disk, a file cut short."""


class KernelBuildError(MiniVLLMError):
    """The fast kernels cannot be built or loaded on this machine."""


class ModelLoadError(MiniVLLMError):
    """A model's files are damaged, incomplete, or do not fit its configuration."""


class UnsupportedModelError(ModelLoadError):
    """The model asks for something that mini vLLM does not implement, and will not guess."""


class EngineDeadError(MiniVLLMError):
    """The engine has stopped, because of an internal failure or because it was shut down; the message says which."""
