"""GGUF metadata said as a Hugging Face `config.json`, so that one reader (`model/config.py`) serves both formats.

Where it stands: `model_files.py` calls this once for a file and keeps the result.

    llama.block_count 30                  "num_hidden_layers": 30
    llama.attention.head_count_kv 3       "num_key_value_heads": 3
    no tensor output.weight               "tie_word_embeddings": true
    rows of token_embd.weight             "vocab_size": 49152

What always holds: every key of the architecture is known here, or the model is refused with the key's name. Mistral
models are written as "llama", with the same names and the same order of rows.

In vLLM: transformers does this part (`modeling_gguf_pytorch_utils.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from mini_vllm.errors import ModelLoadError, UnsupportedModelError
from mini_vllm.model.gguf_rope import ROPE_KEYS, rope_config
from mini_vllm.store.gguf_file import GGUFFile

_ARCHITECTURES: Mapping[str, str] = MappingProxyType(
    {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
)
# Families whose query and key rows the converter reorders.
_REORDERED = ("llama",)

# Keys "<architecture>.<name>" that are read here or in gguf_rope.py, and keys that change nothing.
_READ_KEYS = frozenset(
    {"context_length", "embedding_length", "block_count", "feed_forward_length"}
    | {"attention.head_count", "attention.head_count_kv", "attention.layer_norm_rms_epsilon"}
    | {"attention.key_length", "attention.value_length", "attention.sliding_window"}
)
_HARMLESS_KEYS = frozenset({"vocab_size", "tensor_data_layout"})
# Keys that change the computation unless they have the value of a model that does without.
_NEUTRAL_KEYS: Mapping[str, Any] = MappingProxyType(
    {"expert_count": 0, "expert_used_count": 0, "attention.causal": True, "pooling_type": 0, "logit_scale": 1.0}
)
_ENDING_IDS = ("eos_token_id", "eot_token_id", "eom_token_id")  # end of sequence, of turn, of message

_GENERATION_KEYS: Mapping[str, str] = MappingProxyType(
    {
        "temp": "temperature",
        "top_k": "top_k",
        "top_p": "top_p",
        "min_p": "min_p",
        "penalty_repeat": "repetition_penalty",
    }
)


class GGUFMetadata:
    """Typed look-ups of one architecture's keys, with errors that name the file and the key.

    Args:
        file: the head of the file.

    Raises:
        UnsupportedModelError: the architecture is not implemented.
    """

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        name = file.metadata.get("general.architecture")
        if name not in _ARCHITECTURES:
            raise UnsupportedModelError(
                f"general.architecture={name!r} in {file.path} is not implemented; supported: "
                f"{', '.join(_ARCHITECTURES)}."
            )
        self.architecture = str(name)

    def get(self, key: str) -> Any:
        """The value of "<architecture>.<key>", or None."""
        return self.file.metadata.get(f"{self.architecture}.{key}")

    def integer(self, key: str, default: int | None = None) -> int:
        """A whole number. A list with one number for each layer will do when they are all equal.

        Raises:
            ModelLoadError: missing, or not a whole number.
            UnsupportedModelError: layers differ.
        """
        value = self.get(key)
        if isinstance(value, list) and value:
            if any(item != value[0] for item in value):
                raise UnsupportedModelError(
                    f"{self.architecture}.{key} in {self.file.path} differs between layers, which is not implemented."
                )
            value = value[0]
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int):
            raise ModelLoadError(self._wrong(key, value, "a whole number"))
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A number.

        Raises:
            ModelLoadError: missing, or not a number.
        """
        value = self.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ModelLoadError(self._wrong(key, value, "a number"))
        return float(value)

    def refuse_unknown(self, known: frozenset[str]) -> None:
        """Refuse every key of the architecture that is neither known nor neutral."""
        prefix = f"{self.architecture}."
        for full, value in self.file.metadata.items():
            key = full.removeprefix(prefix)
            if not full.startswith(prefix) or key in known or key in _HARMLESS_KEYS:
                continue
            if key not in _NEUTRAL_KEYS or value != _NEUTRAL_KEYS[key]:
                raise UnsupportedModelError(
                    f"{full}={value!r} in {self.file.path} may change what the model computes and is not implemented."
                )

    def _wrong(self, key: str, value: Any, wanted: str) -> str:
        return f"{self.architecture}.{key} in {self.file.path} must be {wanted}, not {value!r}. Download it again."


