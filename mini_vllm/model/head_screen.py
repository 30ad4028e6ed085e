"""A copy of the head's weights in bytes, by which the greatest logit is found without computing most of the others.

Where it stands: `PackedHead` (cpu_layers.py) makes one of its weight after loading and asks it where a step's draws are
all greedy. How the greatest one is found is told in `kernels/cpu/csrc/screen.h`; here is what is prepared for it.

    weight [V, H] -> turned by a rotation -> codes from -127 to 127, and what a code is worth: a scale for each row

What always holds: the rotation moves no length and no product, so `turned(w) . turned(x) = w . x`. The bound is of real
numbers; what single precision may lose is added to it, and weights and rows whose numbers are so large or so small that
more could be lost have no bounds.

In vLLM: no counterpart; all logits are computed there.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mini_vllm.kernels.cpu import ops

_LARGEST_CODE = 127
_LARGEST_WEIGHT = 1e15  # as LARGEST in screen.h, where it is told why
_SMALLEST_SCALE = 1e-25
_MOST_INPUTS = 65536  # of which a sum of byte products has room in 31 bits
_LONGEST_PAUSE = 63
_ZERO = 128  # what a 0 of the other factor is stored as, see `BYTE_ZERO` in screen.h
_OUTPUTS_AT_ONCE = 256  # whole panels, of which the turned weight exists in float64


class Rotation:
    """A fixed rotation of rows that leaves no element much larger than the others.

    An element of the result is a sum over all elements of the row, with signs that look random. A full matrix of that
    kind costs width^2 multiplications a row; the row read as a matrix [a, b] and multiplied by a small one from either
    side costs width * (a + b).

    Args:
        width: elements of a row.
    """

    def __init__(self, width: int) -> None:
        rows = max(factor for factor in range(1, math.isqrt(width) + 1) if width % factor == 0)
        generator = torch.Generator().manual_seed(0)
        self.left, self.right = _orthogonal(rows, generator), _orthogonal(width // rows, generator)

    @property
    def lost(self) -> float:
        """What rounding may move a product of two vectors by, in parts of their lengths, at the most.

        A sum of n products in float32 is off by n / 2^24 of the lengths (Higham, Accuracy and Stability of Numerical
        Algorithms, section 3.1); so a product with a [n, n] rotation is off by sqrt(n) times as much, for each of its
        n elements may be. There are the product itself, two small ones for either vector, and some single operations,
        for which 64 are added. All of it twice, since these are first-order terms.
        """
        sizes = [len(self.left), len(self.right)]
        return (math.prod(sizes) + 2 * sum(size * math.sqrt(size) for size in sizes) + 64) * 2 * 2.0**-24

    def __call__(self, rows: Tensor) -> Tensor:
        """[R, width] in any dtype -> [R, width] float32."""
        # In float64, because PyTorch has a switch by which products in float32 are rounded more than that.
        left, right = self.left.to(torch.float64), self.right.to(torch.float64)
        turned: Tensor = left @ rows.to(torch.float64).reshape(-1, len(left), len(right)) @ right
        return turned.flatten(start_dim=1).to(torch.float32)


def _orthogonal(size: int, generator: torch.Generator) -> Tensor:
    """[size, size] float32; rows and columns have length 1 and stand at right angles."""
    matrix = torch.randn(size, size, generator=generator, dtype=torch.float64)
    orthogonal: Tensor = torch.linalg.qr(matrix)[0]
    return orthogonal.to(torch.float32).contiguous()


class HeadScreen:
    """What `ops.best_outputs` needs beside the packed weight. `make_screen` makes one.

    Args:
        outputs: rows of the weight.
        weights: in bytes.
    """

    def __init__(self, outputs: int, weights: ops.ScreenWeights) -> None:
        self._outputs = outputs
        self._weights = weights
        # Where logits are always too close, looking for the greatest one would be in vain at each step. So after it was
        # in vain it is left alone for some calls: 1, 3, 7 and more.
        self._pause = self._rest_of_pause = 0

    def best_outputs(self, x: Tensor, packed: Tensor) -> tuple[Tensor, Tensor] | None:
        """The greatest output of each row of x [R, inputs] and its first place; None where the bounds do not tell.

        Args:
            packed: the same weight from `ops.pack_linear`.
        """
        if self._rest_of_pause > 0:
            self._rest_of_pause -= 1
            return None
        found = ops.best_outputs(x.contiguous(), packed, self._outputs, self._weights)
        self._pause = 0 if found is not None else min(2 * self._pause + 1, _LONGEST_PAUSE)
        self._rest_of_pause = self._pause
        return found


def make_screen(weight: Tensor, memory: ops.Memory = torch.empty) -> HeadScreen | None:
    """The screen of a weight [outputs, inputs]; None for one that bytes do not suit.

    Its width must be a multiple of 4 up to 65,536, and its numbers finite and none above 1e15.

    Args:
        memory: who gives memory for the codes.
    """
    outputs, inputs = weight.shape
    if inputs % 4 or inputs > _MOST_INPUTS:
        return None
    rotation = Rotation(inputs)
    codes = memory((-(-outputs // ops.PANEL), inputs, ops.PANEL), dtype=torch.int8)
    num_places = -(-outputs // ops.PANEL) * ops.PANEL  # what fills up the last panel has scale, norm and zero 0
    scales, norms = torch.zeros(2, num_places, dtype=torch.float32)
    zeros = torch.zeros(num_places, dtype=torch.int32)
    error = 1.0
    for start in range(0, outputs, _OUTPUTS_AT_ONCE):
        turned = rotation(weight[start : start + _OUTPUTS_AT_ONCE])
        some = slice(start, start + len(turned))
        largest = turned.abs().amax(dim=1)
        scales[some] = (largest / _LARGEST_CODE).clamp(min=_SMALLEST_SCALE)
        exact = turned / scales[some, None]
        rounded = exact.round()
        ops.pack_bytes(rounded.to(torch.int8), codes[start // ops.PANEL : -(-some.stop // ops.PANEL)])
        norms[some] = torch.linalg.vector_norm(rounded, dim=1)
        zeros[some] = -_ZERO * rounded.sum(dim=1).to(torch.int32)
        error = max(error, torch.linalg.vector_norm(exact - rounded, dim=1).max().item())
        if not largest.max().item() <= _LARGEST_WEIGHT:
            return None
    weights = ops.ScreenWeights(codes, scales, norms, zeros, error, rotation.lost, rotation.left, rotation.right)
    return HeadScreen(outputs, weights)
