"""SentencePiece BPE on the `tokenizers` library: pieces and scores become merges.

Where it stands: the one mechanism behind `tokenizer.model` files and behind GGUF files whose tokenizer is "llama".

SentencePiece stores no merges. It repeats: of all neighbours whose joined text is a piece, join those of the highest
score, the leftmost first. The `tokenizers` library repeats: of all neighbours that a list of merges names, join those
that stand first in the list. So the list is every way to cut every piece into two pieces, best score first:

    score   -1 "▁t"   -2 "he"   -3 "▁the"        merges   ("▁", "t")   ("h", "e")   ("▁t", "he")

What always holds: the ids are those of the SentencePiece library (Kudo and Richardson 2018) for the same text, and
special tokens in the text, which that library does not look for, become their ids, as in the transformers library.

In vLLM: `transformers.convert_slow_tokenizer`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from mini_vllm.errors import ModelLoadError
from mini_vllm.tokenizer.decoding import SPACE_MARK


class PieceType(IntEnum):
    """What a piece is; the numbers are those of SentencePiece and of GGUF alike."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class SentencePieceVocabulary:
    """A BPE vocabulary with scores.

    Args:
        pieces: texts; a piece's id is its index.
        scores: higher is merged earlier; one for each piece.
        types: one for each piece.
        space_before: SentencePiece puts a space before a text: "every" puts it before each stretch between special
            tokens, "first" before the whole text only, "never" nowhere.
        bos_token_id, eos_token_id: added around a text when not None.
    """

    pieces: Sequence[str]
    scores: Sequence[float]
    types: Sequence[int]
    space_before: str = "every"
    bos_token_id: int | None = None
    eos_token_id: int | None = None


def build_sentencepiece_backend(vocabulary: SentencePieceVocabulary) -> Backend:
    """The `tokenizers` object of a vocabulary.

    Raises:
        ModelLoadError: the lists differ in length, a piece is there twice, or byte fallback lacks a byte.
    """
    ids = _piece_ids(vocabulary)
    user_defined = _pieces_of(vocabulary, PieceType.USER_DEFINED)
    unknown = _pieces_of(vocabulary, PieceType.UNKNOWN)
    backend = Backend(
        models.BPE(
            vocab=ids,
            merges=_merges(vocabulary),
            unk_token=unknown[0] if unknown else None,
            fuse_unk=True,
            byte_fallback=True,
            ignore_merges=bool(user_defined),  # a user-defined piece is a word of its own, and no merge leads to it
        )
    )
    _set_spelling(backend, vocabulary.space_before, user_defined)
    backend.add_special_tokens(
        [AddedToken(piece, special=True, normalized=False) for piece in _control_pieces(vocabulary)]
    )
    backend.post_processor = around_text(vocabulary.pieces, vocabulary.bos_token_id, vocabulary.eos_token_id)
    return backend


def around_text(pieces: Sequence[str], bos_token_id: int | None, eos_token_id: int | None) -> processors.PostProcessor:
    """The post-processor that puts BOS before and EOS after a text, each where its id is not None."""
    before = [] if bos_token_id is None else [(pieces[bos_token_id], bos_token_id)]
    after = [] if eos_token_id is None else [(pieces[eos_token_id], eos_token_id)]
    single = [*(text for text, _ in before), "$A", *(text for text, _ in after)]
    return processors.TemplateProcessing(single=single, pair=[*single, "$B"], special_tokens=[*before, *after])


def _piece_ids(vocabulary: SentencePieceVocabulary) -> dict[str, int]:
    pieces, scores, types = vocabulary.pieces, vocabulary.scores, vocabulary.types
    if not len(pieces) == len(scores) == len(types):
        raise ModelLoadError(
            f"The tokenizer has {len(pieces)} pieces but {len(scores)} scores and {len(types)} types. "
            "The file is damaged; download it again."
        )
    ids: dict[str, int] = {}
    for index, piece in enumerate(pieces):
        if piece in ids:
            raise ModelLoadError(f"The tokenizer has the piece {piece!r} twice, with ids {ids[piece]} and {index}.")
        ids[piece] = index
    missing = [byte for byte in range(256) if f"<0x{byte:02X}>" not in ids]
    if missing:
        raise ModelLoadError(
            f"The tokenizer has no token for byte 0x{missing[0]:02X} (and {len(missing) - 1} more), so it cannot "
            "encode every text; only SentencePiece models with byte fallback are supported."
        )
    return ids


def _pieces_of(vocabulary: SentencePieceVocabulary, piece_type: PieceType) -> list[str]:
    return [piece for piece, of_type in zip(vocabulary.pieces, vocabulary.types, strict=True) if of_type == piece_type]


def _control_pieces(vocabulary: SentencePieceVocabulary) -> list[str]:
    """Pieces that stand for no text, in the order of their ids."""
    no_text = {PieceType.UNKNOWN, PieceType.CONTROL}
    return [piece for piece, of_type in zip(vocabulary.pieces, vocabulary.types, strict=True) if of_type in no_text]


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


def _set_spelling(backend: Backend, space_before: str, user_defined: list[str]) -> None:
    """Spaces to ▁ and back, the space before the text, and user-defined pieces cut out whole."""
    mark_spaces = normalizers.Replace(" ", SPACE_MARK)
    steps: list[decoders.Decoder] = [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    before: list[pre_tokenizers.PreTokenizer] = []
    if space_before == "every":
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE_MARK), mark_spaces])
    else:
        backend.normalizer = mark_spaces
    if space_before == "first":
        before.append(pre_tokenizers.Metaspace(replacement=SPACE_MARK, prepend_scheme="first", split=False))
    if user_defined:
        longest_first = sorted(user_defined, key=len, reverse=True)
        pattern = "|".join(re.escape(piece) for piece in longest_first)
        before.append(pre_tokenizers.Split(Regex(pattern), behavior="isolated"))
    if before:
        backend.pre_tokenizer = pre_tokenizers.Sequence(before)
    if space_before != "never":
        steps.append(decoders.Strip(content=" ", left=1))
    backend.decoder = decoders.Sequence(steps)