def hf_config(file: GGUFFile) -> dict[str, Any]:
    """The `config.json` that a Hugging Face checkpoint of this model would have.

    Args:
        file: the head of the file.

    Raises:
        UnsupportedModelError: an architecture, or a key, that is not implemented.
        ModelLoadError: a key is missing or wrong.
    """
    metadata = GGUFMetadata(file)
    metadata.refuse_unknown(_READ_KEYS | ROPE_KEYS)
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelLoadError(f"{file.path} has no matrix token_embd.weight. Incomplete download? Download it again.")
    num_heads = metadata.integer("attention.head_count")
    return {
        "architectures": [_ARCHITECTURES[metadata.architecture]],
        "vocab_size": embedding.shape[0],
        "hidden_size": metadata.integer("embedding_length"),
        "intermediate_size": metadata.integer("feed_forward_length"),
        "num_hidden_layers": metadata.integer("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": metadata.integer("attention.head_count_kv", num_heads),
        "head_dim": _head_dim(metadata),
        "max_position_embeddings": metadata.integer("context_length"),
        "rms_norm_eps": metadata.number("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": _ending_ids(file),
        **rope_config(metadata, _head_dim(metadata)),
        **_biases(metadata),
        **_sliding_window(metadata),
    }


def generation_config(file: GGUFFile) -> dict[str, Any]:
    """The `generation_config.json` that the file's `general.sampling.*` keys amount to; often empty."""
    found = {
        ours: file.metadata[f"general.sampling.{theirs}"]
        for theirs, ours in _GENERATION_KEYS.items()
        if f"general.sampling.{theirs}" in file.metadata
    }
    return {**found, "eos_token_id": _ending_ids(file)}


def reordered_heads(file: GGUFFile) -> dict[str, int]:
    """The projections whose rows the converter has reordered, with their numbers of heads (see `GGUFSource`)."""
    metadata = GGUFMetadata(file)
    if metadata.architecture not in _REORDERED:
        return {}
    num_heads = metadata.integer("attention.head_count")
    return {"q_proj": num_heads, "k_proj": metadata.integer("attention.head_count_kv", num_heads)}


def _head_dim(metadata: GGUFMetadata) -> int:
    hidden_size, num_heads = metadata.integer("embedding_length"), metadata.integer("attention.head_count")
    if num_heads < 1:
        raise ModelLoadError(f"{metadata.file.path} says that the model has {num_heads} heads. Download it again.")
    key = metadata.integer("attention.key_length", hidden_size // num_heads)
    value = metadata.integer("attention.value_length", key)
    if key != value:
        raise UnsupportedModelError(
            f"Keys of {key} and values of {value} dimensions in {metadata.file.path}: heads of two widths are not "
            "implemented."
        )
    return key


def _ending_ids(file: GGUFFile) -> list[int]:
    found = [file.metadata.get(f"tokenizer.ggml.{name}") for name in _ENDING_IDS]
    return sorted({token_id for token_id in found if token_id is not None})


def _biases(metadata: GGUFMetadata) -> dict[str, Any]:
    """Whether there are biases is not in the metadata, but the tensors show it. Qwen2 always has those of q, k, v."""
    if metadata.architecture == "qwen2":
        return {}
    tensors = metadata.file.tensors
    biases: dict[str, Any] = {"attention_bias": "blk.0.attn_q.bias" in tensors}
    if metadata.architecture == "llama":
        biases["mlp_bias"] = "blk.0.ffn_gate.bias" in tensors
    return biases


def _sliding_window(metadata: GGUFMetadata) -> dict[str, Any]:
    """A llama with a sliding window is a Mistral; which of its layers have one, a Qwen does not say here."""
    if metadata.get("attention.sliding_window") is None:
        return {}
    window = metadata.integer("attention.sliding_window")
    if metadata.architecture != "llama":
        raise UnsupportedModelError(
            f"{metadata.architecture}.attention.sliding_window={window} in {metadata.file.path}: GGUF does not say in "
            "which layers, so it is not implemented for this architecture."
        )
    return {"architectures": ["MistralForCausalLM"], "sliding_window": window}
