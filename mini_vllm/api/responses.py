"""What answers look like. These models document the server (`/docs`), and tests hold every answer against them.

Where it stands: beside the code that writes answers. That code makes plain dicts, since an answer is written once a
token and a Pydantic model costs more than the token's JSON.

In vLLM: the response classes in `vllm/entrypoints/openai/*/protocol.py`.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

FinishName = Literal["stop", "length", "abort", "error"]
ChatFinishName = Literal["stop", "length", "tool_calls", "abort", "error"]


class Answer(BaseModel):
    """The base: an answer has no fields but those named."""

    model_config = ConfigDict(extra="forbid")


class ErrorDetail(Answer):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(Answer):
    """Every answer that is not a success."""

    error: ErrorDetail


class CachedTokens(Answer):
    cached_tokens: int


class Usage(Answer):
    """Token counts of a whole request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class PromptLogprob(Answer):
    """vLLM's form: one token that could stand at a place of the prompt."""

    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class CompletionLogprobs(Answer):
    """One entry a token in each list."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Answer):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishName | None
    stop_reason: int | str | None
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class Completion(Answer):
    """Of `/v1/completions`, whole or as an event of a stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


class TopLogprob(Answer):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Answer):
    content: list[TokenLogprob]


class CalledFunction(Answer):
    name: str
    arguments: str


class ToolCall(Answer):
    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(Answer):
    role: Literal["assistant"]
    content: str | None
    refusal: None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None


class ChatChoice(Answer):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishName
    stop_reason: int | str | None
    token_ids: list[int] | None = None


class ChatCompletion(Answer):
    """Of `/v1/chat/completions`."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class ToolCallDelta(ToolCall):
    """A whole call: it is sent when it is complete."""

    index: int


class ChatDelta(Answer):
    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChunkChoice(Answer):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishName | None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatChunk(Answer):
    """One event of a chat stream."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class GeneratedText(Answer):
    index: int
    text: str
    finish_reason: FinishName | None
    stop_reason: int | str | None
    token_ids: list[int] | None = None


class Generated(Answer):
    """Of `/generate`."""

    id: str
    model: str
    text: list[str]
    outputs: list[GeneratedText]
    usage: Usage


class Tokens(Answer):
    """Of `/tokenize`."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizedText(Answer):
    """Of `/detokenize`."""

    prompt: str


class Model(Answer):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int


class Models(Answer):
    """Of `/v1/models`."""

    object: Literal["list"]
    data: list[Model]


class Health(Answer):
    """Of `/health`."""

    status: Literal["ok", "loading", "shutting down", "failed"]
    detail: str | None


class Version(Answer):
    """Of `/version`."""

    version: str
