"""A small copy of a model, run by transformers and by Megatron-Core side by side."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from isthmus.convert.online import import_weights
from isthmus.errors import UsageError
from isthmus.families.family import Family
from isthmus.families.rules.shard import whole
from isthmus.hf.model_folder import ModelFolder
from isthmus.hf.shrunken_model import copy_logits

_LENGTHS = (37, 23)
"""Tokens of the samples: more than any window and any original length of a copy."""
_LEAST_EFFECT = 1e-3
"""How much every tensor of a copy has to matter to its logits, or nothing would be proven about it."""


@dataclass(frozen=True, slots=True)
class Copy:
    """A small model on the disk, and what transformers makes of some samples."""

    folder: ModelFolder
    samples: list[Tensor]
    logits: list[Tensor]

    @classmethod
    def open(cls, path: Path) -> Copy:
        """Run a saved copy."""
        folder = ModelFolder.open(path)
        generator = torch.Generator().manual_seed(0)
        vocabulary = folder.config["vocab_size"]
        samples = [torch.randint(3, vocabulary, (length,), generator=generator) for length in _LENGTHS]
        return cls(folder, samples, copy_logits(path, samples))


@torch.no_grad()
def difference(family: Family, copy: Copy) -> float:
    """The largest difference between transformers' logits and those of a decoder that the family fills.

    Raises:
        IsthmusError, ValueError: the family does not fit the copy's tensors, or is no model that can be built.
    """
    return furthest(_logits(_filled(family, copy), copy), copy.logits)


def _filled(family: Family, copy: Copy) -> Any:
    from isthmus.engine.megatron_model import build_model, live_tensors
    from isthmus.engine.model_config import transformer_config

    arch = family.to_architecture(copy.folder.config)
    model = build_model(arch, transformer_config(arch, dtype=torch.float32)).eval()
    live = live_tensors(model)
    if unread := sorted(family.placements(arch).keys() - live.keys() - {"output_layer.weight"}):
        raise ValueError(f"{unread[0]} is no tensor of this decoder")
    import_weights(live, family, arch, copy.folder, layout=whole(arch))
    return model


def _logits(model: Any, copy: Copy) -> list[Tensor]:
    from isthmus.engine.layers.attention import Segments

    device = next(model.parameters()).device
    line, lengths = torch.cat(copy.samples).to(device), [len(sample) for sample in copy.samples]
    positions = torch.cat([torch.arange(length) for length in lengths]).to(device)
    return list(model(line, positions, Segments(tuple(lengths))).float().cpu().split(lengths))


def furthest(ours: list[Tensor], theirs: list[Tensor]) -> float:
    """The largest difference between samples' logits; infinite where one is no number."""
    apart = max((mine - other).abs().max().item() for mine, other in zip(ours, theirs, strict=True))
    return apart if apart == apart else float("inf")


@torch.no_grad()
def check_effects(family: Family, copy: Copy) -> None:
    """Refuse a proof in which some tensor could be anything.

    Raises:
        UsageError: a tensor hardly matters to the logits of the copy.
    """
    from isthmus.engine.megatron_model import live_tensors

    model = _filled(family, copy)
    effects: dict[str, float] = {}
    for name, tensor in live_tensors(model).items():
        # An expert that no token of the samples visits is like the others of its layer, which stand for it.
        alike = re.sub(r"local_experts\.\d+\.", "local_experts.*.", name)
        if effects.get(alike, 0.0) >= _LEAST_EFFECT:
            continue
        kept = tensor.clone()
        tensor.copy_(tensor.roll(1))
        effects[alike] = max(effects.get(alike, 0.0), furthest(_logits(model, copy), copy.logits))
        tensor.copy_(kept)
    for name, effect in effects.items():
        if effect < _LEAST_EFFECT:
            raise UsageError(
                f"{name} changes the logits of a small copy by {effect:.1e} only, which proves nothing of it."
            )
