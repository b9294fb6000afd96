"""Settings that a family does not read: small models must show that they limit nothing that larger ones have."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any

from isthmus.errors import UsageError
from isthmus.families.rules.common_settings import METADATA, is_dropout
from isthmus.hf.tiny_model import saved_model_logits
from isthmus.tools.learn.probe_model import ProbeModel, max_difference

_LARGE = 4
"""A number of a layer, or a limit of a length, that is smaller is within reach of every probe model."""
_ROUNDING = 1e-5
"""Difference of logits that the order of sums makes, such as the chunks of a recurrence."""


def check_unread(
    names: Collection[str],
    config: Mapping[str, Any],
    small: Mapping[str, Any],
    probe: ProbeModel,
    section: str | None = None,
) -> None:
    """Raise UsageError if a limit among these settings of ``config`` is out of the probe model's reach.

    ``small`` is the config of the probe model, or of its language model in this ``section``.
    Its few layers and short samples do not show the window of a large config, or a list of late layers. Such a setting
    changes the logits when it is smaller.
    """
    for name in sorted(names):
        values = [0.5] if _is_rate(name, small.get(name)) else smaller_values(small.get(name), config.get(name))
        if METADATA.fullmatch(name) or not _has_effect(name, values, probe, section):
            continue
        raise UsageError(
            f"config.json: {name}={config.get(name)!r:.60} has an effect in models with more layers or longer samples "
            "than those with which mappings are verified, and its meaning is not known."
        )


def _is_rate(name: str, value: Any) -> bool:
    """Whether a setting is taken for a dropout rate, which has no effect outside of training."""
    return is_dropout(name) and isinstance(value, int | float) and not isinstance(value, bool)


def smaller_values(value: Any, meant: Any) -> list[Any]:
    """Numbers in place of one that is large, or that a probe model has instead of ``meant``; lists of first layers."""
    if isinstance(value, int | float) and not isinstance(value, bool) and (value >= _LARGE or value != meant):
        return [other for other in map(type(value), (1, 2, 3)) if other != value]
    numbers = isinstance(value, list) and all(isinstance(entry, int) and not isinstance(entry, bool) for entry in value)
    return [[0], [1]] if numbers and value and max(value) >= _LARGE else []


def _has_effect(name: str, values: list[Any], probe: ProbeModel, section: str | None) -> bool:
    for other in values:
        with suppress(UsageError):  # there is no such model
            logits = saved_model_logits(probe.folder.path, probe.samples, {name: other}, section=section)
            if max_difference(logits, probe.logits) > _ROUNDING:
                return True
    return False
