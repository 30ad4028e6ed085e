"""`Request`: what a user asked for, checked and tokenised, before any of it is computed.

Where it stands: made by the input processor, kept by its `SequenceGroup` until the final output. It never changes.

In vLLM: `vllm/v1/request.py` and `vllm/v1/engine/__init__.py` (`EngineCoreRequest`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from mini_vllm.engine.grammar import CompiledGrammar
from mini_vllm.sampling_params import SamplingParams


@dataclass(frozen=True)
class Request:
    """One request with every open question settled.

    Args:
        request_id: unique among the live requests of an engine.
        prompt: the text as it was given, None for token ids.
        prompt_token_ids: at least one id, each below the model's vocabulary size.
        params: resolved sampling parameters: no field is None that generation needs.
        seed: of the random draws; a signed 64-bit integer.
        stop_token_ids: ids that end the generation, the ends of sequence included unless `ignore_eos`.
        stop_token_reasons: what to report as the stop reason, for the ids the user asked for (the id itself, or the
            stop string that it stands for). An end of sequence has none.
        bad_words_token_ids: the token sequences that spell bad words; the last token of each is what is forbidden.
        arrival_time: seconds on the engine's clock.
        arrival_index: counts the requests of this engine; breaks ties of arrival and priority.
        priority: smaller goes first under the `priority` policy.
        cache_salt: requests share prefix-cache blocks only with requests of the same salt.
        grammar: of the form that the answer must have; None for free text.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    max_tokens: int
    stop_token_ids: frozenset[int] = frozenset()
    stop_token_reasons: dict[int, int | str] = field(default_factory=dict)
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    arrival_time: float = 0.0
    arrival_index: int = 0
    priority: int = 0
    cache_salt: str | None = None
    grammar: CompiledGrammar | None = None
