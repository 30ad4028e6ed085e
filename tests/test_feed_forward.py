"""The feed-forward part of a layer: experts work on groups of tokens, and a token's neighbours change nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import tiny_model_config
from torch import Tensor

from mini_vllm.model.feed_forward import GatedMLP, MixtureOfExperts, build_feed_forward

CPU = torch.device("cpu")
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}


def build(architecture: str, layer: int = 0, **changes: Any) -> torch.nn.Module:
    network = build_feed_forward(tiny_model_config(architecture, **changes), layer, dtype=torch.float32, device=CPU)
    generator = torch.Generator().manual_seed(0)
    for parameter in network.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return network


def some_hidden(count: int) -> Tensor:
    return torch.randn(count, 32, generator=torch.Generator().manual_seed(1))


def written_out(moe: MixtureOfExperts, token: Tensor) -> Tensor:
    """The definition, for one token [hidden]."""
    probabilities = moe.router(token).softmax(-1)
    best = probabilities.argsort(descending=True)[: moe.experts_per_token]
    total = probabilities[best].sum() if moe.normalize else 1.0
    return sum(probabilities[i] / total * moe.experts[int(i)](token) for i in best)


@pytest.mark.parametrize("normalize", [True, False])
def test_each_token_gets_the_weighed_sum_of_its_best_experts(normalize: bool) -> None:
    moe = build("Qwen3MoeForCausalLM", **{**EXPERTS, "norm_topk_prob": normalize})
    hidden = some_hidden(20)
    expected = torch.stack([written_out(moe, token) for token in hidden])
    torch.testing.assert_close(moe(hidden), expected, atol=1e-5, rtol=0)


def test_an_expert_is_called_once_a_step_with_all_of_its_tokens_and_not_at_all_without_any() -> None:
    moe = build("Qwen3MoeForCausalLM", **EXPERTS)
    calls: list[tuple[int, int]] = []
    for number, expert in enumerate(moe.experts):
        expert.register_forward_hook(lambda _, args, __, number=number: calls.append((number, len(args[0]))))
    moe(some_hidden(500))
    assert [number for number, _ in calls] == sorted({number for number, _ in calls})
    assert sum(count for _, count in calls) == 500 * 2
    calls.clear()
    moe(some_hidden(1))
    assert [count for _, count in calls] == [1, 1]


def test_a_token_gets_the_same_alone_and_among_others() -> None:
    moe = build("Qwen2MoeForCausalLM", **EXPERTS, shared_expert_intermediate_size=24)
    hidden = some_hidden(50)
    together = moe(hidden)
    alone = torch.cat([moe(token[None]) for token in hidden])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=0)


def test_the_shared_expert_is_added_for_every_token_behind_its_gate() -> None:
    moe = build("Qwen2MoeForCausalLM", **EXPERTS, shared_expert_intermediate_size=24)
    hidden = some_hidden(5)
    shared = torch.sigmoid(moe.shared_expert.gate(hidden)) * moe.shared_expert.mlp(hidden)
    expected = torch.stack([written_out(moe, token) for token in hidden]) + shared
    torch.testing.assert_close(moe(hidden), expected, atol=1e-5, rtol=0)


def test_which_layers_have_experts_and_which_network_the_others_have() -> None:
    values = {**EXPERTS, "num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
    kinds = [type(build("Qwen3MoeForCausalLM", layer, **values)) for layer in range(4)]
    assert kinds == [GatedMLP, MixtureOfExperts, GatedMLP, GatedMLP]


def test_no_tokens_give_no_output() -> None:
    assert build("Qwen3MoeForCausalLM", **EXPERTS)(some_hidden(0)).shape == (0, 32)
