"""The decoder-only transformer: token ids and positions in, logits out. Every family of models runs through it.

Where it stands: the worker calls it once a step with the tokens of all sequences that run, laid flat; it calls the
step's attention plan once a layer and knows neither requests nor where keys and values are kept.

    token ids [T] -> embedding -> layer 0 -> ... -> layer L-1 -> norm -> hidden [T, hidden] -> head -> logits

What families differ in is data in `ModelConfig`, and chooses the modules that are built; no forward pass asks which
family it is. A layer is wired in one of these ways (`ModelConfig.block`)::

    pre                  x = x + attention(norm(x))         x = x + mlp(norm(x))             Llama and most others
    post                 x = x + norm(attention(x))         x = x + norm(mlp(x))             OLMo 2
    sandwich             x = x + norm(attention(norm(x)))   x = x + norm(mlp(norm(x)))       Gemma 2 and 3
    parallel             x = x + attention(norm(x)) + mlp(other_norm(x))                     GPT-NeoX
    parallel_one_norm    n = norm(x)    x = x + attention(n) + mlp(n)                        Cohere

What always holds: rows mix in `attention` alone; every other operation treats each token by itself. So one token gives
the same result whichever other tokens share its step: to the bit on the C++ kernels, up to the rounding of the matrix
products in plain PyTorch.

In vLLM: `vllm/model_executor/models/llama.py` and its neighbours.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mini_vllm.model.attention import AttentionLayerSpec, StepAttention
from mini_vllm.model.config import ModelConfig
from mini_vllm.model.feed_forward import build_feed_forward
from mini_vllm.model.language_model import FindsBestTokens
from mini_vllm.model.layers import Embedding, Linear, Scale, SoftCap, TiedHead
from mini_vllm.model.norms import WideRMSNorm, build_head_norm, build_norm
from mini_vllm.model.rotary import RotaryEmbedding, build_apply_rotary, build_rotary_embedding


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
        self.q_norm = build_head_norm(config, config.num_heads, dtype=dtype, device=device)
        self.k_norm = build_head_norm(config, config.num_kv_heads, dtype=dtype, device=device)
        self.apply_rotary = build_apply_rotary(config.ropes[layer], config.head_dim)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor, attention: StepAttention) -> Tensor:
        heads = self.qkv_proj(hidden).view(len(hidden), -1, self.head_dim)  # [T, query + key + value heads, head_dim]
        query, key, value = heads.split([self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1)
        query, key = self.apply_rotary(self.q_norm(query), self.k_norm(key), cos, sin)
        output = attention(self.layer, query, key, value)  # [T, num_heads, head_dim]
        projected: Tensor = self.o_proj(output.flatten(start_dim=1))
        return projected


class DecoderLayer(nn.Module):
    """Attention, then the feed-forward network, each added to the residual stream: pre, post and sandwich."""

    def __init__(self, config: ModelConfig, layer: int, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()

        def norm_if(wanted: bool, otherwise: nn.Module) -> nn.Module:
            return build_norm(config, config.hidden_size, dtype=dtype, device=device) if wanted else otherwise

        before, after = config.block != "post", config.block in ("post", "sandwich")
        scale = nn.Identity() if config.residual_scale == 1 else Scale(config.residual_scale)
        self.input_norm = norm_if(before, nn.Identity())
        self.attention = Attention(config, layer, dtype=dtype, device=device)
        self.attention_output = norm_if(after, scale)
        self.post_attention_norm = norm_if(before, nn.Identity())
        self.mlp = build_feed_forward(config, layer, dtype=dtype, device=device)
        self.mlp_output = norm_if(after, scale)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor, attention: StepAttention) -> Tensor:
        hidden = hidden + self.attention_output(self.attention(self.input_norm(hidden), cos, sin, attention))
        output: Tensor = hidden + self.mlp_output(self.mlp(self.post_attention_norm(hidden)))
        return output


class ParallelDecoderLayer(nn.Module):
    """Attention and feed-forward network side by side, both added to what the layer was given."""

    def __init__(self, config: ModelConfig, layer: int, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.input_norm = build_norm(config, config.hidden_size, dtype=dtype, device=device)
        self.attention = Attention(config, layer, dtype=dtype, device=device)
        self.post_attention_norm: nn.Module | None = None  # None: the network reads what the attention reads
        if config.block == "parallel":
            self.post_attention_norm = build_norm(config, config.hidden_size, dtype=dtype, device=device)
        self.mlp = build_feed_forward(config, layer, dtype=dtype, device=device)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor, attention: StepAttention) -> Tensor:
        normed = self.input_norm(hidden)
        mlp_input = normed if self.post_attention_norm is None else self.post_attention_norm(hidden)
        output: Tensor = hidden + self.attention(normed, cos, sin, attention) + self.mlp(mlp_input)
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
        self.embed_positions: Embedding | None = None
        if config.learned_positions:
            rows = config.max_position_embeddings
            self.embed_positions = Embedding(rows, config.hidden_size, dtype=dtype, device=device)
        self.scale_embedding = _embedding_scale(config, dtype)
        # Layers share cos and sin where they share the frequencies.
        ropes = list(dict.fromkeys(config.ropes))
        self.rotaries = nn.ModuleList(
            build_rotary_embedding(rope, config.head_dim, config.max_position_embeddings) for rope in ropes
        )
        self.rotary_of_layer = [ropes.index(rope) for rope in config.ropes]
        layer_class = ParallelDecoderLayer if config.block.startswith("parallel") else DecoderLayer
        self.layers = nn.ModuleList(
            layer_class(config, layer, dtype=dtype, device=device) for layer in range(config.num_layers)
        )
        self.norm = build_norm(config, config.hidden_size, dtype=dtype, device=device)
        self.lm_head: nn.Module = TiedHead(self.embed_tokens)
        if not config.tie_word_embeddings:
            self.lm_head = Linear(config.hidden_size, config.vocab_size, dtype=dtype, device=device)
        self.finish_logits = _finish_logits(config)

    @property
    def layer_specs(self) -> list[AttentionLayerSpec]:
        """What the attention backend must know of each layer."""
        config = self.config
        scale = config.head_dim**-0.5 if config.attention_scale is None else config.attention_scale
        return [
            AttentionLayerSpec(
                config.num_heads, config.num_kv_heads, config.head_dim, scale, window, config.attention_softcap
            )
            for window in config.sliding_windows
        ]

    def settle_context(self, max_model_len: int) -> None:
        """Tell the model, before its first step, how many tokens the longest sequence can have.

        Only "longrope" asks: see `rotary.py`.
        """
        for rotary in self.rotaries:
            if isinstance(rotary, RotaryEmbedding):
                rotary.settle_context(max_model_len)

    def forward(self, input_ids: Tensor, positions: Tensor, attention: StepAttention) -> Tensor:
        """One step over the tokens of any number of sequences, flat and without padding.

        Args:
            input_ids: [T] int64.
            positions: [T] int64, each token's place in its own sequence, 0 first.
            attention: the plan of this step.

        Returns:
            [T, hidden_size], the final norm applied; `logits` turns the rows that are needed into logits.
        """
        hidden: Tensor = self.scale_embedding(self.embed_tokens(input_ids))
        if self.embed_positions is not None:
            hidden = hidden + self.embed_positions(positions)
        angles = [rotary(positions, hidden.dtype) for rotary in self.rotaries]  # (cos, sin) each
        for layer, rotary in zip(self.layers, self.rotary_of_layer, strict=True):
            hidden = layer(hidden, *angles[rotary], attention)
        normed: Tensor = self.norm(hidden)
        return normed

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, hidden_size] -> [R, vocab_size] in float32, computed in the model's dtype.

        The C++ head sums in float32 and leaves the sums as they are; the plain one rounds them to the dtype first.
        """
        logits: Tensor = self.finish_logits(self.lm_head(hidden).to(torch.float32))
        return logits

    def best_tokens(self, hidden: Tensor) -> tuple[Tensor, Tensor] | None:
        """See `FindsBestTokens`: what the head knows, if nothing is done with the logits behind it."""
        if isinstance(self.lm_head, FindsBestTokens) and len(self.finish_logits) == 0:
            return self.lm_head.best_tokens(hidden)
        return None


