"""Phi-3, Phi-3.5 and Phi-4-mini: a Llama whose checkpoints hold q/k/v and gate/up joined, with "longrope".

Where it stands: listed in `architectures.py`.

In vLLM: `vllm/model_executor/models/phi3.py`.
"""

from __future__ import annotations

from dataclasses import replace

from mini_vllm.model.config import ModelConfig
from mini_vllm.model.families.common import Reading, read_common, read_windows
from mini_vllm.model.hf_config import HFConfig
from mini_vllm.model.weight_map import TensorNames

PHI3_NAMES = TensorNames(qkv=("self_attn.qkv_proj",), gate_up=("gate_up_proj",))

_READING = Reading(
    frozenset({"partial_rotary_factor", "sliding_window"}),
    eps=1e-5,
    partial_rotary=1.0,
    rope_aliases={"su": "longrope", "yarn": "longrope"},  # what the first checkpoints called it
)


def read_phi3(config: HFConfig) -> ModelConfig:
    """All layers slide when there is a window."""
    model = read_common(config, "Phi3ForCausalLM", _READING)
    window = config.integer("sliding_window") if config.has("sliding_window") else None
    return replace(model, sliding_windows=read_windows(config, model.num_layers, window))
