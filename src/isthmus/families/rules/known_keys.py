"""Which keys of a config a family looks at: what it says there counts, and a key beside them may be a slip."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from isthmus.families.discover.config_inference import ABOUT_ELSE, ROPE, WINDOW
from isthmus.families.family import Family

WITHOUT_BEARING = ("aux_loss_alpha", "seq_aux", "router_aux_loss_coef", "max_window_layers")
"""Keys that configs on the Hub have and that no family reads: of training, or of a window that is switched off."""


class _Watched(dict[str, Any]):
    """A config that remembers what it was asked for."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self.asked: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.asked.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.asked.add(str(key))
        return super().__contains__(key)

    def get(self, key: str, default: Any = None) -> Any:
        """Like that of a dict."""
        self.asked.add(key)
        return super().get(key, default)


def keys_read(family: Family, hf: Mapping[str, Any]) -> set[str]:
    """All keys that ``family`` takes into account when it reads this config, those that are absent too.

    Raises:
        DataError, UsageError: it is not one of the family's, see :meth:`Family.to_architecture`.
    """
    watched = _Watched(hf)
    family.to_architecture(watched)
    # Rotary settings are read from a copy.
    return watched.asked | family.fixed.keys() | {*ROPE, *WINDOW, *family.rope_names.values()}


def is_about_else(key: str) -> bool:
    """Whether a key says something that is no matter of tensors and logits, such as the tokens that end a text."""
    return ABOUT_ELSE.fullmatch(key) is not None
