"""The families of models: how each one's `config.json` is read and where its weights lie in the checkpoint.

Where it stands: `model_config_from_hf` finds a family here by the checkpoint's class name; the loader asks `weight_map`
which tensors to read and where they go.

    "LlamaForCausalLM" -> Architecture(read_config, names)

What always holds: all families run through the one `Transformer`. A new one is a function that reads its configuration,
a table of its tensors' names (often one that is here already), and an entry in `ARCHITECTURES`. No torch is needed.

In vLLM: `vllm/model_executor/models/registry.py`, and `load_weights` of each file beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from mini_vllm.errors import UnsupportedModelError
from mini_vllm.model.config import ModelConfig
from mini_vllm.model.families import cohere, gemma, gpt, granite, llama, moe, olmo2, phi3, smollm3
from mini_vllm.model.hf_config import HFConfig
from mini_vllm.model.weight_map import TensorNames, WeightSpec, map_weights

__all__ = ["ARCHITECTURES", "Architecture", "WeightSpec", "find_architecture", "tied_head", "weight_map"]


@dataclass(frozen=True)
class Architecture:
    """A family of models.

    Args:
        name: the class name in `architectures` of `config.json`.
        models: whose checkpoints name it, for people.
        read_config: makes the `ModelConfig`, or refuses.
        names: what its checkpoints call their tensors.
    """

    name: str
    models: str
    read_config: Callable[[HFConfig], ModelConfig]
    names: TensorNames


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
    return map_weights(config, find_architecture([config.architecture]).names)


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


ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {
        each.name: each
        for each in (
            Architecture(
                "LlamaForCausalLM", "Llama 2, 3 and 3.x, TinyLlama, SmolLM2", llama.read_llama, llama.LLAMA_NAMES
            ),
            Architecture("MistralForCausalLM", "Mistral", llama.read_mistral, llama.LLAMA_NAMES),
            Architecture("Qwen2ForCausalLM", "Qwen2, Qwen2.5", llama.read_qwen2, llama.LLAMA_NAMES),
            Architecture("Qwen3ForCausalLM", "Qwen3", llama.read_qwen3, llama.LLAMA_NAMES),
            Architecture("SmolLM3ForCausalLM", "SmolLM3", smollm3.read_smollm3, llama.LLAMA_NAMES),
            Architecture("Phi3ForCausalLM", "Phi-3, Phi-3.5, Phi-4, Phi-4-mini", phi3.read_phi3, phi3.PHI3_NAMES),
            Architecture("GemmaForCausalLM", "Gemma", gemma.read_gemma, llama.LLAMA_NAMES),
            Architecture("Gemma2ForCausalLM", "Gemma 2", gemma.read_gemma2, gemma.SANDWICH_NAMES),
            Architecture("Gemma3ForCausalLM", "Gemma 3, text only", gemma.read_gemma3, gemma.SANDWICH_NAMES),
            Architecture(
                "Gemma3ForConditionalGeneration",
                "Gemma 3 with vision, its text part",
                gemma.read_gemma3_with_vision,
                gemma.SANDWICH_NAMES,
            ),
            Architecture("MixtralForCausalLM", "Mixtral", moe.read_mixtral, moe.MIXTRAL_NAMES),
            Architecture("Qwen2MoeForCausalLM", "Qwen1.5-MoE, Qwen2-MoE", moe.read_qwen2_moe, llama.LLAMA_NAMES),
            Architecture("Qwen3MoeForCausalLM", "Qwen3-MoE", moe.read_qwen3_moe, llama.LLAMA_NAMES),
            Architecture("OlmoeForCausalLM", "OLMoE", moe.read_olmoe, llama.LLAMA_NAMES),
            Architecture("Olmo2ForCausalLM", "OLMo 2", olmo2.read_olmo2, llama.LLAMA_NAMES),
            Architecture("GraniteForCausalLM", "Granite 3", granite.read_granite, llama.LLAMA_NAMES),
            Architecture("CohereForCausalLM", "Command R", cohere.read_cohere, llama.LLAMA_NAMES),
            Architecture("GPT2LMHeadModel", "GPT-2, DistilGPT2", gpt.read_gpt2, gpt.GPT2_NAMES),
            Architecture("GPTNeoXForCausalLM", "GPT-NeoX, Pythia, Dolly", gpt.read_gpt_neox, gpt.GPT_NEOX_NAMES),
            Architecture("Starcoder2ForCausalLM", "StarCoder2", gpt.read_starcoder2, gpt.STARCODER2_NAMES),
        )
    }
)
