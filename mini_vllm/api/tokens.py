"""`POST /tokenize` and `POST /detokenize`: the tokenizer by itself.

What always holds: the ids of messages are those that the chat endpoint would compute. Texts are not bound to the
context, so they may be megabytes: they are worked on away from the event loop, and so are their answers, in slices,
between which other threads run.

In vLLM: `vllm/entrypoints/serve/tokenize/serving.py`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from fastapi import APIRouter, Request
from fastapi.responses import Response

from mini_vllm.api.answering import check_body, lifecycle_of
from mini_vllm.api.json_body import JsonRoute
from mini_vllm.api.protocol import DetokenizeBody, TokenizeChatBody, TokenizeTextBody
from mini_vllm.api.responses import DetokenizedText, Tokens
from mini_vllm.engine.llm_engine import LLMEngine
from mini_vllm.errors import InvalidRequestError
from mini_vllm.tokenizer.tokenizer import Tokenizer

router = APIRouter(route_class=JsonRoute)
SLICE = 16_384  # tokens; json.dumps lets no other thread run until it is done


@router.post("/tokenize", response_model=Tokens)
async def tokenize(body: TokenizeTextBody | TokenizeChatBody, request: Request) -> Response:
    """The token ids of a text, or of messages under the chat template."""
    check_body(request, body)
    engine = lifecycle_of(request).engine()
    content = await engine.in_tokenizer_thread(lambda: _tokenize(engine.engine, body))
    return Response(content, media_type="application/json")


def _tokenize(engine: LLMEngine, body: TokenizeTextBody | TokenizeChatBody) -> bytes:
    """The answer: a `Tokens` as JSON."""
    tokenizer = engine.tokenizer
    if isinstance(body, TokenizeChatBody):
        text = engine.chat_template.render(body.messages, **body.template_options())
        adds_special_tokens = bool(body.add_special_tokens)
    else:
        text, adds_special_tokens = body.prompt, body.add_special_tokens is not False
    token_ids = tokenizer.encode(text, add_special_tokens=adds_special_tokens)
    strings = [tokenizer.token_text(token_id) for token_id in token_ids] if body.return_token_strs else None
    parts = (
        f'{{"count":{len(token_ids)},"max_model_len":{engine.config.max_model_len or 0}',
        f'"tokens":{_json_list(token_ids)}',
        f'"token_strs":{"null" if strings is None else _json_list(strings)}}}',
    )
    return ",".join(parts).encode()


def _json_list(items: Sequence[int] | Sequence[str]) -> str:
    slices = (items[start : start + SLICE] for start in range(0, len(items), SLICE))
    return "[" + ",".join(json.dumps(part, separators=(",", ":"))[1:-1] for part in slices) + "]"


@router.post("/detokenize")
async def detokenize(body: DetokenizeBody, request: Request) -> DetokenizedText:
    """The text of token ids, special tokens included."""
    check_body(request, body)
    engine = lifecycle_of(request).engine()
    return DetokenizedText(
        prompt=await engine.in_tokenizer_thread(lambda: _detokenize(engine.engine.tokenizer, body.tokens))
    )


def _detokenize(tokenizer: Tokenizer, token_ids: list[int]) -> str:
    for wrong in (min(token_ids, default=0), max(token_ids, default=0)):
        if not 0 <= wrong < tokenizer.vocab_size:
            raise InvalidRequestError(
                f"tokens holds {wrong}, but the tokenizer's ids go from 0 to {tokenizer.vocab_size - 1}", param="tokens"
            )
    return tokenizer.decode(token_ids, skip_special_tokens=False)
