"""The default model from its GGUF file: what is in it, and how long a start takes."""

from __future__ import annotations

import time

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType

from mini_vllm.model.layers import TiedHead
from mini_vllm.model.loader import load_model
from mini_vllm.store.gguf_file import read_gguf
from mini_vllm.store.model_store import ModelFiles


def test_it_loads_with_its_tied_head(smollm2_files: ModelFiles) -> None:
    loaded = load_model(smollm2_files, dtype="bfloat16")
    assert loaded.dtype is torch.bfloat16
    assert loaded.config.tie_word_embeddings
    assert isinstance(loaded.model.lm_head, TiedHead)
    assert not loaded.model.training
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())
    assert sum(parameter.numel() for parameter in loaded.model.parameters()) == 134_515_008
    stored = read_gguf(smollm2_files.path).tensors["blk.29.attn_v.weight"]
    blocks = np.fromfile(smollm2_files.path, np.uint8, stored.num_bytes, offset=stored.offset).reshape(192, -1)
    value = torch.from_numpy(gguf.dequantize(blocks, GGMLQuantizationType.Q4_1)).to(torch.bfloat16)
    assert torch.equal(loaded.model.layers[29].attention.qkv_proj.weight[-192:], value)


def test_its_second_load_takes_less_than_two_seconds(smollm2_files: ModelFiles) -> None:
    load_model(smollm2_files, dtype="bfloat16")
    start = time.perf_counter()
    load_model(smollm2_files, dtype="bfloat16")
    assert time.perf_counter() - start < 2  # a tenth of a second on a laptop
