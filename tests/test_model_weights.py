"""The weight map and the parameters that it fills."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from tiny_models import our_logits, some_tokens, tiny_model_config

from mini_vllm.model.architectures import WeightSpec, tied_head, weight_map
from mini_vllm.model.transformer import Transformer, init_random_weights

# One of each way to wire a layer, to norm, and to keep weights.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {},
    "Qwen3ForCausalLM": {},
    "Gemma2ForCausalLM": {},
    "Qwen2MoeForCausalLM": {"num_experts": 4, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8},
    "Olmo2ForCausalLM": {},
    "CohereForCausalLM": {"use_qk_norm": True},
    "GPT2LMHeadModel": {"num_key_value_heads": 4},
    "GPTNeoXForCausalLM": {"num_key_value_heads": 4},
}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("tied", [True, False])
def test_the_map_fills_every_parameter_once_with_the_right_shape(architecture: str, tied: bool) -> None:
    config = tiny_model_config(architecture, **ARCHITECTURES[architecture], tie_word_embeddings=tied)
    parameters = Transformer(config, device="meta").state_dict()
    specs = weight_map(config)
    assert sorted(spec.parameter for spec in specs) == sorted(parameters)
    for spec in specs:
        sources = [torch.empty(shape) for shape in spec.shapes]
        if spec.rearrange is not None:
            sources = [spec.rearrange(source) for source in sources]
        assert torch.cat(sources).shape == parameters[spec.parameter].shape


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


def test_random_norms_multiply_by_one_also_where_weights_count_from_one() -> None:
    for architecture, expected in [("LlamaForCausalLM", 1.0), ("GemmaForCausalLM", 0.0)]:
        model = Transformer(tiny_model_config(architecture))
        init_random_weights(model)
        assert model.norm.weight.tolist() == [expected] * 32


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


def test_rows_that_go_head_by_head_are_sorted_into_queries_keys_and_values() -> None:
    config = tiny_model_config("GPTNeoXForCausalLM", num_attention_heads=2, num_key_value_heads=2, rotary_pct=1.0)
    config = dataclasses.replace(config, head_dim=2)
    spec = next(spec for spec in weight_map(config) if spec.parameter == "layers.0.attention.qkv_proj.bias")
    assert spec.rearrange is not None
    # 10 * head + row of the head's own six: two of q, two of k, two of v
    assert spec.rearrange(torch.tensor([0, 1, 2, 3, 4, 5, 10, 11, 12, 13, 14, 15])).tolist() == [
        *(0, 1, 10, 11),
        *(2, 3, 12, 13),
        *(4, 5, 14, 15),
    ]


def test_matrices_kept_in_by_out_are_turned() -> None:
    spec = next(
        spec
        for spec in weight_map(tiny_model_config("GPT2LMHeadModel"))
        if spec.parameter == "layers.0.mlp.up_proj.weight"
    )
    assert spec.shapes == ((32, 128),)
    assert spec.rearrange is not None
    turned = spec.rearrange(torch.tensor([[1, 2, 3], [4, 5, 6]]))
    assert turned.tolist() == [[1, 4], [2, 5], [3, 6]]
    assert turned.is_contiguous()
