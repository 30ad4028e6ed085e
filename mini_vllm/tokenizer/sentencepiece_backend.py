"""A SentencePiece vocabulary as an object of the `tokenizers` library.

Where it stands: behind `tokenizer.model` files, and behind GGUF files whose tokenizer is "llama".

    text -> spelling (characters replaced, extra spaces removed, ▁ for space) -> cut into pieces -> ids, BOS before them
                                                                                 sentencepiece_bpe.py, _unigram.py

What always holds: the ids are those of the SentencePiece library (Kudo and Richardson 2018) for the same text, and
special tokens in the text, which that library does not look for, become their ids, as in the transformers library.
Where a model replaces characters, this is done by the `tokenizers` library, which looks at whole graphemes first: for
a letter with several marks the ids may differ from SentencePiece's, and are those of the transformers library.

In vLLM: `transformers.convert_slow_tokenizer`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from mini_vllm.tokenizer.decoding import SPACE_MARK
from mini_vllm.tokenizer.sentencepiece_bpe import bpe_model
from mini_vllm.tokenizer.sentencepiece_unigram import unigram_model
from mini_vllm.tokenizer.sentencepiece_vocabulary import PieceType, SentencePieceVocabulary


def build_sentencepiece_backend(vocabulary: SentencePieceVocabulary) -> Backend:
    """The `tokenizers` object of a vocabulary.

    Raises:
        ModelLoadError: the vocabulary is damaged.
    """
    backend = Backend(bpe_model(vocabulary) if vocabulary.model == "bpe" else unigram_model(vocabulary))
    backend.normalizer = _normalizer(vocabulary)
    cuts = _cuts_before_pieces(vocabulary)
    if cuts:
        backend.pre_tokenizer = pre_tokenizers.Sequence(cuts)
    backend.decoder = _decoder(vocabulary)
    # What stands for no text is found whole in a text, and not shown.
    special = vocabulary.of_types(PieceType.UNKNOWN, PieceType.CONTROL)
    backend.add_special_tokens([AddedToken(piece, special=True, normalized=False) for piece in special])
    backend.post_processor = around_text(vocabulary.pieces, vocabulary.bos_token_id, vocabulary.eos_token_id)
    return backend


def around_text(
    pieces: Sequence[str] | Mapping[int, str], bos_token_id: int | None, eos_token_id: int | None
) -> processors.PostProcessor:
    """The post-processor that puts BOS before and EOS after a text, each where its id is not None."""
    before = [] if bos_token_id is None else [(pieces[bos_token_id], bos_token_id)]
    after = [] if eos_token_id is None else [(pieces[eos_token_id], eos_token_id)]
    single = [*(text for text, _ in before), "$A", *(text for text, _ in after)]
    return processors.TemplateProcessing(single=single, pair=[*single, "$B"], special_tokens=[*before, *after])


def _normalizer(vocabulary: SentencePieceVocabulary) -> normalizers.Normalizer:
    """What happens to the text first, in SentencePiece's order."""
    steps: list[normalizers.Normalizer] = []
    if vocabulary.charsmap:
        steps.append(normalizers.Precompiled(vocabulary.charsmap))
    if vocabulary.remove_extra_spaces:
        steps.append(normalizers.Replace(Regex(r"\A +| +\z"), ""))
        steps.append(normalizers.Replace(Regex(" {2,}"), " "))
    if vocabulary.space_before == "every":
        steps.append(normalizers.Prepend(SPACE_MARK))
    steps.append(normalizers.Replace(" ", SPACE_MARK))
    return normalizers.Sequence(steps)


def _cuts_before_pieces(vocabulary: SentencePieceVocabulary) -> list[pre_tokenizers.PreTokenizer]:
    """What is cut before the pieces are: the space before the whole text, and user-defined pieces, which stay whole."""
    cuts: list[pre_tokenizers.PreTokenizer] = []
    if vocabulary.space_before == "first":
        cuts.append(pre_tokenizers.Metaspace(replacement=SPACE_MARK, prepend_scheme="first", split=False))
    user_defined = vocabulary.of_types(PieceType.USER_DEFINED)
    if user_defined:
        longest_first = sorted(user_defined, key=len, reverse=True)
        cuts.append(pre_tokenizers.Split(Regex("|".join(map(re.escape, longest_first))), behavior="isolated"))
    return cuts


def _decoder(vocabulary: SentencePieceVocabulary) -> decoders.Decoder:
    """▁ back to spaces, bytes to characters, and the space before the text away."""
    steps: list[decoders.Decoder] = [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    if vocabulary.space_before != "never":
        steps.append(decoders.Strip(content=" ", left=1))
    return decoders.Sequence(steps)
