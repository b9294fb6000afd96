"""Writes the reference pages that are made from the code: config.md, families.md and presets.md in docs/reference.

Run it with `make docs`; tests/unit/test_docs.py fails while a page differs from what this would write.
"""

from __future__ import annotations

import importlib
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from isthmus.config.model_file import read_model
from isthmus.config.presets import PREFIX, about, config_path, opening_lines, preset_names
from isthmus.config.schema import RunConfig
from isthmus.families.family import Family
from isthmus.families.registry import all_families

REFERENCE = Path(__file__).resolve().parent / "reference"
_MADE = "<!-- Made by docs/generate.py from the code; change it there and run `make docs`. -->"
_BOUNDS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}


def config_page() -> str:
    """All settings, group by group."""
    schema = RunConfig.model_json_schema()
    groups = {name: entry for name, entry in schema["properties"].items() if "$ref" in entry}
    plain = {name: entry for name, entry in schema["properties"].items() if "$ref" not in entry}
    lines = [
        "# Settings",
        "",
        _MADE,
        "",
        "A setting comes from the YAML file, from an option such as `--model`, or from an override `group.key=value`",
        "on the command line; the later of these wins. An unknown key, a value of another kind and a key given twice",
        "are errors, with file, line and column. The complete settings of a run are saved in its folder as",
        "`config.yaml`, which is itself a config that can be run. `--dry-run` prints them and stops.",
        "",
        "Values are YAML 1.2: `1e-5` is a number, `no` is text, `null` leaves a setting out.",
        "",
        *_table("Of the run", "", plain, schema),
    ]
    for group, entry in groups.items():
        model = schema["$defs"][entry["$ref"].rpartition("/")[2]]
        lines += _table(f"`{group}`", f"{group}.", model["properties"], model)
    return "\n".join(lines).rstrip() + "\n"


def _table(title: str, prefix: str, settings: dict[str, Any], schema: dict[str, Any]) -> list[str]:
    required = schema.get("required", [])
    about = [schema["description"], ""] if prefix else []
    rows = [
        f"| `{prefix}{name}` | {_kind(entry)} | {'required' if name in required else _default(entry)} "
        f"| {_one_line(entry['description'])} |"
        for name, entry in settings.items()
    ]
    return [f"## {title}", "", *about, "| setting | kind | default | meaning |", "| --- | --- | --- | --- |", *rows, ""]


def _kind(entry: dict[str, Any]) -> str:
    if "anyOf" in entry:
        return " or ".join(_kind(choice) for choice in entry["anyOf"] if choice.get("type") != "null")
    if "enum" in entry:
        return ", ".join(f"`{value}`" for value in entry["enum"])
    if "const" in entry:
        return f"`{entry['const']}`"
    if entry.get("format") == "path":
        return "path"
    if entry.get("type") == "array":
        items = _kind(entry["items"])
        return f"list of {items}" if "enum" in entry["items"] else f"list of {items}s"
    if entry["type"] == "object":
        return "mapping of names"
    name = {"integer": "integer", "number": "number", "boolean": "true or false", "string": "text"}[entry["type"]]
    return " ".join([name, *(f"{sign} {entry[key]:g}" for key, sign in _BOUNDS.items() if key in entry)])


