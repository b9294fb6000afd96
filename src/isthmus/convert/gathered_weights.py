"""Whole Hugging Face tensors of a live model, gathered in buckets among the ranks that have their parts.

The ranks of a replica of the model exchange its tensors (:mod:`isthmus.engine.parallel.replica_exchange`). Each knows
what the others have, so that every element is sent by one rank, in the dtype of the Hugging Face tensor.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from isthmus.convert.online import MergeTensor, checked_placements, merged_tensor
from isthmus.engine.parallel.process_groups import gather_objects
from isthmus.engine.parallel.replica_exchange import PartExchange, replica_group
from isthmus.engine.parallel.sharded_params import buckets, full_tensors
from isthmus.families.architecture import Architecture
from isthmus.families.family import Family, Placement
from isthmus.families.rules.rule import Shape
from isthmus.families.rules.shard import Layout, TensorSlice, tensor_slices
from isthmus.hf.tensors.finite import check_cast, check_merge


@torch.no_grad()
def full_weights(
    live: Mapping[str, Tensor],
    family: Family,
    arch: Architecture,
    dtypes: torch.dtype | Mapping[str, torch.dtype],
    *,
    layout: Layout,
    device: torch.device,
    rank0_only: bool = False,
    merge: MergeTensor | None = None,
    only: Collection[str] | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield every Hugging Face tensor by name, whole, on ``device``; a collective of all ranks.

    Experts come last. Memory is that of two buckets (with FSDP three), or of two copies of a larger tensor.

    Args:
        live: this rank's tensors by canonical name. Of those that several stages have, one has it.
        family: of the model.
        arch: of the model.
        dtypes: of the Hugging Face tensors.
        layout: of this rank.
        device: of the results.
        rank0_only: the other ranks yield nothing.
        merge: makes the tensor to export from a live one.
        only: canonical names; the Hugging Face tensors of these; None: of all.
    """
    checked_placements(live, family, arch, layout)  # before the first collective
    placements = [placed for placed in family.placements(arch).values() if not placed.rule.alias]
    placements = [placed for placed in placements if only is None or placed.canonical in only]
    for experts in (False, True):
        chosen = [placement for placement in placements if placement.rule.is_expert == experts]
        replica = _Replica(replica_group(experts=experts), live, family.hf_shapes(arch), dtypes, arch, layout, device)
        yield from replica.full_tensors(chosen, merge, rank0_only=rank0_only)


@dataclass(frozen=True, slots=True)
class _Unit:
    """All placements of some Hugging Face tensors: one, or those of all experts of a layer if a file stacks them."""

    placements: Sequence[Placement]
    names: Sequence[str]
    num_bytes: int


@dataclass(frozen=True, slots=True)
class _Slice:
    """A rectangle of a Hugging Face tensor, which one rank sends."""

    canonical: str
    name: str
    piece: TensorSlice
    dtype: torch.dtype
    shape: torch.Size

    @property
    def num_bytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


