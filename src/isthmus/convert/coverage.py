"""Checks that a source has exactly the tensors of the model."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from isthmus.convert.weight_source import WeightSource
from isthmus.errors import DataError, MissingInput
from isthmus.families.architecture import Architecture
from isthmus.families.family import Family

_TRAINABLE = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
MAX_LISTED = 4
"""Tensors that an error message names."""


def check_coverage(source: WeightSource, family: Family, arch: Architecture) -> None:
    """Raise a MissingInput or DataError unless the source has exactly the tensors of the model.

    Ignored are buffers in old files (``family.ignorable``), tensors without effect (``family.unused``), those that are
    passed through, and an output layer that the config ties to the embedding.
    """
    present, expected = source.tensors, family.hf_shapes(arch)
    if not present:
        raise MissingInput(
            f"{source} has no safetensors weights. Give a folder with weights, convert .bin files to safetensors "
            "(isthmus convert SRC DST --to hf --bin), or use random weights (model.init=random)."
        )
    ignored = {name for name in present if name.endswith(family.ignorable)} | family.unused_tensors(arch)
    ignored |= family.copied_tensors(present) - expected.keys()
    if arch.head.tie_embeddings:
        ignored |= {part.name for rule in family.rules if rule.unless == "tie_embeddings" for part in rule.parts}
    both = [name for name in expected if name in present]
    problems = describe_problems(
        missing=[name for name in expected if name not in present],
        unexpected=[name for name in present if name not in expected and name not in ignored],
        misshapen=[
            f"{name} is {list(present[name].shape)}, not {list(expected[name])}"
            for name in both
            if tuple(present[name].shape) != expected[name]
        ],
        mistyped=[f"{name} is {present[name].dtype}" for name in both if present[name].dtype not in _TRAINABLE],
    )
    if problems:
        raise DataError(
            f"{source} does not match its config ({family.name}): {problems}. Correct config.json or the weights."
        )


def reject_mismatch(
    checkpoint: object, family: Family, missing: Sequence[str], unexpected: Sequence[str], misshapen: Sequence[str]
) -> None:
    """Raise a DataError if a Megatron checkpoint has tensors missing, unexpected or of another shape."""
    misshapen = list(dict.fromkeys(misshapen))
    if problems := describe_problems(missing=missing, unexpected=unexpected, misshapen=misshapen):
        raise DataError(
            f"{checkpoint} is not the {family.name} model that its config describes: {problems}. "
            "Give the matching config (--hf-like DIR), or fetch the checkpoint again."
        )


def describe_problems(
    *,
    missing: Sequence[str] = (),
    unexpected: Sequence[str] = (),
    misshapen: Sequence[str] = (),
    mistyped: Sequence[str] = (),
) -> str:
    """Count and first few names of each kind of problem; empty if there are none."""
    kinds = {
        "missing": missing,
        "not expected": unexpected,
        "of another shape": misshapen,
        "of a type that cannot be trained": mistyped,
    }
    return "; ".join(f"{len(names)} {kind}: {first_few(names)}" for kind, names in kinds.items() if names)


def first_few(items: Sequence[str], separator: str = ", ") -> str:
    more = f" and {len(items) - MAX_LISTED} more" if len(items) > MAX_LISTED else ""
    return separator.join(items[:MAX_LISTED]) + more
