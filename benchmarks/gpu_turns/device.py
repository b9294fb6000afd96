"""The device and its software, for the certificate; in a process of its own, which leaves no memory allocated."""

from __future__ import annotations

import json
import subprocess
from typing import Any

from rounds import turn_files


def run(spec: dict[str, Any]) -> dict[str, Any]:
    """Facts about the device, or ``refused`` with the reason if ``spec["platform"]`` is auto and there is no GPU."""
    import torch

    from isthmus.platforms.detect import detect

    platform = detect(spec["platform"])
    values: dict[str, Any] = {"platform": platform.name, "device": platform.describe()}
    if platform.device_type == "cpu":
        return values if spec["platform"] == "cpu" else {"refused": platform.reason}
    return values | {
        "device_name": torch.cuda.get_device_name(),
        "devices": torch.cuda.device_count(),
        "driver": _driver(),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "cudnn": torch.backends.cudnn.version(),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "peak_tflops": {name: platform.peak_tflops(name) for name in ("bf16", "fp8")},
    }


def _driver() -> str | None:
    query = ["nvidia-smi", "--query-gpu=driver_version,power.limit", "--format=csv,noheader", "--id=0"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


if __name__ == "__main__":
    spec, result_file = turn_files()
    result_file.write_text(json.dumps(run(spec)))
