"""What all families read from `config.json` in the same way.

Where it stands: each family's reader starts with `read_common` and changes the rest with `dataclasses.replace`.

What always holds: a key that changes the numbers is either read by the family or has the value that changes nothing.

In vLLM: nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from mini_vllm.errors import ModelLoadError, UnsupportedModelError
from mini_vllm.model.config import Activation, ModelConfig, RopeConfig
from mini_vllm.model.hf_config import HFConfig
from mini_vllm.model.rope_config import context_length, read_rope

# Activations by their names in transformers. "gelu_new" and "gelu_fast" are older spellings of the same formula.
_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}


@dataclass(frozen=True)
class Reading:
    """How a family's configuration differs from the usual one.

    Args:
        reads: the number-changing keys that the family reads itself; all others must be neutral.
        head_dim: what the family has where the configuration has none; None derives it from the hidden size.
        tied: `tie_word_embeddings` where the configuration has none.
        eps_key: the name of the norm's eps, and `eps` its value where the configuration has none.
        activation_key: the name of the activation, and `activation` its value where the configuration has none.
        rope_theta: the base of the rotary embedding where the configuration has none.
        partial_rotary: what part of a head turns where the configuration has none; None: the family always turns all.
        rope_aliases: names of rope types that mean another one in this family.
        has_rope: False for a family without rotary embedding.
    """

    reads: frozenset[str] = frozenset()
    head_dim: int | None = None
    tied: bool = False
    eps_key: str = "rms_norm_eps"
    eps: float = 1e-6
    activation_key: str = "hidden_act"
    activation: str = "silu"
    rope_theta: float = RopeConfig.theta
    partial_rotary: float | None = None
    rope_aliases: dict[str, str] = field(default_factory=dict)
    has_rope: bool = True


def read_common(config: HFConfig, name: str, reading: Reading) -> ModelConfig:
    """A `ModelConfig` of Llama's kind with the numbers of this model.

    Args:
        config: the parsed `config.json`.
        name: the architecture.
        reading: what differs in this family.
    """
    config.refuse_unread(reading.reads)
    hidden_size = config.integer("hidden_size")
    num_heads = config.integer("num_attention_heads")
    num_layers = config.integer("num_hidden_layers")
    max_position = config.integer("max_position_embeddings")
    rope: RopeConfig | None = None
    notes: tuple[str, ...] = ()
    if reading.has_rope:
        rope = read_rope(config, reading.rope_theta, reading.partial_rotary, reading.rope_aliases)
        max_position, notes = context_length(rope, max_position)
    model = ModelConfig(
        architecture=name,
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=config.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=config.integer("num_key_value_heads", num_heads),
        head_dim=_head_dim(config, reading.head_dim, hidden_size, num_heads),
        max_position_embeddings=max_position,
        norm_eps=config.number(reading.eps_key, reading.eps),
        ropes=(rope,) * num_layers,
        tie_word_embeddings=config.boolean("tie_word_embeddings", reading.tied),
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        qk_norm=None,
        sliding_windows=(None,) * num_layers,
        bos_token_id=config.integer("bos_token_id", minimum=0) if config.has("bos_token_id") else None,
        eos_token_ids=config.token_ids("eos_token_id"),
        checkpoint_dtype=config.dtype(),
        notes=notes,
        activation=read_activation(config, reading.activation_key, reading.activation),
    )
    _check_heads(model)
    return model


def read_activation(config: HFConfig, key: str, default: str) -> Activation:
    """The activation under `key`.

    Raises:
        UnsupportedModelError: one that is not implemented.
    """
    return _ACTIVATIONS[config.only(key, tuple(_ACTIVATIONS), default=default)]


def read_windows(config: HFConfig, num_layers: int, window: int | None, first: int = 0) -> tuple[int | None, ...]:
    """The window of each layer: by `layer_types` if given, else `window` from layer `first` on."""
    if not config.has("layer_types"):
        return tuple(window if layer >= first else None for layer in range(num_layers))
    types = read_layer_types(config, num_layers)
    if window is None and "sliding_attention" in types:
        raise ModelLoadError("layer_types in config.json names sliding_attention, but there is no sliding window.")
    return tuple(window if layer_type == "sliding_attention" else None for layer_type in types)


def read_layer_types(config: HFConfig, num_layers: int) -> list[str]:
    """`layer_types`: "full_attention" or "sliding_attention" for each layer."""
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
    return types


def _head_dim(config: HFConfig, default: int | None, hidden_size: int, num_heads: int) -> int:
    if default is not None or config.has("head_dim"):
        return config.integer("head_dim", default)
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
    if model.rope is not None:
        _check_rope(model.rope, model.head_dim)


def _check_rope(rope: RopeConfig, head_dim: int) -> None:
    turning = rope.rotary_dim(head_dim)
    if turning % 2 or turning == 0:
        part = "odd" if rope.partial == 1 else f"turned in {turning} dimensions (partial_rotary_factor={rope.partial})"
        raise ModelLoadError(
            f"head_dim={head_dim} in config.json is {part}, but the rotary embedding turns dimensions in pairs."
        )
    if rope.rope_type != "longrope":
        return
    for name, factors in (("short_factor", rope.short_factors), ("long_factor", rope.long_factors)):
        if len(factors) != turning // 2:
            raise ModelLoadError(
                f"{name} in config.json must have a number for each of the {turning // 2} pairs of dimensions that "
                f"turn, but it has {len(factors)}."
            )
