"""The random noise: its exact bits, its distribution, and that it depends on its four inputs and nothing else."""

from __future__ import annotations

import math

import pytest
import torch
from sampler_helpers import chi_square_p
from torch import Tensor

from mini_vllm.model import noise
from mini_vllm.model.noise import gumbel_noise, random_bits

INPUTS = ["seed", "sample index", "position", "token id"]
GOLDEN = 0x9E3779B97F4A7C15
LINE = 1 << 16  # numbers looked at along one input


def mix(z: int) -> int:
    """The recipe of the module's docstring, in Python's own integers."""
    z %= 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)


def bits_by_recipe(seed: int, sample_index: int, position: int, token_id: int) -> int:
    key = mix(mix(mix(seed + GOLDEN) + sample_index + GOLDEN) + position + GOLDEN)
    return mix(key + (token_id + 1) * GOLDEN) >> 32


def along(which: int, start: int = 0, stride: int = 1) -> Tensor:
    """The bits of LINE draws that differ in one input: [LINE]."""
    line = start + stride * torch.arange(LINE)
    inputs = [torch.full((LINE,), fixed) for fixed in (11, 1, 500, 77)]
    inputs[which] = line
    return random_bits(*inputs[:3], inputs[3][:, None]).squeeze(1)


def test_worked_example() -> None:
    """The bits that any other implementation of the recipe has to give."""
    zero = torch.zeros(1, dtype=torch.int64)
    bits = random_bits(zero, zero, zero, torch.tensor([[0, 1, 49151]]))
    assert bits.tolist() == [[556823690, 214405049, 1594335995]]


@pytest.mark.parametrize("seed", [0, 7, -1, -5, 2**63 - 1, -(2**63)])
@pytest.mark.parametrize(("sample_index", "position"), [(0, 0), (1, 100), (127, 131071)])
def test_bits_follow_the_recipe(seed: int, sample_index: int, position: int) -> None:
    tokens = [0, 1, 2, 49151, 262143]
    one = [torch.tensor([value]) for value in (seed, sample_index, position)]
    expected = [bits_by_recipe(seed, sample_index, position, token_id) for token_id in tokens]
    assert random_bits(*one, torch.tensor([tokens])).tolist() == [expected]


def test_noise_follows_from_the_bits() -> None:
    one = torch.tensor([3]), torch.tensor([0]), torch.tensor([9])
    tokens = torch.arange(2000)[None]
    uniform = (random_bits(*one, tokens).double() + 0.5) * 2.0**-32
    expected = -torch.log(-torch.log1p(-uniform))
    torch.testing.assert_close(gumbel_noise(*one, tokens).double(), expected, rtol=0, atol=1e-4)  # v has 24 bits near 1


@pytest.mark.parametrize(("bits", "expected"), [(0, 22.874), (2**32 - 1, -2.811), (2**31, 0.3665)])
def test_noise_is_finite_for_every_value_of_the_bits(
    bits: int, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(noise, "random_bits", lambda *_: torch.tensor([[bits]]))
    nothing = torch.zeros(1, dtype=torch.int64)
    found = gumbel_noise(nothing, nothing, nothing, nothing[None])
    assert found.dtype == torch.float32
    assert math.isclose(found.item(), expected, abs_tol=1e-3)


def test_noise_has_the_mean_and_variance_of_a_gumbel_number() -> None:
    draws = torch.arange(64)
    values = gumbel_noise(draws, draws * 0, draws, torch.arange(4096)[None]).double()
    assert abs(values.mean().item() - 0.577216) < 0.01  # Euler's constant; 262,144 numbers
    assert abs(values.var().item() - math.pi**2 / 6) < 0.03


@pytest.mark.parametrize("which", range(4), ids=INPUTS)
@pytest.mark.parametrize("shift", [0, 8, 16, 24])
def test_bits_are_uniform_along_each_input(which: int, shift: int) -> None:
    counts = torch.bincount((along(which) >> shift) & 0xFF, minlength=256)
    assert chi_square_p(counts, torch.full((256,), 1 / 256)) > 1e-4


@pytest.mark.parametrize("which", range(4), ids=INPUTS)
@pytest.mark.parametrize("stride", [1, 2, 1 << 16, 1 << 32, GOLDEN - 2**64], ids=["1", "2", "2^16", "2^32", "golden"])
def test_neighbours_are_independent(which: int, stride: int) -> None:
    """The high bits of one number and of its neighbour fill a 16 x 16 table evenly."""
    high = along(which, stride=stride) >> 28
    counts = torch.bincount(high[:-1] * 16 + high[1:], minlength=256)
    assert chi_square_p(counts, torch.full((256,), 1 / 256)) > 1e-4


@pytest.mark.parametrize("first", range(4), ids=INPUTS)
@pytest.mark.parametrize("second", range(4), ids=INPUTS)
def test_a_step_in_one_input_says_nothing_about_a_step_in_another(first: int, second: int) -> None:
    """Also that swapping two inputs gives other numbers: seed 3, position 5 is not seed 5, position 3."""
    if first == second:
        return
    one, other = along(first, start=1000), along(second, start=1000)
    assert (one == other).float().mean() < 1e-3
    counts = torch.bincount((one >> 28) * 16 + (other >> 28), minlength=256)
    assert chi_square_p(counts, torch.full((256,), 1 / 256)) > 1e-4


def test_a_draw_has_the_same_noise_alone_and_among_others() -> None:
    seeds, samples, positions = torch.arange(-20, 20), torch.arange(40) % 3, torch.arange(40) * 7
    tokens = torch.arange(1001)[None]
    together = gumbel_noise(seeds, samples, positions, tokens)
    for draw in (0, 17, 39):
        one = slice(draw, draw + 1)
        assert torch.equal(gumbel_noise(seeds[one], samples[one], positions[one], tokens)[0], together[draw])


def test_a_token_has_the_same_noise_wherever_it_stands_among_the_candidates() -> None:
    seeds = torch.arange(5)
    everything = gumbel_noise(seeds, seeds, seeds, torch.arange(500)[None])
    candidates = torch.randint(500, (5, 37), generator=torch.Generator().manual_seed(0))
    assert torch.equal(gumbel_noise(seeds, seeds, seeds, candidates), everything.gather(1, candidates))


def test_the_arguments_are_not_changed() -> None:
    arguments = [torch.tensor([5]), torch.tensor([1]), torch.tensor([2]), torch.tensor([[3, 4]])]
    before = [argument.clone() for argument in arguments]
    gumbel_noise(*arguments)
    assert all(torch.equal(*pair) for pair in zip(arguments, before, strict=True))
