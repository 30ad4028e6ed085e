"""What the transformer must know of a model: a frozen value, read once from `config.json`.

Where it stands: the loader reads a model's configuration, this value decides which layers `Transformer` builds, and the
engine reads the context length and the end-of-sequence ids from it.

    config.json -> model_config_from_hf -> ModelConfig -> Transformer, weight_map, engine

What always holds: a `ModelConfig` describes a model that is fully implemented. Whatever would change the numbers and is
not implemented (an unknown rope type, another activation ...) was refused while it was made. No torch is needed here:
dtypes are strings, so that commands which only look at a model stay light.

In vLLM: `vllm/config/model.py` (`ModelConfig`) and `vllm/transformers_utils/config.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

RopeType = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope"]
NormKind = Literal["rms", "rms_float32", "rms_plus_one", "layer"]
QKNorm = Literal["head", "each_head", "width"]
Block = Literal["pre", "post", "sandwich", "parallel", "parallel_one_norm"]
Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]


@dataclass(frozen=True)
class RopeConfig:
    """The frequencies of the rotary position embedding (RoPE, Su et al. 2021, arXiv:2104.09864).

    Pair i of a head's dimensions turns by `position * inv_freq[i]`, with `inv_freq[i] = theta ** (-2i / head_dim)`. The
    other types stretch these angles so that a model reads longer texts than it was first trained on; `rotary.py` has
    the formulas.

    Args:
        rope_type: "default"; "linear" (all angles divided by `factor`); "llama3" (slow pairs only); "yarn" (a ramp from
            fast pairs to slow ones, Peng et al. 2023, arXiv:2309.00071); "dynamic" (depends on the current length, so
            it is settled at load: the context is capped where it equals "default"); "longrope" (each pair slowed by a
            factor of its own, one list for texts up to the original context and one for longer ones, Ding et al. 2024,
            arXiv:2402.13753; the engine's longest context decides which, see `rotary.py`).
        theta: base of the geometric series of frequencies.
        factor: how many times longer the context gets.
        original_max_position: context of the first training, in tokens; what llama3 and yarn measure wavelengths by,
            and what longrope compares the longest context with.
        low_freq_factor, high_freq_factor: llama3 only: a pair that turns less than `low_freq_factor` times within the
            original context is slowed by `factor`, one that turns more than `high_freq_factor` times is left alone.
        beta_fast, beta_slow: yarn only: the same two limits, in the opposite order.
        truncate: yarn only: whether the ends of the ramp are rounded outwards to whole pairs.
        attention_factor: yarn and longrope: cos and sin are multiplied by it, so attention scores by its square.
        short_factors, long_factors: longrope only: what each pair's period is multiplied by, [rotary_dim / 2].
        partial: the part of a head that turns: the first `rotary_dim(head_dim)` dimensions; the rest stay.
        interleaved: a pair is two dimensions side by side, not half a head apart.
    """

    rope_type: RopeType = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    partial: float = 1.0
    interleaved: bool = False

    def rotary_dim(self, head_dim: int) -> int:
        """How many dimensions of a head turn."""
        return int(head_dim * self.partial)


@dataclass(frozen=True)
class ExpertsConfig:
    """Feed-forward networks of which each token uses a few (mixture of experts, Shazeer et al. 2017, arXiv:1701.06538).

    Args:
        num_experts: networks in a layer.
        experts_per_token: how many of them a token uses: those that its router rates highest.
        intermediate_size: width inside one of them.
        normalize: the weights of the chosen ones are divided by their sum.
        shared_intermediate_size: width of one more network that every token uses, weighed by a gate of its own;
            0: there is none.
        layers: the layers that have experts; the others have one network of `ModelConfig.intermediate_size`.
    """

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    normalize: bool
    shared_intermediate_size: int
    layers: frozenset[int]


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer, layer by layer, in the terms of `transformer.py`.

    The fields with defaults are what families differ in; the defaults are Llama's.

    Args:
        architecture: the checkpoint's class name, such as "LlamaForCausalLM".
        vocab_size: rows of the embedding and of the logits.
        hidden_size: width of the residual stream.
        intermediate_size: width inside the feed-forward network.
        num_layers: decoder layers.
        num_heads: query heads.
        num_kv_heads: key/value heads; divides num_heads.
        head_dim: width of one head, even; num_heads * head_dim need not be hidden_size.
        max_position_embeddings: longest context in tokens, rope scaling included: the engine's upper limit.
        norm_eps: added to the mean square (or the variance) before the root.
        ropes: the rotary embedding of each layer; None for a layer that does not turn queries and keys.
        tie_word_embeddings: the output head is the embedding matrix.
        qkv_bias, output_bias: biases of the attention's input projections and of its output projection.
        mlp_bias: biases of the feed-forward network.
        qk_norm: norms of queries and keys before the rotary embedding: "head" (each head, one weight for all heads),
            "each_head" (each head, with a weight of its own), "width" (all heads together); None: no norms.
        sliding_windows: one entry a layer: keys a query sees, itself included; None sees all.
        bos_token_id: beginning of sequence, if the configuration names one.
        eos_token_ids: every end-of-sequence id that the configuration names.
        checkpoint_dtype: dtype the checkpoint says it was saved in ("bfloat16"), None when it does not say.
        notes: what was decided while reading, one sentence each; the engine logs them at start.
        block: how attention, feed-forward network and norms are wired; `transformer.py` has the pictures.
        norm: "rms"; "rms_float32" (rounded after the weight is multiplied, not before); "rms_plus_one" (the same, and
            the weight counts from 1); "layer" (LayerNorm: the mean is taken away).
        norm_bias: LayerNorm has a bias.
        activation: of the feed-forward network; "gelu_tanh" is GELU's approximation by tanh.
        gated_mlp: down(activation(gate(x)) * up(x)), else down(activation(up(x))).
        experts: the mixture of experts; None: every layer has one network.
        learned_positions: positions are a table of vectors that are added to the embedding.
        embedding_scale: what the embedding is multiplied by.
        residual_scale: what attention and feed-forward network are multiplied by before they are added.
        attention_scale: what query-key products are multiplied by; None: head_dim ** -0.5.
        attention_softcap: c of s -> c tanh(s / c) on these products; None: no cap.
        logit_scale: what the logits are multiplied by.
        logit_softcap: c of l -> c tanh(l / c) on the logits; None: no cap.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    norm_eps: float
    ropes: tuple[RopeConfig | None, ...]
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: QKNorm | None
    sliding_windows: tuple[int | None, ...]
    bos_token_id: int | None = None
    eos_token_ids: frozenset[int] = frozenset()
    checkpoint_dtype: str | None = None
    notes: tuple[str, ...] = ()
    block: Block = "pre"
    norm: NormKind = "rms"
    norm_bias: bool = False
    activation: Activation = "silu"
    gated_mlp: bool = True
    experts: ExpertsConfig | None = None
    learned_positions: bool = False
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    attention_scale: float | None = None
    attention_softcap: float | None = None
    logit_scale: float = 1.0
    logit_softcap: float | None = None

    @property
    def rope(self) -> RopeConfig | None:
        """The rotary embedding of the first layer that has one; in most families all layers share it."""
        return next((rope for rope in self.ropes if rope is not None), None)

    @property
    def query_size(self) -> int:
        """Width of all query heads together."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads together; the value heads have the same."""
        return self.num_kv_heads * self.head_dim


def model_config_from_hf(raw: Mapping[str, Any]) -> ModelConfig:
    """Read a parsed Hugging Face `config.json`.

    Args:
        raw: the JSON object, with the spellings of transformers 4 (`rope_scaling`) or 5 (`rope_parameters`).

    Raises:
        UnsupportedModelError: the architecture, or a value that changes the numbers, is not implemented.
        ModelLoadError: a value is missing, of the wrong type, or does not fit the others.
    """
    # The registry of architectures builds ModelConfigs, so it imports this module; hence it is imported late.
    from mini_vllm.model.architectures import find_architecture
    from mini_vllm.model.hf_config import HFConfig

    return find_architecture(raw.get("architectures"), raw.get("model_type")).read_config(HFConfig(raw))
