"""One timed step of GRPO after one that is not: Isthmus, or TRL's GRPOTrainer, with the workload of ``grpo.py``."""

from __future__ import annotations

import importlib
import os
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from grpo_turns.workload import Turn, build

from gpu_turns.cases import Absent
from gpu_turns.rows import append


def run(spec: dict[str, Any]) -> None:
    """Append the result of the contestant."""
    needed = ("trl", "accelerate", "datasets") if spec["contestant"] == "trl" else ()
    if missing := [name for name in needed if find_spec(name) is None]:
        raise Absent(f"not installed: {', '.join(missing)}")
    sizes = {"answers": 8, "group_size": 4, "new_tokens": 4, "micro_batch_size": 4} if spec["dry"] else {
        "answers": 64, "group_size": 8, "new_tokens": 64, "micro_batch_size": 8
    }  # fmt: skip
    module = importlib.import_module(f"grpo_turns.{spec['contestant']}_turn")
    before = Path.cwd()
    with tempfile.TemporaryDirectory(prefix="isthmus-bench-") as folder:
        model, prompts, parameters = build(Path(folder), tiny=spec["dry"])
        append("fact", parameters=parameters)
        os.chdir(folder)
        try:
            turn = Turn(model=str(model), prompts=str(prompts), steps=3, platform=spec["platform"], **sizes)
            append("grpo", **module.run(turn))
        finally:
            os.chdir(before)
