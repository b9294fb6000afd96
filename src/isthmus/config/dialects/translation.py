"""A run of another program as Isthmus settings, with remarks on options without an equal setting."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

Status: TypeAlias = Literal["different", "unsupported", "mistake"]
"""``mistake``: the option probably does not have the effect that its author expects."""


@dataclass(frozen=True, slots=True)
class OptionRemark:
    option: str
    """As in the other program: ``GEMM_TUNING=1``, ``--use-flash-attn``."""
    status: Status
    reason: str


@dataclass(frozen=True, slots=True)
class World:
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
    """The option of each setting, by dotted name."""
    remarks: list[OptionRemark] = field(default_factory=list)
    world: World = World()

    def put(self, name: str, value: Any, origin: str) -> None:
        """A later call wins."""
        self.settings[name], self.origins[name] = value, origin

    def remark(self, option: str, status: Status, reason: str) -> None:
        self.remarks.append(OptionRemark(option, status, reason))
