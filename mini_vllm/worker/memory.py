"""How many blocks the pool has: from a number, a budget in bytes, or a share of the memory that is free.

Where it stands: asked once at start, when the weights are loaded and before the cache is allocated.

In vLLM: `determine_available_memory` in `vllm/v1/worker/gpu_worker.py` and `get_kv_cache_configs` in
`vllm/v1/core/kv_cache_utils.py`.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from mini_vllm.config import EngineConfig
from mini_vllm.errors import InvalidConfigError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PoolPlan:
    """The pool and what follows from it.

    Args:
        num_blocks: blocks of the pool.
        block_size: tokens in one; for the contiguous cache and for none, a slot of max_model_len.
        max_model_len: longest sequence in tokens, lowered to what the pool holds.
        block_bytes: bytes of one block; 0 without a cache.
    """

    num_blocks: int
    block_size: int
    max_model_len: int
    block_bytes: int

    @property
    def num_tokens(self) -> int:
        return self.num_blocks * self.block_size


def slot_size(config: EngineConfig, max_model_len: int) -> int:
    """Tokens in a block of this config's cache."""
    return config.block_size if config.cache == "paged" else max_model_len


def plan_pool(config: EngineConfig, max_model_len: int, block_bytes: int, device: torch.device) -> PoolPlan:
    """Decide the size of the pool.

    Args:
        config: the user's wishes.
        max_model_len: what model and user allow, in tokens.
        block_bytes: bytes of one block in all layers; 0 if nothing is stored.
        device: whose free memory counts.

    Raises:
        InvalidConfigError: the memory given does not hold a single block.
    """
    block_size = slot_size(config, max_model_len)
    # More than this could never be filled by running sequences.
    useful = config.max_num_seqs * -(-max_model_len // block_size)
    if config.num_kv_blocks is not None:
        num_blocks = config.num_kv_blocks
        _check_room("num_kv_blocks", num_blocks, max(block_bytes, 1), device)
    elif block_bytes == 0:
        num_blocks = useful
    else:
        budget = config.kv_cache_memory
        if not isinstance(budget, int):
            budget = int(free_memory(device) * config.kv_cache_memory_fraction)
        num_blocks = min(budget // block_bytes, useful)
        if num_blocks == 0:
            smaller = "block_size" if config.cache == "paged" else "max_model_len"
            raise InvalidConfigError(
                f"{budget:,} bytes for keys and values do not hold one block of {block_size} tokens, which takes "
                f"{block_bytes:,}; raise kv_cache_memory or lower {smaller}",
                field="kv_cache_memory",
            )
        _check_room("kv_cache_memory", num_blocks, block_bytes, device)
    plan = PoolPlan(num_blocks, block_size, min(max_model_len, num_blocks * block_size), block_bytes)
    _log(plan, max_model_len)
    return plan


def _check_room(field: str, num_blocks: int, block_bytes: int, device: torch.device) -> None:
    free = free_memory(device)
    if num_blocks * block_bytes > free:
        most = f"{free // block_bytes} blocks" if field == "num_kv_blocks" else f"{free:,} bytes"
        raise InvalidConfigError(
            f"{field} asks for a pool of {num_blocks} blocks of {block_bytes:,} bytes, and {free:,} bytes are free; "
            f"ask for at most {most}",
            field=field,
        )


def _log(plan: PoolPlan, wanted_max_model_len: int) -> None:
    if plan.max_model_len < wanted_max_model_len:
        logger.warning(
            "max_model_len lowered from %d to %d tokens: that is all the pool of %d blocks holds",
            wanted_max_model_len,
            plan.max_model_len,
            plan.num_blocks,
        )
    if plan.block_bytes:
        logger.info(
            "KV cache: %d blocks of %d tokens = %d tokens (%.0f MiB); %.1f requests of the full %d tokens fit at once",
            plan.num_blocks,
            plan.block_size,
            plan.num_tokens,
            plan.num_blocks * plan.block_bytes / 2**20,
            plan.num_tokens / plan.max_model_len,
            plan.max_model_len,
        )


def free_memory(device: torch.device) -> int:
    """Bytes that can still be allocated on a device."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2  # where nothing better is known (macOS)
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                free = int(line.split()[1]) * 1024
    return min(free, _cgroup_headroom(free))


def _cgroup_headroom(default: int) -> int:
    """What a container's memory limit leaves (cgroup v2)."""
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if not limit.exists() or not used.exists() or limit.read_text().strip() == "max":
        return default
    return max(0, int(limit.read_text()) - int(used.read_text()))
