"""From one format to another, tensor by tensor; the destination appears whole or not at all."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from isthmus.convert.legacy import Grid, write_legacy
from isthmus.convert.megatron_args import flags_to_give, megatron_args
from isthmus.convert.online import export_plan
from isthmus.convert.stored import HF_PART, Format, Stored, open_stored
from isthmus.convert.torch_dist import Entry, write_torch_dist
from isthmus.engine.names import TRACKER, extra_state_keys, torch_dist_key
from isthmus.errors import UsageError
from isthmus.families.shard import weave
from isthmus.hf.folder import write_model_files
from isthmus.hf.staged import StagedFolder, disk_errors
from isthmus.hf.writer import SafetensorsWriter

Progress = Callable[[int, int], None]
"""Told after every tensor: bytes written, bytes in all."""


@dataclass(frozen=True, slots=True)
class Converted:
    """What a conversion did, for people and for ``--json``."""

    source: str
    source_format: str
    destination: str
    destination_format: str
    family: str
    num_tensors: int
    num_bytes: int
    time_s: float
    megatron_flags: list[str]
    """What Megatron-LM has to be told on its command line, since it does not take it from a checkpoint."""

    def as_dict(self) -> dict[str, Any]:
        """All fields by name."""
        return asdict(self)


@torch.no_grad()
def convert(
    source: Path,
    destination: Path,
    to: Format | None = None,
    *,
    dtype: torch.dtype | None = None,
    hf_like: Path | None = None,
    grid: Grid | None = None,
    progress: Progress = lambda done, total: None,
) -> Converted:
    """Convert a model on the disk into another format.

    Args:
        source: a Hugging Face folder or a Megatron checkpoint.
        destination: must not exist.
        to: ``hf``, ``torch_dist`` or ``torch`` (legacy); None is ``torch_dist`` for a Hugging Face folder, else ``hf``.
        dtype: of the tensors; None keeps what each of them has.
        hf_like: see :func:`~isthmus.convert.stored.open_stored`.
        grid: ranks of a legacy checkpoint; the other formats have none.
        progress: called with bytes done and bytes in all.

    Raises:
        MissingInput, DataError, UnsafeInput, UsageError: the source is absent, damaged, or not what its config says;
            nothing was written.
        NoSpace, IOFailure: the destination exists or cannot be written; nothing of it is left.
    """
    start_s = time.monotonic()
    stored = open_stored(source, hf_like)
    target: Format = to or ("torch_dist" if stored.format == "hf" else "hf")
    if grid is not None and target != "torch":
        raise UsageError(
            f"{target} has no layout: it is read under any. Leave --tp, --pp and --vpp out, or --to torch."
        )
    grid = grid or Grid()
    grid.check(stored.arch)
    with StagedFolder(destination) as staged:
        if target == "torch":
            num_tensors, num_bytes = _write_legacy(stored, staged.path, dtype, grid, progress)
        else:
            write = _write_hf if target == "hf" else _write_torch_dist
            num_tensors, num_bytes = write(stored, staged.path, dtype, progress)
    return Converted(
        source=str(source),
        source_format=stored.format,
        destination=str(destination),
        destination_format=target,
        family=stored.family.name,
        num_tensors=num_tensors,
        num_bytes=num_bytes,
        time_s=time.monotonic() - start_s,
        megatron_flags=flags_to_give(stored.arch) if target != "hf" else [],
    )


def _hf_config(stored: Stored, dtype: torch.dtype | None) -> dict[str, Any]:
    written = str(dtype).removeprefix("torch.") if dtype else None
    return stored.family.to_hf_config(stored.arch, stored.like.config, dtype=written)


def _write_hf(stored: Stored, folder: Path, dtype: torch.dtype | None, progress: Progress) -> tuple[int, int]:
    names = stored.family.hf_shapes(stored.arch)
    dtypes = {name: dtype or stored.weights.tensors[name].dtype for name in names}
    if dtype is None and stored.format != "hf" and len(set(dtypes.values())) == 1:
        dtype = next(iter(dtypes.values()))  # so that config.json says it
    plan = export_plan(stored.family, stored.arch, dtypes)
    plan.create(folder)
    done = 0
    with SafetensorsWriter(plan, folder) as writer:
        for name in names:
            done += writer.write(name, None, stored.weights.read(name))
            progress(done, plan.total_bytes)
    with disk_errors(folder):
        write_model_files(folder, stored.like, _hf_config(stored, dtype))
    return len(names), done


def _write_torch_dist(stored: Stored, folder: Path, dtype: torch.dtype | None, progress: Progress) -> tuple[int, int]:
    arch, family, weights = stored.arch, stored.family, stored.weights
    placements = {name: placed for name, placed in family.placements(arch).items() if not placed.rule.alias}
    entries: list[Entry] = []
    for name, placed in placements.items():
        key, layer = torch_dist_key(name)
        kept = weights.tensors[placed.hf[0]].dtype
        entries.append(Entry(name, key, layer, arch.num_layers, placed.rule.canonical_shape(arch), dtype or kept))
    total = sum(entry.nbytes for entry in entries)
    done = 0

    def load(entry: Entry) -> Tensor:
        nonlocal done
        placed = placements[entry.canonical]
        done += entry.nbytes
        progress(done, total)
        woven = weave(placed.rule, arch, lambda part, index: weights.read(placed.hf[part], index), placed.expert)
        return woven.to(entry.dtype)

    inner = folder / "release"
    with disk_errors(folder, total):
        inner.mkdir()
        args = megatron_args(arch, entries[0].dtype)
        content = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
        common = {"args": args, "checkpoint_version": 3.0, "iteration": 0, "content_metadata": content}
        write_torch_dist(inner, entries, extra_state_keys(arch.num_layers), common, load)
        _write_beside(stored, folder, dtype)
    return len(entries), total


def _write_legacy(
    stored: Stored, folder: Path, dtype: torch.dtype | None, grid: Grid, progress: Progress
) -> tuple[int, int]:
    kept = {meta.dtype for meta in stored.weights.tensors.values()}
    if dtype is None and len(kept) > 1:
        raise UsageError(f"the tensors are of {len(kept)} dtypes, and a legacy checkpoint has one. Choose it: --dtype.")
    dtype = dtype or next(iter(kept))
    total = sum(torch.Size(meta.shape).numel() for meta in stored.weights.tensors.values()) * dtype.itemsize
    done = 0
    with disk_errors(folder, total):
        inner = folder / "release"
        inner.mkdir()
        for read in write_legacy(inner, stored.family, stored.arch, stored.weights, grid, dtype):
            done = min(total, done + read)
            progress(done, total)
        _write_beside(stored, folder, dtype)
    return len(stored.weights.tensors), total


def _write_beside(stored: Stored, folder: Path, dtype: torch.dtype | None) -> None:
    """The tracker that Megatron-LM looks for, and the config and tokenizer for the way back."""
    (folder / TRACKER).write_text("release", encoding="utf-8")
    (folder / HF_PART).mkdir()
    write_model_files(folder / HF_PART, stored.like, _hf_config(stored, dtype))
