"""Parameter groups: weights with their own learning rate, and the matrices that Muon updates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from isthmus.config.schema.optim import OptimConfig
from isthmus.engine.parallel.live_parameters import live_parameters
from isthmus.families.family import Family
from isthmus.families.matched_tensors import hidden_matrices, values_by_pattern


def mark_parameters(model: Sequence[Any], optim: OptimConfig, family: Family) -> None:
    """Set ``lr_multiplier`` and ``by_muon`` of the parameters, which :func:`group_overrides` reads.

    Other code may set ``lr_multiplier`` of parameters that are no tensors of the family, and ``without_decay`` of
    parameters with several axes that are no weight matrices.
    """
    decoder = model[0].module
    architecture = decoder.architecture
    multipliers = values_by_pattern(
        family, architecture, optim.lr_multipliers, "optim.lr_multipliers", frozen=decoder.frozen
    )
    matrices = hidden_matrices(family, architecture) if optim.optimizer == "muon" else {}
    for name, parameter in live_parameters(list(model)).items():
        marked: Any = parameter
        if name in multipliers:
            marked.lr_multiplier = multipliers[name]
        if name in matrices:
            marked.by_muon = True


def group_overrides(model: Sequence[nn.Module], optim: OptimConfig, settings: Any) -> dict[str, Any]:
    """Arguments of ``get_megatron_optimizer`` for the marked parameters; none without them.

    ``settings`` is Megatron-Core's ``OptimizerConfig``.
    """
    groups = {_override(parameter, optim) for stage in model for parameter in stage.parameters()} - {()}
    if not groups:
        return {}
    from megatron.core.optimizer import get_standard_config_overrides
    from megatron.core.optimizer.optimizer_config import ParamKey, ParamPredicate

    overrides = get_standard_config_overrides(settings)
    for group in groups:

        def matches(parameter: nn.Parameter, group: tuple[tuple[str, Any], ...] = group) -> bool:
            return _override(parameter, optim) == group

        overrides[ParamKey(predicate=ParamPredicate(name=str(group), fn=matches))] = dict(group)  # type: ignore
    return {"config_overrides": overrides}


def _override(parameter: nn.Parameter, optim: OptimConfig) -> tuple[tuple[str, Any], ...]:
    """The entries in which the group of this parameter differs from others."""
    by_muon = hasattr(parameter, "by_muon")
    lr = optim.muon_lr if by_muon and optim.muon_lr is not None else optim.lr
    lr *= getattr(parameter, "lr_multiplier", 1.0)
    override: dict[str, Any] = {"muon": True} if by_muon else {}
    if hasattr(parameter, "without_decay"):
        override["wd_mult"] = 0.0
    if lr != optim.lr:
        override |= {"max_lr": lr, "min_lr": optim.min_lr * (lr / optim.lr)}
    return tuple(override.items())
