"""An adapter of a Hugging Face linear layer, without Megatron-Core."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from isthmus.families.adapted_linears import HfLinear, name_of

Role = Literal["lora_A", "lora_B", "lora_magnitude_vector"]
"""PEFT's names of an adapter's tensors."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """``scale * B @ A`` is added to the weight of ``linear``."""

    linear: HfLinear
    rank: int
    scale: float

    def shape(self, role: Role) -> tuple[int, ...]:
        """Shape of the tensor over all ranks."""
        shapes = {"lora_A": (self.rank, self.linear.inputs), "lora_B": (self.linear.out, self.rank)}
        return shapes.get(role, (self.linear.out,))


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSet:
    """All adapters of a model."""

    by_weight: Mapping[str, tuple[Adapter, ...]] = field(default_factory=dict)
    """Adapters by canonical name of the weight."""
    dropout: float = 0.0
    """Dropout rate of their inputs."""
    dora: bool = False
    lr_ratio: float = 1.0
    """LoRA+: learning rate of B and of vectors over that of other parameters."""

    @property
    def num_parameters(self) -> int:
        adapters = [adapter for weight_adapters in self.by_weight.values() for adapter in weight_adapters]
        return sum(math.prod(adapter.shape(role)) for adapter in adapters for role in self.roles)

    def summary(self) -> str:
        """Ranks and layers, for the log."""
        adapters = [adapter for weight_adapters in self.by_weight.values() for adapter in weight_adapters]
        names = ", ".join(dict.fromkeys(name_of(adapter.linear.module) for adapter in adapters))
        ranks = "/".join(map(str, sorted({adapter.rank for adapter in adapters})))
        kind = "DoRA" if self.dora else "LoRA"
        return f"{kind} of rank {ranks} on {len(adapters)} linear layers ({names}), {self.num_parameters:,} parameters"

    def described(self) -> list[str]:
        """One line per layer, to compare the adapters of two runs."""
        adapters = [adapter for weight_adapters in self.by_weight.values() for adapter in weight_adapters]
        kind = "DoRA" if self.dora else "LoRA"
        return sorted(
            f"{adapter.linear.module} {adapter.linear.expert or 0}: {kind} of rank {adapter.rank}, "
            f"scale {adapter.scale:.9g}"
            for adapter in adapters
        )

    @property
    def roles(self) -> tuple[Role, ...]:
        """The tensors that each adapter has."""
        return ("lora_A", "lora_B", "lora_magnitude_vector") if self.dora else ("lora_A", "lora_B")
