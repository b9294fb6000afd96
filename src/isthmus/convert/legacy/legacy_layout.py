"""The ranks of a legacy checkpoint: which files it consists of, and which of them has which part of the model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from isthmus.engine.checkpoint.checkpoint_names import expert_of, layer_of, renumbered
from isthmus.errors import UsageError
from isthmus.families.architecture import Architecture
from isthmus.families.rules.rule import Rule, Shape
from isthmus.families.rules.shard import Index, Layout, check_expert_sizes, check_tp_size, held, local_shape


@dataclass(frozen=True, slots=True)
class RankFile:
    """One file: the tensor-parallel rank, the pipeline stage, the rank among the experts, and that within an expert."""

    tp: int
    pp: int
    ep: int
    etp: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Sizes of a legacy checkpoint; a stage holds ``vpp`` chunks of layers, dealt out in turns."""

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    etp: int | None = None
    """Ranks that share one expert; None is as many as tp, as Megatron-LM has it."""

    @property
    def expert_tp(self) -> int:
        """Ranks that share one expert."""
        return self.etp if self.etp is not None else self.tp

    def check_sizes(self, arch: Architecture) -> None:
        """Refuse a grid that the model's tensors cannot be cut into.

        Raises:
            UsageError: naming what does not divide.
        """
        check_tp_size(arch, self.tp)
        if arch.moe is not None or self.ep > 1:
            check_expert_sizes(arch, self.ep, self.expert_tp)

    def check(self, arch: Architecture) -> None:
        """Refuse a grid that the model cannot be cut into evenly.

        Raises:
            UsageError: naming what does not divide.
        """
        self.check_sizes(arch)
        if arch.moe is None and self.etp is not None:
            raise UsageError(f"etp={self.etp} is for experts, and {arch.family} has none. Leave --etp out.")
        if self.vpp > 1 and self.pp == 1:
            raise UsageError(f"vpp={self.vpp} needs more than one pipeline stage. Give --pp, or leave --vpp out.")
        if arch.num_layers % (self.pp * self.vpp):
            cut = f"pp={self.pp}" + (f" times vpp={self.vpp}" if self.vpp > 1 else "")
            raise UsageError(f"{cut} does not divide num_layers={arch.num_layers} ({arch.family}). Use fewer.")
        self.files()

    def files(self) -> list[RankFile]:
        """Every file, stage after stage.

        Megatron-Core numbers the ranks of a stage with tp fastest for attention, and with etp fastest, then ep, for
        experts; a file is named after tp and ep alone.

        Raises:
            UsageError: two ranks that hold different parts of an expert would have the same file.
        """
        found: dict[tuple[int, int, int], RankFile] = {}
        for pp in range(self.pp):
            for rank in range(math.lcm(self.tp, self.ep * self.expert_tp)):
                etp, ep = rank % self.expert_tp, rank // self.expert_tp % self.ep
                file = RankFile(rank % self.tp, pp, ep, etp)
                if found.setdefault((file.tp, pp, file.ep), file) != file:
                    raise UsageError(
                        f"tp={self.tp}, ep={self.ep}, etp={self.expert_tp}: legacy files are named after tp and ep, "
                        "and two ranks with different parts of an expert would share one. Use an etp that divides tp."
                    )
        return list(found.values())

    def folder(self, file: RankFile) -> str:
        """Name of a rank's folder."""
        stage = f"_{file.pp:03d}" if self.pp > 1 else ""
        return f"mp_rank_{file.tp:02d}{stage}" + (f"_{file.ep:03d}" if self.ep > 1 else "")

    def flags(self) -> list[str]:
        """What Megatron-LM's command line has to say for these ranks."""
        sizes = {
            "--tensor-model-parallel-size": self.tp,
            "--pipeline-model-parallel-size": self.pp,
            "--num-virtual-stages-per-pipeline-rank": self.vpp,
            "--expert-model-parallel-size": self.ep,
        }
        told = [f"{flag} {size}" for flag, size in sizes.items() if size > 1]
        return told if self.expert_tp == self.tp else [*told, f"--expert-tensor-parallel-size {self.expert_tp}"]

    def layout(self, file: RankFile, padded_vocab_size: int) -> Layout:
        """How the tensors of a file are cut."""
        return Layout(
            tp_rank=file.tp,
            tp_size=self.tp,
            etp_rank=file.etp,
            etp_size=self.expert_tp,
            padded_vocab_size=padded_vocab_size,
        )

    def chunk(self, number: int) -> str:
        """Under which key of a rank's file a chunk of layers lies."""
        return "model" if self.vpp == 1 else f"model{number}"

    def layers_of(self, arch: Architecture) -> list[list[int]]:
        """Number of layers of each stage, chunk by chunk, when all have the same."""
        return [[arch.num_layers // (self.pp * self.vpp)] * self.vpp for _ in range(self.pp)]

    def place(self, canonical: str, arch: Architecture, layers: Sequence[Sequence[int]]) -> list[tuple[int, int, str]]:
        """(stage, chunk, name there) of a tensor; the output layer of a tied model only where there are stages.

        Args:
            canonical: the tensor.
            arch: the model.
            layers: as ``layers_of`` has them.
        """
        last = (self.pp - 1, self.vpp - 1)
        if (number := layer_of(canonical)) is None:
            tied_output = canonical == "output_layer.weight" and arch.tie_embeddings
            if tied_output and self.pp == 1:
                return []
            return [(0, 0, canonical)] if canonical.startswith("embedding.") else [(*last, canonical)]
        for chunk in range(self.vpp):
            for stage in range(self.pp):
                if number < layers[stage][chunk]:
                    return [(stage, chunk, renumbered(canonical, layer=number))]
                number -= layers[stage][chunk]
        raise ValueError(f"{canonical} lies behind the last of the layers {layers}")

    def on_rank(self, local: str, file: RankFile, arch: Architecture) -> str | None:
        """The tensor's name in a file of its stage, an expert's with its number there; None where it has others."""
        if (expert := expert_of(local)) is None or arch.moe is None:
            return local
        rank, number = divmod(expert, arch.moe.num_experts // self.ep)
        return renumbered(local, expert=number) if rank == file.ep else None


class Cuts:
    """Shapes of tensors in each rank's file, and what of the whole they hold: the same for all layers and experts."""

    def __init__(self, grid: Grid, arch: Architecture) -> None:
        """Nothing is known yet."""
        self._grid, self._arch = grid, arch
        self._known: dict[tuple[int, RankFile, int], tuple[Shape, list[tuple[Index, Index]]]] = {}

    def of(self, rule: Rule, file: RankFile, padded_vocab_size: int) -> tuple[Shape, list[tuple[Index, Index]]]:
        """See :func:`~isthmus.families.rules.shard.local_shape` and :func:`~isthmus.families.rules.shard.held`."""
        which = id(rule), file, padded_vocab_size
        if which not in self._known:
            layout = self._grid.layout(file, padded_vocab_size)
            self._known[which] = local_shape(rule, self._arch, layout), held(rule, self._arch, layout)
        return self._known[which]
