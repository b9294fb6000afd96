"""Whether a run can be resumed: what differs from the run record of its checkpoint, and which of it is accepted."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from isthmus.config.deprecated_names import current_settings
from isthmus.config.schema import RunConfig
from isthmus.config.schema.resume_rules import RESUME_RULES, ResumeRule, names_accepted
from isthmus.errors import DataError, UsageError
from isthmus.recipes.plan.run_record import run_record
from isthmus.recipes.plan.validation import RunContext
from isthmus.recipes.run_dir import RUN_RECORD, read_record


@dataclass(frozen=True, slots=True)
class Change:
    """One difference between a run and the run record of its checkpoint."""

    name: str
    """The setting."""
    text: str
    rule: ResumeRule


def checked_record(context: RunContext) -> tuple[dict[str, Any], list[str]]:
    """The record of the run, and lines for the log.

    Raises:
        UsageError: the checkpoint to resume from was trained with something else that shapes the result.
        DataError: its record is damaged.
    """
    now = run_record(context)
    if context.resume is None:
        return now, []
    saved = read_record(context.resume)
    if saved is None:
        older = f"{context.resume} was written by an older version and has no run record"
        return now, [f"{older}: its settings and its model are not compared with those of this run"]
    try:
        differences, history = [*changes(saved, now)], [*saved["changes"]]
    except (LookupError, TypeError, AttributeError) as error:
        record = context.resume / RUN_RECORD
        raise DataError(f"{record} has other content than a run record. Resume from another checkpoint.") from error
    accepted = names_accepted(context.config.checkpoint.accept_changes)
    refused = [change for change in differences if change.rule != "noted" and change.name not in accepted]
    if refused:
        raise UsageError(_refusal(context, refused))
    texts = [change.text for change in differences]
    now["changes"] = history
    if not texts:
        return now, []
    history.append({"checkpoint": str(context.resume), "changes": texts})
    return now, [f"changed since {context.resume}: {', '.join(texts)}"]


def _refusal(context: RunContext, refused: Sequence[Change]) -> str:
    texts = [change.text for change in refused]
    continues = context.resume is not None and context.resume.parent == context.run_dir.checkpoints
    anew = "another --out" if continues else "checkpoint.resume=never"
    hint = f"Restore {'it' if len(texts) == 1 else 'them'}, or start a new run with {anew}."
    if asked := list(dict.fromkeys(change.name for change in refused if change.rule == "ask")):
        names = ",".join(asked)
        hint += f" To resume with another {names}: --accept-changes {names} (setting checkpoint.accept_changes)."
    if len(texts) == 1:
        return f"{context.resume} was trained with another setting: {texts[0]}. {hint}"
    return "\n  ".join([f"{context.resume} was trained with other settings:", *texts, hint])


def changes(saved: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[Change]:
    """The differences of two records; a setting that an older version did not have has its default."""
    settings = current_settings(saved["settings"])
    for name, rule in RESUME_RULES.items():
        if rule in ("content", "free"):
            continue
        before = settings[name] if name in settings else _default(name)
        if before != now["settings"][name]:
            yield Change(name, f"{name} {_shown(before)} -> {_shown(now['settings'][name])}", rule)
    yield from _model_changes("model", saved["model"], now["model"], "fixed")
    if saved["teacher"] and now["teacher"]:
        yield from _model_changes("distill.teacher", saved["teacher"], now["teacher"], "ask")
    if saved["adapter"] != now["adapter"]:
        yield Change("lora.path", "lora.path: another adapter to start from", "fixed")
    if any(saved["tokenizer"][part] != now["tokenizer"][part] for part in ("vocabulary", "probe")):
        yield Change("tokenizer.path", "tokenizer: other tokens", "fixed")
    elif saved["tokenizer"]["template"] != now["tokenizer"]["template"]:
        yield Change("chat.template", "chat.template: another chat template", "fixed")


def _model_changes(name: str, saved: Mapping[str, Any], now: Mapping[str, Any], rule: ResumeRule) -> Iterator[Change]:
    before, after = saved["architecture"], now["architecture"]
    differing = [key for key in before.keys() & after.keys() if before[key] != after[key]]
    for key in sorted(differing):
        yield Change(name, f"{name} {key} {_shown(before[key])} -> {_shown(after[key])}", rule)
    if not differing and saved["weights"] != now["weights"]:
        first, other = (
            model["weights"] if model["weights"].startswith("random") else f"{what} {model['name']}"
            for model, what in ((saved, "of"), (now, "other weights in"))
        )
        yield Change(name, f"{name} weights {first} -> {other}", rule)


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _default(name: str) -> Any:
    section, _, key = name.partition(".")
    field = RunConfig.model_fields[section]
    annotation: Any = field.annotation
    field = annotation.model_fields[key] if key else field
    return json.loads(json.dumps(field.get_default(call_default_factory=True)))
