"""Loads a model into live weights in bf16, exports it, and compares each exported tensor with its source."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

from gpu_turns.rows import append


def run(spec: dict[str, Any]) -> None:
    """Append seconds and GB/s of both ways, and the tensors that differ."""
    import torch
    from safetensors import safe_open

    from isthmus import AutoBridge
    from isthmus.engine.parallel.process_groups import close_groups

    source = Path(spec["weights"])
    size_gb = sum(path.stat().st_size for path in source.glob("*.safetensors")) / 1e9
    with tempfile.TemporaryDirectory(prefix="isthmus-bench-", dir=spec["folder"]) as folder:
        started_s = time.perf_counter()
        bridge = AutoBridge.from_hf_pretrained(source)
        model = bridge.to_megatron_model(precision="bf16")
        loaded_s = time.perf_counter() - started_s
        append("transfer", operation="load", seconds=loaded_s, gb_per_s=size_gb / loaded_s)
        started_s = time.perf_counter()
        bridge.save_hf_pretrained(model, Path(folder) / "hf")
        saved_s = time.perf_counter() - started_s
        append("transfer", operation="export", seconds=saved_s, gb_per_s=size_gb / saved_s)
        close_groups()
        places = [
            {key: path for path in sorted(root.glob("*.safetensors")) for key in safe_open(path, "pt").keys()}
            for root in (source, Path(folder) / "hf")
        ]
        different = sorted(set(places[0]) ^ set(places[1]))
        for key in places[0].keys() & places[1].keys():
            tensors = [safe_open(place[key], "pt").get_tensor(key) for place in places]
            if tensors[0].dtype != tensors[1].dtype or not torch.equal(*tensors):
                different.append(key)
        append("exported", tensors=len(places[0]), different=different[:10], equal=not different)
