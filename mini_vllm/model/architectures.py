"""The families of models: how each one's `config.json` is read and where its weights lie in the checkpoint.

Where it stands: `model_config_from_hf` finds a family here by the checkpoint's class name; the loader asks `weight_map`
which tensors to read and where they go.

    "LlamaForCausalLM" -> Architecture(read_config, weight_map)

What always holds: all families run through the one `Transformer`. A new one is a function that reads its configuration,
a function that maps its weights (often one that is here already), and an entry in `ARCHITECTURES`. No torch is needed.

In vLLM: `vllm/model_executor/models/registry.py`, and `load_weights` of each file beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from mini_vllm.errors import ModelLoadError, UnsupportedModelError
from mini_vllm.model.config import ModelConfig
from mini_vllm.model.hf_config import HFConfig
from mini_vllm.model.rope_config import context_length, read_rope


@dataclass(frozen=True)
class WeightSpec:
    """Where one parameter of the transformer comes from.

    The query, key and value projections are three tensors in the checkpoint and one matrix here, so that one
    multiplication makes all three::

        layers.0.attention.qkv_proj.weight  =  q_proj.weight   [num_heads * head_dim, hidden]
                                               k_proj.weight   [num_kv_heads * head_dim, hidden]
                                               v_proj.weight   [num_kv_heads * head_dim, hidden]

    Args:
        parameter: the name in `Transformer.state_dict()`.
        sources: names of the checkpoint's tensors, to be joined along dimension 0 in this order.
        shapes: the shape that each source must have.
    """

    parameter: str
    sources: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Architecture:
    """A family of models.

    Args:
        name: the class name in `architectures` of `config.json`.
        read_config: makes the `ModelConfig`, or refuses.
        weight_map: every parameter of the transformer, each once, in the order of the forward pass.
    """

    name: str
    read_config: Callable[[HFConfig], ModelConfig]
    weight_map: Callable[[ModelConfig], list[WeightSpec]]


def find_architecture(names: Any, model_type: Any = None) -> Architecture:
    """The first of the named architectures that is implemented.

    Args:
        names: `architectures` of `config.json`: a list of class names.
        model_type: `model_type` of `config.json`, only to make the message clearer.

    Raises:
        UnsupportedModelError: none of the names is known; the message lists those that are.
    """
    candidates = names if isinstance(names, list) else []
    for name in candidates:
        if isinstance(name, str) and name in ARCHITECTURES:
            return ARCHITECTURES[name]
    raise UnsupportedModelError(
        f"architectures={names!r} (model_type={model_type!r}) in config.json is not implemented; "
        f"supported: {', '.join(ARCHITECTURES)}."
    )


def weight_map(config: ModelConfig) -> list[WeightSpec]:
    """Where every parameter of `Transformer(config)` comes from, each exactly once."""
    return find_architecture([config.architecture]).weight_map(config)


def tied_head(config: ModelConfig) -> WeightSpec | None:
    """The output head that a checkpoint may hold although the configuration says that the embedding serves as head.

    Some files carry both. When the two are equal, the head is a copy and is left out. When they differ, the
    configuration is wrong and the model was trained with two matrices: transformers (since version 5) then uses both,
    and the loader does as well, with `dataclasses.replace(config, tie_word_embeddings=False)`.

    Returns:
        The head as an untied model would have it, or None when the configuration is untied anyway.
    """
    if not config.tie_word_embeddings:
        return None
    return weight_map(replace(config, tie_word_embeddings=False))[-1]


# -- Configurations ----------------------------------------------------------------------------------------------------


def _read_common(config: HFConfig, name: str, *, reads: frozenset[str], head_dim: int | None = None) -> ModelConfig:
    """What all families share; the families change the rest with `dataclasses.replace`.

    Args:
        config: the parsed `config.json`.
        name: the architecture.
        reads: the number-changing keys that the family reads itself; all others must be neutral.
        head_dim: the family's own default; None derives it from the hidden size.
    """
    config.refuse_unread(reads)
    config.only("hidden_act", ("silu", "swish"), default="silu")
    hidden_size = config.integer("hidden_size")
    num_heads = config.integer("num_attention_heads")
    num_layers = config.integer("num_hidden_layers")
    rope = read_rope(config)
    max_position, notes = context_length(rope, config.integer("max_position_embeddings"))
    model = ModelConfig(
        architecture=name,
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=config.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=config.integer("num_key_value_heads", num_heads),
        head_dim=config.integer("head_dim", head_dim or _derived_head_dim(hidden_size, num_heads)),
        max_position_embeddings=max_position,
        rms_norm_eps=config.number("rms_norm_eps", 1e-6),
        rope=rope,
        tie_word_embeddings=config.boolean("tie_word_embeddings", False),
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        qk_norm=False,
        sliding_windows=(None,) * num_layers,
        bos_token_id=config.integer("bos_token_id", minimum=0) if config.has("bos_token_id") else None,
        eos_token_ids=config.token_ids("eos_token_id"),
        checkpoint_dtype=_read_dtype(config),
        notes=notes,
    )
    _check_heads(model)
    return model


def _read_llama(config: HFConfig) -> ModelConfig:
    """Llama 2 and 3, TinyLlama, SmolLM2."""
    model = _read_common(config, "LlamaForCausalLM", reads=frozenset({"attention_bias", "mlp_bias"}))
    bias = config.boolean("attention_bias", False)
    windows = _read_windows(config, model.num_layers, window=None)
    mlp_bias = config.boolean("mlp_bias", False)
    return replace(model, qkv_bias=bias, output_bias=bias, mlp_bias=mlp_bias, sliding_windows=windows)


def _read_mistral(config: HFConfig) -> ModelConfig:
    """Llama with a sliding window, of 4096 unless the configuration says otherwise (here a null means none)."""
    model = _read_common(config, "MistralForCausalLM", reads=frozenset({"sliding_window"}))
    no_window = "sliding_window" in config.raw and not config.has("sliding_window")
    window = None if no_window else config.integer("sliding_window", 4096)
    return replace(model, sliding_windows=_read_windows(config, model.num_layers, window))


def _read_qwen2(config: HFConfig) -> ModelConfig:
    """Qwen2 and Qwen2.5: biases on the query, key and value projections."""
    model = _read_common(config, "Qwen2ForCausalLM", reads=frozenset({"sliding_window", "use_sliding_window"}))
    return replace(model, qkv_bias=True, sliding_windows=_qwen_windows(config, model.num_layers))


def _read_qwen3(config: HFConfig) -> ModelConfig:
    """Qwen3: norms on query and key heads, and heads of 128 unless the configuration says otherwise."""
    reads = frozenset({"attention_bias", "sliding_window", "use_sliding_window"})
    model = _read_common(config, "Qwen3ForCausalLM", reads=reads, head_dim=128)
    bias = config.boolean("attention_bias", False)
    windows = _qwen_windows(config, model.num_layers)
    return replace(model, qk_norm=True, qkv_bias=bias, output_bias=bias, sliding_windows=windows)


def _qwen_windows(config: HFConfig, num_layers: int) -> tuple[int | None, ...]:
    """Only where `use_sliding_window` is set, and there from layer `max_window_layers` on."""
    window = config.integer("sliding_window", 4096) if config.boolean("use_sliding_window", False) else None
    return _read_windows(config, num_layers, window, first=config.integer("max_window_layers", 28, minimum=0))


def _read_windows(config: HFConfig, num_layers: int, window: int | None, first: int = 0) -> tuple[int | None, ...]:
    """The window of each layer: by `layer_types` if given, else `window` from layer `first` on."""
    if not config.has("layer_types"):
        return tuple(window if layer >= first else None for layer in range(num_layers))
    types = config.raw["layer_types"]
    if not isinstance(types, list) or len(types) != num_layers:
        raise ModelLoadError(f"layer_types in config.json must list {num_layers} layers, but it is {types!r}.")
    supported = ("full_attention", "sliding_attention")
    for layer_type in types:
        if layer_type not in supported:
            raise UnsupportedModelError(
                f"layer_types in config.json names {layer_type!r}, which is not implemented; "
                f"supported: {', '.join(supported)}."
            )
    if window is None and "sliding_attention" in types:
        raise ModelLoadError("layer_types in config.json names sliding_attention, but there is no sliding window.")
    return tuple(window if layer_type == "sliding_attention" else None for layer_type in types)


def _derived_head_dim(hidden_size: int, num_heads: int) -> int:
    if hidden_size % num_heads:
        raise ModelLoadError(
            f"hidden_size={hidden_size} in config.json is not a multiple of num_attention_heads={num_heads}, "
            "and there is no head_dim."
        )
    return hidden_size // num_heads


def _check_heads(model: ModelConfig) -> None:
    if model.num_heads % model.num_kv_heads:
        raise ModelLoadError(
            f"num_attention_heads={model.num_heads} in config.json is not a multiple of "
            f"num_key_value_heads={model.num_kv_heads}."
        )
    if model.head_dim % 2:
        raise ModelLoadError(
            f"head_dim={model.head_dim} in config.json is odd, but the rotary embedding turns dimensions in pairs."
        )


def _read_dtype(config: HFConfig) -> str | None:
    """`dtype`, or `torch_dtype` as it was called before transformers 5."""
    dtype = config.raw.get("dtype") or config.raw.get("torch_dtype")
    return None if dtype is None else str(dtype).removeprefix("torch.")


# -- Weights -----------------------------------------------------------------------------------------------------------


def _llama_weights(config: ModelConfig) -> list[WeightSpec]:
    """The names of Llama's checkpoints, which Mistral and Qwen share."""
    table = (config.vocab_size, config.hidden_size)
    specs = [WeightSpec("embed_tokens.weight", ("model.embed_tokens.weight",), (table,))]
    for layer in range(config.num_layers):
        specs += _llama_layer_weights(config, f"layers.{layer}.", f"model.layers.{layer}.")
    specs.append(WeightSpec("norm.weight", ("model.norm.weight",), ((config.hidden_size,),)))
    if not config.tie_word_embeddings:
        specs.append(WeightSpec("lm_head.weight", ("lm_head.weight",), (table,)))
    return specs


