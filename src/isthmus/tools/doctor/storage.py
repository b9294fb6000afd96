"""Disks: the working folder and the cache of the Hub."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from isthmus.tools.doctor.findings import Finding, error, ok, warning, warning_unless
from isthmus.tools.doctor.hub_access import hub_home
from isthmus.tools.doctor.machine import Machine

_LEAST_FREE = 50 * 2**30
_TOO_LITTLE = 1 << 30
_LOST = {"overlay": "the layer of a container", "tmpfs": "memory"}
"""File systems that do not outlive the container or the machine."""
_CHUNK, _CHUNKS, _WRITE_SECONDS = 8 << 20, 32, 2.0
_SLOW = 200e6
"""Bytes per second; a checkpoint of an 8B model with AdamW, 112 GB, takes over 9 minutes."""


def check_disk_space(machine: Machine) -> Iterator[Finding]:
    yield from _folder(
        machine,
        machine.folder,
        "the working folder",
        "A checkpoint with AdamW takes about 14 bytes per parameter",
        "write runs to another disk (--out)",
    )
    yield from _folder(
        machine,
        hub_cache(machine),
        "the cache of the Hub",
        "A model in bf16 takes 2 bytes per parameter",
        "set HF_HOME to a folder on another disk",
    )


def hub_cache(machine: Machine) -> Path:
    """As huggingface_hub finds it, which is too slow to import."""
    values = machine.environment
    named = values.get("HF_HUB_CACHE") or values.get("HUGGINGFACE_HUB_CACHE")
    chosen = named or os.path.join(hub_home(machine), "hub")
    return Path(os.path.expandvars(chosen)).expanduser()


def _folder(machine: Machine, folder: Path, what: str, need: str, other: str) -> Iterator[Finding]:
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    free = machine.disk_usage(existing).free
    kind, source = _file_system(machine, existing), f"statvfs({existing}), /proc/mounts"
    text = f"{what} {folder}: {free / 2**30:,.1f} GiB free{f' ({kind})' if kind else ''}"
    if not os.access(existing, os.W_OK):
        yield error("disk", f"{text}; this user cannot write there", f"Change its permissions, or {other}.", source)
    elif free < _TOO_LITTLE:
        yield error("disk", text, f"Make room, or {other}.", source)
    elif free < _LEAST_FREE:
        yield warning("disk", text, f"{need}: make room, or {other}.", source)
    elif kind in _LOST:
        yield warning("disk", f"{text}; this is {_LOST[kind]} and not kept", f"Mount a volume, or {other}.", source)
    else:
        yield ok("disk", text, source)


def _file_system(machine: Machine, folder: Path) -> str:
    """Type of the innermost mount that contains ``folder``."""
    types = {"/": ""}
    for line in (machine.read("/proc/mounts") or "").splitlines():
        words = line.split()
        if len(words) > 2 and folder.resolve().is_relative_to(words[1]):
            types[words[1]] = words[2]
    return types[max(types, key=len)]


def check_disk_speed(machine: Machine) -> Iterator[Finding]:
    """Writes at most 256 MiB, for at most 2 s before the sync."""
    data = os.urandom(_CHUNK)
    source = f"write and fsync in {machine.folder}"
    try:
        with tempfile.TemporaryFile(dir=machine.folder) as file:
            start, written = time.perf_counter(), 0
            while written < _CHUNK * _CHUNKS and time.perf_counter() - start < _WRITE_SECONDS:
                written += file.write(data)
            os.fsync(file.fileno())
            rate = written / (time.perf_counter() - start)
    except OSError as failure:
        yield error("disk", f"a test file cannot be written: {failure.strerror}", "Use another folder.", source)
        return
    text = f"{rate / 1e6:,.0f} MB/s for one process that writes {written / 2**20:.0f} MiB"
    yield warning_unless(
        rate >= _SLOW,
        "disk",
        text,
        "Checkpoints take long: 14 bytes per parameter, shared by the ranks. Write to a local NVMe disk or a parallel "
        "file system, or save in the background (checkpoint.async=true).",
        source,
    )
