"""SmolLM3: a Llama in which some layers have no rotary embedding (NoPE).

Where it stands: listed in `architectures.py`.

In vLLM: nothing of its own; it runs through the transformers library.
"""

from __future__ import annotations

from dataclasses import replace

from mini_vllm.errors import ModelLoadError
from mini_vllm.model.config import ModelConfig
from mini_vllm.model.families.common import Reading, read_common, read_windows
from mini_vllm.model.hf_config import HFConfig

_READS = frozenset({"attention_bias", "mlp_bias", "no_rope_layers", "sliding_window", "use_sliding_window"})


def read_smollm3(config: HFConfig) -> ModelConfig:
    """SmolLM3; where windows are used, the layers without rotary embedding have them."""
    model = read_common(config, "SmolLM3ForCausalLM", Reading(_READS, tied=True, rope_theta=2_000_000.0))
    turns = _read_turning_layers(config, model.num_layers)
    bias = config.boolean("attention_bias", False)
    use_window = config.boolean("use_sliding_window", False) and config.has("sliding_window")
    window = config.integer("sliding_window") if use_window else None
    windows = read_windows(config, model.num_layers, window)
    if not config.has("layer_types"):
        windows = tuple(None if turn else window for turn in turns)
    return replace(
        model,
        ropes=tuple(model.rope if turn else None for turn in turns),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=config.boolean("mlp_bias", False),
        sliding_windows=windows,
    )


def _read_turning_layers(config: HFConfig, num_layers: int) -> list[bool]:
    """Whether each layer turns: `no_rope_layers` has a 1 where it does; else every so-many-th does not."""
    if not config.has("no_rope_layers"):
        interval = config.integer("no_rope_layer_interval", 4)
        return [(layer + 1) % interval != 0 for layer in range(num_layers)]
    turns = config.raw["no_rope_layers"]
    if not isinstance(turns, list) or len(turns) < num_layers or any(turn not in (0, 1) for turn in turns):
        raise ModelLoadError(
            f"no_rope_layers in config.json must list a 0 or a 1 for each of the {num_layers} layers, not {turns!r}."
        )
    return [bool(turn) for turn in turns[:num_layers]]
