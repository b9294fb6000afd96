"""A run as another program was told to do it, in the settings of this one; and what is said that we do otherwise."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Remark:
    """Something that was said and has no setting of the same meaning here."""

    said: str
    """In the other program's words, such as ``GEMM_TUNING=1`` or ``--use-flash-attn``."""
    became: Literal["otherwise", "not at all", "mistaken"]
    """Whether it is done in another way, not done, or likely not what its writer meant."""
    why: str
    """A sentence for the user."""


@dataclass(frozen=True, slots=True)
class World:
    """The ranks that were asked for."""

    nnodes: int = 1
    node_rank: int = 0
    nproc_per_node: int | None = None
    """None: one for each GPU, as the scripts have it."""
    master_addr: str | None = None
    master_port: int | None = None


@dataclass(slots=True)
class Translation:
    """What a config file would say. It is checked where it is used, as every config is."""

    recipe: Literal["pretrain", "sft", "dpo"]
    settings: dict[str, Any] = field(default_factory=dict)
    """By dotted name (``parallel.tp``), in the values of the schema."""
    origins: dict[str, str] = field(default_factory=dict)
    """By dotted name: the words it is from."""
    remarks: list[Remark] = field(default_factory=list)
    world: World = World()

    def put(self, name: str, value: Any, said: str) -> None:
        """Set ``name`` since ``said`` says so; the later word wins."""
        self.settings[name], self.origins[name] = value, said

    def remark(self, said: str, became: Literal["otherwise", "not at all", "mistaken"], why: str) -> None:
        """Note what has no setting."""
        self.remarks.append(Remark(said, became, why))
