"""Infers the family of an unknown model type (``convert --learn``).

A mapping is accepted only if small random models have the same logits in transformers and in Megatron-Core.
"""

from __future__ import annotations

import itertools
import math
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from isthmus import __version__
from isthmus.config.schema.parallel import ParallelConfig
from isthmus.convert.online import import_weights
from isthmus.convert.open_model import checkpoint_folder
from isthmus.engine.parallel.process_groups import open_groups
from isthmus.errors import IsthmusError, NoSpace, UsageError, disk_errors
from isthmus.families.discover.candidates import Candidates, Choices
from isthmus.families.discover.config_inference import ConfigInference
from isthmus.families.discover.json_family import read_family, write_family
from isthmus.families.discover.probe_config import FIRST, SECOND, ProbeSizes
from isthmus.families.discover.tensor_matching import DecoderStructure, match_tensors
from isthmus.families.family import Family
from isthmus.families.registry import all_families
from isthmus.families.rules.shard import unsharded
from isthmus.hf.model_folder import ModelFolder
from isthmus.hf.tiny_model import (
    VERSION,
    architecture_of,
    effective_config,
    save_random_model,
    saved_model_logits,
    zero_tensors,
)
from isthmus.platforms.detect import detect

TOLERANCE = 1e-4
"""Largest difference of float32 logits; logits of a probe model are of order one."""
MAX_CANDIDATES = 500
_LENGTHS = (37, 23)
"""Longer than any window and original context of a probe model."""
_MIN_EFFECT = 1e-3
"""Smallest change of the logits that counts as an effect."""
Log = Callable[[str], None]


def learn(path: Path, log: Log = lambda line: None) -> Family:
    """Infer the family of a model folder from its config; ``log`` gets each decision.

    Raises:
        UsageError: the model type has a family or is unknown to transformers, or no mapping gives its logits.
    """
    if path.is_dir() and checkpoint_folder(path) is not None:
        raise UsageError(f"{path} is a Megatron checkpoint; --learn is for Hugging Face folders. Omit it.")
    folder = ModelFolder.open(path)
    model_type = folder.config.get("model_type")
    if model_type in all_families():
        raise UsageError(f"{path}: model_type {model_type!r} has a family. Omit --learn.")
    try:
        return prove(folder.config, log)
    except UsageError as error:
        raise UsageError(f"{path}: model_type {model_type!r} was not learned: {error}") from None


def save_family(family: Family, folder: Path) -> Path:
    """Write an inferred family into a folder for ``ISTHMUS_FAMILIES``."""
    path = family_path(family.name, folder)
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with path.open("x", encoding="utf-8") as file:
            file.write(write_family(family))
    return path


def family_path(model_type: str, folder: Path) -> Path:
    """The file of an inferred family; an error if it exists."""
    path = folder / f"{model_type}.json"
    if path.exists():
        raise NoSpace(f"{path} exists already. Remove it, or keep the family in another folder.")
    return path


def prove(config: Mapping[str, Any], log: Log = lambda line: None) -> Family:
    """Infer the family of a config, even if the model type has a family already."""
    architecture = architecture_of(config)
    effective = effective_config(config)
    settings = ConfigInference(effective, effective_config({"model_type": config["model_type"]}))
    log(f"{config['model_type']} is {architecture} of transformers {VERSION}")
    with tempfile.TemporaryDirectory(prefix="isthmus-learn-") as scratch:
        probe, sizes = _build(Path(scratch, "first"), settings, FIRST)
        shapes = {name: tuple(info.shape) for name, info in probe.folder.tensors.items()}
        structure = _match_tensors(settings, shapes, settings.symbols(sizes))
        log(f"a probe model has {len(shapes)} tensors, those of the layers in {structure.layers}*")
        live = _effective_numbers(settings, probe)
        settings.check_meanings(live)
        log(f"numbers in the config that change the logits: {', '.join(sorted(live)) or 'sizes only'}")
        open_groups(ParallelConfig(), detect(), seed=0)
        search = CandidateSearch(Candidates(settings, structure, live, architecture), probe, Path(scratch), log)
        picks, first = search.run()
        data = search.candidates.family_data(picks)
        other, _ = _build(Path(scratch, "second"), settings, SECOND)
        second = logits_difference(read_family(data), other)
        if not second <= TOLERANCE:
            raise UsageError(f"the mapping for one probe model differs by {second:.1e} on one with other sizes.")
        for each in (probe, other):
            check_effects(read_family(data), each)
        log(f"proven: logits agree to {first:.1e} and, with other sizes, to {second:.1e}; every tensor affects them")
    data["proof"] = {
        "transformers": VERSION,
        "isthmus": __version__,
        "max_abs_difference": [first, second],
        "candidates_tried": search.tried,
    }
    family = read_family(data)
    _check_config(family, config, effective)
    return family


