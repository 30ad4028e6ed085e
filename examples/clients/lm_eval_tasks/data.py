"""The questions of both tasks, from the file beside this one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets


def capitals(**_: Any) -> dict[str, datasets.Dataset]:
    """The test split that the harness asks for."""
    return {"test": datasets.Dataset.from_json(str(Path(__file__).with_name("capitals.jsonl")))}
