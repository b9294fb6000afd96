"""Small random models with which mappings are tested, and the tests."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from isthmus.convert.online import import_weights
from isthmus.errors import UsageError
from isthmus.families.family import Family
from isthmus.families.rules.shard import unsharded
from isthmus.hf.model_folder import ModelFolder
from isthmus.hf.tiny_model import save_random_model, saved_model_logits
from isthmus.platforms.detect import detect

TOLERANCE = 1e-4
"""Largest difference of float32 logits; logits of a probe model are of order one."""
_LENGTHS = (37, 23)
"""Longer than any window and original context of a probe model."""
_SMALL_WEIGHTS = 0.01
"""Scale of weights with which activations are about as small as the epsilons of norms."""
DEEP_SCALE = 0.5
"""Scale of weights of a model with many layers, in which rounding errors grow."""
_LARGE_WEIGHTS = 8.0
"""Scale of weights with which logits and scores of attention reach usual caps and bounds, about 10 to 50."""
_LARGE_TOLERANCE = 1e-2
"""Largest relative difference then: rounding errors of large scores are large, effects of a bound are larger."""
_MIN_EFFECT = 1e-3
"""Smallest change of the logits that counts as an effect."""
Sizes = TypeVar("Sizes")


@dataclass(frozen=True, slots=True)
class ProbeModel:
    """A small model on disk, with the logits of transformers for some samples."""

    folder: ModelFolder
    samples: list[Tensor]
    logits: list[Tensor]

    @classmethod
    def open(cls, path: Path) -> ProbeModel:
        folder = ModelFolder.open(path)
        generator = torch.Generator().manual_seed(0)
        vocab_size = (folder.config.get("text_config") or folder.config)["vocab_size"]
        samples = [torch.randint(3, vocab_size, (length,), generator=generator) for length in _LENGTHS]
        return cls(folder, samples, saved_model_logits(path, samples))

    @classmethod
    def build(cls, path: Path, config: Mapping[str, Any], seed: int, *, scale: float = 1.5) -> ProbeModel:
        """A random model of this config, saved to ``path``; UsageError if transformers cannot build or run it."""
        save_random_model(path, config, seed, scale=scale)
        return cls.open(path)

    def with_small_weights(self, path: Path) -> ProbeModel:
        """Another model of this config, in which epsilons of norms matter."""
        return self.build(path, self.folder.config, 4, scale=_SMALL_WEIGHTS)

    def with_large_weights(self, path: Path) -> ProbeModel | None:
        """Another model of this config, in which caps and bounds matter; None if its logits are not finite."""
        model = self.build(path, self.folder.config, 6, scale=_LARGE_WEIGHTS)
        return model if all(logits.isfinite().all() for logits in model.logits) else None


def build_first(
    folder: Path,
    choices: Sequence[Sizes],
    config: Callable[[Sizes], Mapping[str, Any]],
    seed: int,
    *,
    scale: float = 1.5,
) -> tuple[ProbeModel, Sizes]:
    """A probe model of the first sizes with which it can be built and run."""
    failures = []
    for number, sizes in enumerate(choices):
        try:
            return ProbeModel.build(
                folder.with_name(f"{folder.name}-{number}"), config(sizes), seed, scale=scale
            ), sizes
        except UsageError as error:
            failures.append(error)
    raise failures[-1]


def proven(first: float, second: float) -> str:
    """What the differences of logits of two probe models show."""
    return f"proven: logits agree to {first:.1e} and, with other sizes, to {second:.1e}; every tensor affects them"


@torch.no_grad()
def logits_difference(family: Family, probe: ProbeModel) -> float:
    """Largest difference between the logits of transformers and of Megatron-Core with this family."""
    return max_difference(_logits(_load(family, probe), probe), probe.logits)


def relative_difference(family: Family, probe: ProbeModel) -> float:
    """:func:`logits_difference` over the largest logit."""
    return logits_difference(family, probe) / max(logits.abs().max().item() for logits in probe.logits)


def large_difference(family: Family, large: ProbeModel | None) -> str | None:
    """What a model with large weights shows: None, or a difference that only a cap or bound explains."""
    if large is None or (difference := relative_difference(family, large)) <= _LARGE_TOLERANCE:
        return None
    return (
        f"in a model with large weights, where caps and bounds matter, logits differ by {difference:.1e} of the largest"
    )


def _load(family: Family, probe: ProbeModel) -> Any:
    from isthmus.engine.decoder.decoder import build_model
    from isthmus.engine.decoder.model_config import transformer_config
    from isthmus.engine.parallel.live_parameters import live_tensors

    arch = family.to_architecture(probe.folder.config)
    device = torch.device(detect().device_type)
    model = build_model(arch, transformer_config(arch, dtype=torch.float32, device=device)).eval()
    live = live_tensors(model)
    if unused := sorted(family.placements(arch).keys() - live.keys() - {"output_layer.weight"}):
        raise ValueError(f"{unused[0]} is not a tensor of this decoder")
    import_weights(live, family, arch, probe.folder, layout=unsharded(arch))
    return model


def _logits(model: Any, probe: ProbeModel) -> list[Tensor]:
    from isthmus.data.batching.packed_batch import PackedBatch

    device = next(model.parameters()).device
    batch = PackedBatch.for_inference([sample.to(device) for sample in probe.samples])
    return list(model(batch).float().cpu().split(batch.lengths))


def max_difference(ours: list[Tensor], theirs: list[Tensor]) -> float:
    """Infinite if a difference is NaN."""
    differences = [(a - b).abs().max().item() for a, b in zip(ours, theirs, strict=True)]
    return float("inf") if any(map(math.isnan, differences)) else max(differences)


@torch.no_grad()
def check_effects(family: Family, probe: ProbeModel) -> None:
    """Raise a UsageError if a tensor hardly affects the logits: its mapping is unverified then."""
    from isthmus.engine.parallel.live_parameters import live_tensors

    model = _load(family, probe)
    effects: dict[str, float] = {}
    for name, tensor in live_tensors(model).items():
        # The experts of a layer count as one: the router may not use all of them.
        alike = re.sub(r"local_experts\.\d+\.", "local_experts.*.", name)
        original = tensor.clone()
        for changed in (original.roll(1), -original):
            if effects.get(alike, 0.0) < _MIN_EFFECT:
                tensor.copy_(changed)
                effects[alike] = max(effects.get(alike, 0.0), max_difference(_logits(model, probe), probe.logits))
        tensor.copy_(original)
    for name, effect in effects.items():
        if effect < _MIN_EFFECT:
            raise UsageError(f"{name} changes the logits of a probe model by only {effect:.1e}, which proves nothing.")
