"""Every family of models against the transformers library: a tiny random model of it, saved to disk and loaded.

Prompts of ragged lengths are prefilled in chunks and decoded for 40 steps through the paged cache, short ones decoding
while long ones still prefill; the logits of every position and the greedy tokens are those of transformers. To see that
a difference would show, each value that makes a family special is then changed, and the logits move far.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from paged_helpers import decode_greedily
from tiny_models import TinyModel, build_tiny_model, load_tiny_model, our_logits, some_tokens

from mini_vllm.config import EngineConfig
from mini_vllm.engine.sequence_table import SequenceTable
from mini_vllm.kernels.cpu.build import load_kernels
from mini_vllm.model.architectures import ARCHITECTURES
from mini_vllm.model.config import ExpertsConfig, RopeConfig
from mini_vllm.model.cpu_layers import use_cpu_kernels
from mini_vllm.model.loader import load_model
from mini_vllm.store.model_store import ModelFiles, home
from mini_vllm.worker.executor import InProcessExecutor

# Absolute, for logits that lie between about -10 and 10; float32.
TOLERANCE = 5e-5
# What a wrong value must at least move some logit by; the two formulas of GELU differ by so little.
VISIBLE = 3e-4
PROMPT_LENGTHS = (1, 9, 26)
CHUNK_SIZE = 7
NUM_DECODES = 40


@dataclass(frozen=True)
class Family:
    """A model to build, and what makes it special.

    Args:
        architecture: the class of transformers.
        changes: values of its configuration.
        matters: fields of `ModelConfig` with wrong values, each of which must move the logits.
    """

    architecture: str
    changes: dict[str, Any] = field(default_factory=dict)
    matters: dict[str, Any] = field(default_factory=dict)


ROPE = RopeConfig(theta=50.0)
SLIDING_LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 100.0,
    "short_factor": [1.0, 1.1, 1.3, 1.7],
    "long_factor": [1.5, 2.0, 4.0, 9.0],
    "original_max_position_embeddings": 24,
}

FAMILIES = {
    "Llama 2": Family("LlamaForCausalLM", {"num_key_value_heads": 4}, {"ropes": (ROPE,) * 3}),
    "Llama 3": Family(
        "LlamaForCausalLM",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 100.0,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            },
            "tie_word_embeddings": True,
        },
        {"ropes": (RopeConfig(theta=100.0),) * 3},
    ),
    "Llama with biases": Family("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    "Mistral": Family("MistralForCausalLM", {"sliding_window": 11}, {"sliding_windows": (10, 11, 11)}),
    "Qwen2": Family("Qwen2ForCausalLM", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "Qwen2 with windows": Family(
        "Qwen2ForCausalLM",
        {"use_sliding_window": True, "sliding_window": 9, "layer_types": SLIDING_LAYERS},
        {"sliding_windows": (None, 9, 9)},
    ),
    "Qwen3": Family("Qwen3ForCausalLM", {"head_dim": 24}, {"norm_eps": 0.5}),
    "Phi-3": Family("Phi3ForCausalLM", {"sliding_window": 13, "pad_token_id": 0}, {"sliding_windows": (12, 13, 13)}),
    "Phi-3 with long factors": Family(
        "Phi3ForCausalLM",
        {"rope_parameters": LONGROPE, "original_max_position_embeddings": 24, "pad_token_id": 0},
        {"max_position_embeddings": 24},  # would take the short factors
    ),
    "Phi-4-mini": Family(
        "Phi3ForCausalLM",
        {
            "rope_parameters": {**LONGROPE, "partial_rotary_factor": 0.5},
            "tie_word_embeddings": True,
            "head_dim": 16,
            "hidden_size": 64,
            "original_max_position_embeddings": 24,
            "pad_token_id": 0,
        },
        {"ropes": (RopeConfig(partial=0.5),) * 3},
    ),
    "Gemma": Family(
        "GemmaForCausalLM",
        {"num_key_value_heads": 1, "head_dim": 16},
        {"embedding_scale": 1.0, "norm": "rms_float32", "activation": "gelu"},
    ),
    "Gemma 2": Family(
        "Gemma2ForCausalLM",
        {
            "sliding_window": 9,
            "query_pre_attn_scalar": 5,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 4.0,
            "num_hidden_layers": 4,
        },
        {
            "attention_softcap": None,
            "logit_softcap": None,
            "attention_scale": None,
            "embedding_scale": 1.0,
            "sliding_windows": (None, 9, None, 9),
            "norm": "rms_float32",
        },
    ),
    "Gemma 3": Family(
        "Gemma3ForCausalLM",
        {
            "sliding_window": 9,
            "query_pre_attn_scalar": 5,
            "num_hidden_layers": 4,
            "attention_bias": True,
            "layer_types": [*SLIDING_LAYERS, "full_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 300.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 20.0},
            },
        },
        {
            "ropes": (RopeConfig(theta=300.0),) * 4,
            "attention_scale": None,
            "embedding_scale": 1.0,
            "sliding_windows": (None,) * 4,
        },
    ),
    "Mixtral": Family(
        "MixtralForCausalLM",
        {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 15},
        {"experts": ExpertsConfig(5, 1, 48, True, 0, frozenset(range(3))), "sliding_windows": (None,) * 3},
    ),
    "Qwen2-MoE": Family(
        "Qwen2MoeForCausalLM",
        {
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 20,
            "shared_expert_intermediate_size": 28,
            "norm_topk_prob": False,
        },
        {"experts": ExpertsConfig(6, 3, 20, True, 28, frozenset(range(3)))},
    ),
    "Qwen2-MoE with dense layers and windows": Family(
        "Qwen2MoeForCausalLM",
        {
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 20,
            "shared_expert_intermediate_size": 28,
            "norm_topk_prob": True,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
            "num_hidden_layers": 4,
            "use_sliding_window": True,
            "sliding_window": 8,
        },
        {"experts": ExpertsConfig(6, 2, 20, False, 28, frozenset({1})), "sliding_windows": (8, None, None, None)},
    ),
    "Qwen3-MoE": Family(
        "Qwen3MoeForCausalLM",
        {
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 20,
            "norm_topk_prob": True,
            "mlp_only_layers": [0],
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
        {"experts": ExpertsConfig(6, 2, 20, False, 0, frozenset({1, 2}))},
    ),
    "OLMoE": Family(
        "OlmoeForCausalLM",
        {"num_experts": 6, "num_experts_per_tok": 3, "norm_topk_prob": False, "pad_token_id": 0},
        {"experts": ExpertsConfig(6, 3, 48, True, 0, frozenset(range(3))), "norm_eps": 0.5},
    ),
    "OLMo 2": Family(
        "Olmo2ForCausalLM",
        {"pad_token_id": 0, "rope_parameters": {"rope_type": "default", "rope_theta": 50.0}},
        {"norm_eps": 0.5, "ropes": (RopeConfig(),) * 3},
    ),
    "OLMo 2 with biases": Family("Olmo2ForCausalLM", {"pad_token_id": 0, "attention_bias": True}),
    "Granite": Family(
        "GraniteForCausalLM",
        {
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.1,
            "residual_multiplier": 0.4,
            "logits_scaling": 2.0,
            "tie_word_embeddings": True,
        },
        {"embedding_scale": 1.0, "attention_scale": None, "residual_scale": 1.0, "logit_scale": 1.0},
    ),
    "Granite with biases": Family("GraniteForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    "Cohere": Family(
        "CohereForCausalLM",
        {"logit_scale": 0.5, "pad_token_id": 0},
        {"logit_scale": 1.0, "norm_eps": 0.5, "ropes": (RopeConfig(),) * 3},
    ),
    "Cohere with norms and biases": Family(
        "CohereForCausalLM",
        {"use_qk_norm": True, "attention_bias": True, "logit_scale": 0.5, "pad_token_id": 0, "num_key_value_heads": 1},
    ),
    "GPT-2": Family(
        "GPT2LMHeadModel",
        {"num_key_value_heads": 4, "max_position_embeddings": 80},
        {"activation": "gelu", "norm_eps": 0.5, "attention_scale": 1.0},
    ),
    "GPT-2 with a head of its own": Family(
        "GPT2LMHeadModel",
        {
            "num_key_value_heads": 4,
            "max_position_embeddings": 80,
            "tie_word_embeddings": False,
            "n_inner": 40,
            "scale_attn_weights": False,
        },
    ),
    "GPT-NeoX": Family(
        "GPTNeoXForCausalLM",
        {"num_key_value_heads": 4},
        {"ropes": (RopeConfig(),) * 3, "activation": "gelu_tanh", "block": "pre"},
    ),
    "GPT-NeoX in sequence": Family(
        "GPTNeoXForCausalLM",
        {
            "num_key_value_heads": 4,
            "use_parallel_residual": False,
            "attention_bias": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 50.0, "partial_rotary_factor": 0.5},
            "tie_word_embeddings": True,
        },
        {"ropes": (RopeConfig(theta=50.0, partial=0.25),) * 3, "block": "parallel"},
    ),
    "StarCoder2": Family(
        "Starcoder2ForCausalLM",
        {"sliding_window": 12, "head_dim": 8},
        {"sliding_windows": (None,) * 3, "activation": "gelu"},
    ),
    "StarCoder2 without biases": Family(
        "Starcoder2ForCausalLM", {"use_bias": False, "tie_word_embeddings": False, "num_key_value_heads": 1}
    ),
    "SmolLM3": Family(
        "SmolLM3ForCausalLM",
        {"no_rope_layer_interval": 2, "tie_word_embeddings": True, "pad_token_id": 0},
        {"ropes": (RopeConfig(theta=2e6),) * 3},
    ),
    "SmolLM3 with windows and biases": Family(
        "SmolLM3ForCausalLM",
        {
            "no_rope_layers": [0, 1, 0],
            "use_sliding_window": True,
            "sliding_window": 5,
            "pad_token_id": 0,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": False,
            "num_key_value_heads": 1,
        },
        {"sliding_windows": (5, 5, 5)},
    ),
}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TinyModel]:
    """Models that tests share; each is made when it is first asked for."""
    return {}


@pytest.fixture
def tiny(request: pytest.FixtureRequest, built: dict[str, TinyModel], tmp_path_factory: Any) -> TinyModel:
    name = request.node.callspec.params["name"]
    if name not in built:
        family = FAMILIES[name]
        built[name] = build_tiny_model(tmp_path_factory.mktemp("model"), family.architecture, **family.changes)
    return built[name]


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_prefill_in_chunks_and_40_decodes_give_the_logits_and_tokens_of_transformers(
    name: str, tiny: TinyModel, backend: str
) -> None:
    model = load_model(ModelFiles("tiny", tiny.directory, "safetensors"), dtype="float32").model
    if backend == "cpu":
        load_kernels(home())
        use_cpu_kernels(model)
    prompts = [some_tokens(length, seed=length) for length in PROMPT_LENGTHS]
    sequences = decode_greedily(model, prompts, num_tokens=NUM_DECODES, chunk_size=CHUNK_SIZE, backend=backend)
    for prompt, sequence in zip(prompts, sequences, strict=True):
        expected = tiny.logits(sequence.token_ids)[:-1]
        torch.testing.assert_close(torch.stack(sequence.logits), expected, atol=TOLERANCE, rtol=0)
        greedy = expected[len(prompt) - 1 :].argmax(dim=-1).tolist()
        assert sequence.token_ids[len(prompt) :] == greedy


@pytest.mark.parametrize(
    ("name", "change"), [(name, change) for name, family in FAMILIES.items() for change in family.matters]
)
def test_a_wrong_value_would_show(name: str, change: str, tiny: TinyModel) -> None:
    tokens = some_tokens(40)
    right = our_logits(load_tiny_model(tiny), tokens)
    wrong = our_logits(load_tiny_model(tiny, **{change: FAMILIES[name].matters[change]}), tokens)
    assert (right - wrong).abs().max() > VISIBLE


# These have a key head for every query head.
WITHOUT_GROUPS = {"GPT2LMHeadModel", "GPTNeoXForCausalLM"}


@pytest.mark.parametrize(
    ("architecture", "num_kv_heads"),
    [
        (architecture, count)
        for architecture in sorted({family.architecture for family in FAMILIES.values()})
        for count in ((4,) if architecture in WITHOUT_GROUPS else (1, 2, 4))
    ],
)
@pytest.mark.parametrize("tied", [True, False])
def test_kv_heads_and_tied_and_untied_heads(tmp_path: Path, architecture: str, num_kv_heads: int, tied: bool) -> None:
    family = next(each for each in FAMILIES.values() if each.architecture == architecture)
    changes = {**family.changes, "num_key_value_heads": num_kv_heads, "tie_word_embeddings": tied}
    tiny = build_tiny_model(tmp_path, architecture, **changes)
    tokens = some_tokens(30)
    torch.testing.assert_close(our_logits(load_tiny_model(tiny), tokens), tiny.logits(tokens), atol=TOLERANCE, rtol=0)


def test_every_architecture_has_a_family_here() -> None:
    in_another_file = {"Gemma3ForConditionalGeneration"}  # test_renamed_checkpoints.py
    assert {family.architecture for family in FAMILIES.values()} == set(ARCHITECTURES) - in_another_file


# ---- longrope: the longest context decides which of its two sets of frequencies is used ------------------------------


@pytest.mark.parametrize("name", ["Phi-3 with long factors"])
def test_longrope_takes_the_short_factors_when_no_text_can_be_longer_than_the_original_context(
    name: str, tiny: TinyModel
) -> None:
    model, tokens = load_tiny_model(tiny), some_tokens(24)
    model.settle_context(24)
    torch.testing.assert_close(our_logits(model, tokens), tiny.logits(tokens), atol=TOLERANCE, rtol=0)
    model.settle_context(25)
    assert (our_logits(model, tokens) - tiny.logits(tokens)).abs().max() > VISIBLE


@pytest.mark.parametrize("name", ["Phi-3 with long factors"])
@pytest.mark.parametrize("max_model_len", [24, 40])
def test_the_engine_settles_longrope_by_its_own_max_model_len(name: str, tiny: TinyModel, max_model_len: int) -> None:
    loaded = load_model(ModelFiles("tiny", tiny.directory, "safetensors"), dtype="float32")
    config = EngineConfig(model="tiny", max_model_len=max_model_len, num_kv_blocks=64, block_size=4, max_num_seqs=2)
    executor = InProcessExecutor(config, loaded.model, loaded.dtype, torch.device("cpu"))
    plan = executor.plan_pool(max_model_len)
    executor.allocate(plan, SequenceTable(2, plan.max_model_len, plan.block_size))
    chosen = LONGROPE["short_factor"] if max_model_len == 24 else LONGROPE["long_factor"]
    periods = [factor * 100.0 ** (2 * pair / 8) for pair, factor in enumerate(chosen)]
    torch.testing.assert_close(loaded.model.rotaries[0].inv_freq, 1 / torch.tensor(periods))
    assert "longrope has two sets" in loaded.config.notes[0]


# ---- bfloat16 --------------------------------------------------------------------------------------------------------


# These round at other places in transformers; how far two equally rough results may lie apart is the other bound.
ROUNDED_ELSEWHERE = {
    "OLMo 2": "transformers turns queries and keys in float32",
    "OLMo 2 with biases": "transformers turns queries and keys in float32",
    "GPT-2": "transformers rounds after each step of the formula of GELU",
    "GPT-2 with a head of its own": "transformers rounds after each step of the formula of GELU",
    "GPT-NeoX": "transformers adds the two halves of a layer before it adds what the layer was given",
    "Mixtral": "transformers keeps the weights of experts in float32",
}


@pytest.mark.parametrize("name", FAMILIES)
def test_bfloat16_rounds_where_transformers_rounds(tmp_path: Path, name: str) -> None:
    # A rounding more or less anywhere (norms, activations, multipliers ...) is an error as large as that of bfloat16
    # itself, which is what the bound measures.
    tiny = build_tiny_model(tmp_path, FAMILIES[name].architecture, dtype=torch.bfloat16, **FAMILIES[name].changes)
    tokens = some_tokens(40)
    ours, theirs = our_logits(load_tiny_model(tiny, torch.bfloat16), tokens), tiny.logits(tokens)
    exact = our_logits(load_tiny_model(tiny, torch.float32), tokens)
    bound = 1.5 if name in ROUNDED_ELSEWHERE else 0.2
    assert (ours - theirs).abs().mean() < bound * (theirs - exact).abs().mean()
