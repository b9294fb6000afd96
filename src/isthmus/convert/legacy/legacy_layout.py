"""The layout of a legacy checkpoint: its files, and the part of the model in each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from isthmus.engine.tensor_names import expert_of, layer_of, renumbered
from isthmus.errors import UsageError
from isthmus.families.architecture import Architecture
from isthmus.families.rules.rule import Rule, Shape
from isthmus.families.rules.shard import Index, Layout, check_expert_sizes, check_tp_size, local_shape, owned_slices


@dataclass(frozen=True, slots=True)
class RankFile:
    """Parallel ranks that identify a file."""

    tp: int
    pp: int
    ep: int
    etp: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LegacyLayout:
    """Parallel sizes of a legacy checkpoint; a pipeline stage has ``vpp`` interleaved chunks of layers."""

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    etp: int | None = None
    """None is ``tp``, as in Megatron-LM."""

    @property
    def expert_tp(self) -> int:
        return self.etp if self.etp is not None else self.tp

    def check_sizes(self, arch: Architecture) -> None:
        """Raise a UsageError if the sizes do not divide the model's tensors."""
        check_tp_size(arch, self.tp)
        if arch.moe is not None or self.ep > 1:
            check_expert_sizes(arch, self.ep, self.expert_tp)

    def check(self, arch: Architecture) -> None:
        """Raise a UsageError if the sizes do not divide the model's tensors and layers."""
        self.check_sizes(arch)
        if arch.moe is None and self.etp is not None:
            raise UsageError(f"etp={self.etp} is for experts, and {arch.family} has none. Omit --etp.")
        if self.vpp > 1 and self.pp == 1:
            raise UsageError(f"vpp={self.vpp} needs more than one pipeline stage. Give --pp, or leave --vpp out.")
        layers = f"num_layers={arch.num_layers} ({arch.family})"
        if arch.num_layers % (self.pp * self.vpp) and self.vpp > 1:
            raise UsageError(
                f"pp={self.pp} times vpp={self.vpp} does not divide {layers}. Use fewer; without vpp the first and the "
                "last stage may have other numbers of layers."
            )
        if arch.num_layers < self.pp:
            raise UsageError(f"pp={self.pp} is more than {layers}. Use fewer stages.")
        self.files()

    def files(self) -> list[RankFile]:
        """Every file, stage after stage; a UsageError if ranks with different expert shards would share a file.

        Megatron-Core numbers the ranks of a stage with tp fastest for attention, and with etp, then ep, for experts.
        File names contain only tp and ep.
        """
        rank_files: dict[tuple[int, int, int], RankFile] = {}
        for pp in range(self.pp):
            for rank in range(math.lcm(self.tp, self.ep * self.expert_tp)):
                etp, ep = rank % self.expert_tp, rank // self.expert_tp % self.ep
                file = RankFile(rank % self.tp, pp, ep, etp)
                if rank_files.setdefault((file.tp, pp, file.ep), file) != file:
                    raise UsageError(
                        f"tp={self.tp}, ep={self.ep}, etp={self.expert_tp}: legacy files are named by tp and ep, "
                        "so two ranks with different parts of an expert would share one. Use an etp that divides tp."
                    )
        return list(rank_files.values())

    def folder(self, file: RankFile) -> str:
        stage = f"_{file.pp:03d}" if self.pp > 1 else ""
        return f"mp_rank_{file.tp:02d}{stage}" + (f"_{file.ep:03d}" if self.ep > 1 else "")

    def outer_stages(self, num_layers: int) -> tuple[int, int] | None:
        """Layers of the first and the last stage; None if all stages have equally many.

        Megatron-LM gives all stages between them the same number. This is the most even of these splits, with fewer
        layers beside the embedding and the output layer if there are several.
        """
        if num_layers % (self.pp * self.vpp) == 0:
            return None
        splits = ((middle, num_layers - middle * (self.pp - 2)) for middle in range(1, num_layers))
        _, outer = min(
            (split for split in splits if split[1] >= 2),
            key=lambda split: (max(split[0], -(-split[1] // 2)), -split[0]),
        )
        return outer - outer // 2, outer // 2

    def flags(self, num_layers: int) -> list[str]:
        first, last = self.outer_stages(num_layers) or (0, 0)
        sizes = {
            "--tensor-model-parallel-size": self.tp,
            "--pipeline-model-parallel-size": self.pp,
            "--num-virtual-stages-per-pipeline-rank": self.vpp,
            "--expert-model-parallel-size": self.ep,
        }
        flags = [f"{flag} {size}" for flag, size in sizes.items() if size > 1]
        if first:
            flags += [f"--decoder-first-pipeline-num-layers {first}", f"--decoder-last-pipeline-num-layers {last}"]
        return flags if self.expert_tp == self.tp else [*flags, f"--expert-tensor-parallel-size {self.expert_tp}"]

    def chunk_key(self, number: int) -> str:
        """Key of a chunk of layers in a file."""
        return "model" if self.vpp == 1 else f"model{number}"

    def layers_of(self, arch: Architecture) -> list[list[int]]:
        """Number of layers in each chunk of each stage."""
        if (outer := self.outer_stages(arch.num_layers)) is None:
            return [[arch.num_layers // (self.pp * self.vpp)] * self.vpp for _ in range(self.pp)]
        middle = (arch.num_layers - sum(outer)) // max(1, self.pp - 2)
        return [[outer[0]], *([middle] for _ in range(self.pp - 2)), [outer[1]]]

    def place(self, canonical: str, arch: Architecture, layers: Sequence[Sequence[int]]) -> list[tuple[int, int, str]]:
        """(stage, chunk, local name) of a tensor; empty for a tied output layer in a single stage.

        ``layers`` is the number of layers in each chunk of each stage.
        """
        last = (self.pp - 1, self.vpp - 1)
        if (number := layer_of(canonical)) is None:
            tied_output = canonical == "output_layer.weight" and arch.head.tie_embeddings
            if tied_output and self.pp == 1:
                return []
            return [(0, 0, canonical)] if canonical.startswith("embedding.") else [(*last, canonical)]
        for chunk in range(self.vpp):
            for stage in range(self.pp):
                if number < layers[stage][chunk]:
                    return [(stage, chunk, renumbered(canonical, layer=number))]
                number -= layers[stage][chunk]
        raise ValueError(f"{canonical} is beyond the last layer of {layers}")

    def on_rank(self, local: str, file: RankFile, arch: Architecture) -> str | None:
        """The name with the local expert number; None if the file does not have this expert."""
        if (expert := expert_of(local)) is None or arch.moe is None:
            return local
        rank, number = divmod(expert, arch.moe.num_experts // self.ep)
        return renumbered(local, expert=number) if rank == file.ep else None


class DataParallelExpertLayout(LegacyLayout):
    """MegaBlocks shards experts over the data parallel ranks: by their number, and by their width if ranks are left.

    A file is named by tp, data parallel and pipeline rank, in this order. Tensor parallel ranks have the same experts.
    """

    __slots__ = ()

    def files(self) -> list[RankFile]:
        ranks = [(etp, ep) for etp in range(self.expert_tp) for ep in range(self.ep)]
        return [RankFile(tp, pp, ep, etp) for pp in range(self.pp) for tp in range(self.tp) for etp, ep in ranks]

    def folder(self, file: RankFile) -> str:
        stage = f"_{file.pp:03d}" if self.pp > 1 else ""
        return f"mp_rank_{file.tp:02d}_{file.etp * self.ep + file.ep:03d}{stage}"


@cache  # layers share their rules
def local_slices(
    rule: Rule, arch: Architecture, layout: LegacyLayout, file: RankFile, padded_vocab_size: int
) -> tuple[Shape, list[tuple[Index, Index]]]:
    """Shape of a rank's shard, and pairs of (slice of the whole tensor, slice of the shard)."""
    sizes = {"tp_size": layout.tp, "etp_size": layout.expert_tp, "padded_vocab_size": padded_vocab_size}
    ranks = Layout(tp_rank=file.tp, etp_rank=file.etp, **sizes)
    return local_shape(rule, arch, ranks), owned_slices(rule, arch, ranks)
