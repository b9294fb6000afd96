"""The first config of a run: settings with the reason of each as a comment."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import Any, NamedTuple

from isthmus.config.recipes import RECIPE_SETTINGS, RecipeName
from isthmus.config.yaml_text import write_mapping
from isthmus.data.tokenize.record_kinds import RECORD_KINDS
from isthmus.errors import UsageError, counted
from isthmus.tools.init.data_survey import MOST_RECORDS, DataSurvey

_COVERED = 0.99
"""Share of the samples that ``data.seq_length`` leaves uncut."""
_LEAST_LENGTH, _MOST_LENGTH, _TEXT_LENGTH = 128, 8192, 2048
_FEW_RECORDS = 20_000
_COMMENT_COLUMN = 44


class ProposedSetting(NamedTuple):
    name: str
    """Dotted."""
    value: Any
    reason: str | None = None


def recipe_for(survey: DataSurvey, recipe: str | None) -> RecipeName:
    """The recipe that trains on these records; ``recipe`` is the one that was asked for.

    Raises:
        UsageError: there is no such recipe, or it does not train on these records.
    """
    kind = RECORD_KINDS[survey.kind]
    if recipe is None:
        recipe = kind.recipe
    if recipe not in RECIPE_SETTINGS:
        raise UsageError(f"--recipe {recipe} is unknown. Use {', '.join(RECIPE_SETTINGS)}.")
    name: RecipeName = recipe  # type: ignore[assignment]
    expected = RECORD_KINDS[RECIPE_SETTINGS[name].records]
    accepted = {expected.name, "preference"} if expected.name == "unpaired" else {expected.name}
    if not expected.has_columns and survey.kind not in accepted:
        raise UsageError(
            f"{name} trains on {expected.phrase}, and the data has {kind.phrase} in each record. Use --recipe "
            f"{kind.recipe}, or other data."
        )
    return name


def data_settings(survey: DataSurvey, positions: int) -> list[ProposedSetting]:
    """Length, epochs and validation for this data.

    Args:
        survey: of the training data.
        positions: that the model is made for.
    """
    settings = [ProposedSetting("data.files", list(survey.files))]
    if RECORD_KINDS[survey.kind].is_text:
        length = min(_TEXT_LENGTH, positions)
        reason = "documents are cut into sequences of this length"
    else:
        covered = max(_LEAST_LENGTH, survey.length(_COVERED))
        length = min(1 << (covered - 1).bit_length(), _MOST_LENGTH, positions)
        cut = float((survey.lengths > length + 1).mean())
        reason = f"{_COVERED:.0%} of the samples have at most {survey.length(_COVERED):,} tokens; {cut:.1%} are cut"
        reason += f", as the model has {positions:,} positions" if length == positions else ""
    settings.append(ProposedSetting("data.seq_length", length, reason))
    if survey.bad:
        reason = f"{counted(survey.bad, 'bad record')}, the first: {survey.first_error}"
        settings.append(ProposedSetting("data.on_error", "skip", reason.replace("\n", " ")))
    is_small = survey.is_complete and survey.records < _FEW_RECORDS
    share = 0.05 if is_small else 0.02
    settings.append(ProposedSetting("data.valid_fraction", share, "kept for validation"))
    repeats = is_small and survey.kind in ("chat", "text")
    epochs = 3 if repeats and survey.kind == "chat" else 1
    settings.append(
        ProposedSetting("train.epochs", epochs, "passes over the data" + (", which is small" if epochs > 1 else ""))
    )
    return settings


def run_file(settings: Iterable[ProposedSetting], *, command: str, survey: DataSurvey) -> str:
    """YAML of the settings with their reasons, and what the data has as its first comment."""
    lines = [f"# Written by isthmus init. Start it with: {command}", "# All settings: isthmus config schema", "#"]
    lines += [f"# {line}" for line in survey.lines()]
    if not survey.is_complete:
        lines.append(f"# Only the first {MOST_RECORDS:,} records were read for these numbers.")
    lines.append("")
    for section, group in groupby(settings, key=lambda setting: setting.name.partition(".")[0]):
        members = list(group)
        if members[0].name == section:
            lines += _lines({section: members[0].value}, members[0].reason, "")
            continue
        lines.append(f"{section}:")
        for name, value, reason in members:
            lines += _lines({name.partition(".")[2]: value}, reason, "  ")
    return "\n".join([*lines, ""])


def _lines(value: Mapping[str, Any], reason: str | None, indent: str) -> list[str]:
    text = [f"{indent}{line}" for line in write_mapping(value).rstrip("\n").split("\n")]
    if reason is not None:
        text[0] = (
            f"{text[0]:<{_COMMENT_COLUMN}}# {reason}" if len(text[0]) < _COMMENT_COLUMN else f"{text[0]}  # {reason}"
        )
    return text
