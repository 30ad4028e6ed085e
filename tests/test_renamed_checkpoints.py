"""Checkpoints in other layouts than the usual one: other prefixes, shards, tensors that are computed anyway."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny_models import TinyModel, build_tiny_model, our_logits, some_tokens
from torch import Tensor

from mini_vllm.errors import ModelLoadError
from mini_vllm.model.loader import load_model
from mini_vllm.store.model_store import ModelFiles

TOLERANCE = 5e-5


def load(directory: Path) -> torch.nn.Module:
    return load_model(ModelFiles("tiny", directory, "safetensors"), dtype="float32").model


def rename(tiny: TinyModel, change: Callable[[str], str], extra: dict[str, Tensor] | None = None) -> None:
    """Write the checkpoint anew with other names."""
    path = tiny.directory / "model.safetensors"
    tensors = {change(name): tensor.clone() for name, tensor in load_file(path).items()}
    save_file({**tensors, **(extra or {})}, path)


def assert_same_logits(tiny: TinyModel) -> None:
    tokens = some_tokens(20)
    torch.testing.assert_close(our_logits(load(tiny.directory), tokens), tiny.logits(tokens), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(
    "change",
    [
        lambda name: name.removeprefix("model."),
        lambda name: f"language_model.{name}",
        lambda name: name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name,
    ],
    ids=["without model.", "language_model. before all", "model.language_model."],
)
@pytest.mark.parametrize("tied", [True, False])
def test_another_prefix_is_found_by_the_embedding(tmp_path: Path, change: Callable[[str], str], tied: bool) -> None:
    tiny = build_tiny_model(tmp_path, "Qwen3ForCausalLM", tie_word_embeddings=tied)
    rename(tiny, change)
    assert_same_logits(tiny)


def test_gpt2_as_its_makers_published_it_has_no_prefix_and_brings_its_masks(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tiny = build_tiny_model(tmp_path, "GPT2LMHeadModel", num_key_value_heads=4)
    masks = {f"h.{layer}.attn.bias": torch.ones(1, 1, 64, 64).tril() for layer in range(3)}
    rename(tiny, lambda name: name.removeprefix("transformer."), masks)
    with caplog.at_level(logging.WARNING):
        assert_same_logits(tiny)
    assert not caplog.records


def test_two_tensors_that_could_be_the_embedding_are_not_guessed_between(tmp_path: Path) -> None:
    tiny = build_tiny_model(tmp_path, "LlamaForCausalLM")
    rename(tiny, lambda name: f"first.{name}", {"second.model.embed_tokens.weight": torch.zeros(97, 32)})
    with pytest.raises(ModelLoadError, match=r"lacks .* model\.embed_tokens\.weight"):
        load(tiny.directory)


@pytest.mark.parametrize("architecture", ["Phi3ForCausalLM", "MixtralForCausalLM", "GPTNeoXForCausalLM"])
def test_shards_of_joined_and_of_many_tensors(tmp_path: Path, architecture: str) -> None:
    changes = {"pad_token_id": 0} if architecture == "Phi3ForCausalLM" else {}
    if architecture == "GPTNeoXForCausalLM":
        changes = {"num_key_value_heads": 4}
    tiny = build_tiny_model(tmp_path / "whole", architecture, **changes)
    tiny.reference.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    assert_same_logits(TinyModel(tmp_path / "shards", tiny.reference))


def test_the_text_model_of_a_gemma3_that_can_see(tmp_path: Path) -> None:
    text = {
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 7,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "sliding_window": 6,
        "query_pre_attn_scalar": 5,
    }
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = {**vision, "image_size": 28, "patch_size": 14}
    tokens = {"image_token_index": 96, "boi_token_index": 95, "eoi_token_index": 94, "eos_token_id": [1, 7]}
    config = transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, **tokens)
    reference = transformers.Gemma3ForConditionalGeneration(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    reference.save_pretrained(tmp_path)
    loaded = load_model(ModelFiles("tiny", tmp_path, "safetensors"), dtype="float32")
    ids = some_tokens(20, vocab_size=90)
    with torch.no_grad():
        expected = reference(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(our_logits(loaded.model, ids), expected, atol=TOLERANCE, rtol=0)
    assert loaded.config.eos_token_ids == {1, 7}
    assert "text only" in loaded.config.notes[0]
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["Gemma3ForConditionalGeneration"]
