"""The parallel layout of a run."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, model_validator

from isthmus.config.schema.section import Count, Seconds, Section, refuse
from isthmus.errors import UsageError

_Shards = Annotated[bool | Count, AfterValidator(lambda value: False if value == 1 and value is not True else value)]
"""1 shards nothing, and True is all ranks."""


class ParallelConfig(Section):
    """Parallel layout; data parallelism uses the remaining ranks."""

    tp: Count = 1
    """Tensor parallel size: ranks that split each weight matrix."""
    sp: bool | None = None
    """Sequence parallelism: tp ranks also split activations outside of matmuls; null: on if tp > 1."""
    async_tp: bool = False
    """Overlap parts of matmuls with the communication of sequence parallelism, through the symmetric memory of a
    machine's GPUs. Others report that it is faster with many tokens and slower with few. It is untested on GPUs.
    """
    pp: Count = 1
    """Pipeline parallel size: stages that split the layers."""
    vpp: Count = 1
    """Virtual pipeline stages per pipeline rank (interleaved schedule), which makes ranks wait less."""
    cp: Count = 1
    """Context parallel size: ranks that split the tokens of each micro batch."""
    ep: Count = 1
    """Expert parallel size: ranks that split the experts of a layer."""
    etp: Count | None = None
    """Tensor parallel size of each expert; null: tp."""
    fsdp: _Shards = False
    """Fully sharded data parallelism: data and context parallel ranks split weights, gradients and optimizer state. A
    number of ranks that divides them (HSDP): groups of so many neighbouring ranks split them, and each group has all.
    """
    fsdp_reduce: Literal["micro_batch", "step"] = "micro_batch"
    """When fsdp reduces gradients: after each micro batch, or after the last one of a step, which communicates less and
    keeps the float32 gradients of the whole model on each rank: 4 bytes per parameter, divided by tp.
    """
    elastic: bool = False
    """Use as many ranks as a data parallel size that divides train.global_batch_size allows: a run continues with fewer
    or more machines, with the same batches. Other ranks end, with exit code 0; micro batches may become smaller.
    """
    join_timeout_s: Seconds = 600.0
    """Seconds that a rank waits for the others at the start."""
    timeout_s: Seconds = 600.0
    """Seconds that a rank waits for another one in a collective, until the run ends. A rank whose process or machine is
    lost is noticed earlier, after 90 seconds at most.
    """
    overlap_grad_reduce: bool | None = None
    """Overlap the gradient reduction over data parallel ranks with the backward pass; null: on GPUs, not on CPUs."""
    overlap_param_gather: bool | None = None
    """Overlap the gathering of updated weights with the next forward pass; null: as overlap_grad_reduce."""

    @property
    def sequence_parallel(self) -> bool:
        """Whether sequence parallelism is on, with null resolved."""
        return self.tp > 1 if self.sp is None else self.sp

    @property
    def expert_tp(self) -> int:
        """Tensor parallel ranks of each expert, with null resolved."""
        return self.tp if self.etp is None else self.etp

    def dp(self, world_size: int) -> int:
        """Data parallel ranks of ``world_size`` ranks."""
        return world_size // (self.tp * self.pp * self.cp)

    def shards(self, world_size: int) -> int:
        """Ranks of ``world_size`` that split the weights of a tensor parallel rank with fsdp; 1 without it."""
        return self.dp(world_size) * self.cp if self.fsdp is True else int(self.fsdp) or 1

    def describe(self, world_size: int) -> str:
        """The layout of ``world_size`` ranks in one line, such as ``tp=2 +sp pp=1 dp=4``."""
        parts = [f"tp={self.tp}{' +sp' if self.sequence_parallel else ''}", f"pp={self.pp}"]
        parts += [f"{name}={size}" for name, size in (("vpp", self.vpp), ("cp", self.cp), ("ep", self.ep)) if size > 1]
        parts += [f"etp={self.etp}"] if self.expert_tp != self.tp else []
        fsdp = "" if not self.fsdp else " +fsdp" if self.fsdp is True else f" +fsdp={self.fsdp}"
        return " ".join([*parts, f"dp={self.dp(world_size)}{fsdp}"])

    def check_world_size(self, world_size: int) -> None:
        """Refuse a number of ranks that the layout does not divide.

        Raises:
            UsageError: naming a number of ranks that it divides.
        """
        needed = self.tp * self.pp * self.cp
        if world_size % needed:
            cp = f" x cp={self.cp}" if self.cp > 1 else ""
            lower = "parallel.tp or parallel.pp" if self.cp == 1 else "parallel.tp, parallel.pp or parallel.cp"
            raise UsageError(
                f"tp={self.tp} x pp={self.pp}{cp} = {needed} ranks do not divide the {world_size} ranks "
                f"of this run. Start a multiple of {needed} (--nproc {needed}), or lower {lower}."
            )
        replicas = self.dp(world_size) * self.cp
        if replicas % self.shards(world_size):
            fitting = [str(size) for size in range(2, replicas + 1) if replicas % size == 0]
            hint = f"Use {' or '.join(fitting)}" if fitting else "Leave it out"
            raise UsageError(
                f"parallel.fsdp={self.fsdp} does not divide the dp x cp = {replicas} ranks that it shards over. "
                f"{hint}, or start another number of ranks."
            )
        expert_ranks = self.expert_tp * self.ep
        if (world_size // self.pp) % expert_ranks:
            raise UsageError(
                f"etp={self.expert_tp} x ep={self.ep} = {expert_ranks} ranks do not divide the "
                f"{world_size // self.pp} ranks of a stage. Start a multiple of {expert_ranks * self.pp} ranks, "
                "or lower parallel.ep or parallel.etp."
            )

    @property
    def length_multiple(self) -> int:
        """Packed sequences have a multiple of this many tokens: each cp rank has two equal chunks, split over tp."""
        return self.tp * (2 * self.cp if self.cp > 1 else 1)

    @model_validator(mode="after")
    def _sizes_fit(self) -> ParallelConfig:
        if self.sp and self.tp == 1:
            refuse("sp", "sp=true needs tp > 1, got tp=1; set parallel.tp, or leave parallel.sp out")
        if self.vpp > 1 and self.pp == 1:
            refuse("vpp", f"vpp={self.vpp} needs pp > 1, got pp=1; set parallel.pp, or leave parallel.vpp out")
        for name in ("overlap_grad_reduce", "overlap_param_gather"):
            if self.fsdp and getattr(self, name) is not None:
                refuse(name, f"fsdp always overlaps its communication, got {name}; leave parallel.{name} out")
        if self.fsdp_reduce == "step" and not self.fsdp:
            refuse(
                "fsdp_reduce",
                "fsdp_reduce=step needs fsdp, got fsdp=false: without it gradients are reduced once per step; leave "
                "parallel.fsdp_reduce out",
            )
        if self.overlap_param_gather and self.overlap_grad_reduce is False:
            refuse(
                "overlap_param_gather",
                "overlap_param_gather=true needs overlap_grad_reduce, got false; leave one of them out",
            )
        return self
