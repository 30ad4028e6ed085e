"""The input processor: from what a user gives to a `Request` with every question settled.

Where it stands: the first station of a request in the engine. It tokenises, fills in defaults, and refuses what cannot
be served, so that nothing behind it meets a bad value.

    str            -> tokenizer.encode, with what the tokenizer adds (BOS)
    chat messages  -> the model's chat template -> encode, with nothing added beyond the template
    token ids      -> checked against the vocabulary

What always holds: a request that passed has at least one prompt token, every id is in the vocabulary, and prompt and
max_tokens together fit max_model_len, which fits the pool. Otherwise `InvalidRequestError` names the field.

In vLLM: `vllm/v1/engine/input_processor.py` (`processor.py` in older versions).
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from mini_vllm.config import EngineConfig
from mini_vllm.engine.grammar import CompiledGrammar, GrammarCompiler
from mini_vllm.engine.prompts import PlainPrompt, Prompt, checked_token_ids, is_chat, plain_prompt
from mini_vllm.engine.request import Request
from mini_vllm.errors import InvalidRequestError
from mini_vllm.sampling_params import SamplingParams
from mini_vllm.structured_outputs import StructuredOutputsParams, ToolCallForm
from mini_vllm.tokenizer.chat_template import ChatTemplate
from mini_vllm.tokenizer.tokenizer import Tokenizer

COMPLETION_MAX_TOKENS = 16  # what a completion gets without max_tokens, as over the OpenAI API


@dataclass(frozen=True)
class ModelFacts:
    """What a request is checked against.

    Args:
        vocab_size: rows of the embedding: ids from 0 to below it exist.
        eos_token_ids: every id that ends a sequence (config, generation_config and tokenizer together).
        generation_defaults: sampling fields of generation_config.json; they count where a request is silent.
    """

    vocab_size: int
    eos_token_ids: frozenset[int]
    generation_defaults: Mapping[str, Any]


class InputProcessor:
    """Makes requests. One per engine.

    Args:
        config: with its limits settled.
        tokenizer: the model's.
        chat_template: the model's, or the user's own; it may hold no template, and then refuses messages.
        facts: what requests are checked against.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        config: EngineConfig,
        tokenizer: Tokenizer,
        chat_template: ChatTemplate,
        facts: ModelFacts,
        clock: Callable[[], float],
    ) -> None:
        if config.max_model_len is None:
            raise RuntimeError("the input processor needs a config whose limits are settled (with_model_limits)")
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        self._facts = facts
        self._grammars = GrammarCompiler(tokenizer, facts.vocab_size, facts.eos_token_ids)
        self._clock = clock
        self._max_model_len = config.max_model_len
        self._max_num_seqs = config.max_num_seqs
        self._max_text_length = self._max_model_len * tokenizer.longest_token_length()
        self._seeds: random.Random = random.SystemRandom() if config.seed is None else random.Random(config.seed)
        self._arrivals = itertools.count()

    def make_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        template_options: Mapping[str, Any] | None = None,
    ) -> Request:
        """Check and settle everything.

        Args:
            template_options: for chat messages, what `ChatTemplate.render` takes besides them.

        Raises:
            InvalidRequestError: with the field at fault in `param`.
        """
        plain = plain_prompt(prompt)
        token_ids = self._tokenize(plain, template_options or {})
        asked_for = params.max_tokens
        params = params.resolve(self._facts.generation_defaults)
        params.check_vocabulary(self._facts.vocab_size)
        if params.n > self._max_num_seqs:
            raise InvalidRequestError(
                f"n={params.n} sequences need as many places, and max_num_seqs is {self._max_num_seqs}", param="n"
            )
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise InvalidRequestError(f"priority must be a whole number, got {priority!r}", param="priority")
        if cache_salt is not None and (not isinstance(cache_salt, str) or not cache_salt):
            raise InvalidRequestError(f"cache_salt must be a non-empty string, got {cache_salt!r}", param="cache_salt")
        max_tokens = self._max_tokens(len(token_ids), asked_for, params, is_chat=is_chat(plain))
        stop_ids, reasons = self._stop_token_ids(params)
        grammar = self._grammar(params)
        # Everything that can be refused has been, so a refused request moves neither the seeds nor the arrivals.
        return Request(
            request_id=request_id,
            prompt=plain if isinstance(plain, str) else None,
            prompt_token_ids=token_ids,
            params=params,
            seed=_signed_64_bit(self._seeds.getrandbits(64) if params.seed is None else params.seed),
            max_tokens=max_tokens,
            stop_token_ids=stop_ids,
            stop_token_reasons=reasons,
            bad_words_token_ids=self._bad_words_token_ids(params),
            arrival_time=self._clock(),
            arrival_index=next(self._arrivals),
            priority=priority,
            cache_salt=cache_salt,
            grammar=grammar,
        )

    def _tokenize(self, prompt: PlainPrompt, template_options: Mapping[str, Any]) -> list[int]:
        if isinstance(prompt, str):
            self._check_text_length(prompt, "prompt")
            token_ids = self._tokenizer.encode(prompt)
            if not token_ids:
                raise InvalidRequestError("prompt is empty; it must give at least one token", param="prompt")
        elif is_chat(prompt):
            text = self._chat_template.render(cast("Sequence[Mapping[str, Any]]", prompt), **template_options)
            self._check_text_length(text, "messages")
            token_ids = self._tokenizer.encode(text, add_special_tokens=False)
            if not token_ids:
                raise InvalidRequestError("messages give an empty prompt under this chat template", param="messages")
        else:
            if isinstance(prompt, Sequence) and len(prompt) > self._max_model_len:  # before a million are looked at
                raise _too_long(len(prompt), self._max_model_len, "prompt")
            token_ids = checked_token_ids(prompt)
        return self._within_vocabulary(token_ids)

    def _check_text_length(self, text: str, param: str) -> None:
        """Refuse a text that cannot fit whatever its tokens are, since tokenising megabytes takes seconds."""
        if len(text) > self._max_text_length:
            raise InvalidRequestError(
                f"the prompt has {len(text)} characters; a context of {self._max_model_len} tokens holds "
                f"{self._max_text_length} at most, even if every token were the longest one of the vocabulary",
                param=param,
            )

    def _within_vocabulary(self, token_ids: list[int]) -> list[int]:
        size = self._facts.vocab_size
        if min(token_ids) < 0 or max(token_ids) >= size:
            wrong = next(token_id for token_id in token_ids if not 0 <= token_id < size)
            raise InvalidRequestError(
                f"prompt holds token id {wrong}, but the model's ids go from 0 to {size - 1}", param="prompt"
            )
        return token_ids

    def _max_tokens(self, prompt_len: int, asked_for: int | None, params: SamplingParams, *, is_chat: bool) -> int:
        """The number of tokens this request may generate, which always fits the context.

        Args:
            asked_for: the request's own max_tokens. A default is cut to what is left; this is not: it is refused.
        """
        limit = self._max_model_len
        room = limit - prompt_len
        if room < 0 or (room == 0 and asked_for != 0):
            raise _too_long(prompt_len, limit, "messages" if is_chat else "prompt")
        if asked_for is None:
            default = params.max_tokens or (room if is_chat else COMPLETION_MAX_TOKENS)  # generation_config's, or ours
            wanted = min(default, room)
        else:
            wanted = asked_for
        if wanted > room:
            raise InvalidRequestError(
                f"max_tokens={wanted} and a prompt of {prompt_len} tokens go over the context of {limit} tokens; "
                f"ask for at most {room}",
                param="max_tokens",
            )
        if params.min_tokens > wanted:
            raise InvalidRequestError(
                f"min_tokens={params.min_tokens} is more than max_tokens={wanted}, the most this request can get",
                param="min_tokens",
            )
        return wanted

    def _grammar(self, params: SamplingParams) -> CompiledGrammar | None:
        form = params.structured_outputs
        return self._grammars.compile(form) if isinstance(form, (StructuredOutputsParams, ToolCallForm)) else None

    def _bad_words_token_ids(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Every bad word as tokens, both as it stands inside a text (after a space) and at its beginning."""
        spellings: dict[tuple[int, ...], None] = {}
        for word in params.bad_words or ():
            for text in (word, " " + word.lstrip()):
                token_ids = tuple(self._tokenizer.encode(text, add_special_tokens=False))
                if token_ids:
                    spellings[token_ids] = None
        return tuple(spellings)

    def _stop_token_ids(self, params: SamplingParams) -> tuple[frozenset[int], dict[int, int | str]]:
        """All ids that end the generation, and the stop reason of those that the user asked for."""
        reasons: dict[int, int | str] = {}
        for stop in params.stop or ():
            # A special token has no text where special tokens are skipped, so its string could never match.
            token_id = self._tokenizer.special_token_id(stop)
            if token_id is not None:
                reasons[token_id] = stop
        reasons.update((token_id, token_id) for token_id in params.stop_token_ids or ())
        # Under a grammar an end of sequence means that the form is complete, so it ends the answer in any case.
        ignores_eos = params.ignore_eos and params.structured_outputs is None
        ends: frozenset[int] = frozenset() if ignores_eos else self._facts.eos_token_ids
        return ends | reasons.keys(), reasons


def _too_long(num_tokens: int, limit: int, param: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"the prompt has {num_tokens} tokens, and the context holds {limit}, prompt and answer together; "
        f"shorten the prompt to {limit - 1} tokens or fewer",
        param=param,
    )


def _signed_64_bit(seed: int) -> int:
    """Seeds are any 64-bit integer, signed or unsigned: the same bits, read as signed."""
    return (seed + 2**63) % 2**64 - 2**63
