"""A run of another program, as settings of Isthmus, with remarks on the options that have no equal setting."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

Status: TypeAlias = Literal["different", "unsupported", "mistake"]
"""What happens to an option without an equal setting: Isthmus does it in another way, or does not do it, or it is
likely not what its writer meant."""


@dataclass(frozen=True, slots=True)
class OptionRemark:
    """An option that has no setting of the same meaning."""

    option: str
    """As the other program spells it: ``GEMM_TUNING=1``, ``--use-flash-attn``."""
    status: Status
    reason: str
    """A sentence for the user."""


@dataclass(frozen=True, slots=True)
class World:
    """The ranks of the run."""

    nnodes: int = 1
    node_rank: int = 0
    nproc_per_node: int | None = None
    """None: one rank per GPU."""
    master_addr: str | None = None
    master_port: int | None = None


@dataclass(slots=True)
class Translation:
    """The content of a config file, not validated yet."""

    recipe: Literal["pretrain", "sft", "dpo"]
    settings: dict[str, Any] = field(default_factory=dict)
    """By dotted name (``parallel.tp``), in the types of the schema."""
    origins: dict[str, str] = field(default_factory=dict)
    """By dotted name: the option that it comes from."""
    remarks: list[OptionRemark] = field(default_factory=list)
    world: World = World()

    def put(self, name: str, value: Any, origin: str) -> None:
        """Set ``name``; a later call wins."""
        self.settings[name], self.origins[name] = value, origin

    def remark(self, option: str, status: Status, reason: str) -> None:
        """Add a remark."""
        self.remarks.append(OptionRemark(option, status, reason))
