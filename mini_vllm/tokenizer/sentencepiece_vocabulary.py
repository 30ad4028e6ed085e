"""What a SentencePiece model holds, whichever way it cuts text: pieces, scores, types, and how text is spelled first.

Where it stands: the input of `sentencepiece_bpe.py` and `sentencepiece_unigram.py`, read from a `tokenizer.model` file
or from the metadata of a GGUF file.

In vLLM: none; `sentencepiece_model.proto` of SentencePiece has the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal

from mini_vllm.errors import ModelLoadError


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
    """A vocabulary with scores.

    Args:
        pieces: texts; a piece's id is its index.
        scores: one for each piece: higher is merged earlier (bpe), or is the logarithm of its share (unigram).
        types: one for each piece.
        model: how text is cut into pieces: "bpe" or "unigram".
        byte_fallback: a character without a piece becomes its bytes, not the unknown piece.
        space_before: SentencePiece puts a space before a text: "every" puts it before each stretch between special
            tokens, "first" before the whole text only, "never" nowhere.
        charsmap: SentencePiece's compiled table of characters to replace (`nmt_nfkc` and the like); b"" for none.
        remove_extra_spaces: spaces around the text go, and several in a row become one.
        bos_token_id, eos_token_id: added around a text when not None.
    """

    pieces: Sequence[str]
    scores: Sequence[float]
    types: Sequence[int]
    model: Literal["bpe", "unigram"] = "bpe"
    byte_fallback: bool = True
    space_before: str = "every"
    charsmap: bytes = b""
    remove_extra_spaces: bool = False
    bos_token_id: int | None = None
    eos_token_id: int | None = None

    def of_types(self, *wanted: PieceType) -> list[str]:
        """The pieces of these types, in the order of their ids."""
        return [piece for piece, of_type in zip(self.pieces, self.types, strict=True) if of_type in wanted]

    def ids(self) -> dict[str, int]:
        """Piece to id.

        Raises:
            ModelLoadError: the lists differ in length, a piece is there twice, or byte fallback lacks a byte.
        """
        if not len(self.pieces) == len(self.scores) == len(self.types):
            raise ModelLoadError(
                f"The tokenizer has {len(self.pieces)} pieces but {len(self.scores)} scores and {len(self.types)} "
                "types. The file is damaged; download it again."
            )
        ids: dict[str, int] = {}
        for index, piece in enumerate(self.pieces):
            if piece in ids:
                raise ModelLoadError(f"The tokenizer has the piece {piece!r} twice, with ids {ids[piece]} and {index}.")
            ids[piece] = index
        missing = [byte for byte in range(256) if f"<0x{byte:02X}>" not in ids]
        if missing and self.byte_fallback:
            raise ModelLoadError(
                f"The tokenizer has no token for byte 0x{missing[0]:02X} (and {len(missing) - 1} more), so it cannot "
                "encode every text. The file is damaged; download it again."
            )
        return ids
