"""Drawing a token: temperature, min_p, top_k, top_p, and the argmax of scaled logit + Gumbel noise.

Where it stands: the second half of the sampler, for draws with a temperature. They come in up to three groups, because
what a draw costs depends on how it is cut down; most are cut to a few candidates, and noise is made for these alone.

    top_k         the k best tokens are taken, then top_p among them
    top_p         as few of the best tokens as are sure to hold p; the whole row only where it is that flat
    everything    neither: noise for the whole vocabulary

Each of min_p, top_k and top_p keeps a beginning of the same order (sampling_order.py), so together they do too.

What always holds: which group a draw is in, and every number that decides its token, follow from its own logits and
parameters; neighbours can only change how many candidates that cannot win are looked at. Work goes in pieces of rows,
so memory does not grow with the batch.

In vLLM: `vllm/v1/sample/ops/topk_topp_sampler.py`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mini_vllm.model.noise import gumbel_noise
from mini_vllm.model.sampling_batch import DrawGroup, WorkedDraws
from mini_vllm.model.sampling_order import top_tokens
from mini_vllm.model.sampling_pieces import rows_per_piece

NUCLEUS_CANDIDATES = 512  # top_p mostly keeps far fewer


def draw_tokens(logits: Tensor, rows: Tensor, best: Tensor, worked: WorkedDraws) -> tuple[Tensor, Tensor]:
    """Draw for every worked draw that has a temperature.

    Args:
        logits: [R, vocabulary] float32, adjusted already; not changed.
        rows: [W] int64, the row of logits that each worked draw reads.
        best: [R] float32, the greatest logit of each row.
        worked: the draws.

    Returns:
        places [S] int64, which of the W were drawn; token_ids [S] int64.
    """
    places, token_ids = [rows[:0]], [rows[:0]]
    for group in worked.groups:
        for part in torch.split(group.places, rows_per_piece(logits)):
            scaled = _scaled(logits[rows[part]], best[rows[part]], worked, part, group)
            if group.max_top_k > 0:
                drawn = _draw_by_top_k(scaled, worked, part, group)
            elif group.uses_top_p:
                drawn = _draw_by_top_p(scaled, worked, part)
            else:
                drawn = _draw_from_all(scaled, worked, part)
            places.append(part)
            token_ids.append(drawn)
    return torch.cat(places), torch.cat(token_ids)


def _scaled(logits: Tensor, best: Tensor, worked: WorkedDraws, places: Tensor, group: DrawGroup) -> Tensor:
    """Logits over temperature, -inf where min_p cuts off. [P, vocabulary], `logits` changed in place.

    The best logit becomes 0 first: dividing by a tiny temperature then cannot overflow, and min_p, a share of the
    best token's probability, is a threshold of log(min_p).
    """
    scaled = logits.sub_(best[:, None]).div_(worked.temperature[places, None])
    if group.uses_min_p:
        scaled.masked_fill_(scaled < worked.min_p[places, None].log(), -math.inf)
    return scaled


def _draw_from_all(scaled: Tensor, worked: WorkedDraws, places: Tensor) -> Tensor:
    every_token = torch.arange(scaled.shape[1], device=scaled.device)[None]
    return scaled.add_(_noise(worked, places, every_token)).argmax(dim=1)


def _draw_by_top_k(scaled: Tensor, worked: WorkedDraws, places: Tensor, group: DrawGroup) -> Tensor:
    """The candidates are the group's largest k; what lies behind a draw's own k is cut off."""
    values, token_ids = top_tokens(scaled, group.max_top_k)  # [P, K]
    rank = torch.arange(group.max_top_k, device=scaled.device)
    values.masked_fill_(rank >= worked.top_k[places, None], -math.inf)
    if group.uses_top_p:
        top_p = worked.top_p[places, None]
        weights = values.double().exp()
        mass = weights.cumsum(dim=1)
        is_inside = (mass - weights < top_p * mass[:, -1:]) | (top_p >= 1)
        is_inside[:, 0] = True
        values.masked_fill_(~is_inside, -math.inf)
    return _best_candidate(values, token_ids, worked, places)


def _draw_by_top_p(scaled: Tensor, worked: WorkedDraws, places: Tensor) -> Tensor:
    """Draw among the few hundred best tokens where these hold p of the mass, else from the row in full order."""
    probabilities = scaled.softmax(dim=1)
    vocab_size = scaled.shape[1]
    drawn, is_certain = _draw_in_nucleus(scaled, probabilities, worked, places, min(NUCLEUS_CANDIDATES, vocab_size))
    if vocab_size > NUCLEUS_CANDIDATES and not bool(is_certain.all()):
        rest = (~is_certain).nonzero().squeeze(1)
        drawn[rest], _ = _draw_in_nucleus(scaled[rest], probabilities[rest], worked, places[rest], vocab_size)
    return drawn


def _draw_in_nucleus(
    scaled: Tensor, probabilities: Tensor, worked: WorkedDraws, places: Tensor, width: int
) -> tuple[Tensor, Tensor]:
    """Draw from the nucleus (Holtzman et al. 2020), looked for among the `width` best tokens.

    Example: probabilities .4 .3 .2 .1, top_p .6. Before each token stand 0, .4, .7, .9; the first two are below .6, so
    two are kept: the one that crosses p is in.

    Returns:
        token_ids [P] int64; is_certain [P] bool: the `width` best hold p, so the nucleus ends among them.
    """
    values, token_ids = top_tokens(scaled, width)
    weights = probabilities.gather(1, token_ids).double()
    mass = weights.cumsum(dim=1)
    top_p = worked.top_p[places, None]
    is_inside = mass - weights < top_p
    is_inside[:, 0] = True  # also for a p so small that float32 has no number for it
    values.masked_fill_(~is_inside, -math.inf)
    is_certain = ~(mass[:, -1] < top_p[:, 0])  # a broken row is certain too: it fails anyway
    return _best_candidate(values, token_ids, worked, places), is_certain


def _best_candidate(values: Tensor, token_ids: Tensor, worked: WorkedDraws, places: Tensor) -> Tensor:
    chosen = (values + _noise(worked, places, token_ids)).argmax(dim=1, keepdim=True)
    return token_ids.gather(1, chosen).squeeze(1)


def _noise(worked: WorkedDraws, places: Tensor, token_ids: Tensor) -> Tensor:
    """[P, K] float32 for token_ids [P, K], or [1, K] if they are the same for all."""
    return gumbel_noise(worked.seeds[places], worked.sample_index[places], worked.positions[places], token_ids)