def _default(entry: dict[str, Any]) -> str:
    value = entry.get("default")
    if value is None or value in ([], {}):
        return "not given"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _one_line(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def families_page() -> str:
    """What of each family is built, what of it is proven by which test, and what is refused."""
    cases = Counter(family for family, _, _ in _logits_cases().values())
    lines = [
        "# Families",
        "",
        _MADE,
        "",
        "A model folder is of the family that the `model_type` of its `config.json` names. A setting that asks for",
        "something that is not built is refused: a model is taken as its config describes it or not at all.",
        "",
        "| `model_type` | class | what is its own | import, export | logits | training |",
        "| --- | --- | --- | --- | --- | --- |",
        *(_family_row(family, cases[family.name]) for family in all_families().values()),
        "",
        "What the last three columns stand for, each run by `make test`:",
        "",
        "- **import, export**: a random model that transformers saved goes through `torch_dist` and through legacy",
        "  files of two tensor-parallel ranks and two stages (and two expert-parallel ranks), and through a live model",
        "  over ranks, and comes back with the same names, types and bytes and a config of the same meaning.",
        "- **logits**: so many configs of tiny random models give transformers' logits within 1e-4 in float32; where a",
        "  config is about a feature, turning it off is seen to change them.",
        "- **training**: the gradient of every tensor is transformers' own, to 2e-5 of its largest entry.",
        "",
        "For all of them: grouped-query attention where the class has it, heads of any width, tied or untied",
        "embeddings, a vocabulary of any size (rows that tensor parallelism adds never leave the run), weights in one",
        "safetensors file or many, in float64, float32, float16 or bfloat16.",
        "",
        "Rotary positions: `default`, `linear`, `llama3`, `yarn` and `longrope`, with every constant taken from the",
        "config, read from `rope_parameters` as well as from `rope_theta` and `rope_scaling`. Exports carry both",
        "spellings. `dynamic` is refused.",
        "",
        "Experts are routed as each family's own code does it; without `moe.capacity_factor` no token is dropped. What",
        "balances them (auxiliary losses, updates of the bias by which experts are chosen) is off unless it is set:",
        "[Train experts](../how-to/train-moe-models.md).",
        "",
        "Layers that predict further tokens (`num_nextn_predict_layers`) are kept through conversions and trained with",
        "the model where the weights have them (`train.mtp_loss_weight`).",
        "",
        "## What is refused",
        "",
        "Dropout is refused of a model that is to be trained; it has no bearing on a conversion.",
        "",
        "| setting | families | allowed | because |",
        "| --- | --- | --- | --- |",
        *_refusals(),
        "",
        "Every tensor of the files must be wanted and every wanted tensor must be there, in its shape; otherwise",
        "nothing is loaded and the differences are listed. Buffers that old files carry (`rotary_emb.inv_freq`) and",
        "the `lm_head.weight` of a tied model are not read.",
    ]
    return "\n".join(lines) + "\n"


def _family_row(family: Family, cases: int) -> str:
    about = (importlib.import_module(f"isthmus.families.models.{family.name}").__doc__ or "").strip().split("\n\n")[0]
    logits = f"{cases} configs" if cases > 1 else f"{cases} config"
    return f"| `{family.name}` | `{family.hf_architecture}` | {_one_line(about)} | yes | {logits} | yes |"


def _logits_cases() -> dict[str, tuple[str, Any, Any]]:
    """Those of the test, so that the page claims what is run."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
    found: dict[str, tuple[str, Any, Any]] = importlib.import_module("parity.test_logits").CASES
    return found


def _refusals() -> Iterator[str]:
    everyone = all_families().values()
    said: dict[tuple[str, str], list[str]] = {}
    for family in everyone:
        for key, fixed in family.fixed.items():
            allowed = ", ".join("absent" if value is None else f"`{str(value).lower()}`" for value in fixed.allowed)
            said.setdefault((key, f"{allowed} | {fixed.why}"), []).append(family.name)
    for (key, rest), names in said.items():
        who = "all" if len(names) == len(everyone) else ", ".join(names)
        yield f"| `{key}` | {who} | {rest} |"


def presets_page() -> str:
    """What comes along: configs of runs with their commands, and models with what they are quoted from."""
    lines = [
        "# Presets",
        "",
        _MADE,
        "",
        "`isthmus config ls` lists them, `isthmus config show preset:NAME` prints one with all that it builds on, and",
        "`isthmus config cp NAME FILE.yaml` makes it your own.",
        "",
        "## Runs",
        "",
        "Each stands wherever a config file can. What comes after it on the command line counts more.",
        "",
        "| preset | what it is for | command |",
        "| --- | --- | --- |",
        *(_run_row(name) for name in preset_names()),
        "",
        "## Models",
        "",
        "Each is a `model.path`, with `model.init=random`: the keys of the `config.json` on the Hub, and no weights. A",
        "test counts the parameters that they make.",
        "",
        "| preset | family | what it is |",
        "| --- | --- | --- |",
        *(_model_row(name) for name in preset_names("models")),
    ]
    return "\n".join(lines) + "\n"


def _run_row(name: str) -> str:
    lines = opening_lines(config_path(f"{PREFIX}{name}"))
    command = next(line for line in lines if line.startswith("isthmus "))
    return f"| `{PREFIX}{name}` | {_one_line(about(name))} | `{command}` |"


def _model_row(name: str) -> str:
    return f"| `{PREFIX}{name}` | `{read_model(PREFIX + name)['model_type']}` | {_one_line(about(name, 'models'))} |"


if __name__ == "__main__":
    (REFERENCE / "config.md").write_text(config_page())
    (REFERENCE / "families.md").write_text(families_page())
    (REFERENCE / "presets.md").write_text(presets_page())
