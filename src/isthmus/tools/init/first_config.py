"""Writes the config of a first run from a look at model, data and machine."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isthmus.config.load import load_config
from isthmus.config.recipes import RECIPE_SETTINGS, RecipeName
from isthmus.config.schema.model import ModelConfig
from isthmus.config.yaml_text import read_value
from isthmus.errors import OutputExists, UsageError
from isthmus.families.registry import family_for, language_config
from isthmus.files.atomic_write import atomic_file
from isthmus.platforms.described import described_platform
from isthmus.recipes.data.data_notes import model_positions
from isthmus.recipes.dry_run import dry_run
from isthmus.recipes.model.model_source import open_source, tokenizer_at
from isthmus.tools.init.data_survey import DataSurvey, survey
from isthmus.tools.init.layout import batch_size, first_layout, gpus_here, learning_rate
from isthmus.tools.init.run_file import ProposedSetting, data_settings, recipe_for, run_file
from isthmus.tools.planner.planned_gpus import PlannedGpus


@dataclass(frozen=True, slots=True)
class FirstConfig:
    path: Path
    recipe: RecipeName
    command: str
    """That starts the run."""
    survey: DataSurvey
    settings: Sequence[ProposedSetting]

    def as_dict(self) -> dict[str, Any]:
        """The result for ``--json``."""
        return {
            "config": str(self.path),
            "recipe": self.recipe,
            "command": self.command,
            "settings": {setting.name: setting.value for setting in self.settings},
            "data": self.survey.as_dict(),
        }


def write_first_config(
    path: Path,
    *,
    model: str,
    data: Sequence[str],
    recipe: str | None,
    machine: PlannedGpus | None,
    words: Sequence[str],
    report: Callable[[str], None],
) -> FirstConfig:
    """Write a commented config that starts at once; its checks are those of ``--dry-run``.

    Args:
        path: the file, which must not exist.
        model: Hugging Face folder or Hub id.
        data: as ``data.files``.
        recipe: goal of the run; None: what fits the records.
        machine: GPUs that will train; None: this machine.
        words: settings of the user, ``key=value``; they replace those of the proposal.
        report: is called with each line of the checks.

    Raises:
        OutputExists: ``path`` exists.
        UsageError: recipe and data do not fit, or the run does not fit into the machine.
        DataError: the data has no record of the recipe.
    """
    if path.exists():
        raise OutputExists(f"{path} exists. Give another file with --out, or remove it.")
    chosen = {name: read_value(value) for name, _, value in (word.partition("=") for word in words)}
    here = gpus_here() if machine is None else machine
    with open_source(ModelConfig(path=model)) as source:
        report(f"reading {', '.join(data)} with the tokenizer of {source}")
        records = survey(data, tokenizer_at(model, None))
        name = recipe_for(records, recipe)
        missing = [setting for setting in RECIPE_SETTINGS[name].required if setting not in chosen]
        if missing:
            raise UsageError(f"{name} needs {', '.join(missing)}. Add {missing[0]}=VALUE.")
        config = language_config(source.config)
        of_data = data_settings(records, model_positions(family_for(config).to_architecture(config)))
        length = next(setting for setting in of_data if setting.name == "data.seq_length")
        planned = list(words) if "data.seq_length" in chosen else [*words, f"data.seq_length={length.value}"]
        if here is not None and not any(setting in chosen for setting in ("train.global_batch_size", "train.steps")):
            planned += batch_size(records, name, int(length.value), here.world_size)
        layout = first_layout(model, source, name, here, planned)
        rate = learning_rate(source, name, layout.settings, words)
        title = ProposedSetting("model", model)
    proposal = [
        ProposedSetting("recipe", name, RECIPE_SETTINGS[name].short_help),
        title,
        *of_data,
        *layout.settings,
        *rate,
    ]
    settings = _sorted([setting for setting in proposal if setting.name not in chosen], chosen)
    nproc = ["--nproc", str(layout.nproc)] if layout.nproc > 1 else []
    command = shlex.join(["isthmus", name, str(path), *nproc])
    with atomic_file(path) as temporary:
        temporary.write_text(run_file(settings, command=command, survey=records))
        checked = load_config(name, temporary, [], {"out": "run"})
        platform = None
        if machine is not None and machine.part is not None:
            platform = described_platform(machine.part, machine.gpus_per_node, machine.memory_bytes)
        ranks = layout.nproc * (1 if machine is None else machine.nodes)
        dry_run(
            checked,
            world_size=ranks,
            ranks_here=layout.nproc,
            report=report,
            machine=platform,
            runs_here=machine is None,
        )
    return FirstConfig(path, name, command, records, settings)


def _sorted(proposal: Sequence[ProposedSetting], chosen: dict[str, Any]) -> list[ProposedSetting]:
    """All settings, those of a section together, each once."""
    settings = {setting.name: setting for setting in proposal}
    settings |= {name: ProposedSetting(name, value, "as you gave it") for name, value in chosen.items()}
    sections = list(dict.fromkeys(name.partition(".")[0] for name in settings))
    return sorted(settings.values(), key=lambda setting: sections.index(setting.name.partition(".")[0]))
