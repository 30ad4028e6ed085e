"""What requests look like: OpenAI's fields and vLLM's extensions, as Pydantic models.

Where it stands: FastAPI fills these from JSON bodies; `completions.py`, `chat.py` and the others read them. What
answers look like is in `responses.py`.

What always holds:
- Types are strict: "0.5", true or NaN where a number belongs is a 400. Ranges are the business of `SamplingParams`.
- null is the same as leaving a field out.
- A large body costs the event loop little: `json_body.py` has counted its lists, so that a million wrong entries are
  not a million errors, and lists of token ids are checked without a loop in Python.
- A field that is known but not supported is a 400, unless it has the value that changes nothing. A field that nobody
  knows is named in the log and ignored.

To support one more of OpenAI's fields: declare it here, and take it out of `_NOT_SUPPORTED`.

In vLLM: `vllm/entrypoints/openai/*/protocol.py`.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from typing import Annotated, Any, TypeAlias

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    WithJsonSchema,
)

from mini_vllm.api.errors import shown
from mini_vllm.api.response_format import form_of
from mini_vllm.api.tools import ToolPlan, plan_tools
from mini_vllm.errors import InvalidRequestError
from mini_vllm.sampling_params import MAX_LOGPROBS, SamplingParams

logger = logging.getLogger(__name__)

MAX_PROMPTS = 2048  # in one request
MAX_NAMED = 16  # unknown fields that the log names
PromptItem: TypeAlias = str | list[int]

_WITHOUT_EFFECT = frozenset(
    {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"}
)
# Known fields and, of each, the values that ask for nothing.
_NOT_SUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "suffix": ("",),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": ([],),
    "guided_grammar": (),
    "tools": ([],),  # these three outside of chat
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "reasoning_effort": ("none",),
    "verbosity": (),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "truncate_prompt_tokens": (),
    "logits_processors": ([],),
    "chat_template": (),
    "documents": ([],),
}
_SAMPLING_FIELDS = frozenset(field.name for field in dataclasses.fields(SamplingParams))


def _prompts(value: Any) -> list[PromptItem]:
    """A string, strings, token ids, or lists of token ids: always as a list of prompts."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise ValueError("must be a string, a list of strings, a list of token ids, or a list of those")
    if not value:
        raise ValueError("is an empty list; it must hold at least one prompt")
    if _is_token_id(value[0]):
        return [_token_ids(value)]
    if len(value) > MAX_PROMPTS:
        raise ValueError(f"holds {len(value)} prompts; at most {MAX_PROMPTS} go into one request")
    if all(isinstance(item, str) for item in value):
        return value
    if all(isinstance(item, list) for item in value):
        return [_token_ids(item) for item in value]
    raise ValueError("must hold only strings, only token ids, or only lists of token ids")


def _token_ids(value: Any) -> list[int]:
    if not isinstance(value, list):
        raise ValueError("must be a list of token ids")
    if not set(map(type, value)) <= {int}:  # true and false are of another type
        wrong = next(item for item in value if type(item) is not int)
        raise ValueError(f"must hold whole numbers as token ids; one is {shown(wrong)}")
    return value


def _is_token_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _messages(value: Any) -> Any:
    if isinstance(value, list) and not value:
        raise ValueError("is an empty list; it must hold at least one message")
    if isinstance(value, list) and not set(map(type, value)) <= {dict}:
        wrong = next(item for item in value if not isinstance(item, dict))
        raise ValueError(f"must hold messages, which are objects; one is {shown(wrong)}")
    return value


_TEXTS_OR_IDS = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}, "minItems": 1},
        {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1},
        {"type": "array", "items": {"type": "array", "items": {"type": "integer", "minimum": 0}}, "minItems": 1},
    ],
    "examples": ["The capital of France is"],
}
_MESSAGES = {
    "type": "array",
    "minItems": 1,
    "items": {
        "type": "object",
        "required": ["role"],
        "properties": {
            "role": {"type": "string", "minLength": 1},
            "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": {}}, {"type": "null"}]},
        },
    },
    "examples": [[{"role": "user", "content": "What is the capital of Japan?"}]],
}
Prompts = Annotated[list[PromptItem], PlainValidator(_prompts), WithJsonSchema(_TEXTS_OR_IDS)]
Messages = Annotated[list[dict[str, Any]], BeforeValidator(_messages), WithJsonSchema(_MESSAGES)]
TokenIds = Annotated[
    list[int], PlainValidator(_token_ids), WithJsonSchema({"type": "array", "items": {"type": "integer"}})
]