class _Replica:
    """The ranks that exchange tensors."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        live: Mapping[str, Tensor],
        shapes: Mapping[str, Shape],
        dtypes: torch.dtype | Mapping[str, torch.dtype],
        arch: Architecture,
        layout: Layout,
        device: torch.device,
    ) -> None:
        """A collective of the group."""
        self.group, self.live, self.arch, self.device = group, live, arch, device
        self._shapes, self._dtypes = shapes, dtypes
        local = layout, frozenset(live)
        self._ranks = [local] if group.size() == 1 else gather_objects(local, group)
        """Layout and names of the tensors of each rank."""

    def full_tensors(
        self, placements: Sequence[Placement], merge: MergeTensor | None, *, rank0_only: bool
    ) -> Iterator[tuple[str, Tensor]]:
        """As :func:`full_weights`."""
        units = list(self._units(placements))
        names = [name for unit in units for placed in unit.placements if (name := placed.canonical) in self.live]
        tensors = zip(names, full_tensors([self.live[name] for name in names]), strict=True)
        if rank0_only and dist.get_process_group_ranks(self.group)[0]:
            for _ in tensors:  # other ranks gather their shards
                pass
            return
        is_alone, exchange = self.group.size() == 1, PartExchange(self.group, self.device, first_only=rank0_only)
        for bucket in ([unit] for unit in units) if is_alone else buckets(units, lambda unit: unit.num_bytes):
            slices = self._slices([placed for unit in bucket for placed in unit.placements])
            local_slices = slices[self.group.rank()]
            if is_alone:
                targets = self._empty(bucket)
                views = [targets[part.name][part.piece.hf] for part in local_slices]
                self._fill(views, local_slices, tensors, bucket, merge)
            else:
                received = exchange.parts([sum(part.num_bytes for part in parts) for parts in slices])
                views = _views(received[self.group.rank()], local_slices)
                self._fill(views, local_slices, tensors, bucket, merge)
                if not exchange.run():
                    continue
                targets = self._empty(bucket)
                for parts, values in zip(slices, received, strict=True):
                    for part, view in zip(parts, _views(values, parts), strict=True):
                        targets[part.name][part.piece.hf] = view
            yield from targets.items()

    def _units(self, placements: Sequence[Placement]) -> Iterator[_Unit]:
        units: dict[tuple[str, ...], list[Placement]] = {}
        for placement in placements:
            units.setdefault(placement.hf, []).append(placement)
        assert len({name for hf in units for name in hf}) == sum(len({*hf}) for hf in units), "a tensor in two units"
        for hf, parts in units.items():
            names = list(dict.fromkeys(hf))
            yield _Unit(parts, names, sum(map(self._num_bytes, names)))

    def _holders(self, placement: Placement) -> Iterator[int]:
        return (rank for rank, (_, names) in enumerate(self._ranks) if placement.canonical in names)

    def _slices(self, placements: Sequence[Placement]) -> list[list[_Slice]]:
        """What each rank sends, so that every element is sent once."""
        result: list[list[_Slice]] = [[] for _ in self._ranks]
        loads = [0] * len(result)
        for placement in sorted(placements, key=lambda placed: placed.rule.shard == "whole"):
            owners: dict[int, int] = {}
            for rank in self._holders(placement):
                owners.setdefault(self._ranks[rank][0].rank_and_size(placement.rule)[0], rank)
            if placement.rule.shard == "whole":  # any of them can send it
                owners = {0: min(owners.values(), key=loads.__getitem__)} if owners else {}
            for rank in owners.values():
                parts = self._parts(placement, self._ranks[rank][0])
                result[rank] += parts
                loads[rank] += sum(part.num_bytes for part in parts)
        # Elements of two bytes before those of four would not begin at a multiple of four.
        return [sorted(parts, key=lambda part: -part.dtype.itemsize) for parts in result]

    def _parts(self, placement: Placement, layout: Layout) -> list[_Slice]:
        parts = []
        for piece in tensor_slices(placement.rule, self.arch, layout, placement.expert):
            name = placement.hf[piece.part]
            shape = torch.empty(self._shapes[name], device="meta")[piece.hf].shape
            parts.append(_Slice(placement.canonical, name, piece, self._dtype(name), shape))
        return parts

    def _fill(
        self,
        views: Sequence[Tensor],
        slices: Sequence[_Slice],
        tensors: Iterator[tuple[str, Tensor]],
        bucket: Sequence[_Unit],
        merge: MergeTensor | None,
    ) -> None:
        """Set ``views`` from this rank's tensors of the bucket, the next ones of ``tensors``."""
        by_name: dict[str, list[tuple[Tensor, _Slice]]] = {}
        for view, part in zip(views, slices, strict=True):
            by_name.setdefault(part.canonical, []).append((view, part))
        for placement in (placed for unit in bucket for placed in unit.placements if placed.canonical in self.live):
            canonical, full = next(tensors)
            assert canonical == placement.canonical
            tensor, merged = merged_tensor(canonical, full, merge)
            check_merge(canonical, merged, tensor, "its adapter")
            for view, part in by_name.get(canonical, ()):
                values = part.piece.view(merged)
                view.copy_(values)
                check_cast(part.name, view, values)

    def _empty(self, bucket: Sequence[_Unit]) -> dict[str, Tensor]:
        names = [name for unit in bucket for name in unit.names]
        return {name: torch.zeros(self._shapes[name], dtype=self._dtype(name), device=self.device) for name in names}

    def _dtype(self, name: str) -> torch.dtype:
        return self._dtypes if isinstance(self._dtypes, torch.dtype) else self._dtypes[name]

    def _num_bytes(self, name: str) -> int:
        return torch.Size(self._shapes[name]).numel() * self._dtype(name).itemsize


def _views(part: Tensor, slices: Sequence[_Slice]) -> list[Tensor]:
    """The elements of ``slices``, in their order, in the bytes of a part."""
    views, start = [], 0
    for piece in slices:
        end = start + piece.num_bytes
        views.append(part[start:end].view(piece.dtype).view(piece.shape))
        start = end
    return views
