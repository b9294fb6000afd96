"""Runs one contestant of the conversion benchmark."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import torch  # noqa: F401  # before the clock starts
from rounds import CpuWatch, peak_rss_gib, rss_gib, turn_files

SOURCES = {
    "cp": ("hf",),
    "hf-to-torch_dist": ("hf",),
    "torch_dist-to-hf": ("torch_dist",),
    "hf-to-legacy-tp8": ("hf",),
    "legacy-tp8-to-hf": ("legacy-tp8",),
    "verify": ("hf", "torch_dist"),
    "transformers": ("hf",),
}
"""The folders that each contestant reads."""


def copy(source: Path, target: Path) -> float:
    """``cp -r``; returns zero seconds of imports."""
    subprocess.run(["cp", "-r", str(source), str(target)], check=True)
    return 0.0


def isthmus_conversion(source: Path, target: Path, to: Any) -> float:
    """``isthmus convert``, which syncs its files; returns the seconds of its imports."""
    started_s = time.perf_counter()
    from isthmus.convert.legacy.legacy_layout import LegacyLayout
    from isthmus.convert.transfer import convert

    import_s = time.perf_counter() - started_s
    convert(source, target, to, layout=LegacyLayout(tp=8) if to == "torch" else None)
    return import_s


def isthmus_verification(first: Path, second: Path) -> float:
    """``isthmus verify``, with the checksums of the checkpoint; returns the seconds of its imports."""
    started_s = time.perf_counter()
    from isthmus.convert.verify.compare import compare_models

    import_s = time.perf_counter() - started_s
    compare_models(first, second)
    return import_s


def transformers_copy(source: Path, target: Path) -> float:
    """``from_pretrained``, then ``save_pretrained``; returns the seconds of the imports."""
    started_s = time.perf_counter()
    from transformers import AutoModelForCausalLM, Qwen3ForCausalLM  # noqa: F401  # the class is imported lazily

    import_s = time.perf_counter() - started_s
    model: Any = AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    model.save_pretrained(target)
    return import_s


def run(spec: dict[str, Any]) -> dict[str, Any]:
    """Run the contestant of ``spec``; its output is removed afterwards, unless ``spec`` keeps it.

    The clock starts with torch imported, no dirty pages, the sources in the page cache and memory for the target's
    pages available. It stops when everything is on the disk.
    """
    folder, name = Path(spec["folder"]), spec["contestant"]
    sources, target = [folder / source for source in SOURCES[name]], folder / "written"
    num_bytes = sum(_read(source) for source in sources)
    _warm_memory(folder / "scratch", num_bytes)
    os.sync()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak, which includes the import of torch
    torch_gib = rss_gib()
    watch, started_s = CpuWatch(), time.perf_counter()
    if name == "cp":
        import_s = copy(sources[0], target)
    elif name == "verify":
        import_s = isthmus_verification(*sources)
    elif name == "transformers":
        import_s = transformers_copy(sources[0], target)
    else:
        to = {"torch_dist": "torch_dist", "legacy-tp8": "torch", "hf": "hf"}[name.partition("-to-")[2]]
        import_s = isthmus_conversion(sources[0], target, to)
    if name != "verify":
        os.sync()
    time_s, cpu = time.perf_counter() - started_s, watch.shares()
    peak_gib = peak_rss_gib()
    if "keep_as" in spec:
        target.rename(folder / spec["keep_as"])
    shutil.rmtree(target, ignore_errors=True)
    return cpu | {
        "time_s": time_s,
        "import_s": import_s,
        "torch_rss_gib": torch_gib,
        "memory_added_gib": peak_gib - torch_gib,
        "line": f"{time_s:7.2f} s, of which imports {import_s:.2f}; {peak_gib - torch_gib:.3f} GiB beyond torch",
    }


def _read(folder: Path) -> int:
    """Read every file into the page cache; returns their bytes."""
    buffer, done = bytearray(1 << 22), 0
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with path.open("rb", buffering=0) as file:
                while got := file.readinto(buffer):
                    done += got
    return done


def _warm_memory(scratch: Path, num_bytes: int) -> None:
    """Fill the page cache with more pages than the target needs, and free them.

    A virtual machine may have returned free memory to its host, and getting it back takes ten times as long as a copy.
    Without this step, that cost would hit a random contestant.
    """
    block = bytes(1 << 20)
    with scratch.open("wb", buffering=0) as file:
        for _ in range(0, int(1.3 * num_bytes), len(block)):
            file.write(block)
    scratch.unlink()


if __name__ == "__main__":
    spec, result_file = turn_files()
    Path(result_file).write_text(json.dumps(run(spec)))
