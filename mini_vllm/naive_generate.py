"""Where the story starts: text generation in two plain loops, without engine, scheduler or batch.

Read this first. Everything else in mini vLLM exists because these loops serve one request at a time.

    generate_without_cache    each new token computes the whole text again    work grows with the length squared
    generate_with_cache       keys and values of past tokens are kept         one token of work for each new token

Both take the most likely token at each step, and both give the same tokens: so does the engine, in every mode.
`python -m mini_vllm.naive_generate "The capital of France is"` runs both and times them.

In vLLM: nothing.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from mini_vllm.model.attention import AttentionLayerSpec
from mini_vllm.model.attention_backends.one_sequence import attend_one_sequence
from mini_vllm.model.language_model import LanguageModel


def generate_without_cache(
    model: LanguageModel, prompt_token_ids: Sequence[int], max_tokens: int, eos_token_ids: Collection[int] = ()
) -> list[int]:
    """Greedy generation that remembers nothing: step t runs the model over all tokens so far.

    Args:
        model: in evaluation mode.
        prompt_token_ids: at least one.
        max_tokens: tokens to generate at most.
        eos_token_ids: ids that end the text.

    Returns:
        The new token ids, the ending one included.
    """
    token_ids = list(prompt_token_ids)
    for _ in range(max_tokens):
        attention = _GrowingCache(model.layer_specs)  # made anew at each step: nothing is kept
        token_ids.append(_most_likely_next(model, token_ids, 0, attention))
        if token_ids[-1] in eos_token_ids:
            break
    return token_ids[len(prompt_token_ids) :]


def generate_with_cache(
    model: LanguageModel, prompt_token_ids: Sequence[int], max_tokens: int, eos_token_ids: Collection[int] = ()
) -> list[int]:
    """Greedy generation with a contiguous KV cache: a prefill, then one decode a token.

    Args, Returns: as `generate_without_cache`.
    """
    cache = _GrowingCache(model.layer_specs)
    new_token_ids: list[int] = []
    if max_tokens > 0:
        new_token_ids.append(prefill(model, prompt_token_ids, cache))
    while len(new_token_ids) < max_tokens and new_token_ids[-1] not in eos_token_ids:
        position = len(prompt_token_ids) + len(new_token_ids) - 1
        new_token_ids.append(decode(model, new_token_ids[-1], position, cache))
    return new_token_ids


def prefill(model: LanguageModel, prompt_token_ids: Sequence[int], cache: _GrowingCache) -> int:
    """Compute the whole prompt at once, keep its keys and values, and give the first token of the answer."""
    return _most_likely_next(model, prompt_token_ids, 0, cache)


def decode(model: LanguageModel, token_id: int, position: int, cache: _GrowingCache) -> int:
    """Compute one token against the cache, and give the next one."""
    return _most_likely_next(model, [token_id], position, cache)


def _most_likely_next(
    model: LanguageModel, token_ids: Sequence[int], first_position: int, attention: _GrowingCache
) -> int:
    with torch.inference_mode():
        positions = torch.arange(first_position, first_position + len(token_ids))
        hidden = model(torch.tensor(token_ids), positions, attention)  # [T, hidden_size]
        logits = model.logits(hidden[-1:])  # [1, vocab_size]: only the last token says what comes next
        return int(logits.argmax())


class _GrowingCache:
    """Keys and values of one sequence, one tensor a layer, longer at each step.

    Growing copies everything at each step. The engine's contiguous cache therefore takes the longest possible tensor
    at once, and wastes most of it; blocks are the way out of both.
    """

    def __init__(self, layers: Sequence[AttentionLayerSpec]) -> None:
        self._layers = layers
        self._keys: list[Tensor | None] = [None] * len(layers)
        self._values: list[Tensor | None] = [None] * len(layers)

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        keys, values = _appended(self._keys[layer], key), _appended(self._values[layer], value)
        self._keys[layer], self._values[layer] = keys, values
        return attend_one_sequence(query, keys, values, self._layers[layer])


def _appended(past: Tensor | None, new: Tensor) -> Tensor:
    return new if past is None else torch.cat([past, new])


def main(prompt: str, max_tokens: int = 48) -> None:
    """Answer a prompt with both loops, and say what the cache saved."""
    from mini_vllm.config import DEFAULT_MODEL
    from mini_vllm.model.loader import load_model
    from mini_vllm.store.model_store import resolve_model
    from mini_vllm.tokenizer.tokenizer import load_tokenizer

    files = resolve_model(DEFAULT_MODEL)
    tokenizer, loaded = load_tokenizer(files), load_model(files)
    prompt_token_ids = tokenizer.encode(prompt)
    for generate in (generate_without_cache, generate_with_cache):
        start = time.perf_counter()
        token_ids = generate(loaded.model, prompt_token_ids, max_tokens, loaded.config.eos_token_ids)
        seconds = time.perf_counter() - start
        print(f"{generate.__name__}: {len(token_ids)} tokens in {seconds:.2f} s")
        print(f"{prompt}{tokenizer.decode(token_ids)}\n")


if __name__ == "__main__":
    if hasattr(signal, "SIGPIPE"):  # `| head` ends it quietly, as it does other tools
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    main(" ".join(sys.argv[1:]) or "The capital of France is")
