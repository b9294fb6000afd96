"""The Hugging Face config of a model that Megatron-LM's arguments describe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from isthmus.convert.family_matching import fit
from isthmus.convert.legacy.model_from_args import architecture_of


def config_of(args: Mapping[str, Any]) -> dict[str, Any]:
    """``config.json`` of the family that says exactly this model.

    Args:
        args: as a checkpoint has them, by name, with ``padded_vocab_size`` and ``vocab_size``.

    Raises:
        DataError: an argument is missing or makes no sense.
        UsageError: one asks for what cannot be built here.
    """
    arch, _ = architecture_of(args)
    found = fit(arch)
    return found.family.to_hf_config(found.arch)
