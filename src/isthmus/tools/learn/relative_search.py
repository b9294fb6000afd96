"""Searches a family that an unknown model type equals but for names and traits, and verifies its settings."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from isthmus.errors import IsthmusError, UsageError
from isthmus.families.family import Family
from isthmus.families.rules.common_settings import METADATA
from isthmus.hf.tiny_model import effective_config, embedding_modules
from isthmus.tools.learn.language_section import SECTION, TIED, LanguageSection, find_section, nested_data
from isthmus.tools.learn.probe_model import (
    DEEP_SCALE,
    TOLERANCE,
    ProbeModel,
    build_first,
    check_effects,
    large_difference,
    logits_difference,
    proven,
    relative_difference,
)
from isthmus.tools.learn.related_family import Data, Unknown, read_related, related_candidates, settings_read
from isthmus.tools.learn.setting_values import (
    fixed_settings,
    independent_defaults,
    other_values,
    repeated_sizes,
)
from isthmus.tools.learn.small_config import FIRST, SECOND, SmallSizes, number_of_layers, size_keys, small_config
from isthmus.tools.learn.unread_settings import check_unread

MAX_CANDIDATES = 80
_SENSITIVE = 1e-2
"""Below this difference, another value of a setting is tried again with smaller weights."""
_MAX_UNPROVEN = 4
"""Candidates with the logits of all small models and a setting that may be a limit, after which the search ends."""
Log = Callable[[str], None]


class RelativeSearch:
    """``config`` is completed by transformers."""

    def __init__(
        self, config: Mapping[str, Any], architecture: str, families: Mapping[str, Family], scratch: Path, log: Log
    ) -> None:
        self._config, self._families, self._scratch, self._log = config, families, scratch, log
        self._name = str(config["model_type"])
        self._is_nested = isinstance(config.get(SECTION), Mapping)
        self._defaults = self._complete({})
        self._section = LanguageSection(self._name, architecture, None, {})
        self._deep: ProbeModel | None = None
        self.tried: int = 0
        self.nearest: float = float("inf")
        """Smallest difference of logits of a candidate that has the tensors of the model."""

    def run(self) -> Data | None:
        """The data of the family; None if no candidate has the tensors and the logits of the model."""
        try:
            first = self._probe("small", FIRST, seed=1)
        except UsageError as error:
            if self._is_nested:
                raise
            self._log(f"no model with small sizes: {error}")
            return None
        if self._is_nested:
            self._section = self._find_section(first)
        unproven: list[UsageError] = []
        for data, description, difference in self._candidates(first):
            family = self._section.family(read_related(data, self._families))
            second = self._probe(f"larger-{self.tried}", SECOND, seed=2)
            differences = [difference, self._difference(family, second)]
            if not differences[1] <= TOLERANCE:
                self._log(f"like {description}, but logits differ with other sizes")
                continue
            small = first.with_small_weights(self._scratch / f"small-weights-{self.tried}")
            if not self._difference(family, small, relative_difference) <= TOLERANCE:
                self._log(f"like {description}, but logits differ with small weights: epsilons of norms")
                continue
            large = first.with_large_weights(self._scratch / f"large-weights-{self.tried}")
            if (why := large_difference(family, large) or self._deep_difference(family)) is not None:
                self._log(f"like {description}, but {why}")
                continue
            for probe in (first, second):
                check_effects(family, probe)
            try:
                self._check_unread(data, first, second)
                self._prepare_settings(data, first, second)
            except UsageError as error:
                unproven.append(error)
                self._log(f"like {description}, but {error}")
                if len(unproven) == _MAX_UNPROVEN:
                    break
                continue
            self._log(f"like {description}")
            self._log(proven(*differences))
            proven_data = data | {"proof": {"max_abs_difference": differences}}
            return proven_data if self._section.nested is None else self._nested_data(proven_data, first, second)
        if unproven:
            raise unproven[0]
        return None

    def _probe(self, name: str, sizes: Sequence[SmallSizes], seed: int) -> ProbeModel:
        return build_first(self._scratch / name, sizes, partial(small_config, self._config), seed=seed)[0]

    def _deep_difference(self, family: Family) -> str | None:
        """How the logits of a small model with all layers differ; None if they agree.

        Few layers do not show what a late one has: experts in every eighth layer, or another kind of attention.
        """
        layers = number_of_layers(self._config.get(SECTION) or self._config)
        if self._deep is None and layers:
            shrink = partial(small_config, self._config, all_layers=True)
            self._deep = build_first(self._scratch / "deep", FIRST, shrink, seed=5, scale=DEEP_SCALE)[0]
        if self._deep is None:
            return None
        difference = self._difference(family, self._deep, relative_difference)
        if difference <= TOLERANCE:
            return None
        return f"logits of a small model with all {layers} layers differ by {difference:.1e} of the largest"

    def _candidates(self, probe: ProbeModel) -> Iterator[tuple[Data, str, float]]:
        """Candidates that agree with one probe model, and the difference of logits."""
        shapes = {name: tuple(info.shape) for name, info in probe.folder.tensors.items()}
        config = self._section.config(probe.folder.config)
        unknown = Unknown(
            str(config["model_type"]),
            self._section.hf_architecture,
            config,
            self._defaults,
            self._section.tensors(shapes),
        )
        for data, description in itertools.islice(related_candidates(unknown, self._families), MAX_CANDIDATES):
            self.tried += 1
            difference = self._difference(self._section.family(read_related(data, self._families)), probe)
            self.nearest = min(self.nearest, difference)
            if difference <= TOLERANCE:
                yield data, description, difference

    def _difference(
        self, family: Family, probe: ProbeModel, measure: Callable[[Family, ProbeModel], float] = logits_difference
    ) -> float:
        try:
            return measure(family, probe)
        except (IsthmusError, ValueError, AssertionError, RuntimeError, KeyError, TypeError):
            return float("inf")

    def _find_section(self, probe: ProbeModel) -> LanguageSection:
        config, path = effective_config(probe.folder.config), probe.folder.path
        shapes = {name: tuple(info.shape) for name, info in probe.folder.tensors.items()}
        tied = effective_config({"model_type": self._name}).get(TIED)
        section = find_section(self._name, self._section.hf_architecture, config, shapes, tied, embedding_modules(path))
        assert section.nested is not None
        self._log(f"the language model in {SECTION} is of type {section.nested.model_type}")
        return section

    def _repeated(self, data: Data, *probes: ProbeModel) -> dict[str, tuple[str, ...]]:
        """Sizes that the family does not read and that repeat others."""
        configs = [
            self._section.config(full_config)
            for full_config in (self._config, *(probe.folder.config for probe in probes))
        ]
        read = settings_read(read_related(data, self._families), configs[1]) - data["fixed"].keys()
        sizes = size_keys(configs[1]) | ({"qk_head_dim"} & configs[1].keys())
        return repeated_sizes(sizes - read, sizes & read, configs)

    def _check_unread(self, data: Data, probe: ProbeModel, second: ProbeModel) -> None:
        """Raise UsageError if a setting that is not read may be a limit that no small model reaches."""
        config = self._section.config(probe.folder.config)
        family = read_related(data, self._families)
        names = (config.keys() - settings_read(family, config)) | data["fixed"].keys()
        names -= self._repeated(data, probe, second).keys()
        language_config = self._section.config(self._config)
        check_unread(names, language_config, config, probe, section=self._section.key)
        if self._is_nested:
            outer = [name for name in probe.folder.config if not name.endswith("_config")]
            check_unread(outer, self._config, probe.folder.config, probe)

    def _nested_data(self, language: Data, *probes: ProbeModel) -> Data:
        defaults = effective_config({"model_type": self._name})
        outer = {name: value for name, value in self._config.items() if not name.endswith("_config")}
        fixed = {
            name: {"is": value, "absent": defaults.get(name)}
            for name, value in sorted(outer.items())
            if not METADATA.fullmatch(name)
        }
        section, configs = self._config[SECTION], (self._config, *(probe.folder.config for probe in probes))
        for name in size_keys(outer):
            if name not in section or any(
                full_config[name] != full_config[SECTION].get(name) for full_config in configs
            ):
                continue
            fixed[name]["same_in_section"] = True
        tied = {"is": section.get(TIED), "absent": self._defaults.get(TIED)}
        return nested_data(self._section, language, fixed, tied)

    def _prepare_settings(self, data: Data, first: ProbeModel, second: ProbeModel) -> None:
        """List the settings that may have other values, and fix all others."""
        family = read_related(data, self._families)
        config, other = (self._section.config(probe.folder.config) for probe in (first, second))
        meant = self._section.config(self._config)
        read = {name for name in settings_read(family, config) - data["fixed"].keys() if not METADATA.fullmatch(name)}
        sizes = size_keys(config) & read
        free = {name for name in sizes if config[name] != other.get(name)}
        overridden = {TIED} & config.keys() if self._is_nested else set()
        free |= {name for name in sorted(read - free - overridden) if self._is_verified(family, first, name)}
        if unverified := [name for name in sizes - free if config[name] != meant[name]]:
            raise UsageError(f"config.json: the meaning of {', '.join(sorted(unverified))} could not be verified.")
        # A family that reads a limit may ignore it, without a second setting that this model type does not have.
        check_unread(read - free - overridden, meant, config, first, section=self._section.key)
        constant_names = ", ".join(sorted(read - free)) or "none"
        self._log(
            f"settings with a verified meaning: {', '.join(sorted(free))}; that keep their value: {constant_names}"
        )
        repeated = self._repeated(data, first, second)
        constant = independent_defaults(self._defaults, self._with)
        data["settings"] = {
            name: {"default": self._defaults[name]} if name in constant else {} for name in sorted(free | overridden)
        }
        data["fixed"] = fixed_settings(meant, self._defaults, free=free | overridden)
        for name in repeated.keys() & data["fixed"].keys():
            data["fixed"][name] |= {"sum_of": [*repeated[name]]} | ({} if name in constant else {"absent": None})

    def _with(self, name: str, value: Any) -> Mapping[str, Any]:
        return self._complete({name: value})

    def _complete(self, language: Mapping[str, Any]) -> Mapping[str, Any]:
        """The config of a language model with these settings and the defaults of all others."""
        if not self._is_nested:
            return effective_config({"model_type": self._name, **language})
        kind = {name: value for name, value in self._config[SECTION].items() if name == "model_type"}
        section: Mapping[str, Any] = effective_config({"model_type": self._name, SECTION: {**kind, **language}})[
            SECTION
        ]
        return section

    def _is_verified(self, family: Family, probe: ProbeModel, name: str) -> bool:
        """Whether logits agree for every other value of the setting that the family and transformers accept."""
        verified = 0
        config = self._section.config(probe.folder.config)
        arch = family.to_architecture(config)
        width = arch.setting("mla.qk_rope_head_dim") or arch.attention.kv_channels
        rotary_pairs = int(width * arch.rotary.rotary_percent) // 2
        for number, value in enumerate(other_values(name, config.get(name), family, rotary_pairs)):
            changed = {**config, name: value}
            try:
                family.to_architecture(changed)
            except IsthmusError:
                continue  # such a model is refused
            try:
                changed_config = self._section.changed(probe.folder.config, name, value)
                other = ProbeModel.build(self._scratch / f"{name}-{number}", changed_config, 3)
            except UsageError:
                continue  # there is no such model
            difference = self._difference(self._section.family(family), other)
            if TOLERANCE < difference < _SENSITIVE:  # rounding errors, such as of large scores, are smaller here
                other = ProbeModel.build(
                    self._scratch / f"{name}-{number}-smaller", changed_config, 3, scale=DEEP_SCALE
                )
                difference = self._difference(self._section.family(family), other)
            if not difference <= TOLERANCE:
                return False
            verified += 1
        return verified > 0
