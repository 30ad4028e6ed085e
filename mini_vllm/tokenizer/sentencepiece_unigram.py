"""SentencePiece unigram on the `tokenizers` library: the most likely way to cut a text.

Where it stands: one of the two ways to cut text in `sentencepiece_backend.py`.

A piece's score is the logarithm of its probability; of all ways to cut a text into pieces, the one with the largest sum
is taken (Kudo 2018, arXiv:1804.10959; the search is Viterbi's):

    "▁hats"    "▁hat" -3.0 + "s" -4.5 = -7.5        "▁ha" -5.1 + "ts" -6.0 = -11.1

Both libraries search alike but differ in which pieces may be found in a text. In SentencePiece these are the normal and
the user-defined ones; the `tokenizers` library would find any, so pieces that are not to be found get a score that no
way wins with. A user-defined piece always wins; it stands alone already (`sentencepiece_backend.py`), and 0 beats any
sum of logarithms. Of two ways with the same sum either library may take the other one.

In vLLM: `transformers.convert_slow_tokenizer`.
"""

from __future__ import annotations

from tokenizers import models

from mini_vllm.errors import ModelLoadError
from mini_vllm.tokenizer.sentencepiece_vocabulary import PieceType, SentencePieceVocabulary


def unigram_model(vocabulary: SentencePieceVocabulary) -> models.Model:
    """The cutter of a unigram vocabulary.

    Raises:
        ModelLoadError: the vocabulary is damaged, or has no normal or no unknown piece.
    """
    ids = vocabulary.ids()
    unknown = vocabulary.of_types(PieceType.UNKNOWN)
    normal = [
        score for score, of_type in zip(vocabulary.scores, vocabulary.types, strict=True) if of_type == PieceType.NORMAL
    ]
    if not unknown or not normal:
        raise ModelLoadError("The tokenizer has no unknown piece or no normal ones. Download it again.")
    # Below any sum of scores that spells such a piece, "<0x0A>" for one, letter by letter.
    never = min(normal) * 100 - 100
    scored = [
        (piece, _score(score, of_type, never))
        for piece, score, of_type in zip(vocabulary.pieces, vocabulary.scores, vocabulary.types, strict=True)
    ]
    return models.Unigram(vocab=scored, unk_id=ids[unknown[0]], byte_fallback=vocabulary.byte_fallback)


def _score(score: float, of_type: int, never: float) -> float:
    if of_type == PieceType.NORMAL:
        return score
    return 0.0 if of_type == PieceType.USER_DEFINED else never
