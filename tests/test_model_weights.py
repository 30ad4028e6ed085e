"""The weight map and the parameters that it fills."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from tiny_models import our_logits, some_tokens, tiny_model_config

from mini_vllm.model.architectures import WeightSpec, tied_head, weight_map
from mini_vllm.model.transformer import Transformer, init_random_weights

ARCHITECTURES = ["LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("tied", [True, False])
def test_the_map_fills_every_parameter_once_with_the_right_shape(architecture: str, tied: bool) -> None:
    config = tiny_model_config(architecture, tie_word_embeddings=tied)
    parameters = Transformer(config, device="meta").state_dict()
    specs = weight_map(config)
    assert sorted(spec.parameter for spec in specs) == sorted(parameters)
    for spec in specs:
        rows = sum(shape[0] for shape in spec.shapes)
        assert (rows, *spec.shapes[0][1:]) == tuple(parameters[spec.parameter].shape)


def test_query_key_and_value_are_joined_in_this_order() -> None:
    specs = {spec.parameter: spec for spec in weight_map(tiny_model_config("Qwen2ForCausalLM"))}
    names = [f"model.layers.2.self_attn.{which}_proj" for which in "qkv"]
    assert specs["layers.2.attention.qkv_proj.weight"] == WeightSpec(
        "layers.2.attention.qkv_proj.weight",
        tuple(f"{name}.weight" for name in names),
        ((32, 32), (16, 32), (16, 32)),
    )
    assert specs["layers.2.attention.qkv_proj.bias"].sources == tuple(f"{name}.bias" for name in names)
    assert specs["layers.2.attention.qkv_proj.bias"].shapes == ((32,), (16,), (16,))


def test_a_tied_head_is_no_weight_of_its_own_but_the_map_says_what_it_would_be() -> None:
    tied = tiny_model_config(tie_word_embeddings=True)
    assert all("lm_head" not in spec.parameter for spec in weight_map(tied))
    assert tied_head(tied) == WeightSpec("lm_head.weight", ("lm_head.weight",), ((97, 32),))
    assert tied_head(dataclasses.replace(tied, tie_word_embeddings=False)) is None


def test_a_tied_head_computes_what_an_untied_copy_of_the_embedding_does() -> None:
    tied = Transformer(tiny_model_config(tie_word_embeddings=True))
    untied = Transformer(tiny_model_config(tie_word_embeddings=False))
    init_random_weights(tied)
    untied.load_state_dict({**tied.state_dict(), "lm_head.weight": tied.embed_tokens.weight})
    assert torch.equal(our_logits(tied, some_tokens(5)), our_logits(untied, some_tokens(5)))


def test_random_weights_depend_on_the_seed_only() -> None:
    models = [Transformer(tiny_model_config("Qwen2ForCausalLM")) for _ in range(3)]
    for model, seed in zip(models, [1, 1, 2], strict=True):
        init_random_weights(model, seed)
    first, same, other = (our_logits(model, some_tokens(8)) for model in models)
    assert torch.equal(first, same)
    assert not torch.equal(first, other)
    assert first.isfinite().all()
    assert first.std() > 0


def test_random_weights_in_bfloat16_are_the_rounded_float32_ones() -> None:
    exact = Transformer(tiny_model_config())
    rounded = Transformer(tiny_model_config(), dtype=torch.bfloat16)
    init_random_weights(exact, 3)
    init_random_weights(rounded, 3)
    for name, parameter in rounded.state_dict().items():
        assert torch.equal(parameter, exact.state_dict()[name].to(torch.bfloat16))


def test_no_parameter_wants_a_gradient() -> None:
    assert not any(parameter.requires_grad for parameter in Transformer(tiny_model_config()).parameters())


def test_each_layer_tells_the_attention_backend_its_shape_scale_and_window() -> None:
    config = tiny_model_config("Qwen2ForCausalLM", use_sliding_window=True, sliding_window=9, max_window_layers=2)
    specs = Transformer(config, device="meta").layer_specs
    assert [spec.sliding_window for spec in specs] == [None, None, 9]
    assert {(spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.scale) for spec in specs} == {(4, 2, 8, 8**-0.5)}
