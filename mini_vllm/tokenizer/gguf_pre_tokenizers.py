"""How byte-level BPE vocabularies cut text into words before merging, by the names that GGUF files use.

Where it stands: a table for `gguf_tokenizer.py`. A GGUF file keeps the merges of a tokenizer but only a name
(`tokenizer.ggml.pre`) for how it cuts text into words, and no merge crosses the edge of a word.

    "in 1984, it's"   gpt-2       "in" " 1984" "," " it" "'s"
                      smollm      "in" " " "1" "9" "8" "4" "," " it" "'s"        digits stand alone
                      llama-bpe   "in" " " "198" "4" "," " it" "'s"              digits by three

What always holds: each entry cuts as the original model's own tokenizer does; a name that is not here is refused, since
a wrong cut gives ids that look right and are not.

In vLLM: none; llama.cpp's `llama_vocab` has the same table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from tokenizers import Regex, normalizers, pre_tokenizers

from mini_vllm.errors import UnsupportedModelError

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")


@dataclass(frozen=True)
class PreTokenization:
    """One way to cut text.

    Args:
        patterns: applied one after another, each to the words that the one before left; a match is a word, and so is
            what stands between two matches.
        ignore_merges: a word that is a token by itself is that token, whatever the merges would make of it.
        adds_bos: BOS is added when the file says nothing about it.
        composes: text is brought into Unicode normal form C first.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    adds_bos: bool = False
    composes: bool = False

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        """Cut by the patterns, then spell bytes as characters."""
        cuts = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in self.patterns]
        return pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])

    def normalizer(self) -> normalizers.Normalizer | None:
        """What happens to the text before it is cut, or None."""
        return normalizers.NFC() if self.composes else None


_LLAMA3_CUT = PreTokenization((_LLAMA3,), ignore_merges=True, adds_bos=True)

PRE_TOKENIZATIONS: Final[Mapping[str, PreTokenization]] = MappingProxyType(
    {
        "smollm": PreTokenization((r"\p{N}", _GPT2)),
        "gpt-2": PreTokenization((_GPT2,)),
        "llama-bpe": _LLAMA3_CUT,
        "llama3": _LLAMA3_CUT,
        "llama-v3": _LLAMA3_CUT,
        "qwen2": PreTokenization((_QWEN2,), composes=True),
        "tekken": PreTokenization((_TEKKEN,), ignore_merges=True, adds_bos=True),
        "default": PreTokenization(_DEFAULT),  # what llama.cpp does for files that name "default"
    }
)


def pre_tokenization(name: str) -> PreTokenization:
    """Look a name up.

    Raises:
        UnsupportedModelError: the name is not in the table.
    """
    if name not in PRE_TOKENIZATIONS:
        raise UnsupportedModelError(
            f"The GGUF file's pre-tokenizer (tokenizer.ggml.pre) is {name!r}; supported are "
            f"{', '.join(sorted(PRE_TOKENIZATIONS))}. If the model also comes as safetensors with a tokenizer.json, "
            "use that."
        )
    return PRE_TOKENIZATIONS[name]
