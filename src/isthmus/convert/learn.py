"""An unknown model type, tried by structure: a mapping is taken only if a small random copy of the model gives the same
logits in transformers and here.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from isthmus import __version__
from isthmus.config.schema.parallel import ParallelConfig
from isthmus.convert.torch_dist.from_torch_dist import checkpoint_folder
from isthmus.convert.verify.probe_models import Copy, check_effects, difference, furthest
from isthmus.engine.parallel.process_groups import open_groups
from isthmus.errors import IsthmusError, NoSpace, UsageError, disk_errors
from isthmus.families.discover.candidates import Guesses, Picks, Stage
from isthmus.families.discover.config_inference import Settings
from isthmus.families.discover.json_family import read_family, write_family
from isthmus.families.discover.probe_config import FIRST, SECOND, Shrunken
from isthmus.families.discover.tensor_matching import Structure, recognise
from isthmus.families.family import Family
from isthmus.families.registry import all_families
from isthmus.hf.model_folder import ModelFolder
from isthmus.hf.shrunken_model import VERSION, architecture_of, build_copy, copy_logits, effective_config, silenced
from isthmus.platforms.detect import detect

TOLERANCE = 1e-4
"""How far the logits may be apart, in float32; those of a copy are of the order of one."""
MOST_CANDIDATES = 500
Say = Callable[[str], None]


def learn(path: Path, say: Say = lambda line: None) -> Family:
    """Find the family of a model, and prove it.

    Args:
        path: the model's folder; only its config is looked at.
        say: told what was decided and why, line by line.

    Raises:
        UsageError: there is nothing to learn; or transformers has no code for the model, something in it has no place
            in a decoder that is built, or no mapping gives its logits: the reason, and how near the nearest came.
        MissingInput, DataError: there is no model folder.
    """
    if path.is_dir() and checkpoint_folder(path) is not None:
        raise UsageError(f"{path} is a Megatron checkpoint; --learn is for Hugging Face folders. Leave it out.")
    folder = ModelFolder.open(path)
    model_type = folder.config.get("model_type")
    if model_type in all_families():
        raise UsageError(f"{path}: model_type {model_type!r} has a family. Leave --learn out.")
    try:
        return prove(folder.config, say)
    except UsageError as error:
        raise UsageError(f"{path}: model_type {model_type!r} was not learned: {error}") from None


def keep(family: Family, folder: Path) -> Path:
    """Write a learned family into a folder that ``ISTHMUS_FAMILIES`` can name.

    Raises:
        NoSpace, IOFailure: it is there already, or the disk refuses.
    """
    path = kept_path(family.name, folder)
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with path.open("x", encoding="utf-8") as file:
            file.write(write_family(family))
    return path


def kept_path(model_type: str, folder: Path) -> Path:
    """Where a learned family is kept.

    Raises:
        NoSpace: something is there.
    """
    path = folder / f"{model_type}.json"
    if path.exists():
        raise NoSpace(f"{path} exists already. Remove it, or keep the family in another folder.")
    return path


def prove(config: Mapping[str, Any], say: Say = lambda line: None) -> Family:
    """The family of a model with this config, whether it has one already or not.

    Raises:
        UsageError: see :func:`learn`.
    """
    architecture = architecture_of(config)
    effective = effective_config(config)
    settings = Settings(effective, effective_config({"model_type": config["model_type"]}))
    say(f"{config['model_type']} is {architecture} of transformers {VERSION}")
    with tempfile.TemporaryDirectory(prefix="isthmus-learn-") as scratch:
        copy, sizes = _build(Path(scratch, "first"), settings, FIRST)
        shapes = {name: tuple(info.shape) for name, info in copy.folder.tensors.items()}
        structure = _recognise(settings, shapes, settings.symbols(sizes))
        say(f"a copy of {len(shapes)} tensors, the layers' in {structure.layers}*")
        live = _live(settings, copy)
        settings.check_meanings(live)
        say(f"numbers of its config that change the logits: {', '.join(sorted(live)) or 'none but sizes'}")
        open_groups(ParallelConfig(), detect(), seed=0)
        search = _Search(Guesses(settings, structure, live, architecture), copy, Path(scratch), say)
        picks, first = search.run()
        data = search.guesses.data(picks)
        other, _ = _build(Path(scratch, "second"), settings, SECOND)
        second = difference(read_family(data), other)
        if not second <= TOLERANCE:
            raise UsageError(f"what fits one small copy is {second:.1e} off on one of other sizes.")
        for each in (copy, other):
            check_effects(read_family(data), each)
        say(f"proven: logits agree to {first:.1e} and, with other sizes, to {second:.1e}; all tensors matter to them")
    data["proof"] = {
        "transformers": VERSION,
        "isthmus": __version__,
        "max_abs_difference": [first, second],
        "candidates_tried": search.tried,
    }
    family = read_family(data)
    _check_config(family, config, effective)
    return family


def _build(folder: Path, settings: Settings, choice: tuple[Shrunken, ...]) -> tuple[Copy, Shrunken]:
    """The first of these sizes that the model can be built and run with."""
    failure = None
    for number, small in enumerate(choice):
        place = folder.with_name(f"{folder.name}-{number}")
        try:
            build_copy(place, settings.shrunken(small), seed=number + 1)
            return Copy.open(place), small
        except UsageError as error:
            failure = error
    assert failure is not None
    raise failure


def _recognise(settings: Settings, shapes: Mapping[str, tuple[int, ...]], sizes: dict[str, int]) -> Structure:
    """The structure of a copy with the sizes that its config says; or, where that does not fit, with the usual ones."""
    heads, hidden = sizes["N"], sizes["H"]
    usual = ((sizes["G"], 1, heads), (sizes["D"], hidden // heads), (sizes["F"], 4 * hidden))
    failure: UsageError | None = None
    for groups, width, wide in itertools.product(*usual):
        found = {**sizes, "G": groups, "D": width, "F": wide}
        try:
            structure = recognise(shapes, found)
        except UsageError as error:
            failure = failure or error
            continue
        settings.correct(sizes, found)
        return structure
    assert failure is not None
    raise failure


def _live(settings: Settings, copy: Copy) -> set[str]:
    """The numbers of the config that change what transformers computes."""
    found = set()
    for name in settings.numbers():
        value = copy.folder.config.get(name)
        if value is None:
            continue
        # Far below, far above and a little off: bounds that no number here reaches show when they are tightened.
        tried = [value + 1, value * 2, 1] if isinstance(value, int) else [value * 1e-3, value * 10, value + 0.5]
        ran = False
        for other in tried:
            try:
                logits = copy_logits(copy.folder.path, copy.samples, **{name: other})
            except UsageError:
                continue
            ran = True
            if furthest(logits, copy.logits) > 0:
                found.add(name)
                break
        if not ran:
            found.add(name)
    return found


class _Search:
    """Tries candidates stage by stage, and goes back a stage where nothing fits."""

    def __init__(self, guesses: Guesses, copy: Copy, scratch: Path, say: Say) -> None:
        self.guesses, self._say = guesses, say
        self._copies = [
            Copy.open(silenced(copy.folder.path, guesses.silent(stage), scratch / f"stage-{number}"))
            if stage.silent
            else copy
            for number, stage in enumerate(guesses.stages)
        ]
        self.tried = 0
        self._nearest: dict[int, float] = {}
        self._refusals: dict[int, str] = {}

    def run(self) -> tuple[Picks, float]:
        """The first candidate with which every stage agrees, and the largest difference in the last.

        Raises:
            UsageError: there is none among as many as are tried.
        """
        found = next(self._from(0, {}), None)
        if found is None:
            raise UsageError(self._why())
        return found

    def _from(self, number: int, picks: Picks) -> Iterator[tuple[Picks, float]]:
        stage: Stage = self.guesses.stages[number]
        for option in stage.options(picks):
            if self.tried >= MOST_CANDIDATES:
                return
            candidate = {**picks, **option}
            apart = self._apart(candidate, number)
            self._nearest[number] = min(self._nearest.get(number, apart), apart)
            if not apart <= TOLERANCE:
                continue
            for line in self.guesses.told(option):
                self._say(f"{stage.name}: {line}")
            self._say(f"{stage.name}: agrees to {apart:.1e} ({self.tried} candidates tried)")
            if number + 1 == len(self.guesses.stages):
                yield candidate, apart
            else:
                yield from self._from(number + 1, candidate)
                self._say(f"{stage.name}: nothing that follows agrees, the next is tried")

    def _apart(self, picks: Picks, number: int) -> float:
        self.tried += 1
        try:
            return difference(read_family(self.guesses.data(picks)), self._copies[number])
        except (IsthmusError, ValueError, AssertionError, RuntimeError) as error:
            self._refusals[number] = str(error)
            return float("inf")

    def _why(self) -> str:
        """What did not agree, in the last stage that was reached."""
        number = max(self._nearest)
        stage, near = self.guesses.stages[number].name, self._nearest[number]
        count = f"{self.tried} mappings{', the most that are tried,' if self.tried >= MOST_CANDIDATES else ''}"
        if near == float("inf"):
            return f"none of {count} can be built in the {stage}: {self._refusals[number]}"
        told = ", ".join(f"{key}={value}" for key, value in self._named().items())
        return (
            f"none of {count} gives its logits: in the {stage} the nearest is {near:.1e} off, "
            f"{TOLERANCE:.0e} is allowed ({told}). It computes something that is not built here."
        )

    def _named(self) -> dict[str, Any]:
        settings = self.guesses.settings
        named = (settings.activation, settings.epsilon)
        return {key: settings.effective[key] for key in named if key is not None}


def _check_config(family: Family, config: Mapping[str, Any], effective: Mapping[str, Any]) -> None:
    """The config has to mean the same to the family as with all that transformers adds to it.

    Raises:
        UsageError: it does not.
    """
    ours, meant = family.to_architecture(config), family.to_architecture(effective)
    if apart := [each.name for each in fields(ours) if getattr(ours, each.name) != getattr(meant, each.name)]:
        told = ", ".join(f"{name} ({getattr(ours, name)}, there {getattr(meant, name)})" for name in apart)
        raise UsageError(f"config.json leaves out what transformers takes otherwise: {told}. Write it there.")
