"""Mixture-of-experts training."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from isthmus.config.schema.section import Section

ROUTER_LOSSES = ("aux_loss", "seq_aux_loss", "z_loss")
"""Settings that are coefficients of a loss of the router."""


class MoeConfig(Section):
    """Mixture-of-experts training."""

    dispatcher: Literal["alltoall", "allgather"] = "alltoall"
    """Token dispatch to experts on other ranks: all-to-all, or an all-gather, which is faster on few ranks."""
    capacity_factor: float | None = Field(default=None, gt=0)
    """Expert capacity relative to a uniform load, per micro batch; tokens beyond it are dropped. null: no limit."""
    aux_loss: float = Field(default=0.0, ge=0)
    """Coefficient of the load-balancing loss per micro batch."""
    seq_aux_loss: float = Field(default=0.0, ge=0)
    """Coefficient of the load-balancing loss per sample."""
    z_loss: float = Field(default=0.0, ge=0)
    """Coefficient of the router z-loss, which keeps router logits small."""
    expert_bias_update_rate: float = Field(default=0.0, ge=0)
    """Change per step of each expert's routing bias towards a uniform load, for models with this bias."""

    @property
    def losses(self) -> tuple[str, ...]:
        """Names of the router losses with a coefficient above 0."""
        return tuple(name for name in ROUTER_LOSSES if getattr(self, name))