def _embedding_scale(config: ModelConfig, dtype: torch.dtype) -> nn.Module:
    """The factor is rounded to the model's dtype, as the models that have one were trained."""
    if config.embedding_scale == 1:
        return nn.Identity()
    return Scale(torch.tensor(config.embedding_scale, dtype=dtype, device="cpu").item())


def _finish_logits(config: ModelConfig) -> nn.Sequential:
    """What is done with the head's product, in float32."""
    steps: list[nn.Module] = []
    if config.logit_scale != 1:
        steps.append(Scale(config.logit_scale))
    if config.logit_softcap is not None:
        steps.append(SoftCap(config.logit_softcap))
    return nn.Sequential(*steps)


def init_random_weights(model: nn.Module, seed: int = 0) -> None:
    """Fill a model with small random weights, for runs without a checkpoint (`--load-format dummy`).

    Matrices are normal with a deviation of 0.02, norms multiply by 1, biases are 0. The numbers are drawn in
    float32 on the CPU, so a seed gives the same model, up to rounding, in every dtype and on every device.

    Args:
        model: built on a real device, not on "meta".
        seed: of the draw.
    """
    generator = torch.Generator(device="cpu").manual_seed(seed)
    for module in model.modules():
        one = 1 - module.offset if isinstance(module, WideRMSNorm) else 1
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.dim() > 1:
                parameter.copy_(torch.empty(parameter.shape, device="cpu").normal_(0, 0.02, generator=generator))
            else:
                parameter.fill_(0 if name.endswith("bias") else one)
