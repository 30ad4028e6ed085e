"""GPT-2, GPT-NeoX (Pythia) and StarCoder2: LayerNorm with bias, biases everywhere, and a network without a gate.

Where it stands: listed in `architectures.py`.

In vLLM: `gpt2.py`, `gpt_neox.py` and `starcoder2.py` in `vllm/model_executor/models/`.
"""

from __future__ import annotations

from dataclasses import replace

from mini_vllm.model.config import ModelConfig
from mini_vllm.model.families.common import Reading, read_common, read_windows
from mini_vllm.model.hf_config import HFConfig
from mini_vllm.model.weight_map import TensorNames

GPT2_NAMES = TensorNames(
    embed_tokens="transformer.wte",
    embed_positions="transformer.wpe",
    norm="transformer.ln_f",
    layer="transformer.h.{}.",
    input_norm="ln_1",
    qkv=("attn.c_attn",),
    o_proj="attn.c_proj",
    post_attention_norm="ln_2",
    gate_up=("c_fc",),
    down_proj="c_proj",
    transposed=True,
)
GPT_NEOX_NAMES = TensorNames(
    embed_tokens="gpt_neox.embed_in",
    norm="gpt_neox.final_layer_norm",
    lm_head="embed_out",
    layer="gpt_neox.layers.{}.",
    qkv=("attention.query_key_value",),
    o_proj="attention.dense",
    gate_up=("dense_h_to_4h",),
    down_proj="dense_4h_to_h",
    qkv_by_head=True,
)
STARCODER2_NAMES = TensorNames(gate_up=("c_fc",), down_proj="c_proj")

_GPT2_KEYS = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings",
}
_GPT2_READING = Reading(
    frozenset({"scale_attn_weights"}),
    tied=True,
    eps_key="layer_norm_epsilon",
    eps=1e-5,
    activation_key="activation_function",
    activation="gelu_new",
    has_rope=False,
)
_GPT_NEOX_READING = Reading(
    frozenset({"attention_bias", "partial_rotary_factor", "use_parallel_residual"}),
    eps_key="layer_norm_eps",
    eps=1e-5,
    activation="gelu",
    partial_rotary=0.25,
)
_STARCODER2_READING = Reading(
    frozenset({"sliding_window"}), tied=True, eps_key="norm_epsilon", eps=1e-5, activation="gelu_pytorch_tanh"
)


def read_gpt2(config: HFConfig) -> ModelConfig:
    """Positions are a table that is added to the embedding; it ends where the context ends."""
    config = config.renamed(_GPT2_KEYS)
    inner = config.integer("n_inner", 4 * config.integer("hidden_size"))
    model = read_common(config.with_values(intermediate_size=inner), "GPT2LMHeadModel", _GPT2_READING)
    unscaled = not config.boolean("scale_attn_weights", True)
    model = _with_layer_norm(model, attention_bias=True, mlp_bias=True)
    return replace(model, learned_positions=True, attention_scale=1.0 if unscaled else None)


def read_gpt_neox(config: HFConfig) -> ModelConfig:
    """Attention and feed-forward network side by side, each with a norm of its own; a quarter of each head turns."""
    config = config.renamed({"rotary_pct": "partial_rotary_factor", "rotary_emb_base": "rope_theta"})
    model = read_common(config, "GPTNeoXForCausalLM", _GPT_NEOX_READING)
    parallel = config.boolean("use_parallel_residual", True)
    model = _with_layer_norm(model, attention_bias=config.boolean("attention_bias", True), mlp_bias=True)
    return replace(model, block="parallel" if parallel else "pre")


def read_starcoder2(config: HFConfig) -> ModelConfig:
    """StarCoder2: rotary embedding, grouped keys and a window, as in Mistral."""
    model = read_common(config, "Starcoder2ForCausalLM", _STARCODER2_READING)
    window = config.integer("sliding_window") if config.has("sliding_window") else None
    windows = read_windows(config, model.num_layers, window)
    bias = config.boolean("use_bias", True)
    return replace(_with_layer_norm(model, attention_bias=bias, mlp_bias=bias), sliding_windows=windows)


def _with_layer_norm(model: ModelConfig, *, attention_bias: bool, mlp_bias: bool) -> ModelConfig:
    """What the three share."""
    return replace(
        model,
        norm="layer",
        norm_bias=True,
        gated_mlp=False,
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        mlp_bias=mlp_bias,
    )
