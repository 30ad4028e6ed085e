"""A model of your own in under 100 lines: OPT (Zhang et al. 2022, arXiv:2205.01068), which is not built in.

The class has what the engine asks of a model; paging, batching, prefix caching and the server come with the engine.

    PYTHONPATH=examples mini-vllm generate --model-impl add_a_model:OPT --model DIRECTORY "The capital of France is"

`docs/adding-a-model.md` goes through it; `tests/test_add_a_model.py` holds it to the transformers library.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from mini_vllm import LLM, SamplingParams
from mini_vllm.errors import UnsupportedModelError
from mini_vllm.model.attention import AttentionLayerSpec, StepAttention
from mini_vllm.model.registry import register_model
from mini_vllm.model.weight_map import WeightSpec

FIRST_POSITION = 2  # OPT's table of positions begins with two rows that are not used


class Layer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)). Attribute names are those of the checkpoint's tensors."""

    def __init__(self, index: int, hidden: int, inner: int, heads: int, **where: Any) -> None:
        super().__init__()
        self.index, self.heads = index, heads
        self.self_attn = nn.ModuleDict(
            {name: nn.Linear(hidden, hidden, **where) for name in ("q_proj", "k_proj", "v_proj", "out_proj")}
        )
        self.self_attn_layer_norm = nn.LayerNorm(hidden, **where)
        self.fc1, self.fc2 = nn.Linear(hidden, inner, **where), nn.Linear(inner, hidden, **where)
        self.final_layer_norm = nn.LayerNorm(hidden, **where)

    def forward(self, hidden: Tensor, attention: StepAttention) -> Tensor:
        normed = self.self_attn_layer_norm(hidden)  # [T, hidden]
        project = self.self_attn
        query, key, value = (
            project[name](normed).view(len(hidden), self.heads, -1) for name in ("q_proj", "k_proj", "v_proj")
        )
        hidden = hidden + project["out_proj"](attention(self.index, query, key, value).flatten(1))
        return hidden + self.fc2(functional.relu(self.fc1(self.final_layer_norm(hidden))))


@register_model("OPTForCausalLM")
class OPT(nn.Module):
    """The decoder. `config` is the parsed config.json; dtype and device go to every layer that has weights."""

    def __init__(self, config: Mapping[str, Any], *, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        # What would change the numbers and is not written here is refused, never ignored.
        if config.get("word_embed_proj_dim", hidden) != hidden or not config.get("do_layer_norm_before", True):
            raise UnsupportedModelError("this OPT has projected embeddings or norms after its layers (opt-350m)")
        if config.get("activation_function", "relu") != "relu" or not config.get("enable_bias", True):
            raise UnsupportedModelError("this OPT has another activation than relu, or no biases")
        where: dict[str, Any] = {"dtype": dtype, "device": device}
        self.heads, self.head_dim = heads, hidden // heads
        self.embed_tokens = nn.Embedding(config["vocab_size"], hidden, **where)
        positions = config["max_position_embeddings"] + FIRST_POSITION
        self.embed_positions = nn.Embedding(positions, hidden, **where)
        self.layers = nn.ModuleList(
            Layer(index, hidden, config["ffn_dim"], heads, **where) for index in range(config["num_hidden_layers"])
        )
        self.final_layer_norm = nn.LayerNorm(hidden, **where)

    @property
    def layer_specs(self) -> list[AttentionLayerSpec]:
        return [AttentionLayerSpec(self.heads, self.heads, self.head_dim, self.head_dim**-0.5) for _ in self.layers]

    def weight_map(self) -> list[WeightSpec]:
        """Where each parameter lies in the checkpoint: under the same name, with a prefix."""
        return [
            WeightSpec(name, (f"model.decoder.{name}",), (tuple(parameter.shape),))
            for name, parameter in self.named_parameters()
        ]

    def forward(self, input_ids: Tensor, positions: Tensor, attention: StepAttention) -> Tensor:
        hidden = self.embed_tokens(input_ids) + self.embed_positions(positions + FIRST_POSITION)  # [T, hidden]
        for layer in self.layers:
            hidden = layer(hidden, attention)
        return self.final_layer_norm(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        return functional.linear(hidden, self.embed_tokens.weight).float()


if __name__ == "__main__":
    llm = LLM(model=sys.argv[1], model_impl="add_a_model:OPT")
    for output in llm.generate(sys.argv[2:], SamplingParams(temperature=0, max_tokens=16)):
        print(output.outputs[0].text)
