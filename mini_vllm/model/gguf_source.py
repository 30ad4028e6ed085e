"""The weights of a GGUF file under their Hugging Face names, dequantised as they are read.

Where it stands: opened when a GGUF model is loaded for the first time; `converted_weights.py` writes what it reads into
a file that later starts map.

    token_embd.weight      model.embed_tokens.weight
    blk.7.attn_q.weight    model.layers.7.self_attn.q_proj.weight      rows put back in order (llama only)
    output.weight          lm_head.weight                              absent when the head is tied

What always holds: a value is what `gguf.dequantize` gives in float32, rounded once to the wanted dtype. At most a few
megabytes of float32 exist at a time, however large the tensor.

In vLLM: `gguf_quant_weights_iterator` in `vllm/model_executor/model_loader/weight_utils.py`; it keeps blocks quantised.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import numpy as np
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray
from torch import Tensor

from mini_vllm.errors import UnsupportedModelError
from mini_vllm.store.gguf_file import GGUFFile, GGUFTensor

_SLAB_ELEMENTS = 2**20  # dequantised at a time: 4 MB of float32

_MODEL_NAMES: Mapping[str, str] = MappingProxyType(
    {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
)
_LAYER_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
)


class GGUFSource:
    """The tensors of a GGUF file, as a `WeightSource`.

    Args:
        file: its head.
        reordered_heads: module name ("q_proj", "k_proj") -> number of heads, for the projections whose rows the
            converter has reordered; empty for families that it leaves alone.
    """

    def __init__(self, file: GGUFFile, reordered_heads: Mapping[str, int]) -> None:
        self._path = file.path
        self._tensors = {hf_name(name): tensor for name, tensor in file.tensors.items()}
        self._reordered_heads = reordered_heads
        self._data = np.memmap(file.path, mode="r")

    @property
    def path(self) -> Path:
        return self._path

    def names(self) -> frozenset[str]:
        return frozenset(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        tensor = self._dequantized(self._tensors[name], dtype)
        heads = self._reordered_heads.get(name.split(".")[-2])
        return tensor if heads is None else restore_row_order(tensor, heads)

    def close(self) -> None:
        del self._data  # the file stays mapped as long as anything refers to it

    def _dequantized(self, tensor: GGUFTensor, dtype: torch.dtype) -> Tensor:
        width = tensor.shape[-1]
        num_rows = math.prod(tensor.shape[:-1])
        stored = self._data[tensor.offset : tensor.offset + tensor.num_bytes].reshape(num_rows, -1)
        values = torch.empty(num_rows, width, dtype=dtype)
        step = max(1, _SLAB_ELEMENTS // width)
        for start in range(0, num_rows, step):
            slab = np.array(stored[start : start + step])  # a copy in memory: aligned, and writable as torch wants it
            values[start : start + step] = torch.from_numpy(self._to_float32(slab, tensor))
        return values.view(tensor.shape)

    def _to_float32(self, blocks: NDArray[np.uint8], tensor: GGUFTensor) -> NDArray[np.float32]:
        try:
            floats: NDArray[np.float32] = dequantize(blocks, GGMLQuantizationType[tensor.type_name])
        except NotImplementedError as error:
            raise UnsupportedModelError(
                f"Tensor {tensor.name} in {self._path} is stored as {tensor.type_name}, which the gguf package cannot "
                "dequantise. Get the model in another type, such as Q8_0 or Q4_K_M."
            ) from error
        return floats


def hf_name(name: str) -> str:
    """Hugging Face's name of a GGUF tensor; the name itself if it has none."""
    parts = name.split(".")
    if parts[0] == "blk" and len(parts) == 4 and parts[2] in _LAYER_NAMES:
        return f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.{parts[3]}"
    if len(parts) == 2 and parts[0] in _MODEL_NAMES:
        return f"{_MODEL_NAMES[parts[0]]}.{parts[1]}"
    return name


def restore_row_order(tensor: Tensor, num_heads: int) -> Tensor:
    """Undo the order in which GGUF keeps the query and key rows of llama models.

    Rotary embedding turns dimensions in pairs. GGUF puts the two of a pair side by side, Hugging Face half a head apart
    (see `rotary.py`). One head of 8 rows, named by their place in Hugging Face's order::

        GGUF           0 4 1 5 2 6 3 7
        Hugging Face   0 1 2 3 4 5 6 7

    Args:
        tensor: a weight [num_heads * head_dim, hidden] or a bias [num_heads * head_dim].
        num_heads: heads of this projection.
    """
    pairs = tensor.view(num_heads, tensor.shape[0] // num_heads // 2, 2, *tensor.shape[1:])
    return pairs.transpose(1, 2).reshape(tensor.shape)
