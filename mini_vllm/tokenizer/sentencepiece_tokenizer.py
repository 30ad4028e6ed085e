"""Reading a SentencePiece `tokenizer.model`, as Llama 2, TinyLlama and Mistral have it.

Where it stands: the source of a tokenizer when a directory has no `tokenizer.json`. The file is one protocol buffer of
which a few fields count here; their numbers are those of sentencepiece_model.proto:

    ModelProto   1 pieces: (1 piece, 2 score, 3 type)   2 trainer_spec   3 normalizer_spec
    TrainerSpec  3 model_type  24 treat_whitespace_as_suffix  35 byte_fallback  40-42 unk_id, bos_id, eos_id
    NormalizerSpec  2 precompiled_charsmap  3 add_dummy_prefix  4 remove_extra_whitespaces  5 escape_whitespaces

They are declared here and parsed by the `protobuf` package: the generated module that the `sentencepiece` package ships
works only with the protobuf release that it was generated for.

What always holds: a model of a kind that would be read wrongly (words, single characters, spaces that are kept or that
end a piece) is refused.

In vLLM: `transformers.convert_slow_tokenizer`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from mini_vllm.errors import ModelLoadError, UnsupportedModelError
from mini_vllm.tokenizer.sentencepiece_backend import build_sentencepiece_backend
from mini_vllm.tokenizer.sentencepiece_vocabulary import SentencePieceVocabulary

_UNIGRAM, _BPE, _WORD, _CHAR = 1, 2, 3, 4  # TrainerSpec.ModelType
_REFUSED_KINDS = {_WORD: "word", _CHAR: "char"}


@dataclass(frozen=True)
class SentencePieceModel:
    """A model file as a `tokenizers` object, and the names of its special tokens."""

    backend: Backend
    special_tokens: Mapping[str, str]


def read_sentencepiece_model(path: Path, config: Mapping[str, Any]) -> SentencePieceModel:
    """Read a `tokenizer.model`.

    Args:
        path: the file.
        config: the parsed `tokenizer_config.json` beside it, or {}. `add_bos_token` (true unless it says otherwise, as
            these models were trained with BOS) and `add_eos_token` count, and `legacy: false`, which puts the space
            only before the whole text, not before each stretch between special tokens.

    Raises:
        ModelLoadError: the file is damaged.
        UnsupportedModelError: neither BPE nor unigram, or spaces are not written as a mark before a word.
    """
    model = _parse(path)
    _check_supported(model, path)
    pieces = [piece.piece for piece in model.pieces]
    ids = {"bos_token": model.trainer_spec.bos_id, "eos_token": model.trainer_spec.eos_id}
    ids["unk_token"] = model.trainer_spec.unk_id
    known = {name: token_id for name, token_id in ids.items() if 0 <= token_id < len(pieces)}
    space_before = "first" if config.get("legacy") is False else "every"
    backend = build_sentencepiece_backend(
        SentencePieceVocabulary(
            pieces=pieces,
            scores=[piece.score for piece in model.pieces],
            types=[piece.type for piece in model.pieces],
            model="bpe" if model.trainer_spec.model_type == _BPE else "unigram",
            byte_fallback=model.trainer_spec.byte_fallback,
            charsmap=model.normalizer_spec.precompiled_charsmap,
            remove_extra_spaces=model.normalizer_spec.remove_extra_whitespaces,
            space_before=space_before if model.normalizer_spec.add_dummy_prefix else "never",
            bos_token_id=known.get("bos_token") if config.get("add_bos_token", True) else None,
            eos_token_id=known.get("eos_token") if config.get("add_eos_token", False) else None,
        )
    )
    return SentencePieceModel(backend, {name: pieces[token_id] for name, token_id in known.items()})


def _check_supported(model: Any, path: Path) -> None:
    trainer, normalizer = model.trainer_spec, model.normalizer_spec
    if trainer.model_type not in (_BPE, _UNIGRAM):
        kind = _REFUSED_KINDS.get(trainer.model_type, trainer.model_type)
        raise UnsupportedModelError(
            f"{path} is a SentencePiece model of type {kind}; only BPE and unigram are supported. If the model also "
            "comes with a tokenizer.json, put that beside it."
        )
    if trainer.treat_whitespace_as_suffix or not normalizer.escape_whitespaces:
        raise UnsupportedModelError(
            f"{path} does not write a space as the mark before a word (treat_whitespace_as_suffix="
            f"{trainer.treat_whitespace_as_suffix}, escape_whitespaces={normalizer.escape_whitespaces}), which is not "
            "supported. If the model also comes with a tokenizer.json, put that beside it."
        )


def _parse(path: Path) -> Any:
    """The file as a ModelProto."""
    from google.protobuf.message import DecodeError

    model = _message_classes()["ModelProto"]()
    try:
        model.ParseFromString(path.read_bytes())
    except (OSError, DecodeError) as error:
        raise ModelLoadError(f"{path} is not a SentencePiece model ({error}). Download it again.") from error
    if not model.pieces:
        raise ModelLoadError(f"{path} has no pieces, so it is not a whole SentencePiece model. Download it again.")
    return model


def _message_classes() -> dict[str, Any]:
    """Message classes for the fields above, with the defaults that the .proto file gives them."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    field_types = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(
        name="mini_vllm_sentencepiece.proto", package="mini_vllm", syntax="proto2"
    )
    for message_name, fields in _FIELDS.items():
        message = file.message_type.add(name=message_name)
        for name, number, kind, default in fields:
            field = message.field.add(name=name, number=number, label=field_types.LABEL_OPTIONAL)
            if kind.startswith("repeated "):
                field.label = field_types.LABEL_REPEATED
            type_name = kind.removeprefix("repeated ")
            if type_name in _FIELDS:
                field.type, field.type_name = field_types.TYPE_MESSAGE, f".mini_vllm.{type_name}"
            else:
                field.type = field_types.Type.Value(f"TYPE_{type_name.upper()}")
            if default:
                field.default_value = default
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"mini_vllm.{name}")) for name in _FIELDS}


# message -> (field, number, type, default); enums are read as the numbers that they are
_FIELDS: Mapping[str, tuple[tuple[str, int, str, str], ...]] = {
    "Piece": (("piece", 1, "string", ""), ("score", 2, "float", ""), ("type", 3, "int32", "1")),
    "TrainerSpec": (
        ("model_type", 3, "int32", "1"),
        ("treat_whitespace_as_suffix", 24, "bool", "false"),
        ("byte_fallback", 35, "bool", "false"),
        ("unk_id", 40, "int32", "0"),
        ("bos_id", 41, "int32", "1"),
        ("eos_id", 42, "int32", "2"),
    ),
    "NormalizerSpec": (
        ("name", 1, "string", ""),
        ("precompiled_charsmap", 2, "bytes", ""),
        ("add_dummy_prefix", 3, "bool", "true"),
        ("remove_extra_whitespaces", 4, "bool", "true"),
        ("escape_whitespaces", 5, "bool", "true"),
    ),
    "ModelProto": (
        ("pieces", 1, "repeated Piece", ""),
        ("trainer_spec", 2, "TrainerSpec", ""),
        ("normalizer_spec", 3, "NormalizerSpec", ""),
    ),
}
