"""Whether a request's bits depend on what else runs, tried out on this processor.

Where it stands: `mini-vllm doctor` asks, since the linear layers of some processors come from a library whose ways are
not this project's. A small random model computes a text as one prefill, and token by token beside others.

What always holds: it is a trial, not a proof. The tests hold it for every kernel and every mode.

In vLLM: the batch-invariant mode (`VLLM_BATCH_INVARIANT`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from mini_vllm.model.attention import AttentionBackend, AttentionMetadata
from mini_vllm.model.attention_backends import make_backend
from mini_vllm.model.config import ModelConfig, RopeConfig
from mini_vllm.model.cpu_layers import use_cpu_kernels
from mini_vllm.model.transformer import Transformer, init_random_weights

_LENGTH, _OTHERS, _BLOCK_SIZE = 80, 40, 16
_CONFIG = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=512,
    hidden_size=192,
    intermediate_size=320,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_dim=32,
    max_position_embeddings=_LENGTH,
    norm_eps=1e-5,
    ropes=(RopeConfig(), RopeConfig()),
    tie_word_embeddings=False,
    qkv_bias=False,
    output_bias=False,
    mlp_bias=False,
    qk_norm=None,
    sliding_windows=(None, None),
)


@torch.inference_mode()
def is_exact(dtype: torch.dtype) -> bool:
    """Whether logits are equal to the bit in prefill and in decodes among others. The kernels must be loaded.

    Args:
        dtype: float32 or bfloat16.
    """
    model = Transformer(_CONFIG, dtype=dtype).eval()
    init_random_weights(model)
    use_cpu_kernels(model)
    text = torch.arange(7, 7 + _LENGTH)
    backend = make_backend("cpu", "paged", _BLOCK_SIZE, dtype, torch.device("cpu"))
    blocks = -(-_LENGTH // _BLOCK_SIZE)
    backend.allocate(model.layer_specs, (1 + _OTHERS) * blocks)
    whole = _step(model, backend, text[None], 0)[0]
    texts = torch.stack([text, *((text * factor) % 512 for factor in range(2, 2 + _OTHERS))])
    for position in range(_LENGTH):
        rows = _step(model, backend, texts[:, position : position + 1], position)
        if not torch.equal(rows[0, 0], whole[position]):
            return False
    return True


def _step(model: Transformer, backend: AttentionBackend, tokens: Tensor, start: int) -> Tensor:
    """Logits [B, Q, vocabulary] of tokens [B, Q] that stand from `start` on, each text in blocks of its own."""
    batch, count = tokens.shape
    blocks = -(-_LENGTH // _BLOCK_SIZE)
    tables = torch.arange(batch * blocks, dtype=torch.int32).view(batch, blocks)
    positions = torch.arange(start, start + count)
    slots = tables.long()[:, positions // _BLOCK_SIZE] * _BLOCK_SIZE + positions % _BLOCK_SIZE
    metadata = AttentionMetadata(
        query_starts=torch.arange(batch + 1, dtype=torch.int32) * count,
        context_lens=torch.full((batch,), start + count, dtype=torch.int32),
        block_tables=tables,
        slot_mapping=slots.flatten(),
        max_query_len=count,
        max_context_len=start + count,
    )
    hidden = model(tokens.flatten(), positions.repeat(batch), backend.begin(metadata))
    return model.logits(hidden).view(batch, count, -1)
