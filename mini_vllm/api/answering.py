"""Answering a request for text: what the endpoints have in common.

    body -> checks -> admission -> tokenising -> Generation -> AnswerWriter -> JSON, or events
            400 404   429          400           500 503 504

Where it stands: `completions.py`, `chat.py` and `generate.py` bring prompts and a writer; `streaming.py` sends events.

What always holds:
- What can be refused is refused before the first byte of an answer, so a stream never begins with an error.
- When the client leaves, in whatever phase, the engine ends the request.

In vLLM: `vllm/entrypoints/openai/engine/serving.py` (`OpenAIServing`).
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, TypeAlias, cast

from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, Response

from mini_vllm.api.access_log import CLIENT_GONE, MAX_PROMPT_SHOWN, log_of
from mini_vllm.api.disconnect import unless_gone
from mini_vllm.api.errors import ApiError
from mini_vllm.api.generation import Generation
from mini_vllm.api.lifecycle import Lifecycle
from mini_vllm.api.logprobs import prompt_texts
from mini_vllm.api.protocol import Body, GenerationBody
from mini_vllm.api.streaming import AnswerWriter, EventStream
from mini_vllm.engine.async_engine import AsyncLLMEngine
from mini_vllm.engine.prompts import PlainPrompt
from mini_vllm.engine.request import Request
from mini_vllm.errors import InvalidRequestError
from mini_vllm.sampling_params import SamplingParams

PromptTexts: TypeAlias = Mapping[str, list[str]]  # request id -> the text of each prompt token


def lifecycle_of(http: HttpRequest) -> Lifecycle:
    """The state of the server that a request came to."""
    return cast(Lifecycle, http.app.state.lifecycle)


async def answer_request(
    http: HttpRequest,
    body: GenerationBody,
    params: SamplingParams,
    prompts: Sequence[PlainPrompt],
    make_writer: Callable[[Generation, PromptTexts], AnswerWriter],
    *,
    id_prefix: str,
    template_options: Mapping[str, Any] | None = None,
    needs_prompt_texts: bool = False,
) -> Response:
    """Answer a request for text.

    Args:
        http: the request.
        body: what it asks for, with `params` made of it.
        prompts: at least one.
        make_writer: makes the writer of this endpoint; prompt texts are there only if `needs_prompt_texts`.
        id_prefix: of the answer's id, such as `cmpl`.
        template_options: for messages, see `ChatTemplate.render`.

    Raises:
        InvalidRequestError, ApiError, EngineDeadError: it is refused, or has failed before its answer began.
    """
    lifecycle = lifecycle_of(http)
    engine, log = lifecycle.engine(), log_of(http.scope)
    answer_id = f"{id_prefix}-{uuid.uuid4().hex}"
    if lifecycle.config.log_prompts:
        log.prompt = str(prompts[0][:MAX_PROMPT_SHOWN])[:MAX_PROMPT_SHOWN]

    def prepare() -> tuple[list[Request], dict[str, list[str]]]:
        requests = [
            _make_request(engine, body, params, prompt, answer_id, (index, len(prompts)), template_options)
            for index, prompt in enumerate(prompts)
        ]
        texts = {}
        if needs_prompt_texts:
            tokenizer = engine.engine.tokenizer
            texts = {one.request_id: prompt_texts(tokenizer, one.prompt_token_ids, one.prompt) for one in requests}
        return requests, texts

    with ExitStack() as place:
        place.enter_context(lifecycle.admitted(len(prompts) * params.n))
        requests, texts = await engine.in_tokenizer_thread(prepare, compiles=params.structured_outputs is not None)
        generation = Generation(answer_id, engine, requests, log, lifecycle, shows_tokens=body.shows_tokens)
        writer = make_writer(generation, texts)
        if body.stream:
            shows_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
            return EventStream(generation, writer, shows_usage=shows_usage, on_close=place.pop_all().close)
        pieces = await unless_gone(http.receive, generation.whole())
        return Response(status_code=CLIENT_GONE) if pieces is None else JSONResponse(writer.whole(pieces))


def _make_request(
    engine: AsyncLLMEngine,
    body: GenerationBody,
    params: SamplingParams,
    prompt: PlainPrompt,
    answer_id: str,
    number: tuple[int, int],
    template_options: Mapping[str, Any] | None,
) -> Request:
    index, count = number
    try:
        return engine.engine.make_request(
            prompt,
            params,
            request_id=f"{answer_id}-{index}",
            priority=body.priority or 0,
            cache_salt=body.cache_salt,
            template_options=template_options,
        )
    except InvalidRequestError as error:
        if count == 1:
            raise
        raise InvalidRequestError(f"prompt {index + 1} of {count}: {error}", param=error.param) from error


def check_body(http: HttpRequest, body: Body) -> None:
    """Refuse a model that is not served, and fields that are not supported.

    Raises:
        ApiError: 404 that lists the served names.
        InvalidRequestError: with the field in `param`.
    """
    name, served = body.model, lifecycle_of(http).engine().engine.model_name
    if name is not None and name != served:
        raise ApiError(
            404, f"the model {name[:80]!r} is not served here; served: {served}", param="model", code="model_not_found"
        )
    body.check_other_fields()
