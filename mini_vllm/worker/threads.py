"""How many threads the model computes with.

Where it stands: settled once, when the executor is made. PyTorch and the C++ kernels share one pool.

What always holds: not more threads than a container's quota of processor time has room for. Sixty-four threads on a
quota of two cores are all put to sleep after two sixty-fourths of each period, in the middle of a product, and each
waits for the others.

In vLLM: `vllm/v1/worker/cpu_worker.py` (`VLLM_CPU_OMP_THREADS_BIND`).
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

_QUOTA = Path("/sys/fs/cgroup/cpu.max")  # "200000 100000": microseconds in each period, and the period; or "max 100000"


def settle_threads(threads: int | None) -> None:
    """Set the number of threads.

    Args:
        threads: as the user asked; None leaves PyTorch's choice (the cores this process may use, or OMP_NUM_THREADS),
            lowered to the quota.
    """
    if threads is None:
        quota = quota_of_cores()
        if quota is None or "OMP_NUM_THREADS" in os.environ or torch.get_num_threads() <= quota:
            return
        threads = quota
    torch.set_num_threads(threads)


def quota_of_cores(file: Path = _QUOTA) -> int | None:
    """Whole cores that the container's quota allows, at least 1; None without a quota (cgroup v2)."""
    try:
        quota, period = file.read_text().split()
    except (OSError, ValueError):
        return None
    return None if quota == "max" else max(1, int(quota) // int(period))