class Body(BaseModel):
    """The base of all request bodies."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    model: str | None = Field(None, description="The name that /v1/models lists; the only one there is if left out.")

    def check_other_fields(self) -> None:
        """Refuse what is known and not supported; name in the log what is not known.

        Raises:
            InvalidRequestError: with the field in `param`.
        """
        unknown: list[str] = []
        for name, value in (self.model_extra or {}).items():
            if value is None or name in _WITHOUT_EFFECT:
                continue
            neutral = _NOT_SUPPORTED.get(name)
            if neutral is None:
                unknown.append(name)
            elif not any(value == one and type(value) is type(one) for one in neutral):
                raise InvalidRequestError(f"{name} is not supported here; leave it out", param=name)
        for name in unknown[:MAX_NAMED]:
            logger.warning("ignoring the unknown request field %s", shown(name))
        if len(unknown) > MAX_NAMED:
            logger.warning("ignoring %d more unknown request fields", len(unknown) - MAX_NAMED)


class StreamOptions(BaseModel):
    """What a stream shows beside the text."""

    model_config = ConfigDict(strict=True, extra="ignore")

    include_usage: bool | None = Field(None, description="A last event with the token counts.")
    continuous_usage_stats: bool | None = Field(None, description="Token counts in every event.")


class GenerationBody(Body):
    """What all requests for text have in common; fields of `SamplingParams` have its names."""

    n: int | None = Field(None, description="How many answers to each prompt.")
    best_of: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: TokenIds | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: TokenIds | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    seed: int | None = None
    prompt_logprobs: int | None = None
    structured_outputs: dict[str, Any] | None = Field(
        None, description="The form of the answer: one of json, regex, choice, grammar, json_object."
    )
    response_format: dict[str, Any] | None = Field(None, description="OpenAI's way to ask for JSON or a JSON schema.")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = Field(None, description="Show the token ids of prompt and answer.")
    cache_salt: str | None = Field(None, description="Share the prefix cache only with requests of the same salt.")
    priority: int | None = Field(None, description="Smaller goes first, under --policy priority.")

    @property
    def shows_tokens(self) -> bool:
        """Whether the answer shows anything of a token but its text."""
        counts = self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)
        logprobs = getattr(self, "logprobs", None)  # a number, where 0 asks for them, or true and false
        return bool(self.return_token_ids) or counts or not (logprobs is None or logprobs is False)

    def sampling_fields(self) -> dict[str, Any]:
        """What was given, of the fields that SamplingParams has."""
        given = {name: getattr(self, name) for name in type(self).model_fields if name in _SAMPLING_FIELDS}
        form = None if self.response_format is None else form_of(self.response_format)
        if form is not None and self.structured_outputs is not None:
            raise InvalidRequestError(
                "response_format and structured_outputs both give the answer a form; leave one out",
                param="response_format",
            )
        if form is not None:
            given["structured_outputs"] = form
        return {name: value for name, value in given.items() if value is not None}

    def check_other_fields(self) -> None:
        super().check_other_fields()
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError("stream_options need stream=true", param="stream_options")


class CompletionBody(GenerationBody):
    """`POST /v1/completions`."""

    prompt: Prompts
    echo: bool | None = Field(None, description="Put the prompt before the answer.")
    logprobs: int | None = Field(None, description=f"Log-probabilities and so many alternatives, 0 to {MAX_LOGPROBS}.")

    model_config = ConfigDict(
        json_schema_extra={"example": {"prompt": "The capital of France is", "max_tokens": 16, "temperature": 0}}
    )

    def sampling_params(self) -> SamplingParams:
        """Raises InvalidRequestError, with the field in `param`."""
        fields = self.sampling_fields()
        if self.echo and self.prompt_logprobs is None and (self.logprobs is not None or self.max_tokens == 0):
            fields["prompt_logprobs"] = self.logprobs or 0  # echo shows the prompt's own; 0 tokens are allowed with it
        return SamplingParams.from_fields(fields)


class ChatOptions(Body):
    """How messages become a prompt."""

    messages: Messages
    add_generation_prompt: bool | None = Field(None, description="End the prompt with what begins an answer.")
    continue_final_message: bool | None = Field(None, description="Go on with the last message.")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="More variables for the chat template.")
    tools: list[Any] | None = Field(None, description="Functions that the model may call.")
    tool_choice: str | dict[str, Any] | None = Field(None, description="none, auto, required, or one function.")
    parallel_tool_calls: bool | None = Field(None, description="Whether one answer may have several calls.")

    def tool_plan(self) -> ToolPlan:
        """Raises InvalidRequestError, with the field in `param`."""
        return plan_tools(self.tools, self.tool_choice, self.parallel_tool_calls)

    def template_options(self) -> dict[str, Any]:
        """Arguments of `ChatTemplate.render`."""
        goes_on = bool(self.continue_final_message)
        starts = (not goes_on) if self.add_generation_prompt is None else self.add_generation_prompt
        return {
            "add_generation_prompt": starts,
            "continue_final_message": goes_on,
            "template_kwargs": self.chat_template_kwargs,
            "tools": self.tool_plan().shown,
        }


class ChatBody(ChatOptions, GenerationBody):
    """`POST /v1/chat/completions`."""

    max_completion_tokens: int | None = Field(None, description="The newer name of max_tokens.")
    logprobs: bool | None = Field(None, description="Log-probabilities of the answer's tokens.")
    top_logprobs: int | None = Field(None, description=f"With logprobs: so many alternatives, 0 to {MAX_LOGPROBS}.")

    model_config = ConfigDict(
        json_schema_extra={
            "example": {"messages": [{"role": "user", "content": "What is the capital of Japan?"}], "max_tokens": 64}
        }
    )

    def sampling_params(self) -> SamplingParams:
        """Raises InvalidRequestError, with the field in `param`."""
        fields = self.sampling_fields()
        fields.pop("logprobs", None)
        if self.top_logprobs is not None and not 0 <= self.top_logprobs <= MAX_LOGPROBS:
            raise InvalidRequestError(
                f"top_logprobs must be from 0 to {MAX_LOGPROBS}; got {shown(self.top_logprobs)}", param="top_logprobs"
            )
        if self.logprobs:
            fields["logprobs"] = self.top_logprobs or 0
        elif self.top_logprobs:
            raise InvalidRequestError("top_logprobs need logprobs=true", param="top_logprobs")
        if self.max_completion_tokens is not None:
            fields["max_tokens"] = self.max_completion_tokens
        return SamplingParams.from_fields(fields)


class GenerateBody(GenerationBody):
    """`POST /generate`: a prompt and how to go on, nothing else."""

    prompt: Prompts

    model_config = ConfigDict(
        json_schema_extra={"example": {"prompt": "Explain KV cache.", "max_tokens": 128, "temperature": 0.8}}
    )

    def sampling_params(self) -> SamplingParams:
        """Raises InvalidRequestError, with the field in `param`."""
        return SamplingParams.from_fields(self.sampling_fields())


class TokenizeTextBody(Body):
    """`POST /tokenize` of a text."""

    prompt: str
    add_special_tokens: bool | None = Field(
        None, description="Add what the tokenizer adds, such as BOS; true if left out."
    )
    return_token_strs: bool | None = Field(None, description="Also give each token's text.")

    model_config = ConfigDict(json_schema_extra={"example": {"prompt": "The capital of France is"}})


class TokenizeChatBody(ChatOptions):
    """`POST /tokenize` of messages, as the chat endpoint would see them."""

    add_special_tokens: bool | None = Field(None, description="Add BOS to what the template gives; false if left out.")
    return_token_strs: bool | None = Field(None, description="Also give each token's text.")


class DetokenizeBody(Body):
    """`POST /detokenize`."""

    tokens: TokenIds

    model_config = ConfigDict(json_schema_extra={"example": {"tokens": [504, 3575, 282, 4649, 314]}})