def _llama_layer_weights(config: ModelConfig, ours: str, theirs: str) -> list[WeightSpec]:
    """One decoder layer.

    Args:
        config: the model.
        ours: what the layer's parameters begin with here, such as "layers.0.".
        theirs: what its tensors begin with in the checkpoint, such as "model.layers.0.".
    """
    hidden, inner = config.hidden_size, config.intermediate_size
    attention, mlp = f"{theirs}self_attn.", f"{theirs}mlp."
    qkv = {
        f"{attention}q_proj": config.query_size,
        f"{attention}k_proj": config.kv_size,
        f"{attention}v_proj": config.kv_size,
    }
    gate_up = {f"{mlp}gate_proj": inner, f"{mlp}up_proj": inner}
    specs = [_norm(f"{ours}input_norm", f"{theirs}input_layernorm", hidden)]
    specs += _linear(f"{ours}attention.qkv_proj", qkv, hidden, config.qkv_bias)
    if config.qk_norm:
        specs.append(_norm(f"{ours}attention.q_norm", f"{attention}q_norm", config.head_dim))
        specs.append(_norm(f"{ours}attention.k_norm", f"{attention}k_norm", config.head_dim))
    specs += _linear(f"{ours}attention.o_proj", {f"{attention}o_proj": hidden}, config.query_size, config.output_bias)
    specs.append(_norm(f"{ours}post_attention_norm", f"{theirs}post_attention_layernorm", hidden))
    specs += _linear(f"{ours}mlp.gate_up_proj", gate_up, hidden, config.mlp_bias)
    specs += _linear(f"{ours}mlp.down_proj", {f"{mlp}down_proj": hidden}, inner, config.mlp_bias)
    return specs


def _norm(ours: str, theirs: str, width: int) -> WeightSpec:
    return WeightSpec(f"{ours}.weight", (f"{theirs}.weight",), ((width,),))


def _linear(ours: str, theirs: Mapping[str, int], in_features: int, bias: bool) -> list[WeightSpec]:
    """A linear layer that joins those of the checkpoint, given by name with their output widths."""
    weights = tuple(f"{name}.weight" for name in theirs)
    specs = [WeightSpec(f"{ours}.weight", weights, tuple((rows, in_features) for rows in theirs.values()))]
    if bias:
        biases = tuple(f"{name}.bias" for name in theirs)
        specs.append(WeightSpec(f"{ours}.bias", biases, tuple((rows,) for rows in theirs.values())))
    return specs


ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {
        "LlamaForCausalLM": Architecture("LlamaForCausalLM", _read_llama, _llama_weights),
        "MistralForCausalLM": Architecture("MistralForCausalLM", _read_mistral, _llama_weights),
        "Qwen2ForCausalLM": Architecture("Qwen2ForCausalLM", _read_qwen2, _llama_weights),
        "Qwen3ForCausalLM": Architecture("Qwen3ForCausalLM", _read_qwen3, _llama_weights),
    }
)
