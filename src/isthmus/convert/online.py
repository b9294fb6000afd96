"""Imports and exports the live tensors of one rank, slice by slice."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from isthmus.convert.coverage import check_coverage
from isthmus.convert.weight_source import TensorSpec, WeightSource
from isthmus.engine.linear.quantized_weight import QuantizedWeight
from isthmus.engine.parallel.sharded_params import full_tensors, full_to_shard
from isthmus.errors import IsthmusError
from isthmus.families.architecture import Architecture
from isthmus.families.family import Family, Placement
from isthmus.families.rules.shard import Layout, local_shape, tensor_slices
from isthmus.files.file_checksums import WrittenBlocks
from isthmus.hf.tensors.finite import check_cast, check_merge, is_finite, narrows
from isthmus.hf.tensors.parallel_writer import SafetensorsPlan, SafetensorsWriter
from isthmus.hf.tensors.safetensors_format import TensorInfo

MergeTensor = Callable[[str, Tensor], Tensor]
"""The tensor to write, from a canonical name and this rank's tensor."""


@torch.no_grad()
def import_weights(
    live: Mapping[str, Tensor], family: Family, arch: Architecture, source: WeightSource, *, layout: Layout
) -> int:
    """Copy ``source`` into this rank's tensors by canonical name, cast to their dtype and device; returns bytes read.

    First checks the source against the whole model (``check_coverage``). Vocabulary padding becomes zero.
    """
    check_coverage(source, family, arch)
    position = {name: number for number, name in enumerate(source.tensors)}
    num_bytes = 0
    # In the order of the source, for sequential reads.
    for placement in sorted(checked_placements(live, family, arch, layout), key=lambda placed: position[placed.hf[0]]):
        with full_to_shard(live[placement.canonical].detach()) as tensor:
            num_bytes += read_tensor(placement, tensor, arch, source, layout=layout)
    return num_bytes


def read_tensor(
    placement: Placement, tensor: Tensor, arch: Architecture, source: WeightSource, *, layout: Layout
) -> int:
    """Copy ``source`` into this rank's ``tensor``; returns bytes read. Vocabulary padding becomes zero."""
    filled = num_bytes = 0
    for piece in tensor_slices(placement.rule, arch, layout, placement.expert):
        name, target = placement.hf[piece.part], piece.view(tensor)
        source.read(name, piece.hf, into=target)
        if narrows(source.tensors[name].dtype, target.dtype) and not is_finite(target):
            check_cast(name, target.cpu(), source.read(name, piece.hf))
        filled += target.numel()
        num_bytes += target.numel() * source.tensors[name].dtype.itemsize
    if placement.rule.shard == "vocab" and filled < tensor.numel():
        tensor[filled // tensor[0].numel() :].zero_()
    return num_bytes


def export_plan(
    family: Family,
    arch: Architecture,
    dtypes: torch.dtype | Mapping[str, torch.dtype],
    *,
    max_shard_bytes: float = 5e9,
    towers: Mapping[str, TensorSpec | TensorInfo] | None = None,
) -> SafetensorsPlan:
    """Plan the safetensors files; a mapping of dtypes also sets the order of the tensors.

    ``towers`` are the other tensors of a multimodal model, which keep their dtype.
    """
    others = towers or {}
    shapes = family.hf_shapes(arch)
    if isinstance(dtypes, torch.dtype):
        dtypes = dict.fromkeys(shapes, dtypes)
    shapes |= {name: tuple(meta.shape) for name, meta in others.items()}
    dtypes = {**dtypes, **{name: meta.dtype for name, meta in others.items()}}
    if missing := shapes.keys() - dtypes.keys():
        raise ValueError(f"no dtype for {min(missing)}")
    return SafetensorsPlan(
        ((name, dtype, shapes[name]) for name, dtype in dtypes.items() if name in shapes), max_shard_bytes
    )


@torch.no_grad()
def export_weights(
    live: Mapping[str, Tensor],
    family: Family,
    arch: Architecture,
    plan: SafetensorsPlan,
    folder: Path,
    *,
    layout: Layout,
    writes: bool = True,
    merge: MergeTensor | None = None,
    written: WrittenBlocks | None = None,
) -> int:
    """Write this rank's slices into the files that ``plan.create(folder)`` made, and sync them; returns bytes written.

    One data-parallel rank per shard writes (``writes``). With FSDP all data-parallel ranks must call it, and a bucket
    of tensors at a time is gathered. Of tensor-parallel replicas the first rank writes; aliases and vocabulary padding
    are not written, so the bytes of all ranks add up to ``plan.total_bytes``. ``merge`` returns the tensors to write;
    ``written`` gets the checksums of what is written.
    """
    num_bytes = 0
    failure: IsthmusError | None = None
    placements = checked_placements(live, family, arch, layout)
    tensors = full_tensors([live[placement.canonical] for placement in placements])
    try:
        with SafetensorsWriter(plan, folder, written) as writer:
            for placement, full in zip(placements, tensors, strict=True):
                tensor, merged = merged_tensor(placement.canonical, full, merge)
                if failure is not None or not writes:
                    continue
                try:
                    check_merge(placement.canonical, merged, tensor, "its adapter")
                    for name, index, values in _local_slices(placement, merged, arch, layout):
                        num_bytes += writer.write(name, index, values)
                except IsthmusError as error:  # raised below: other ranks merge the next tensors together with this one
                    failure = error
        if failure is not None:
            raise failure
    finally:
        for _ in tensors:  # after a failure, other ranks still wait in these all-gathers
            pass
    return num_bytes


def merged_tensor(name: str, tensor: Tensor, merge: MergeTensor | None) -> tuple[Tensor, Tensor]:
    """The tensor, and what ``merge`` makes of it."""
    merged = tensor if merge is None else merge(name, tensor)
    return merged.new_zeros(()) if isinstance(tensor, QuantizedWeight) else tensor, merged  # codes are finite


def _local_slices(
    placement: Placement, tensor: Tensor, arch: Architecture, layout: Layout
) -> list[tuple[str, tuple[slice, ...], Tensor]]:
    """(name, index, values) of this rank's elements of Hugging Face tensors; over all tp ranks each appears once."""
    rule = placement.rule
    if rule.alias or (rule.shard == "whole" and layout.rank_and_size(rule)[0]):
        return []
    slices = tensor_slices(rule, arch, layout, placement.expert)
    return [(placement.hf[piece.part], piece.hf, piece.view(tensor)) for piece in slices]


def checked_placements(
    live: Mapping[str, Tensor], family: Family, arch: Architecture, layout: Layout
) -> list[Placement]:
    """The placements of the live tensors; a ValueError if a name or shape is not that of the family."""
    placements = family.placements(arch)
    for name, tensor in live.items():
        if name not in placements:
            raise ValueError(f"live tensor {name} has no rule in family {family.name}")
        if tuple(tensor.shape) != (shape := local_shape(placements[name].rule, arch, layout)):
            raise ValueError(f"live tensor {name} is {tuple(tensor.shape)}, family {family.name} has {shape}")
    return [placements[name] for name in live]
