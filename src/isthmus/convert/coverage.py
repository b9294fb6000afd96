"""The whole model is checked before one byte of it is placed: every tensor that is wanted, none that is not."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from isthmus.convert.weight_source import WeightSource
from isthmus.errors import DataError, MissingInput
from isthmus.families.architecture import Architecture
from isthmus.families.family import Family

_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_SHOWN = 4


def check_coverage(source: WeightSource, family: Family, arch: Architecture) -> None:
    """Refuse a source whose tensors are not exactly those of the model.

    What may be present and is not read: buffers that old files carry (``family.ignorable``) and the output layer of a
    model whose config ties it to the embedding.

    Raises:
        MissingInput: there are no tensors at all.
        DataError: tensors are missing, unexpected, of another shape or not of a floating type that can be trained.
    """
    present, expected = source.tensors, family.hf_shapes(arch)
    if not present:
        raise MissingInput(
            f"{source} holds no safetensors weights. Give a folder with weights, make safetensors of .bin files "
            "(isthmus convert SRC DST --to hf --bin), or ask for random weights (model.init=random)."
        )
    unread = {name for name in present if name.endswith(family.ignorable)} | _given_up_when_tied(family, arch)
    missing = [name for name in expected if name not in present]
    unexpected = [name for name in present if name not in expected and name not in unread]
    both = [name for name in expected if name in present]
    misshapen = [
        f"{name} is {list(present[name].shape)}, not {list(expected[name])}"
        for name in both
        if tuple(present[name].shape) != expected[name]
    ]
    mistyped = [f"{name} is {present[name].dtype}" for name in both if present[name].dtype not in _DTYPES]
    if faults := told(missing=missing, unexpected=unexpected, misshapen=misshapen, mistyped=mistyped):
        raise DataError(f"{source} does not fit its config ({family.name}): {faults}. Mend config.json or the weights.")


def told(
    *,
    missing: Sequence[str] = (),
    unexpected: Sequence[str] = (),
    misshapen: Sequence[str] = (),
    mistyped: Sequence[str] = (),
) -> str:
    """What does not fit, the first few of each kind by name; empty if all does."""
    faults = [
        _list(missing, "missing"),
        _list(unexpected, "not expected"),
        _list(misshapen, "of another shape"),
        _list(mistyped, "of a type that cannot be trained"),
    ]
    return "; ".join(filter(None, faults))


def _given_up_when_tied(family: Family, arch: Architecture) -> set[str]:
    """Names that the same model would have if it were not tied."""
    if not arch.tie_embeddings:
        return set()
    rules = [rule for rule in family.rules if rule.unless == "tie_embeddings"]
    return {part.name for rule in rules for part in rule.parts}


def _list(names: Sequence[str], what: str) -> str:
    shown = ", ".join(names[:_SHOWN])
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{len(names)} {what}: {shown}{more}" if names else ""
