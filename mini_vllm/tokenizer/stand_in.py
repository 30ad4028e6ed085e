"""A tokenizer for a model that has none: a configuration with random weights (`load_format="dummy"`).

Where it stands: made at start-up in place of the model's own. Ids 0 to 255 are bytes, so any text can be encoded and
what was encoded reads back; every other id is a word of its own that no text becomes.

In vLLM: nothing.
"""

from __future__ import annotations

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from mini_vllm.tokenizer.tokenizer import Tokenizer
from mini_vllm.tokenizer.tokenizer_files import TokenizerParts


def stand_in_tokenizer(vocab_size: int) -> Tokenizer:
    """A byte tokenizer whose ids go up to those of the model.

    Args:
        vocab_size: of the model; under 256 the bytes beyond it cannot be encoded.
    """
    words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(f"Ġ[{id}]" for id in range(256, vocab_size))]
    vocab = {word: id for id, word in enumerate(words[:vocab_size])}
    backend = Backend(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(TokenizerParts(backend, {}, frozenset(), {}))
