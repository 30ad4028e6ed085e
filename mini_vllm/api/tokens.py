"""`POST /tokenize` and `POST /detokenize`: the tokenizer by itself.

What always holds: the ids of messages are those that the chat endpoint would compute; long texts are worked on away
from the event loop, and are not bound to the context.

In vLLM: `vllm/entrypoints/serve/tokenize/serving.py`.
"""

from __future__ import annotations

from fastapi import APIRouter, Request

from mini_vllm.api.answering import check_model, lifecycle_of
from mini_vllm.api.json_body import JsonRoute
from mini_vllm.api.protocol import DetokenizeBody, TokenizeChatBody, TokenizeTextBody
from mini_vllm.api.responses import DetokenizedText, Tokens
from mini_vllm.engine.llm_engine import LLMEngine
from mini_vllm.errors import InvalidRequestError

router = APIRouter(route_class=JsonRoute)


@router.post("/tokenize")
async def tokenize(body: TokenizeTextBody | TokenizeChatBody, request: Request) -> Tokens:
    """The token ids of a text, or of messages under the chat template."""
    check_model(request, body.model)
    body.check_other_fields()
    engine = lifecycle_of(request).engine()
    return await engine.in_tokenizer_thread(lambda: _tokenize(engine.engine, body))


def _tokenize(engine: LLMEngine, body: TokenizeTextBody | TokenizeChatBody) -> Tokens:
    tokenizer = engine.tokenizer
    if isinstance(body, TokenizeChatBody):
        text = engine.chat_template.render(body.messages, **body.template_options())
        adds_special_tokens = bool(body.add_special_tokens)
    else:
        text, adds_special_tokens = body.prompt, body.add_special_tokens is not False
    token_ids = tokenizer.encode(text, add_special_tokens=adds_special_tokens)
    return Tokens(
        count=len(token_ids),
        max_model_len=engine.config.max_model_len or 0,
        tokens=token_ids,
        token_strs=[tokenizer.token_text(token_id) for token_id in token_ids] if body.return_token_strs else None,
    )


@router.post("/detokenize")
async def detokenize(body: DetokenizeBody, request: Request) -> DetokenizedText:
    """The text of token ids, special tokens included."""
    check_model(request, body.model)
    body.check_other_fields()
    engine = lifecycle_of(request).engine()
    tokenizer = engine.engine.tokenizer
    for token_id in body.tokens:
        if not 0 <= token_id < tokenizer.vocab_size:
            raise InvalidRequestError(
                f"tokens holds {token_id}, but the tokenizer's ids go from 0 to {tokenizer.vocab_size - 1}",
                param="tokens",
            )
    text = await engine.in_tokenizer_thread(lambda: tokenizer.decode(body.tokens, skip_special_tokens=False))
    return DetokenizedText(prompt=text)
