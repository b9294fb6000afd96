"""Which config keys a family reads; any other key may be a typo."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from isthmus.families.family import Family
from isthmus.families.rules.common_settings import METADATA, ROPE, WINDOW

IGNORED_KEYS = (
    *("aux_loss_alpha", "seq_aux", "router_aux_loss_coef", "mtp_loss_scaling_factor", "max_window_layers"),
    *("chunk_size", "mamba_chunk_size", "use_mamba_kernels", "use_mambapy", "use_associative_scan"),
)
"""Keys of published configs that no family reads: training settings, settings of a disabled sliding window, and of
kernels of Mamba."""


class RecordingDict(dict[str, Any]):
    """A config that records the keys that are read."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self.read: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.read.add(str(key))
        return super().__contains__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.read.add(key)
        return super().get(key, default)


def keys_read(family: Family, hf: Mapping[str, Any]) -> set[str]:
    """All keys that ``family`` reads, present or absent in ``hf``."""
    recorded = RecordingDict(hf)
    if family.spelling is not None:
        newer = family.spelling(recorded)
        return recorded.read | keys_read(replace(family, spelling=None), newer)
    family.to_architecture(recorded)
    # Rotary settings are read from a copy, so they are not recorded.
    family.read_dropout(recorded)
    return recorded.read | family.fixed.keys() | {*ROPE, *WINDOW, *family.rope_names.values()}


def is_metadata(key: str) -> bool:
    """Whether a key has no effect on tensors and logits, such as token ids."""
    return METADATA.fullmatch(key) is not None
