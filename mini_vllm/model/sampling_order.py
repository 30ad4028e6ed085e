"""The one order in which tokens stand: by logit, the greatest first; among equal logits, by id, the smallest first.

Where it stands: below the sampler, wherever "the k best tokens" are asked for: top_k, top_p, the alternatives of
logprobs. Equal logits are common (bfloat16 has 128 numbers from 16 to 32, for a vocabulary of 50,000), and `torch.topk`
takes any of them, different ones for a different k. Then a request's tokens would depend on the k of its neighbours. So
each logit and its id are packed into one integer, and no two integers of a row are equal:

    63            32 31             0
    [ logit, as an ]  [ vocabulary - 1 ]        greater number = earlier in the order
    [ ordered int  ]  [ - token id     ]

What always holds: the first k of the order are the same for every k' >= k.

In vLLM: no counterpart; `vllm/v1/sample/ops/topk_topp_sampler.py` keeps all tokens that tie with the last one.
"""

from __future__ import annotations

import torch
from torch import Tensor

_LOW_HALF = 0xFFFF_FFFF
_ALL_BUT_SIGN = 0x7FFF_FFFF


def top_tokens(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k best tokens of each row, best first.

    Args:
        logits: [N, vocabulary] float32, -inf allowed.
        k: from 0 to the vocabulary's size.

    Returns:
        values [N, k] float32, token_ids [N, k] int64.
    """
    keys = _order_keys(logits).topk(k, dim=1).values
    token_ids = logits.shape[1] - 1 - (keys & _LOW_HALF)
    return logits.gather(1, token_ids), token_ids


def _order_keys(logits: Tensor) -> Tensor:
    """[N, vocabulary] int64, greater for what comes earlier.

    The bits of a positive float, read as an integer, grow with it; those of a negative one grow as it falls, so all but
    its sign are turned over. Adding 0.0 makes -0.0 the 0.0 that it equals.
    """
    keys = (logits + 0.0).view(torch.int32).long()
    keys ^= (keys >> 63).bitwise_and_(_ALL_BUT_SIGN)
    keys <<= 32
    keys |= torch.arange(logits.shape[1] - 1, -1, -1, device=logits.device)
    return keys
