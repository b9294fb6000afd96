"""Infers the family of an unknown model type (``convert --learn``).

A mapping is accepted only if small random models have the same logits in transformers and in Megatron-Core.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

from isthmus import __version__
from isthmus.config.schema.parallel import ParallelConfig
from isthmus.convert.open_model import checkpoint_folder
from isthmus.engine.parallel.process_groups import open_groups
from isthmus.errors import OutputExists, UsageError, disk_errors
from isthmus.families.family import Family
from isthmus.families.inferred.family_file import read_data, write_family
from isthmus.families.inferred.json_family import read_family
from isthmus.families.registry import all_families
from isthmus.hf.model_folder import ModelFolder
from isthmus.hf.tiny_model import (
    VERSION,
    architecture_of,
    effective_config,
    saved_model_logits,
)
from isthmus.platforms.detect import detect
from isthmus.tools.learn.candidate_search import CandidateSearch
from isthmus.tools.learn.candidates import EPSILONS, Candidates, Choices
from isthmus.tools.learn.config_inference import FIRST, SECOND, ConfigInference
from isthmus.tools.learn.family_module import write_module
from isthmus.tools.learn.language_section import SECTION
from isthmus.tools.learn.probe_model import (
    DEEP_SCALE,
    TOLERANCE,
    ProbeModel,
    build_first,
    check_effects,
    large_difference,
    logits_difference,
    max_difference,
    proven,
    relative_difference,
)
from isthmus.tools.learn.related_family import nearest_family
from isthmus.tools.learn.relative_search import RelativeSearch
from isthmus.tools.learn.small_config import check_layers
from isthmus.tools.learn.tensor_matching import DecoderStructure, match_tensors
from isthmus.tools.learn.unread_settings import check_unread

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
        reason = f"{path}: model_type {model_type!r} was not learned: {error}"
        raise UsageError(f"{reason}{_start_from(folder.config)}") from None


def _start_from(config: Mapping[str, Any]) -> str:
    """A sentence about the nearest family; empty if transformers does not know the model type, or it has an encoder."""
    try:
        effective = effective_config(config)
    except UsageError:
        return ""
    if effective.get("is_encoder_decoder"):
        return ""
    section = effective.get(SECTION)
    language = section if isinstance(section, Mapping) else effective
    return f" {nearest_family(language, all_families()).description}"


def save_family(family: Family, target: Path) -> Path:
    """Write an inferred family into a folder for ``ISTHMUS_FAMILIES``, or as the Python module ``target``."""
    path = family_path(family.name, target)
    with disk_errors(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("x", encoding="utf-8") as file:
            file.write(write_module(family.data or {}) if path.suffix == ".py" else write_family(family))
    return path


def family_path(model_type: str, target: Path) -> Path:
    """The file of an inferred family: in a folder, or ``target`` itself if it is a ``.py``; an error if it exists."""
    path = target if target.suffix == ".py" else target / f"{model_type}.json"
    if path.exists():
        raise OutputExists(f"{path} exists already. Remove it, or keep the family in another folder.")
    return path


def prove(config: Mapping[str, Any], log: Log = lambda line: None) -> Family:
    """Infer the family of a config, even if the model type has a family already."""
    architecture = architecture_of(config)
    effective = effective_config(config)
    if effective.get("is_encoder_decoder"):
        raise UsageError("the model has an encoder; only decoders are supported.")
    sections = [name for name, value in effective.items() if name.endswith("_config") and isinstance(value, Mapping)]
    if sections and SECTION not in sections:
        raise UsageError(f"config.json: {sections[0]} is an object, and there is no {SECTION} of a language model.")
    check_layers(effective.get(SECTION) or effective)
    log(f"{config['model_type']} is {architecture} of transformers {VERSION}")
    families = {name: family for name, family in all_families().items() if name != config["model_type"]}
    open_groups(ParallelConfig(), detect(), seed=0)
    with tempfile.TemporaryDirectory(prefix="isthmus-learn-") as scratch:
        search = RelativeSearch(effective, architecture, families, Path(scratch), log)
        data = search.run()
        if data is None and sections:
            raise UsageError(_why_not_nested(effective, search))
        if data is None:
            data = _search_structure(effective, architecture, Path(scratch), log)
        family = read_data(data, families)
    data["proof"] |= {"transformers": VERSION, "isthmus": __version__}
    _check_config(family, config, effective)
    return family


def _why_not_nested(effective: Mapping[str, Any], search: RelativeSearch) -> str:
    kind = effective[SECTION].get("model_type")
    if not search.tried:
        return f"no family has the settings and tensors of the language model in {SECTION}, which is of type {kind!r}."
    return (
        f"none of {search.tried} mappings gives the logits of the language model in {SECTION}, of type {kind!r}: the "
        f"nearest is off by {search.nearest:.1e}, {TOLERANCE:.0e} is allowed. The model has a feature that is not "
        "supported."
    )


def _search_structure(effective: Mapping[str, Any], architecture: str, scratch: Path, log: Log) -> dict[str, Any]:
    """The data of a family that is found by matching the tensors of a probe model to roles."""
    settings = ConfigInference(effective, effective_config({"model_type": effective["model_type"]}))
    probe, sizes = build_first(scratch / "first", FIRST, settings.probe_config, seed=1)
    shapes = {name: tuple(info.shape) for name, info in probe.folder.tensors.items()}
    structure = _match_tensors(settings, shapes, settings.symbols(sizes))
    log(f"a probe model has {len(shapes)} tensors, those of the layers in {structure.layers}*")
    live = _effective_numbers(settings, probe)
    settings.check_meanings(live)
    log(f"numbers in the config that change the logits: {', '.join(sorted(live)) or 'sizes only'}")
    search = CandidateSearch(Candidates(settings, structure, live, architecture), probe, scratch, log)
    picks, first = search.run()
    data = _with_epsilon(search.candidates, picks, probe.with_small_weights(scratch / "small-weights"))
    other, _ = build_first(scratch / "others", SECOND, settings.probe_config, seed=2)
    second = logits_difference(read_family(data), other)
    if not second <= TOLERANCE:
        raise UsageError(f"the mapping for one probe model differs by {second:.1e} on one with other sizes.")
    _check_extremes(read_family(data), settings, probe, scratch)
    for model in (probe, other):
        check_effects(read_family(data), model)
    check_unread(data["fixed"].keys(), effective, probe.folder.config, probe)
    log(proven(first, second))
    data["proof"] = {"max_abs_difference": [first, second], "candidates_tried": search.tried}
    return data


def _check_extremes(family: Family, settings: ConfigInference, probe: ProbeModel, scratch: Path) -> None:
    """Raise UsageError if the mapping is wrong for a model with large weights, or with all layers of the config."""
    if (why := large_difference(family, probe.with_large_weights(scratch / "large-weights"))) is not None:
        raise UsageError(f"{why}.")
    shrink = partial(settings.probe_config, all_layers=True)
    deep, _ = build_first(scratch / "deep", FIRST, shrink, seed=5, scale=DEEP_SCALE)
    if not (difference := relative_difference(family, deep)) <= TOLERANCE:
        raise UsageError(
            f"in a small model with all {settings.num_layers} layers, logits differ by {difference:.1e} of the largest."
        )


def _with_epsilon(candidates: Candidates, picks: Choices, probe: ProbeModel) -> dict[str, Any]:
    """The data of a family with the epsilon that gives the logits of a model with small weights.

    Larger weights do not show an epsilon that is not in the config.
    """
    epsilons = EPSILONS if isinstance(picks["epsilon"], float) else (picks["epsilon"],)
    differences = []
    for epsilon in epsilons:
        data = candidates.family_data({**picks, "epsilon": epsilon})
        differences.append(relative_difference(read_family(data), probe))
        if differences[-1] <= TOLERANCE:
            return data
    raise UsageError(
        f"in a model with small weights, where the epsilons of norms matter, the mapping differs by "
        f"{min(differences):.1e} of the largest logit. Tried as epsilon: {', '.join(map(str, epsilons))}."
    )


def _match_tensors(
    settings: ConfigInference, shapes: Mapping[str, tuple[int, ...]], sizes: dict[str, int]
) -> DecoderStructure:
    """The structure of a probe model with the sizes in its config; if they do not match, with common defaults."""
    heads, hidden = sizes["N"], sizes["H"]
    usual = ((sizes["G"], 1, heads), (sizes["D"], hidden // heads), (sizes["F"], 4 * hidden))
    failures = []
    for groups, width, wide in itertools.product(*usual):
        actual = {**sizes, "G": groups, "D": width, "F": wide}
        try:
            structure = match_tensors(shapes, actual)
        except UsageError as error:
            failures.append(error)
        else:
            settings.correct(sizes, actual)
            return structure
    raise failures[0]


def _effective_numbers(settings: ConfigInference, probe: ProbeModel) -> set[str]:
    """Numbers in the config that change the logits in transformers, or fail with every other value."""
    names = set()
    for name in settings.numbers():
        if (value := probe.folder.config.get(name)) is None:
            continue
        # Small, large and slightly different values: a limit that no input reaches has an effect only if lowered.
        values = [value + 1, value * 2, 1] if isinstance(value, int) else [value * 1e-3, value * 10, value + 0.5]
        differences = []
        for other in values:
            with suppress(UsageError):
                logits = saved_model_logits(probe.folder.path, probe.samples, {name: other})
                differences.append(max_difference(logits, probe.logits))
            if any(differences):
                break
        if any(differences) or not differences:
            names.add(name)
    return names


def _check_config(family: Family, config: Mapping[str, Any], effective: Mapping[str, Any]) -> None:
    """Raise a UsageError if the config lacks settings whose defaults differ in transformers."""
    ours, meant = family.to_architecture(config), family.to_architecture(effective)
    names = [field.name for field in fields(ours) if getattr(ours, field.name) != getattr(meant, field.name)]
    if names:
        values = ", ".join(f"{name} ({getattr(ours, name)}, there {getattr(meant, name)})" for name in names)
        raise UsageError(f"config.json lacks settings whose defaults differ in transformers: {values}. Add them.")
