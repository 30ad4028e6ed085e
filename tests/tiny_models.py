"""Tiny random models of the transformers library, saved to disk as a checkpoint: the oracle of the model tests.

tiny = build_tiny_model(directory, "LlamaForCausalLM", num_key_value_heads=1)
tiny.directory                config.json and model.safetensors
tiny.logits(token_ids)        what transformers computes, [T, vocab_size] float32
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from mini_vllm.model.architectures import weight_map
from mini_vllm.model.attention import AttentionLayerSpec
from mini_vllm.model.config import ModelConfig, model_config_from_hf
from mini_vllm.model.transformer import Transformer

_TINY = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

# Deviation of the weights. Large enough that attention is far from uniform and an error in positions, masks or scales
# moves the logits by much more than the tolerances.
_DEVIATION = 0.2


@dataclass(frozen=True)
class TinyModel:
    """A checkpoint on disk and the transformers model that was saved there."""

    directory: Path
    reference: transformers.PreTrainedModel

    @property
    def raw_config(self) -> dict[str, Any]:
        return json.loads((self.directory / "config.json").read_text())

    @torch.no_grad()
    def logits(self, token_ids: list[int]) -> Tensor:
        return self.reference(torch.tensor([token_ids])).logits[0].float()


def build_tiny_model(
    directory: Path, architecture: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any
) -> TinyModel:
    """Make a random model, save it to `directory` as safetensors.

    Args:
        directory: where the checkpoint goes.
        architecture: a class of transformers, such as "LlamaForCausalLM".
        seed: of the weights.
        dtype: of the weights.
        changes: configuration values other than `_TINY`.
    """
    config = getattr(transformers, architecture).config_class(**{**_TINY, **changes})
    reference = getattr(transformers, architecture)(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in reference.parameters():  # norms and biases too: ones and zeros would hide errors
            offset = 1.0 if parameter.dim() == 1 else 0.0
            parameter.copy_(offset + torch.randn(parameter.shape, generator=generator) * _DEVIATION)
    reference.to(dtype).save_pretrained(directory)
    # Read back, because .to(bfloat16) has rounded the rotary frequencies too, which no real checkpoint goes through.
    reference = type(reference).from_pretrained(directory, dtype=dtype, attn_implementation="eager").eval()
    if hasattr(reference, "set_experts_implementation"):
        reference.set_experts_implementation("eager")  # the definition; the grouped one wants widths of 8
    return TinyModel(directory, reference)


def load_tiny_model(tiny: TinyModel, dtype: torch.dtype = torch.float32, **changes: Any) -> Transformer:
    """Our model from the checkpoint on disk, through the weight map and nothing else.

    `changes` are fields of `ModelConfig` that make it another model than the one on disk.
    """
    config = replace(model_config_from_hf(tiny.raw_config), **changes)
    tensors = load_file(tiny.directory / "model.safetensors")
    model = Transformer(config, dtype=dtype, device="meta")
    state = {}
    for spec in weight_map(config):
        sources = [tensors.pop(name) for name in spec.sources]
        assert [tuple(source.shape) for source in sources] == list(spec.shapes)
        if spec.rearrange is not None:
            sources = [spec.rearrange(source) for source in sources]
        state[spec.parameter] = torch.cat(sources).to(dtype)
    assert not tensors, "the weight map left tensors of the checkpoint out"
    model.load_state_dict(state, strict=True, assign=True)
    return model.eval()


class CausalAttention:
    """Attention of one sequence that starts at position 0 and keeps its keys: the formula, written out."""

    def __init__(self, layers: list[AttentionLayerSpec]) -> None:
        self.layers = layers
        self.keys: list[list[Tensor]] = [[] for _ in layers]
        self.values: list[list[Tensor]] = [[] for _ in layers]

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        spec = self.layers[layer]
        self.keys[layer].append(key)
        self.values[layer].append(value)
        repeats = spec.num_heads // spec.num_kv_heads
        keys = torch.cat(self.keys[layer]).repeat_interleave(repeats, dim=1)  # [K, num_heads, head_dim]
        values = torch.cat(self.values[layer]).repeat_interleave(repeats, dim=1)
        query_position = torch.arange(len(keys) - len(query), len(keys))[:, None]
        key_position = torch.arange(len(keys))[None, :]
        visible = key_position <= query_position
        if spec.sliding_window is not None:
            visible &= key_position > query_position - spec.sliding_window
        scores = torch.einsum("qhd,khd->hqk", query, keys) * spec.scale
        if spec.softcap is not None:
            scores = spec.softcap * torch.tanh(scores / spec.softcap)
        weights = scores.masked_fill(~visible, float("-inf")).softmax(dim=-1, dtype=torch.float32)
        return torch.einsum("hqk,khd->qhd", weights.to(query.dtype), values)


@torch.no_grad()
def our_logits(model: Transformer, token_ids: list[int]) -> Tensor:
    """Logits of every position of one sequence, [T, vocab_size]."""
    attention = CausalAttention(model.layer_specs)
    hidden = model(torch.tensor(token_ids), torch.arange(len(token_ids)), attention)
    return model.logits(hidden)


def some_tokens(count: int, vocab_size: int = 97, seed: int = 0) -> list[int]:
    """Random token ids."""
    return torch.randint(vocab_size, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def tiny_config(architecture: str = "LlamaForCausalLM", **changes: Any) -> dict[str, Any]:
    """A `config.json` as a checkpoint would hold it, without a model; None removes nothing, it is JSON's null."""
    return {"architectures": [architecture], "rms_norm_eps": 1e-6, "hidden_act": "silu", **_TINY, **changes}


def tiny_model_config(architecture: str = "LlamaForCausalLM", **changes: Any) -> ModelConfig:
    """The same, read."""
    return model_config_from_hf(tiny_config(architecture, **changes))
