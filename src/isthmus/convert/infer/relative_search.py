"""Searches a family that an unknown model type equals but for names and traits, and verifies its settings."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from isthmus.convert.infer.probe_model import (
    TOLERANCE,
    ProbeModel,
    build_first,
    check_effects,
    logits_difference,
    proven,
    relative_difference,
)
from isthmus.convert.infer.unread_settings import check_unread
from isthmus.errors import IsthmusError, UsageError
from isthmus.families.discover.config_inference import METADATA
from isthmus.families.discover.related_family import Data, Unknown, read_related, related_candidates, settings_read
from isthmus.families.discover.setting_values import fixed_settings, independent_defaults, other_values
from isthmus.families.discover.small_config import FIRST, SECOND, SmallSizes, size_keys, small_config
from isthmus.families.family import Family
from isthmus.hf.tiny_model import effective_config

MAX_CANDIDATES = 80
Log = Callable[[str], None]


class RelativeSearch:
    """``config`` is completed by transformers."""

    def __init__(
        self, config: Mapping[str, Any], architecture: str, families: Mapping[str, Family], scratch: Path, log: Log
    ) -> None:
        self._config, self._families, self._scratch, self._log = config, families, scratch, log
        self._defaults = effective_config({"model_type": config["model_type"]})
        self._architecture = architecture
        self.tried = 0

    def run(self) -> Data | None:
        """The data of the family; None if no candidate has the tensors and the logits of the model."""
        try:
            first = self._probe("small", FIRST, seed=1)
        except UsageError as error:
            self._log(f"no model with small sizes: {error}")
            return None
        unproven: UsageError | None = None
        for data, description, difference in self._candidates(first):
            family = read_related(data, self._families)
            second = self._probe(f"larger-{self.tried}", SECOND, seed=2)
            differences = [difference, self._difference(family, second)]
            if not differences[1] <= TOLERANCE:
                self._log(f"like {description}, but logits differ with other sizes")
                continue
            small = first.with_small_weights(self._scratch / f"small-weights-{self.tried}")
            if not self._difference(family, small, relative_difference) <= TOLERANCE:
                self._log(f"like {description}, but logits differ with small weights: epsilons of norms")
                continue
            for probe in (first, second):
                check_effects(family, probe)
            unread = first.folder.config.keys() - settings_read(family, first.folder.config)
            try:
                check_unread(unread | data["fixed"].keys(), self._config, first)
            except UsageError as error:
                unproven = error
                self._log(f"like {description}, but {error}")
                continue
            self._log(f"like {description}")
            self._log(proven(*differences))
            self._prepare_settings(data, first, second)
            return data | {"proof": {"max_abs_difference": differences}}
        if unproven is not None:
            raise unproven
        return None

    def _probe(self, name: str, sizes: Sequence[SmallSizes], seed: int) -> ProbeModel:
        return build_first(self._scratch / name, sizes, partial(small_config, self._config), seed=seed)[0]

    def _candidates(self, probe: ProbeModel) -> Iterator[tuple[Data, str, float]]:
        """Those that agree with one probe model, and the difference of logits."""
        shapes = {name: tuple(info.shape) for name, info in probe.folder.tensors.items()}
        unknown = Unknown(
            str(self._config["model_type"]), self._architecture, probe.folder.config, self._defaults, shapes
        )
        for data, description in itertools.islice(related_candidates(unknown, self._families), MAX_CANDIDATES):
            self.tried += 1
            difference = self._difference(read_related(data, self._families), probe)
            if difference <= TOLERANCE:
                yield data, description, difference

    def _difference(
        self, family: Family, probe: ProbeModel, measure: Callable[[Family, ProbeModel], float] = logits_difference
    ) -> float:
        try:
            return measure(family, probe)
        except (IsthmusError, ValueError, AssertionError, RuntimeError, KeyError, TypeError):
            return float("inf")

    def _prepare_settings(self, data: Data, first: ProbeModel, second: ProbeModel) -> None:
        """List the settings that may have other values, and fix all others."""
        family = read_related(data, self._families)
        config, other = first.folder.config, second.folder.config
        read = {name for name in settings_read(family, config) - data["fixed"].keys() if not METADATA.fullmatch(name)}
        sizes = size_keys(config) & read
        free = {name for name in sizes if config[name] != other.get(name)}
        free |= {name for name in sorted(read - free) if self._is_verified(family, config, name)}
        if unverified := [name for name in sizes - free if config[name] != self._config[name]]:
            raise UsageError(f"config.json: the meaning of {', '.join(sorted(unverified))} could not be verified.")
        kept = ", ".join(sorted(read - free)) or "none"
        self._log(f"settings with a verified meaning: {', '.join(sorted(free))}; that keep their value: {kept}")
        constant = independent_defaults(self._defaults, self._with)
        data["settings"] = {
            name: {"default": self._defaults[name]} if name in constant else {} for name in sorted(free)
        }
        data["fixed"] = fixed_settings(self._config, self._defaults, free=free)

    def _with(self, name: str, value: Any) -> dict[str, Any]:
        return effective_config({"model_type": self._config["model_type"], name: value})

    def _is_verified(self, family: Family, config: Mapping[str, Any], name: str) -> bool:
        """Whether logits agree for every other value of the setting that the family and transformers accept."""
        verified = 0
        arch = family.to_architecture(config)
        width = arch.kv_channels if arch.mla is None else arch.mla.qk_rope_head_dim
        rotary_pairs = int(width * arch.rotary_percent) // 2
        for number, value in enumerate(other_values(name, config.get(name), family, rotary_pairs)):
            changed = {**config, name: value}
            try:
                family.to_architecture(changed)
            except IsthmusError:
                continue  # such a model is refused
            try:
                probe = ProbeModel.build(self._scratch / f"{name}-{number}", changed, 3)
            except UsageError:
                continue  # there is no such model
            if not self._difference(family, probe) <= TOLERANCE:
                return False
            verified += 1
        return verified > 0
