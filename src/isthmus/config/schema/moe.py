"""How mixtures of experts are trained."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from isthmus.config.schema.section import Section

ROUTER_LOSSES = ("aux_loss", "seq_aux_loss", "z_loss")
"""Settings that are coefficients of a loss of the router."""


class MoeConfig(Section):
    """How mixtures of experts are trained."""

    dispatcher: Literal["alltoall", "allgather"] = "alltoall"
    """How tokens reach experts on other ranks: sent to those they chose, or shown to all, which pays for few ranks."""
    capacity_factor: float | None = Field(default=None, gt=0)
    """Tokens an expert takes of each forward pass of a rank, over an even share; null: all, nothing is dropped."""
    aux_loss: float = Field(default=0.0, ge=0)
    """Coefficient of the load-balancing loss over each micro batch."""
    seq_aux_loss: float = Field(default=0.0, ge=0)
    """Coefficient of the load-balancing loss over each sample."""
    z_loss: float = Field(default=0.0, ge=0)
    """Coefficient of the loss that keeps the router's logits small."""
    expert_bias_update_rate: float = Field(default=0.0, ge=0)
    """What the bias of each expert's choice changes by a step, towards an even load; for models that have this bias."""

    @property
    def losses(self) -> tuple[str, ...]:
        """Names of the router losses with a coefficient above 0."""
        return tuple(name for name in ROUTER_LOSSES if getattr(self, name))
