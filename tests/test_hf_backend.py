"""Models of the transformers library under our attention and cache, against the library alone.

The same tests as for native families (`test_model_families.py`): all native families run here too, and then decoders
that are not native. Models that do more than attend over keys and values are refused, by what they do.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from cli_helpers import write_byte_tokenizer
from paged_helpers import decode_greedily
from test_model_families import CHUNK_SIZE, FAMILIES, NUM_DECODES, PROMPT_LENGTHS, TOLERANCE
from tiny_models import TinyModel, build_tiny_model, some_tokens
from torch import nn

from mini_vllm import LLM, SamplingParams
from mini_vllm.errors import InvalidConfigError, ModelLoadError, UnsupportedModelError
from mini_vllm.model.architectures import ARCHITECTURES
from mini_vllm.model.attention import AttentionMetadata
from mini_vllm.model.attention_backends import make_backend
from mini_vllm.model.hf_backend import TransformersModel, transformers_architectures
from mini_vllm.model.loader import LoadedModel, load_model
from mini_vllm.store.model_store import ModelFiles


@dataclass(frozen=True)
class Other:
    """A decoder that is not native: what to build, and what its layers must be seen to be."""

    architecture: str
    changes: dict[str, Any] = field(default_factory=dict)
    kv_heads: int = 2
    windows: tuple[int | None, ...] = (None, None, None)


LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 6}
EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_group": 1, "topk_group": 1}
OTHERS = {
    "OPT, learned positions": Other("OPTForCausalLM", {"word_embed_proj_dim": 32, "ffn_dim": 48}, kv_heads=4),
    "StableLM, part of a head turned": Other("StableLmForCausalLM", {"use_qkv_bias": True, "pad_token_id": 0}),
    "Nemotron, squared ReLU": Other("NemotronForCausalLM"),
    "GLM-4, pairs side by side": Other("Glm4ForCausalLM", {"pad_token_id": 0}),
    "EXAONE 4, windows and layers without RoPE": Other(
        "Exaone4ForCausalLM",
        {
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "pad_token_id": 0,
        },
        windows=(9, None, 9),
    ),
    "GPT-BigCode, one key head": Other("GPTBigCodeForCausalLM", {"n_inner": 48}, kv_heads=1),
    "DeepSeek-V3, values narrower than keys, experts": Other(
        "DeepseekV3ForCausalLM",
        {**LATENT, **EXPERTS, "first_k_dense_replace": 1, "num_key_value_heads": 4, "head_dim": 8, "pad_token_id": 0},
        kv_heads=4,
    ),
    "MiniCPM3, scaled embeddings, residuals and logits": Other(
        "MiniCPM3ForCausalLM", {**LATENT, "num_key_value_heads": 4, "head_dim": 8, "pad_token_id": 0}, kv_heads=4
    ),
    "ERNIE 4.5 with experts": Other(
        "Ernie4_5_MoeForCausalLM", {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 24, "pad_token_id": 0}
    ),
}

# More of them, to say in docs/models.md what runs. Windows and layers without are mixed where a model has both.
MIXED = {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
EXPERTS_4 = {"num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
MORE: dict[str, dict[str, Any]] = {
    "AfmoeForCausalLM": {**MIXED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    "ApertusForCausalLM": {},
    "ArceeForCausalLM": {},
    "BioGptForCausalLM": {},
    "BitNetForCausalLM": {},
    "Cohere2ForCausalLM": MIXED,
    "CwmForCausalLM": MIXED,
    "Ernie4_5ForCausalLM": {},
    "ExaoneMoeForCausalLM": {**MIXED, **EXPERTS, "num_experts": 4, "first_k_dense_replace": 1},
    "FlexOlmoForCausalLM": {"num_experts": 4, "num_experts_per_tok": 2},
    "GlmForCausalLM": {},
    "Glm4MoeForCausalLM": {**EXPERTS, "first_k_dense_replace": 1, "n_shared_experts": 1},
    "GraniteMoeForCausalLM": EXPERTS_4,
    "HeliumForCausalLM": {},
    "HunYuanDenseV1ForCausalLM": {},
    "HyperCLOVAXForCausalLM": {},
    "Jais2ForCausalLM": {},
    "JetMoeForCausalLM": EXPERTS_4,
    "MiniMaxM2ForCausalLM": {**EXPERTS_4, "num_experts": 4},
    "Ministral3ForCausalLM": {},
    "MinistralForCausalLM": {**MIXED, "layer_types": ["sliding_attention"] * 3},
    "ModernBertDecoderForCausalLM": {**MIXED, "num_key_value_heads": 4},
    "NanoChatForCausalLM": {},
    "Olmo3ForCausalLM": MIXED,
    "OlmoForCausalLM": {},
    "PersimmonForCausalLM": {},
    "PhiForCausalLM": {},
    "PhimoeForCausalLM": EXPERTS_4,
    "SeedOssForCausalLM": {},
    "VaultGemmaForCausalLM": {**MIXED, "attn_logit_softcapping": 3.0},
    "YoutuForCausalLM": {**LATENT, "v_head_dim": 8, "num_key_value_heads": 4},
}


def load(directory: Path, **options: Any) -> LoadedModel:
    return load_model(ModelFiles("tiny", directory, "safetensors"), dtype="float32", **options)


def assert_parity(tiny: TinyModel, loaded: LoadedModel) -> None:
    """Prefill in chunks beside decodes, 40 decodes, ragged: the logits and the greedy tokens of the library alone."""
    assert isinstance(loaded.model, TransformersModel)
    loaded.model.settle_context(64)
    prompts = [some_tokens(length, seed=length) for length in PROMPT_LENGTHS]
    sequences = decode_greedily(loaded.model, prompts, num_tokens=min(NUM_DECODES, 38), chunk_size=CHUNK_SIZE)
    for prompt, sequence in zip(prompts, sequences, strict=True):
        expected = tiny.logits(sequence.token_ids)[:-1]
        torch.testing.assert_close(torch.stack(sequence.logits), expected, atol=TOLERANCE, rtol=0)
        assert sequence.token_ids[len(prompt) :] == expected[len(prompt) - 1 :].argmax(dim=-1).tolist()


@pytest.mark.parametrize("name", FAMILIES)
def test_a_native_family_gives_the_logits_and_tokens_of_the_library_here_too(tmp_path: Path, name: str) -> None:
    family = FAMILIES[name]
    tiny = build_tiny_model(tmp_path, family.architecture, **family.changes)
    loaded = load(tmp_path, model_impl="transformers")
    assert_parity(tiny, loaded)
    native = load(tmp_path).model
    assert loaded.model.layer_specs == native.layer_specs


@pytest.mark.parametrize("name", OTHERS)
def test_another_decoder_gives_the_logits_and_tokens_of_the_library(tmp_path: Path, name: str) -> None:
    other = OTHERS[name]
    tiny = build_tiny_model(tmp_path, other.architecture, **other.changes)
    loaded = load(tmp_path)
    assert_parity(tiny, loaded)
    specs = loaded.model.layer_specs
    assert [spec.num_kv_heads for spec in specs] == [other.kv_heads] * 3
    assert tuple(spec.sliding_window for spec in specs) == other.windows


@pytest.mark.parametrize("architecture", MORE)
def test_one_more_decoder_gives_the_logits_and_tokens_of_the_library(tmp_path: Path, architecture: str) -> None:
    tiny = build_tiny_model(tmp_path, architecture, pad_token_id=0, **MORE[architecture])
    assert_parity(tiny, load(tmp_path))


def test_the_page_of_models_has_every_architecture_that_is_tested() -> None:
    page = (Path(__file__).parents[1] / "docs" / "models.md").read_text(encoding="utf-8")
    tested = {*ARCHITECTURES, *MORE, *(other.architecture for other in OTHERS.values())}
    assert sorted(tested) == sorted(
        set(re.findall(r"`(\w+(?:ForCausalLM|LMHeadModel|ForConditionalGeneration))`", page))
    )


def test_what_the_engine_reads_of_a_model(tmp_path: Path) -> None:
    build_tiny_model(tmp_path, "StableLmForCausalLM", pad_token_id=0, eos_token_id=[2, 5])
    config = load(tmp_path).config
    assert (config.architecture, config.vocab_size, config.max_position_embeddings) == ("StableLmForCausalLM", 97, 64)
    assert config.eos_token_ids == {2, 5}


def test_two_models_in_one_process_do_not_know_of_each_other(tmp_path: Path) -> None:
    tinies = [
        build_tiny_model(tmp_path / str(seed), "NemotronForCausalLM", seed=seed, num_hidden_layers=seed)
        for seed in (1, 2)
    ]
    models = [load(tiny.directory).model for tiny in tinies]
    for tiny, model in [*zip(tinies, models, strict=True), *zip(tinies, models, strict=True)]:
        sequence = decode_greedily(model, [some_tokens(5)], num_tokens=3, chunk_size=4)[0]
        expected = tiny.logits(sequence.token_ids)[:-1]
        torch.testing.assert_close(torch.stack(sequence.logits), expected, atol=TOLERANCE, rtol=0)


def test_dynamic_rope_caps_the_context_at_that_of_the_training(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    build_tiny_model(tmp_path, "LlamaForCausalLM", rope_parameters=rope, max_position_embeddings=48)
    config = load(tmp_path, model_impl="transformers").config
    assert config.max_position_embeddings == 48
    assert config.notes == ("RoPE dynamic follows the length of the text: the context is 48 tokens",)


@pytest.mark.parametrize("max_model_len", [24, 25])
def test_longrope_is_settled_by_the_longest_context_whatever_the_length_of_a_text(
    tmp_path: Path, max_model_len: int
) -> None:
    family = FAMILIES["Phi-3 with long factors"]
    tiny = build_tiny_model(tmp_path, family.architecture, **family.changes)
    model = load(tmp_path, model_impl="transformers").model
    model.settle_context(max_model_len)
    tokens = some_tokens(12)
    sequence = decode_greedily(model, [tokens], num_tokens=1, chunk_size=CHUNK_SIZE)[0]
    short = tiny.logits(tokens)  # for a text of up to 24 tokens the library takes the short factors
    difference = (torch.stack(sequence.logits) - short).abs().max()
    assert difference < TOLERANCE if max_model_len == 24 else difference > 20 * TOLERANCE


@pytest.mark.parametrize("name", OTHERS)
def test_in_bfloat16_the_logits_are_near_those_of_float32(tmp_path: Path, name: str) -> None:
    build_tiny_model(tmp_path, OTHERS[name].architecture, dtype=torch.bfloat16, **OTHERS[name].changes)
    files, tokens = ModelFiles("tiny", tmp_path, "safetensors"), torch.tensor(some_tokens(20))
    logits = {}
    for dtype in ("float32", "bfloat16"):
        loaded = load_model(files, dtype=dtype)
        backend = make_backend("contiguous", "contiguous", 32, loaded.dtype, torch.device("cpu"))
        backend.allocate(loaded.model.layer_specs, 1)
        starts, zero, context = (torch.tensor(row, dtype=torch.int32) for row in ([0, 20], [[0]], [20]))
        metadata = AttentionMetadata(starts, context, zero, torch.arange(20), 20, 20)
        with torch.inference_mode():
            hidden = loaded.model(tokens, torch.arange(20), backend.begin(metadata))
            logits[dtype] = loaded.model.logits(hidden)
        assert hidden.dtype == loaded.dtype
    # An expert may be chosen differently for a token, so the middle of all differences counts.
    assert (logits["bfloat16"] - logits["float32"]).abs().median() < 0.05 * logits["float32"].abs().median()


# ---- the whole engine ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def with_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """A StableLM with a tokenizer of single bytes."""
    directory = tmp_path_factory.mktemp("stablelm")
    tiny = build_tiny_model(
        directory, "StableLmForCausalLM", vocab_size=257, eos_token_id=256, pad_token_id=0, max_position_embeddings=128
    )
    write_byte_tokenizer(directory)
    return tiny


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 5, "block_size": 4},
        {"num_kv_blocks": 12, "block_size": 4, "max_model_len": 40},  # too few for all: preempts
        {"cache": "contiguous"},
        {"cache": "none"},
    ],
    ids=["continuous batching", "chunks of 5", "preemption", "contiguous", "no cache"],
)
def test_the_engine_gives_the_tokens_of_the_library(with_tokenizer: TinyModel, options: dict[str, Any]) -> None:
    llm = LLM(model=str(with_tokenizer.directory), dtype="float32", max_num_seqs=4, debug_checks=True, **options)
    prompts = [some_tokens(length, vocab_size=256, seed=length) for length in (3, 9, 17, 17)]
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    for prompt, output in zip(prompts, llm.generate(prompts, params), strict=True):
        text = [*prompt, *output.outputs[0].token_ids]
        assert text[len(prompt) :] == with_tokenizer.logits(text)[len(prompt) - 1 : -1].argmax(dim=-1).tolist()


def test_equal_beginnings_are_computed_once(with_tokenizer: TinyModel) -> None:
    llm = LLM(model=str(with_tokenizer.directory), dtype="float32", block_size=4)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    prompt = some_tokens(18, vocab_size=256)
    first, second = (llm.generate([prompt], params)[0] for _ in range(2))
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 16)
    assert first.outputs[0].token_ids == second.outputs[0].token_ids


# ---- who computes a model --------------------------------------------------------------------------------------------


def test_a_model_that_is_not_native_is_taken_to_the_library_with_a_log_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    build_tiny_model(tmp_path, "NemotronForCausalLM")
    with caplog.at_level(logging.INFO, logger="mini_vllm"):
        load(tmp_path)
    assert "tiny: ['NemotronForCausalLM'] is not native and runs through the transformers library" in caplog.messages


def test_native_means_native(tmp_path: Path) -> None:
    build_tiny_model(tmp_path, "NemotronForCausalLM")
    with pytest.raises(UnsupportedModelError, match=r"NemotronForCausalLM.*is not implemented"):
        load(tmp_path, model_impl="native")


def test_without_the_library_the_error_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build_tiny_model(tmp_path, "NemotronForCausalLM")
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "mini_vllm.model.hf_backend")
    with pytest.raises(UnsupportedModelError, match=r"NemotronForCausalLM.* is not native\..*mini-vllm\[hf\]"):
        load(tmp_path)


def test_an_unknown_implementation_is_refused(tmp_path: Path) -> None:
    build_tiny_model(tmp_path, "LlamaForCausalLM")
    with pytest.raises(InvalidConfigError, match="model_impl must be auto, native, transformers, or module:Class"):
        load(tmp_path, model_impl="hf")


def test_a_gguf_file_is_native_only(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfigError, match="GGUF"):
        load_model(ModelFiles("a", tmp_path / "a.gguf", "gguf"), model_impl="transformers")


def test_random_weights_are_drawn_without_a_checkpoint_and_are_the_same_each_time(tmp_path: Path) -> None:
    tiny = build_tiny_model(tmp_path, "NemotronForCausalLM")
    (tiny.directory / "model.safetensors").unlink()
    first, second = (
        decode_greedily(load(tmp_path, load_format="dummy").model, [[1, 2]], num_tokens=2, chunk_size=8)[0]
        for _ in range(2)
    )
    assert torch.equal(torch.stack(first.logits), torch.stack(second.logits))


# ---- what is refused -------------------------------------------------------------------------------------------------

MAMBA = {"state_size": 4, "head_dim": None, "num_key_value_heads": None, "num_attention_heads": None}
HYBRID = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
REFUSED = {
    "state space": ("MambaForCausalLM", MAMBA, "does not attend through the attention interface"),
    "recurrent": ("RwkvForCausalLM", {"attention_hidden_size": 32}, "does not attend through the attention interface"),
    "position biases": ("BloomForCausalLM", {"n_head": 4}, "does not attend through the attention interface"),
    "hybrid": ("Qwen3NextForCausalLM", HYBRID, "has 3 layers, of which 1 attend"),
    "attention sinks": ("GptOssForCausalLM", {"num_local_experts": 4, "pad_token_id": 0}, "for s_aux"),
    "two attentions a layer": ("DiffLlamaForCausalLM", {}, "calls an attention layer more than once"),
    "encoder": ("BertLMHeadModel", {}, "not the plain causal one"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_model_that_does_more_than_attend_is_refused(tmp_path: Path, kind: str) -> None:
    architecture, changes, message = REFUSED[kind]
    model_class = getattr(transformers, architecture)
    size = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64}
    values = {name: value for name, value in {**size, **heads, **changes}.items() if value is not None}
    model_class(model_class.config_class(**values)).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=message):
        load(tmp_path)


def change_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["T5ForConditionalGeneration"]}, "is no decoder of transformers"),
        ({"architectures": ["BertModel"]}, "is no decoder of transformers"),
        ({"architectures": None}, "None .* is no decoder of transformers"),
        (
            {"architectures": ["NobodysModel"], "model_type": "nobody", "auto_map": {"AutoConfig": "code.Config"}},
            "brings Python code of its own, which is never run",
        ),
        ({"architectures": ["OPTForCausalLM"]}, "does not go with model_type='nemotron'"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantised checkpoints are not read"),
    ],
    ids=["encoder-decoder", "encoder", "nothing", "remote code", "another type", "quantised"],
)
def test_a_configuration_that_cannot_run_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    build_tiny_model(tmp_path, "NemotronForCausalLM")
    change_config(tmp_path, **changes)
    (tmp_path / "code.py").write_text("raise SystemExit('code of the checkpoint was run')")
    with pytest.raises(UnsupportedModelError, match=message):
        load(tmp_path)


def test_a_missing_weight_is_an_error_and_never_drawn(tmp_path: Path) -> None:
    build_tiny_model(tmp_path, "NemotronForCausalLM")
    change_config(tmp_path, num_hidden_layers=4)
    with pytest.raises(ModelLoadError, match=r"lacks \d+ weights of NemotronForCausalLM.*model\.layers\.3\."):
        load(tmp_path)


def test_a_damaged_checkpoint_is_an_error(tmp_path: Path) -> None:
    build_tiny_model(tmp_path, "NemotronForCausalLM")
    (tmp_path / "model.safetensors").write_bytes(b"\0" * 100)
    with pytest.raises(ModelLoadError, match="transformers cannot load"):
        load(tmp_path)


class Shifted(nn.Module):
    """A token shift, as RWKV has one: a row takes from the row above it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.inner(hidden + hidden.roll(1, dims=-2))


def test_tokens_that_meet_outside_of_attention_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build_tiny_model(tmp_path, "NemotronForCausalLM")
    original = transformers.NemotronForCausalLM.from_pretrained

    def with_shift(*args: Any, **options: Any) -> Any:
        model, report = original(*args, **options)
        model.model.layers[1].mlp = Shifted(model.model.layers[1].mlp)
        return model, report

    monkeypatch.setattr(transformers.NemotronForCausalLM, "from_pretrained", with_shift)
    with pytest.raises(UnsupportedModelError, match="lets tokens meet outside of attention"):
        load(tmp_path)


def test_positions_that_the_model_counts_itself_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build_tiny_model(tmp_path, "NemotronForCausalLM")
    rotary = transformers.models.nemotron.modeling_nemotron.NemotronRotaryEmbedding
    original = rotary.forward
    monkeypatch.setattr(
        rotary, "forward", lambda self, x, position_ids: original(self, x, torch.arange(x.shape[1])[None])
    )
    with pytest.raises(UnsupportedModelError, match="does not take their places from position_ids"):
        load(tmp_path)


def test_the_list_of_the_library_s_decoders_has_those_of_this_file() -> None:
    assert {other.architecture for other in OTHERS.values()} <= set(transformers_architectures())