def _build(folder: Path, settings: ConfigInference, choices: tuple[ProbeSizes, ...]) -> tuple[ProbeModel, ProbeSizes]:
    """A probe model of the first sizes with which it can be built and run."""
    failures = []
    for number, sizes in enumerate(choices):
        path = folder.with_name(f"{folder.name}-{number}")
        try:
            save_random_model(path, settings.probe_config(sizes), seed=number + 1)
            return ProbeModel.open(path), sizes
        except UsageError as error:
            failures.append(error)
    raise failures[-1]


def _match_tensors(
    settings: ConfigInference, shapes: Mapping[str, tuple[int, ...]], sizes: dict[str, int]
) -> DecoderStructure:
    """The structure of a probe model with the sizes in its config; if they do not match, with common defaults."""
    heads, hidden = sizes["N"], sizes["H"]
    usual = ((sizes["G"], 1, heads), (sizes["D"], hidden // heads), (sizes["F"], 4 * hidden))
    failures = []
    for groups, width, wide in itertools.product(*usual):
        found = {**sizes, "G": groups, "D": width, "F": wide}
        try:
            structure = match_tensors(shapes, found)
        except UsageError as error:
            failures.append(error)
        else:
            settings.correct(sizes, found)
            return structure
    raise failures[0]


def _effective_numbers(settings: ConfigInference, probe: ProbeModel) -> set[str]:
    """Numbers in the config that change the logits in transformers, or fail with every other value."""
    found = set()
    for name in settings.numbers():
        if (value := probe.folder.config.get(name)) is None:
            continue
        # Small, large and slightly different values: a limit that no input reaches has an effect only if lowered.
        values = [value + 1, value * 2, 1] if isinstance(value, int) else [value * 1e-3, value * 10, value + 0.5]
        differences = []
        for other in values:
            with suppress(UsageError):
                logits = saved_model_logits(probe.folder.path, probe.samples, **{name: other})
                differences.append(max_difference(logits, probe.logits))
            if any(differences):
                break
        if any(differences) or not differences:
            found.add(name)
    return found


def _check_config(family: Family, config: Mapping[str, Any], effective: Mapping[str, Any]) -> None:
    """Raise a UsageError if the config lacks settings whose defaults differ in transformers."""
    ours, meant = family.to_architecture(config), family.to_architecture(effective)
    names = [each.name for each in fields(ours) if getattr(ours, each.name) != getattr(meant, each.name)]
    if names:
        values = ", ".join(f"{name} ({getattr(ours, name)}, there {getattr(meant, name)})" for name in names)
        raise UsageError(f"config.json lacks settings whose defaults differ in transformers: {values}. Add them.")


class CandidateSearch:
    """Depth-first search over the stages of the candidates."""

    def __init__(self, candidates: Candidates, probe: ProbeModel, scratch: Path, log: Log) -> None:
        self.candidates, self._log = candidates, log
        self._probes = [
            ProbeModel.open(zero_tensors(probe.folder.path, candidates.is_zeroed(stage), scratch / f"stage-{number}"))
            if stage.zeroed
            else probe
            for number, stage in enumerate(candidates.stages)
        ]
        self.tried = 0
        self._nearest: dict[int, float] = {}
        self._errors: dict[int, str] = {}

    def run(self) -> tuple[Choices, float]:
        """The first candidate that agrees in every stage, and its difference; a UsageError if none does."""
        found = next(self._search(0, {}), None)
        if found is None:
            raise UsageError(self._failure())
        return found

    def _search(self, number: int, picks: Choices) -> Iterator[tuple[Choices, float]]:
        stage = self.candidates.stages[number]
        for option in stage.options(picks):
            if self.tried >= MAX_CANDIDATES:
                return
            candidate = {**picks, **option}
            difference = self._difference(candidate, number)
            self._nearest[number] = min(self._nearest.get(number, difference), difference)
            if not difference <= TOLERANCE:
                continue
            for line in self.candidates.describe(option):
                self._log(f"{stage.name}: {line}")
            self._log(f"{stage.name}: agrees to {difference:.1e} ({self.tried} candidates tried)")
            if number + 1 == len(self.candidates.stages):
                yield candidate, difference
            else:
                yield from self._search(number + 1, candidate)
                self._log(f"{stage.name}: no candidate of the next stage agrees, trying the next one")

    def _difference(self, picks: Choices, number: int) -> float:
        self.tried += 1
        try:
            return logits_difference(read_family(self.candidates.family_data(picks)), self._probes[number])
        except (IsthmusError, ValueError, AssertionError, RuntimeError) as error:
            self._errors[number] = str(error)
            return float("inf")

    def _failure(self) -> str:
        number = max(self._nearest)
        stage, nearest = self.candidates.stages[number].name, self._nearest[number]
        count = f"{self.tried} mappings{' (the maximum)' if self.tried >= MAX_CANDIDATES else ''}"
        if nearest == float("inf"):
            return f"none of {count} can be built in the {stage}: {self._errors[number]}"
        settings = self.candidates.settings
        named = [key for key in (settings.activation, settings.epsilon) if key is not None]
        values = ", ".join(f"{key}={settings.effective[key]}" for key in named)
        return (
            f"none of {count} gives its logits: in the {stage} the nearest is off by {nearest:.1e}, "
            f"{TOLERANCE:.0e} is allowed ({values}). The model has a feature that is not supported."
        )


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
        vocab_size = folder.config["vocab_size"]
        samples = [torch.randint(3, vocab_size, (length,), generator=generator) for length in _LENGTHS]
        return cls(folder, samples, saved_model_logits(path, samples))


@torch.no_grad()
def logits_difference(family: Family, probe: ProbeModel) -> float:
    """Largest difference between the logits of transformers and of Megatron-Core with this family."""
    return max_difference(_logits(_load(family, probe), probe), probe.logits)


def _load(family: Family, probe: ProbeModel) -> Any:
    from isthmus.engine.megatron_model import build_model, live_tensors
    from isthmus.engine.model_config import transformer_config

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
    from isthmus.engine.megatron_model import live_tensors

    model = _load(family, probe)
    effects: dict[str, float] = {}
    for name, tensor in live_tensors(model).items():
        # The experts of a layer count as one: the router may not use all of them.
        alike = re.sub(r"local_experts\.\d+\.", "local_experts.*.", name)
        if effects.get(alike, 0.0) >= _MIN_EFFECT:
            continue
        original = tensor.clone()
        tensor.copy_(tensor.roll(1))
        effects[alike] = max(effects.get(alike, 0.0), max_difference(_logits(model, probe), probe.logits))
        tensor.copy_(original)
    for name, effect in effects.items():
        if effect < _MIN_EFFECT:
            raise UsageError(f"{name} changes the logits of a probe model by only {effect:.1e}, which proves nothing.")
