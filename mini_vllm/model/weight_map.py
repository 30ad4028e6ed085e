"""Where a model's parameters lie in its checkpoint: a table of names for each family, and one function that reads it.

Where it stands: each family of `families/` gives its `TensorNames`; `architectures.weight_map` asks `map_weights`; the
loader reads what it says.

    ModelConfig + TensorNames -> [WeightSpec, WeightSpec, ...]

What always holds: the map names every parameter of `Transformer(config)` once, in the order of the forward pass. What
is there follows from the configuration alone; the table only says what it is called. No torch is needed.

In vLLM: `load_weights` of each model, with its `stacked_params_mapping`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mini_vllm.model.config import ModelConfig

if TYPE_CHECKING:
    from torch import Tensor

Rearrange = Callable[["Tensor"], "Tensor"]


@dataclass(frozen=True)
class WeightSpec:
    """Where one parameter of the transformer comes from.

    The query, key and value projections are three tensors in most checkpoints and one matrix here, so that one
    multiplication makes all three::

        layers.0.attention.qkv_proj.weight  =  q_proj.weight   [num_heads * head_dim, hidden]
                                               k_proj.weight   [num_kv_heads * head_dim, hidden]
                                               v_proj.weight   [num_kv_heads * head_dim, hidden]

    Args:
        parameter: the name in `Transformer.state_dict()`.
        sources: names of the checkpoint's tensors, to be joined along dimension 0 in this order.
        shapes: the shape that each source must have in the checkpoint.
        rearrange: what is done with each source before they are joined; None: nothing.
    """

    parameter: str
    sources: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    rearrange: Rearrange | None = None


@dataclass(frozen=True)
class TensorNames:
    """What a family's checkpoints call their tensors, without ".weight" and ".bias"; the defaults are Llama's.

    Args:
        embed_tokens, embed_positions, norm, lm_head: of the whole model.
        layer: what all names of a layer begin with; {} stands for its number.
        input_norm: before the attention; in parallel layers before both halves.
        qkv: queries, keys and values, or one name where the checkpoint has them in one tensor.
        q_norm, k_norm, o_proj: of the attention.
        attention_output_norm: after the attention, before it is added.
        post_attention_norm: before the feed-forward network.
        mlp: what the names of the feed-forward network begin with.
        gate_up: gate and up projection, or one name: both in one tensor, or a network without gate.
        down_proj: of the feed-forward network.
        mlp_output_norm: after the feed-forward network, before it is added.
        router: of a layer with experts, after `mlp`, as are all that follow.
        expert: what the names of an expert begin with; {} stands for its number.
        expert_gate_up, expert_down: of each expert.
        shared_expert, shared_expert_gate: of the network that every token uses.
        transposed: matrices of attention and feed-forward network are kept [in, out] (GPT-2's Conv1D).
        qkv_by_head: the rows of a joined qkv go head by head: q k v of head 0, q k v of head 1, ... (GPT-NeoX).
    """

    embed_tokens: str = "model.embed_tokens"
    embed_positions: str = ""
    norm: str = "model.norm"
    lm_head: str = "lm_head"
    layer: str = "model.layers.{}."
    input_norm: str = "input_layernorm"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    o_proj: str = "self_attn.o_proj"
    attention_output_norm: str = "post_attention_layernorm"
    post_attention_norm: str = "post_attention_layernorm"
    mlp: str = "mlp."
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    down_proj: str = "down_proj"
    mlp_output_norm: str = "post_feedforward_layernorm"
    router: str = "gate"
    expert: str = "experts.{}."
    expert_gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    expert_down: str = "down_proj"
    shared_expert: str = "shared_expert."
    shared_expert_gate: str = "shared_expert_gate"
    transposed: bool = False
    qkv_by_head: bool = False


def map_weights(config: ModelConfig, names: TensorNames) -> list[WeightSpec]:
    """Every parameter of `Transformer(config)`, the head (if it is not tied) last."""
    hidden = config.hidden_size
    table = (config.vocab_size, hidden)
    specs = [_plain("embed_tokens", names.embed_tokens, table)]
    if config.learned_positions:
        specs.append(_plain("embed_positions", names.embed_positions, (config.max_position_embeddings, hidden)))
    for layer in range(config.num_layers):
        specs += _Layer(config, names, layer).specs()
    specs += _norm(config, "norm", names.norm, hidden)
    if not config.tie_word_embeddings:
        specs.append(_plain("lm_head", names.lm_head, table))
    return specs


class _Layer:
    """The parameters of one decoder layer."""

    def __init__(self, config: ModelConfig, names: TensorNames, layer: int) -> None:
        self.config, self.names, self.layer = config, names, layer
        self.ours, self.theirs = f"layers.{layer}.", names.layer.format(layer)

    def specs(self) -> list[WeightSpec]:
        block, names = self.config.block, self.names
        after = block in ("post", "sandwich")
        return [
            *(self._norm("input_norm", names.input_norm) if block != "post" else []),
            *self._attention(),
            *(self._norm("attention_output", names.attention_output_norm) if after else []),
            *(self._norm("post_attention_norm", names.post_attention_norm) if self._has_second_norm() else []),
            *self._feed_forward(),
            *(self._norm("mlp_output", names.mlp_output_norm) if after else []),
        ]

    def _has_second_norm(self) -> bool:
        return self.config.block in ("pre", "sandwich", "parallel")

    def _norm(self, ours: str, theirs: str) -> list[WeightSpec]:
        return _norm(self.config, self.ours + ours, self.theirs + theirs, self.config.hidden_size)

    def _attention(self) -> list[WeightSpec]:
        config, names = self.config, self.names
        sizes = (config.query_size, config.kv_size, config.kv_size)
        qkv = _named(self.theirs, names.qkv, sizes)
        rearrange = _rows_of_heads(config) if names.qkv_by_head else None
        ours = f"{self.ours}attention."
        output = {self.theirs + names.o_proj: config.hidden_size}
        return [
            *self._linear(f"{ours}qkv_proj", qkv, config.hidden_size, config.qkv_bias, rearrange),
            *self._head_norm(f"{ours}q_norm", names.q_norm, config.num_heads),
            *self._head_norm(f"{ours}k_norm", names.k_norm, config.num_kv_heads),
            *self._linear(f"{ours}o_proj", output, config.query_size, config.output_bias),
        ]

    def _head_norm(self, ours: str, theirs: str, num_heads: int) -> list[WeightSpec]:
        config = self.config
        if config.qk_norm is None:
            return []
        if config.qk_norm == "width":
            return _norm(config, f"{ours}.norm", self.theirs + theirs, num_heads * config.head_dim)
        shape = (num_heads, config.head_dim) if config.qk_norm == "each_head" else (config.head_dim,)
        return _norm(config, ours, self.theirs + theirs, *shape)

    def _feed_forward(self) -> list[WeightSpec]:
        experts, names, hidden = self.config.experts, self.names, self.config.hidden_size
        ours, theirs = f"{self.ours}mlp.", self.theirs + names.mlp
        if experts is None or self.layer not in experts.layers:
            return self._mlp(ours, theirs, names.gate_up, names.down_proj, self.config.intermediate_size)
        specs = self._linear(f"{ours}router", {theirs + names.router: experts.num_experts}, hidden, False)
        for expert in range(experts.num_experts):
            prefix = theirs + names.expert.format(expert)
            inner = experts.intermediate_size
            specs += self._mlp(f"{ours}experts.{expert}.", prefix, names.expert_gate_up, names.expert_down, inner)
        if experts.shared_intermediate_size:
            shared, inner = f"{ours}shared_expert.", experts.shared_intermediate_size
            specs += self._linear(f"{shared}gate", {theirs + names.shared_expert_gate: 1}, hidden, False)
            prefix = theirs + names.shared_expert
            specs += self._mlp(f"{shared}mlp.", prefix, names.gate_up, names.down_proj, inner)
        return specs

    def _mlp(self, ours: str, theirs: str, gate_up: tuple[str, ...], down: str, inner: int) -> list[WeightSpec]:
        config = self.config
        first, sizes = ("gate_up_proj", (inner, inner)) if config.gated_mlp else ("up_proj", (inner,))
        return [
            *self._linear(ours + first, _named(theirs, gate_up, sizes), config.hidden_size, config.mlp_bias),
            *self._linear(f"{ours}down_proj", {theirs + down: config.hidden_size}, inner, config.mlp_bias),
        ]

    def _linear(
        self, ours: str, theirs: Mapping[str, int], in_features: int, bias: bool, rearrange: Rearrange | None = None
    ) -> list[WeightSpec]:
        """A linear layer that joins those of the checkpoint, given by name with their output widths."""
        shapes = tuple((rows, in_features) for rows in theirs.values())
        weights = tuple(f"{name}.weight" for name in theirs)
        if self.names.transposed:
            stored = tuple((columns, rows) for rows, columns in shapes)
            specs = [WeightSpec(f"{ours}.weight", weights, stored, _transposed)]
        else:
            specs = [WeightSpec(f"{ours}.weight", weights, shapes, rearrange)]
        if bias:
            biases = tuple(f"{name}.bias" for name in theirs)
            specs.append(WeightSpec(f"{ours}.bias", biases, tuple((rows,) for rows in theirs.values()), rearrange))
        return specs


def _plain(ours: str, theirs: str, shape: tuple[int, ...]) -> WeightSpec:
    return WeightSpec(f"{ours}.weight", (f"{theirs}.weight",), (shape,))


def _norm(config: ModelConfig, ours: str, theirs: str, *shape: int) -> list[WeightSpec]:
    specs = [_plain(ours, theirs, shape)]
    if config.norm_bias:
        specs.append(WeightSpec(f"{ours}.bias", (f"{theirs}.bias",), (shape,)))
    return specs


def _named(prefix: str, names: tuple[str, ...], sizes: tuple[int, ...]) -> dict[str, int]:
    """The checkpoint's tensors with their rows; one name stands for all sizes together."""
    if len(names) == 1:
        return {prefix + names[0]: sum(sizes)}
    return {prefix + name: size for name, size in zip(names, sizes, strict=True)}


def _transposed(matrix: Tensor) -> Tensor:
    """[in, out] -> [out, in]."""
    return matrix.t().contiguous()


def _rows_of_heads(config: ModelConfig) -> Rearrange:
    """From q k v of head 0, q k v of head 1, ... to all q, all k, all v; as many key heads as query heads.

    Two heads of two rows each::

        checkpoint   q0 q0 k0 k0 v0 v0 q1 q1 k1 k1 v1 v1
        here         q0 q0 q1 q1 k0 k0 k1 k1 v0 v0 v1 v1
    """
    heads, width = config.num_heads, config.head_dim

    def rearrange(rows: Tensor) -> Tensor:
        by_head = rows.view(heads, 3, width, *rows.shape[1:])
        return by_head.transpose(0, 1).reshape(rows.shape)

    return rearrange
