"""The device and its software, for the certificate; in a process of its own, which leaves no memory allocated."""

from __future__ import annotations

import subprocess
from typing import Any

from gpu_turns.rows import append
from isthmus.platforms.gpu import GpuPlatform


def run(spec: dict[str, Any]) -> None:
    """Append facts about the device, or ``refused`` with the reason if ``spec["platform"]`` is auto without a GPU."""
    import torch

    from isthmus.platforms.detect import detect

    platform = detect(spec["platform"])
    values: dict[str, Any] = {"platform": platform.name, "device": platform.describe()}
    if not isinstance(platform, GpuPlatform):
        append("fact", **(values if spec["platform"] == "cpu" else {"refused": platform.reason}))
        return
    append(
        "fact",
        **values,
        device_name=torch.cuda.get_device_name(),
        devices=torch.cuda.device_count(),
        pci=platform.pci_address(),
        uuid=str(getattr(platform.properties(), "uuid", "")),
        driver=_driver(),
        cuda=torch.version.cuda,
        hip=torch.version.hip,
        cudnn=torch.backends.cudnn.version(),
        nccl=".".join(map(str, torch.cuda.nccl.version())),
        peak_tflops={name: platform.peak_tflops(name) for name in ("bf16", "fp8")},
    )


def _driver() -> str | None:
    query = ["nvidia-smi", "--query-gpu=driver_version,power.limit", "--format=csv,noheader", "--id=0"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
