"""The decoder-only transformer: token ids and positions in, logits out. Every family of models runs through it.

Where it stands: the worker calls it once a step with the tokens of all sequences that run, laid flat; it calls the
step's attention plan once a layer and knows neither requests nor where keys and values are kept.

    token ids [T] -> embedding -> layer 0 -> ... -> layer L-1 -> norm -> hidden [T, hidden] -> head -> logits

    a layer:   x = x + attention(norm(x))
               x = x + mlp(norm(x))

What always holds: rows mix in `attention` alone; every other operation treats each token by itself. So one token gives
the same result whichever other tokens share its step, up to the rounding of the matrix products.

In vLLM: `vllm/model_executor/models/llama.py` and its neighbours.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from mini_vllm.model.attention import AttentionLayerSpec, StepAttention
from mini_vllm.model.config import ModelConfig
from mini_vllm.model.layers import Embedding, Linear, RMSNorm, SiluAndMul
from mini_vllm.model.rotary import ApplyRotary, RotaryEmbedding


class Attention(nn.Module):
    """Self-attention of one layer: project, turn by position, attend, project back."""

    def __init__(self, config: ModelConfig, layer: int, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.layer = layer
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        # One matrix for queries, keys and values: one product instead of three.
        qkv_size = config.query_size + 2 * config.kv_size
        self.qkv_proj = Linear(config.hidden_size, qkv_size, bias=config.qkv_bias, dtype=dtype, device=device)
        self.o_proj = Linear(config.query_size, config.hidden_size, bias=config.output_bias, dtype=dtype, device=device)
        self.q_norm: nn.Module = nn.Identity()
        self.k_norm: nn.Module = nn.Identity()
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps, dtype=dtype, device=device)
            self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps, dtype=dtype, device=device)
        self.apply_rotary = ApplyRotary()

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor, attention: StepAttention) -> Tensor:
        heads = self.qkv_proj(hidden).view(len(hidden), -1, self.head_dim)  # [T, query + key + value heads, head_dim]
        query, key, value = heads.split([self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1)
        query, key = self.apply_rotary(self.q_norm(query), self.k_norm(key), cos, sin)
        output = attention(self.layer, query, key, value)  # [T, num_heads, head_dim]
        projected: Tensor = self.o_proj(output.flatten(start_dim=1))
        return projected


class MLP(nn.Module):
    """The feed-forward network of one layer: down(silu(gate(x)) * up(x)), with gate and up in one matrix."""

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_up_proj = Linear(hidden, 2 * inner, bias=bias, dtype=dtype, device=device)
        self.activation = SiluAndMul()
        self.down_proj = Linear(inner, hidden, bias=bias, dtype=dtype, device=device)

    def forward(self, hidden: Tensor) -> Tensor:
        output: Tensor = self.down_proj(self.activation(self.gate_up_proj(hidden)))
        return output


class DecoderLayer(nn.Module):
    """Attention, then the feed-forward network, each added to the residual stream."""

    def __init__(self, config: ModelConfig, layer: int, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.input_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype, device=device)
        self.attention = Attention(config, layer, dtype=dtype, device=device)
        self.post_attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype, device=device)
        self.mlp = MLP(config, dtype=dtype, device=device)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor, attention: StepAttention) -> Tensor:
        hidden = hidden + self.attention(self.input_norm(hidden), cos, sin, attention)
        output: Tensor = hidden + self.mlp(self.post_attention_norm(hidden))
        return output


class Transformer(nn.Module):
    """The whole model.

    Args:
        config: what to build.
        dtype: of the weights and of everything between the layers.
        device: where the weights are made; "meta" makes none, for a loader that puts its own tensors in their place.
    """

    def __init__(
        self, config: ModelConfig, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> None:
        super().__init__()
        device = torch.device(device)
        self.config = config
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype=dtype, device=device)
        self.rotary = RotaryEmbedding(config.rope, config.head_dim)
        self.layers = nn.ModuleList(
            DecoderLayer(config, layer, dtype=dtype, device=device) for layer in range(config.num_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype, device=device)
        self.lm_head: Linear | None = None  # None: the embedding matrix is the head as well
        if not config.tie_word_embeddings:
            self.lm_head = Linear(config.hidden_size, config.vocab_size, dtype=dtype, device=device)

    @property
    def layer_specs(self) -> list[AttentionLayerSpec]:
        """What the attention backend must know of each layer."""
        config = self.config
        return [
            AttentionLayerSpec(config.num_heads, config.num_kv_heads, config.head_dim, config.head_dim**-0.5, window)
            for window in config.sliding_windows
        ]

    def forward(self, input_ids: Tensor, positions: Tensor, attention: StepAttention) -> Tensor:
        """One step over the tokens of any number of sequences, flat and without padding.

        Args:
            input_ids: [T] int64.
            positions: [T] int64, each token's place in its own sequence, 0 first.
            attention: the plan of this step.

        Returns:
            [T, hidden_size], the final norm applied; `logits` turns the rows that are needed into logits.
        """
        hidden: Tensor = self.embed_tokens(input_ids)
        cos, sin = self.rotary(positions, hidden.dtype)
        for layer in self.layers:
            hidden = layer(hidden, cos, sin, attention)
        normed: Tensor = self.norm(hidden)
        return normed

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, hidden_size] -> [R, vocab_size] in float32, computed in the model's dtype."""
        if self.lm_head is None:
            return functional.linear(hidden, self.embed_tokens.weight).to(torch.float32)
        logits: Tensor = self.lm_head(hidden)
        return logits.to(torch.float32)


def init_random_weights(model: Transformer, seed: int = 0) -> None:
    """Fill a model with small random weights, for runs without a checkpoint (`--load-format dummy`).

    Matrices are normal with a deviation of 0.02, norms are 1, biases 0. The numbers are drawn in float32 on the CPU, so
    a seed gives the same model, up to rounding, in every dtype and on every device.

    Args:
        model: built on a real device, not on "meta".
        seed: of the draw.
    """
    generator = torch.Generator(device="cpu").manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            parameter.copy_(torch.empty(parameter.shape, device="cpu").normal_(0, 0.02, generator=generator))
        else:
            parameter.fill_(0 if name.endswith("bias") else 1)
