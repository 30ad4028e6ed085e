"""Texts to tokenize, and where the real SentencePiece models are."""

from __future__ import annotations

import random
from pathlib import Path

import mistral_common

SENTENCEPIECE_MODELS = sorted((Path(mistral_common.__file__).parent / "data").glob("*.model*"))

# Strings that have broken tokenizers and streams before.
HARD_TEXTS = [
    "",
    " ",
    "\n",
    "  leading and trailing  ",
    "    .",
    "a , b",
    " n't",
    "tabs\tand\nnewlines\n\n\r\n",
    "ď 🫠🥹龜 世界",
    "👩‍🚀 é é ﬁ",
    "مرحبا بالعالم",
    "1234567890 3.14 1,000 ٣٤٥ Ⅷ ½",
    "it's IT'S we'll They'D",
    "def f(x):\n    return {'a': [x ** 2 for x in range(10)]}\n",
    "<|im_start|>user\nhi<|im_end|>\n",
    "x<|endoftext|>y <s>z</s>",
    "\u200b\ufeff\u00a0\u3000",
    "\ufffd�",
    "▁▁a ▁b",
    "Ġhello Ċ",
]

_ALPHABETS = [
    "abcdefghijklmnopqrstuvwxyz",
    "ABCDEFGHIJKLMNOPQRSTUVWXYZäöüßéďžñ",
    "0123456789",
    " ",
    "  \t\n",
    ".,;:!?'\"()[]{}<>|/\\@#$%^&*+-=_`~",
    "世界龜日本語中文한국어",
    "приветمرحباשלוםनमस्ते",
    "😀🫠🥹👩‍🚀🇨🇿",
    "\u200b\u0301\u00a0½Ⅷ٣",
]
_WORDS = [
    "the", " capital", " of", "it's", "don't", "\n\n", "def ", "return", "<|im_end|>", "<|im_start|>", "3.14", "http://",
]  # fmt: skip


def varied_texts(count: int, *, seed: int) -> list[str]:
    """The hard texts, then random mixtures of scripts, digits, spaces, code and special tokens."""
    draw = random.Random(seed)
    texts = list(HARD_TEXTS)
    while len(texts) < count:
        parts = []
        for _ in range(draw.randint(1, 12)):
            alphabet = draw.choice(_ALPHABETS)
            run = "".join(draw.choices(alphabet, k=draw.randint(1, 8)))
            parts.append(draw.choice([run, run, draw.choice(_WORDS)]))
        texts.append("".join(parts))
    return texts
