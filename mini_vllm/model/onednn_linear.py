"""Linear layers through oneDNN, for processors with matrix units (AMX), which the kernels of this project do not drive.

Where it stands: beside `cpu_layers.py`, which takes these for bfloat16 weights where `prefers_onednn` says so. The
weights are packed ahead, once; PyTorch's plain `linear` would do it anew at each call.

What always holds: a row's bits do not depend on the batch. For that a single row is computed as two, since oneDNN has
another way for one row, and the head, whose many outputs it divides otherwise from 33 rows on, sees at most 32 at once.

In vLLM: `vllm/model_executor/layers/utils.py` (`dispatch_cpu_unquantized_gemm`).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mini_vllm.model.layers import Linear

HEAD_ROWS = 32
_BATCH_HINT = 64  # rows for which oneDNN chooses the layout; any number of rows can be multiplied afterwards


def prefers_onednn() -> bool:
    """Whether this processor has matrix units for bfloat16, and this PyTorch the operators to use them.

    The operators are no public interface of PyTorch, so they are looked for and not relied upon.
    """
    if not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return False
    is_supported = getattr(torch.cpu, "_is_amx_tile_supported", None)
    return bool(is_supported and is_supported())


class OneDnnLinear(nn.Module):
    """Twin of `Linear`: x [..., in_features] -> [..., out_features], bfloat16."""

    def __init__(self, twin: Linear) -> None:
        super().__init__()
        self.packed = torch.ops.mkldnn._reorder_linear_weight(twin.weight.contiguous(), _BATCH_HINT)
        self.bias = twin.bias
        self.out_features = twin.weight.shape[0]

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        return _linear(rows, self.packed, self.bias).view(*x.shape[:-1], self.out_features)


class OneDnnHead(nn.Module):
    """Twin of the output layer: [R, hidden_size] -> [R, vocab_size], bfloat16."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), HEAD_ROWS)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([_linear(rows, self.packed, None) for rows in torch.split(x, HEAD_ROWS)])


def _linear(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    rows = x.shape[0]
    if rows == 1:
        x = x.expand(2, -1).contiguous()
    y: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return y[:rows]
