"""Tasks of rank pools: Muon beside torch's, on the Hugging Face matrices."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from isthmus.engine.optim.optimizer import chain, local_shards
from isthmus.engine.parallel.live_parameters import live_parameters, live_tensors
from isthmus.families.family import Placement
from isthmus.families.matched_tensors import hidden_matrices, trained_tensors
from isthmus.families.rules.shard import tensor_slices
from ranks.tasks import Training, start


def difference_to_torch(*, steps: int, **settings: Any) -> dict[str, Any]:
    """Largest difference of weights to ``torch.optim.Muon`` and ``AdamW`` with the same gradients, on one rank."""
    training = start(**settings)
    plan, stepper = training.model.plan, training.stepper
    main_weights = {name: main for entry in chain(stepper.optimizer) for name, main in _mains(training, entry)}
    placements = trained_tensors(plan.family, plan.architecture)
    matrices = hidden_matrices(plan.family, plan.architecture)
    copies = {
        name: [torch.nn.Parameter(part.clone()) for part in _parts(training, placements[name], main)]
        for name, main in main_weights.items()
    }
    adamw = {name: parts for name, parts in copies.items() if name not in matrices}
    decays = {name: parts[0].dim() > 1 and not name.endswith("A_log") for name, parts in adamw.items()}
    shared: dict[str, Any] = {"lr": 3e-3, "weight_decay": 0.1}
    references: list[torch.optim.Optimizer] = [
        torch.optim.Muon(
            [part for name in matrices for part in copies[name]], adjust_lr_fn="match_rms_adamw", **shared
        ),
        torch.optim.AdamW(
            [
                {"params": [part for name, parts in adamw.items() if decays[name] for part in parts]},
                {
                    "params": [part for name, parts in adamw.items() if not decays[name] for part in parts],
                    "weight_decay": 0.0,
                },
            ],
            betas=(0.9, 0.95), **shared,
        ),
    ]  # fmt: skip
    muon_step = stepper.optimizer.muon.step

    def step_all() -> None:
        for name, main in main_weights.items():
            for part, gradient in zip(copies[name], _parts(training, placements[name], main.grad), strict=True):
                part.grad = gradient.clone()
        for reference in references:
            reference.step()
        muon_step()

    worst: dict[str, float] = {}
    with patch.object(stepper.optimizer.muon, "step", step_all):
        for step in range(steps):
            stepper.train_step(training.batches.step(step))
            for name, main in main_weights.items():
                parts = zip(copies[name], _parts(training, placements[name], main), strict=True)
                worst[name] = max((ours - part.detach()).abs().max().item() for part, ours in parts)
    return {"worst": worst, "matrices": len(matrices)}


def _mains(training: Training, optimizer: Any) -> Any:
    names = {parameter: name for name, parameter in live_parameters(training.model.stages).items()}
    return [(names[parameter], main) for parameter, main, _ in local_shards(optimizer)]


def _parts(training: Training, placement: Placement, main: Tensor) -> list[Tensor]:
    """The Hugging Face tensors in a canonical tensor, each apart, [out, in]."""
    plan, layout = training.model.plan, training.model.layout
    shape = placement.rule.canonical_shape(plan.architecture)
    full = main.detach().view(-1, *shape[1:])
    parts: dict[int, list[Tensor]] = {}
    for piece in tensor_slices(placement.rule, plan.architecture, layout, placement.expert):
        parts.setdefault(piece.part, []).append(full[piece.local])
    return [torch.cat(pieces) for _, pieces in sorted(parts.items())]


def changes(**settings: Any) -> dict[str, float]:
    """Largest change of each weight in the first step."""
    training = start(**settings)
    before = {name: weight.clone() for name, weight in live_tensors(training.model.stages).items()}
    training.stepper.train_step(training.batches.step(0))
    result = live_tensors(training.model.stages)
    return {"lr": training.stepper.lr} | {name: (result[name] - was).abs().max().item() for name, was in before.items()}
