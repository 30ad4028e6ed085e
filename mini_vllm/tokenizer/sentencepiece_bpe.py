"""SentencePiece BPE on the `tokenizers` library: pieces and scores become merges.

Where it stands: one of the two ways to cut text in `sentencepiece_backend.py`.

SentencePiece stores no merges. It repeats: of all neighbours whose joined text is a piece, join those of the highest
score, the leftmost first. The `tokenizers` library repeats: of all neighbours that a list of merges names, join those
that stand first in the list. So the list is every way to cut every piece into two pieces, best score first:

    score   -1 "▁t"   -2 "he"   -3 "▁the"        merges   ("▁", "t")   ("h", "e")   ("▁t", "he")

In vLLM: `transformers.convert_slow_tokenizer`.
"""

from __future__ import annotations

from tokenizers import models

from mini_vllm.tokenizer.sentencepiece_vocabulary import PieceType, SentencePieceVocabulary


def bpe_model(vocabulary: SentencePieceVocabulary) -> models.Model:
    """The cutter of a BPE vocabulary.

    Raises:
        ModelLoadError: the vocabulary is damaged.
    """
    unknown = vocabulary.of_types(PieceType.UNKNOWN)
    return models.BPE(
        vocab=vocabulary.ids(),
        merges=_merges(vocabulary),
        unk_token=unknown[0] if unknown else None,
        fuse_unk=True,
        byte_fallback=vocabulary.byte_fallback,
        # a user-defined piece is a word of its own, and no merge leads to it
        ignore_merges=bool(vocabulary.of_types(PieceType.USER_DEFINED)),
    )


def _merges(vocabulary: SentencePieceVocabulary) -> list[tuple[str, str]]:
    """Every way to cut a normal piece into two, best piece first; cuts of one piece in the order of their left part."""
    scores = {
        piece: score
        for piece, score, of_type in zip(vocabulary.pieces, vocabulary.scores, vocabulary.types, strict=True)
        if of_type == PieceType.NORMAL
    }
    best_first = sorted(scores, key=lambda piece: -scores[piece])  # stable: equal scores stay in the order of ids
    return [
        (piece[:cut], piece[cut:])
        for piece in best_first
        for cut in range(1, len(piece))
        if piece[:cut] in scores and piece[cut:] in scores
    ]
