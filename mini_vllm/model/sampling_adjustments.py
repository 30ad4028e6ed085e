"""What changes logits before temperature: masks (what may come), then bias and penalties (how much it is liked).

Where it stands: the first half of the sampler, for the draws that have any of it. The order is the one of the functions
in `adjust`; after a mask a logit is -inf, and neither a bias nor a penalty brings it back.

In vLLM: `vllm/v1/sample/logits_processor/`, `vllm/v1/sample/ops/penalties.py`, `bad_words.py`.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mini_vllm.model.sampling_batch import PenaltyHistory, TokenPairs, WorkedDraws


def adjust(logits: Tensor, worked: WorkedDraws) -> Tensor:
    """Apply masks, bias and penalties.

    Args:
        logits: [W, vocabulary] float32, one row a worked draw; changed in place and returned.
    """
    if worked.allowed is not None:
        _keep_only(logits, worked.allowed)
    if worked.grammar_mask is not None:
        apply_bitmask(logits, worked.grammar_mask)
    if worked.forbidden is not None:
        logits[worked.forbidden.draws, worked.forbidden.token_ids] = -math.inf
    if worked.bias is not None and worked.bias.values is not None:
        logits.index_put_((worked.bias.draws, worked.bias.token_ids), worked.bias.values, accumulate=True)
    if worked.history is not None:
        _penalise(logits, worked, worked.history)
    return logits


def unpack_bitmask(mask: Tensor, vocab_size: int) -> Tensor:
    """[W, ceil(vocabulary / 32)] int32, least significant bit first -> [W, vocabulary] bool."""
    bits = (mask[:, :, None] >> torch.arange(32, dtype=torch.int32, device=mask.device)) & 1
    return bits.flatten(1)[:, :vocab_size].bool()


def apply_bitmask(logits: Tensor, mask: Tensor) -> None:
    """Make every token -inf whose bit is not set.

    Args:
        logits: [W, vocabulary] float32, changed in place.
        mask: [W, ceil(vocabulary / 32)] int32, least significant bit first.
    """
    if logits.device.type == "cpu":
        _apply_on_cpu(logits.numpy(), mask.numpy())
    else:
        logits.masked_fill_(~unpack_bitmask(mask, logits.shape[1]), -math.inf)


def _apply_on_cpu(rows: npt.NDArray[np.float32], mask: npt.NDArray[np.int32]) -> None:
    """Row by row, touching the fewer tokens: those that may come, or those that may not.

    A grammar allows a handful of tokens (between the parts of a JSON object) or nearly all (in a string); a row filled
    through a mask of the whole vocabulary takes several times as long.
    """
    vocab_size = rows.shape[1]
    bits = np.unpackbits(mask.view(np.uint8), axis=1, count=vocab_size, bitorder="little").view(np.bool_)
    for row, is_allowed in zip(rows, bits, strict=True):
        if np.count_nonzero(is_allowed) > vocab_size // 2:
            row[np.flatnonzero(~is_allowed)] = -np.inf
        else:
            allowed = np.flatnonzero(is_allowed)
            kept = row[allowed]
            row.fill(-np.inf)
            row[allowed] = kept


def best_allowed(logits: Tensor, rows: Tensor, token_ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Greedy draws under nothing but a mask, on the CPU: no row is copied or filled. Twin: `adjust`, then the maximum.

    Args:
        logits: [R, vocabulary] float32, not changed.
        rows: [W] int64, the row that each draw reads.
        token_ids: [W] int64, the best token of that row, allowed or not.
        mask: [W, ceil(vocabulary / 32)] int32, least significant bit first.

    Returns:
        token_ids [W] int64; has_no_token [W] bool, where none is left.
    """
    values, words = logits.numpy(), mask.numpy()
    best, has_no_token = token_ids.clone(), torch.zeros_like(rows, dtype=torch.bool)
    for draw, (row, token_id) in enumerate(zip(rows.tolist(), token_ids.tolist(), strict=True)):
        if words[draw, token_id // 32] >> (token_id % 32) & 1 and values[row, token_id] > -math.inf:
            continue  # the model wants what it may have
        bits = np.unpackbits(words[draw].view(np.uint8), count=logits.shape[1], bitorder="little")
        allowed = np.flatnonzero(bits)
        place = values[row, allowed].argmax() if len(allowed) else 0
        has_no_token[draw] = not len(allowed) or bool(values[row, allowed[place]] == -math.inf)
        best[draw] = int(allowed[place]) if len(allowed) else token_id
    return best, has_no_token


def _keep_only(logits: Tensor, allowed: TokenPairs) -> None:
    draws = torch.unique(allowed.draws)
    kept = torch.full_like(logits[draws], -math.inf)
    place = torch.searchsorted(draws, allowed.draws)
    kept[place, allowed.token_ids] = logits[allowed.draws, allowed.token_ids]
    logits[draws] = kept


def _penalise(logits: Tensor, worked: WorkedDraws, history: PenaltyHistory) -> None:
    """Repetition penalty over prompt and output, frequency and presence penalty over the output.

    Repetition comes first: it scales what the model said, not what the other penalties left of it (Keskar et al. 2019
    for the repetition penalty; the other two are OpenAI's).
    """
    draws, vocab_size = history.draws, logits.shape[1]
    counts = logits.new_zeros(len(draws), vocab_size + 1)  # the last column takes the padding
    counts.scatter_add_(1, history.output_token_ids, torch.ones_like(history.output_token_ids, dtype=counts.dtype))
    seen = (counts > 0).scatter_(1, history.prompt_token_ids, True)[:, :vocab_size]
    counts = counts[:, :vocab_size]
    penalised = logits[draws]
    repetition = worked.repetition_penalty[draws, None]
    repeated = torch.where(penalised > 0, penalised / repetition, penalised * repetition)
    penalised = torch.where(seen, repeated, penalised)
    penalised -= worked.frequency_penalty[draws, None] * counts
    penalised -= worked.presence_penalty[draws, None] * (counts > 0)
    logits[draws] = penalised
