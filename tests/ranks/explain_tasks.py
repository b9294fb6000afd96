"""Tasks of the tests of explained steps: values that are not finite, and losses of samples."""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.utils import get_attr_wrapped_model

from isthmus.engine.nonfinite import find_nonfinite
from isthmus.engine.parallel.context_parallel import local_spans, local_tokens
from isthmus.engine.parallel.live_parameters import canonical_name
from isthmus.engine.parallel.process_groups import gather_objects
from ranks.tasks import Training, _digest, _poison, start


def first_nonfinite(*, where: str, kind: str, **layout: Any) -> dict[str, Any]:
    """Put NaN into one tensor; returns what was put where, and the findings of all ranks in their order.

    ``kind`` "output" and "output gradient": of module ``where``, in the rows of one sample. "weight": an element of
    parameter ``where``. "weight gradient": see ``_poison``.
    """
    training = start(**layout)
    batches = training.batches.step(0)
    sample = gather_objects(batches[-1].sample_ids[-1])[0]
    if kind == "weight gradient":
        _poison(training.stepper, now=True)
    for stage in training.stepper.model:
        decoder = get_attr_wrapped_model(stage, "decoder", return_model_obj=True)
        modules = {canonical_name(decoder, name): item for name, item in decoder.named_modules()}
        if kind.startswith("output") and where in modules:
            modules[where].register_forward_hook(_poisoned(training, decoder, sample, gradient="gradient" in kind))
        parameters = {canonical_name(decoder, name): item for name, item in decoder.named_parameters()}
        if kind == "weight" and where in parameters:
            parameters[where].data.view(-1)[0] = math.nan
    results = [
        finding for findings in gather_objects(find_nonfinite(training.stepper, batches)) for finding in findings
    ]
    results.sort(key=lambda finding: (*finding.order, finding.rank))
    losses = [loss for rank_losses in gather_objects(training.stepper.sample_losses(batches)) for loss in rank_losses]
    return {
        "sample": sample,
        "findings": [[item.kind, item.name, item.rank, list(item.samples)] for item in results],
        "losses": [item.sample for item in losses if not math.isfinite(item.loss)],
    }


def _poisoned(training: Training, decoder: Any, sample: int, *, gradient: bool) -> Any:
    """A forward hook that replaces the rows of ``sample`` by NaN, in the output or in its gradient."""
    batch = []
    decoder.register_forward_pre_hook(lambda _, args: batch.append(args[0]))

    def rows(tensor: torch.Tensor) -> torch.Tensor:
        now = batch[-1]
        ids = torch.tensor([*now.sample_ids, *[-1] * bool(now.padding)])
        full = ids.repeat_interleave(torch.tensor(now.lengths))
        local = local_tokens(full, local_spans(len(full)))
        ranks = len(local) // len(tensor)
        return (local.chunk(ranks)[parallel_state.get_tensor_model_parallel_rank() if ranks > 1 else 0]) == sample

    def replaced(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.masked_fill(rows(tensor)[:, None, None], math.nan)

    def hook(_module: Any, _args: Any, output: Any) -> Any:
        first, *rest = output if isinstance(output, tuple) else (output,)
        if gradient:
            if first.requires_grad:
                first.register_hook(replaced)
            return None
        first = replaced(first)
        return (first, *rest) if isinstance(output, tuple) else first

    return hook


def train_with_sample_losses(*, measures: bool, steps: int = 3, **layout: Any) -> dict[str, Any]:
    """Train and measure the losses of the samples before each update."""
    training = start(**layout)
    stepper = training.stepper
    result: dict[str, Any] = {"loss": [], "mean": [], "loss_tokens": []}
    for step in range(steps):
        batches = training.batches.step(step)
        measured: list[Any] = []
        if measures:
            stepper.before_update = lambda _, batches=batches, measured=measured: measured.extend(  # type: ignore[misc]
                rank for ranks in gather_objects(stepper.sample_losses(batches)) for rank in ranks
            )
        done = stepper.train_step(batches)
        result["loss"].append(done.loss)
        if measures:
            tokens = sum(rank.loss_tokens for rank in measured)
            per_token = layout.get("dpo") is None and layout.get("kto") is None and layout.get("reward") is None
            result["loss_tokens"].append([tokens, done.loss_tokens])
            result["mean"].append(sum(rank.loss for rank in measured) / (tokens if per_token else len(measured)))
    return result | {"digest": _digest(training)}
