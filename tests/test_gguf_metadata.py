"""GGUF metadata as a Hugging Face configuration: every key counts, and what is not implemented is refused."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFWriter, RopeScalingType
from gguf_helpers import write_gguf
from tiny_models import TinyModel, build_tiny_model
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from mini_vllm.errors import ModelLoadError, UnsupportedModelError
from mini_vllm.model.config import ModelConfig, RopeConfig
from mini_vllm.model.gguf_rope import llama3_factors
from mini_vllm.model.loader import load_model
from mini_vllm.model.model_files import load_generation_config, load_model_config

Change = Callable[[GGUFWriter], None]


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINI_VLLM_HOME", str(tmp_path / "home"))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return build_tiny_model(tmp_path_factory.mktemp("llama"), "LlamaForCausalLM")


@pytest.fixture
def read(tiny: TinyModel, tmp_path: Path) -> Callable[..., ModelConfig]:
    """The configuration of the tiny Llama as GGUF, with metadata changed."""

    def read(change: Change | None = None, architecture: str = "llama") -> ModelConfig:
        return load_model_config(write_gguf(tiny.directory, tmp_path / "a.gguf", architecture, change=change))

    return read


def _set(key: str, value: Any) -> Change:
    """Add or overwrite one key, of the type that its value suggests."""

    def change(writer: GGUFWriter) -> None:
        for kind, add in (
            (bool, writer.add_bool),
            (int, writer.add_uint32),
            (float, writer.add_float32),
            (str, writer.add_string),
            (list, writer.add_array),
        ):
            if isinstance(value, kind):
                writer.kv_data[0].pop(key, None)
                add(key, value)
                return

    return change


def _drop(key: str) -> Change:
    def change(writer: GGUFWriter) -> None:
        del writer.kv_data[0][key]

    return change


def _all(*changes: Change) -> Change:
    def change(writer: GGUFWriter) -> None:
        for one in changes:
            one(writer)

    return change


def test_every_number_reaches_the_configuration(read: Callable[..., ModelConfig]) -> None:
    config = read()
    assert (config.architecture, config.vocab_size, config.hidden_size) == ("LlamaForCausalLM", 97, 32)
    assert (config.intermediate_size, config.num_layers) == (48, 3)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (4, 2, 8)
    assert (config.max_position_embeddings, config.rope) == (64, RopeConfig(theta=10_000.0))
    assert (config.bos_token_id, config.eos_token_ids) == (1, frozenset({2}))
    assert config.norm_eps == pytest.approx(1e-6)


def test_ends_of_turn_and_message_are_ends_of_sequence_too(read: Callable[..., ModelConfig]) -> None:
    change = _all(_set("tokenizer.ggml.eot_token_id", 5), _set("tokenizer.ggml.eom_token_id", 6))
    assert read(change).eos_token_ids == frozenset({2, 5, 6})


def test_what_llama_cpp_defines_for_absent_keys_holds(read: Callable[..., ModelConfig]) -> None:
    keys = ("llama.attention.key_length", "llama.attention.value_length", "llama.rope.freq_base")
    config = read(_all(*map(_drop, keys)))
    assert (config.head_dim, config.rope.theta) == (8, 10_000.0)
    assert read(_drop("llama.attention.head_count_kv")).num_kv_heads == 4


@pytest.mark.parametrize(
    "key",
    [
        "block_count",
        "embedding_length",
        "feed_forward_length",
        "context_length",
        "attention.head_count",
        "attention.layer_norm_rms_epsilon",
    ],
)
def test_a_missing_key_is_named(read: Callable[..., ModelConfig], key: str) -> None:
    with pytest.raises(ModelLoadError, match=rf"llama\.{key} in .*a\.gguf"):
        read(_drop(f"llama.{key}"))


@pytest.mark.parametrize("value", ["4", 4.5, True])
def test_a_value_of_the_wrong_type_is_named(read: Callable[..., ModelConfig], value: Any) -> None:
    with pytest.raises(ModelLoadError, match=rf"llama\.block_count in .*a\.gguf must be a whole number, not {value!r}"):
        read(_set("llama.block_count", value))


def test_an_architecture_that_is_not_implemented_is_refused(read: Callable[..., ModelConfig]) -> None:
    with pytest.raises(UnsupportedModelError, match=r"general\.architecture='gemma2' .* llama, qwen2, qwen3"):
        read(_set("general.architecture", "gemma2"))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("expert_count", 8),
        ("attention.causal", False),
        ("logit_scale", 0.5),
        ("residual_scale", 1.5),
        ("attn_logit_softcapping", 50.0),
        ("attention.clamp_kqv", 8.0),
        ("something_new", 1),
    ],
)
def test_a_key_that_may_change_the_numbers_is_refused(read: Callable[..., ModelConfig], key: str, value: Any) -> None:
    with pytest.raises(UnsupportedModelError, match=re.escape(f"llama.{key}={value!r}")):
        read(_set(f"llama.{key}", value))


@pytest.mark.parametrize(("key", "value"), [("expert_count", 0), ("attention.causal", True), ("vocab_size", 97)])
def test_a_key_that_changes_nothing_is_taken(read: Callable[..., ModelConfig], key: str, value: Any) -> None:
    assert read(_set(f"llama.{key}", value)) == read()


def test_heads_may_be_listed_by_layer_when_all_layers_agree(read: Callable[..., ModelConfig]) -> None:
    key = "llama.attention.head_count_kv"
    assert read(_set(key, [2, 2, 2])).num_kv_heads == 2
    with pytest.raises(UnsupportedModelError, match=f"{key} in .* differs between layers"):
        read(_set(key, [2, 1, 2]))


def test_a_llama_with_a_sliding_window_is_a_mistral(read: Callable[..., ModelConfig]) -> None:
    config = read(_set("llama.attention.sliding_window", 16))
    assert (config.architecture, config.sliding_windows) == ("MistralForCausalLM", (16, 16, 16))


def test_a_sliding_window_of_a_qwen_is_refused(tmp_path: Path) -> None:
    qwen = build_tiny_model(tmp_path / "hf", "Qwen2ForCausalLM")
    change = _set("qwen2.attention.sliding_window", 16)
    with pytest.raises(UnsupportedModelError, match=r"qwen2\.attention\.sliding_window=16"):
        load_model_config(write_gguf(qwen.directory, tmp_path / "a.gguf", "qwen2", change=change))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("attention.value_length", 16, "Keys of 8 and values of 16 dimensions"),
        ("rope.dimension_count", 4, "turns 4 of 8 dimensions"),
    ],
)
def test_other_widths_are_refused(read: Callable[..., ModelConfig], key: str, value: int, message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        read(_set(f"llama.{key}", value))


# -- Rotary embedding --------------------------------------------------------------------------------------------------


def test_theta_is_read(read: Callable[..., ModelConfig]) -> None:
    assert read(_set("llama.rope.freq_base", 500_000.0)).rope.theta == 500_000.0


def test_linear_scaling_is_read_in_both_spellings(read: Callable[..., ModelConfig]) -> None:
    def new(writer: GGUFWriter) -> None:
        writer.add_rope_scaling_type(RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(4.0)

    for change in (new, _set("llama.rope.scale_linear", 4.0)):
        config = read(change)
        assert (config.rope.rope_type, config.rope.factor) == ("linear", 4.0)
        assert config.max_position_embeddings == 256


def test_yarn_is_read(read: Callable[..., ModelConfig]) -> None:
    def yarn(writer: GGUFWriter) -> None:
        writer.add_rope_scaling_type(RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(32)
        writer.add_rope_scaling_yarn_beta_fast(16.0)
        writer.add_rope_scaling_finetuned(True)

    rope = read(yarn).rope
    assert (rope.rope_type, rope.factor, rope.original_max_position) == ("yarn", 4.0, 32)
    assert (rope.beta_fast, rope.beta_slow) == (16.0, 1.0)
    assert rope.attention_factor == pytest.approx(0.1 * math.log(4) + 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_set("llama.rope.scaling.type", "longrope"), "llama.rope.scaling.type='longrope'"),
        (_set("llama.rope.scaling.attn_factor", 0.5), "llama.rope.scaling.attn_factor=0.5"),
        (_set("llama.rope.scaling.yarn_log_multiplier", 0.5), "llama.rope.scaling.yarn_log_multiplier=0.5"),
    ],
)
def test_other_scaling_is_refused(read: Callable[..., ModelConfig], change: Change, message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=re.escape(message)):
        read(change)


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def _oracle_factors(head_dim: int) -> np.ndarray[Any, Any]:
    """Plain frequencies over those of transformers."""
    config = LlamaConfig(head_dim=head_dim, rope_parameters=LLAMA3)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 500_000.0 ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    return (plain / scaled.double()).float().numpy()


@pytest.mark.parametrize("head_dim", [64, 128])
def test_llama3_factors_equal_those_of_transformers(head_dim: int) -> None:
    factors = _oracle_factors(head_dim)
    assert llama3_factors(500_000.0, head_dim, 32.0) == pytest.approx(factors.tolist(), rel=1e-5)
    assert sum(1.001 < factor < 31.999 for factor in factors) >= 3  # some are blended


def _llama3(factors: np.ndarray[Any, Any]) -> Change:
    def change(writer: GGUFWriter) -> None:
        writer.add_tensor("rope_freqs.weight", factors)

    return _all(_set("llama.rope.freq_base", 500_000.0), change)


def test_the_tensor_of_llama3_becomes_its_scaling_and_no_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tiny = build_tiny_model(tmp_path / "hf", "LlamaForCausalLM", head_dim=64, rope_parameters=LLAMA3)
    change = _llama3(_oracle_factors(64))
    files = write_gguf(tiny.directory, tmp_path / "a.gguf", "llama", change=change)
    loaded = load_model(files, dtype="float32")
    assert loaded.config.rope == RopeConfig("llama3", 500_000.0, 32.0, 8192, low_freq_factor=1, high_freq_factor=4)
    assert not [record for record in caplog.records if record.name.startswith("mini_vllm")]


def test_factors_of_one_are_no_scaling(read: Callable[..., ModelConfig]) -> None:
    assert read(_llama3(np.ones(4, dtype=np.float32))).rope == RopeConfig(theta=500_000.0)


@pytest.mark.parametrize("factors", [[1, 1, 2, 8], [1, 1, 1, 1, 8], [float("nan")] * 4])
def test_other_factors_are_refused(read: Callable[..., ModelConfig], factors: list[float]) -> None:
    with pytest.raises(UnsupportedModelError, match=r"rope_freqs\.weight in .*a\.gguf is not that of Llama 3"):
        read(_llama3(np.array(factors, dtype=np.float32)))


# -- Sampling ----------------------------------------------------------------------------------------------------------


def test_sampling_keys_are_generation_defaults(tiny: TinyModel, tmp_path: Path) -> None:
    change = _all(
        _set("general.sampling.temp", 0.5),
        _set("general.sampling.top_k", 20),
        _set("general.sampling.penalty_repeat", 1.25),
        _set("tokenizer.ggml.eot_token_id", 9),
    )
    found = load_generation_config(write_gguf(tiny.directory, tmp_path / "a.gguf", "llama", change=change))
    assert found.sampling_defaults == {"temperature": 0.5, "top_k": 20, "repetition_penalty": 1.25}
    assert found.eos_token_ids == frozenset({2, 9})


def test_most_files_advise_nothing(tiny: TinyModel, tmp_path: Path) -> None:
    found = load_generation_config(write_gguf(tiny.directory, tmp_path / "a.gguf", "llama"))
    assert found.sampling_defaults == {}


def test_reading_configurations_needs_no_torch(tiny: TinyModel, tmp_path: Path) -> None:
    files = write_gguf(tiny.directory, tmp_path / "a.gguf", "llama")
    code = (
        "import sys; from pathlib import Path; from mini_vllm.store.model_store import ModelFiles;"
        "from mini_vllm.model.model_files import load_generation_config, load_model_config;"
        f"files = ModelFiles('a', Path({str(files.path)!r}), 'gguf');"
        "load_model_config(files), load_generation_config(files); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
