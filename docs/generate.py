"""Writes the reference pages that are made from the code: docs/reference/config.md and docs/reference/families.md.

Run it with `make docs`; tests/unit/test_docs.py fails while a page differs from what this would write.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from isthmus.config.schema import RunConfig
from isthmus.families.family import Family
from isthmus.families.registry import all_families

REFERENCE = Path(__file__).resolve().parent / "reference"
_MADE = "<!-- Made by docs/generate.py from the code; change it there and run `make docs`. -->"
_BOUNDS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
_WINDOW = {
    "never": "",
    "always": "sliding window in all layers (`sliding_window`)",
    "by_layer": "sliding window in the layers that the config names (`use_sliding_window`)",
    "pattern": "sliding window in the layers that the config names, or in all but every nth",
}
_PARTS = {
    "mla.kv_lora_rank": "latent keys and values",
    "qkv_bias": "bias on query, key and value",
    "proj_bias": "bias on the output",
    "qk_norm": "norm on query and key",
    "attention_sinks": "sinks",
}


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
        return f"list of {_kind(entry['items'])}s"
    name = {"integer": "integer", "number": "number", "boolean": "true or false", "string": "text"}[entry["type"]]
    return " ".join([name, *(f"{sign} {entry[key]:g}" for key, sign in _BOUNDS.items() if key in entry)])


def _default(entry: dict[str, Any]) -> str:
    value = entry.get("default")
    if value is None or value == []:
        return "not given"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _one_line(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def families_page() -> str:
    """What of each family is built and what is refused."""
    lines = [
        "# Families",
        "",
        _MADE,
        "",
        "A model folder is of the family that the `model_type` of its `config.json` names. Any other is refused, and",
        "so is a setting that asks for something that is not built: a model is trained as its config describes it or",
        "not at all.",
        "",
        "| `model_type` | class | attention | feed-forward blocks |",
        "| --- | --- | --- | --- |",
        *(_family_row(family) for family in all_families().values()),
        "",
        "For all of them: grouped-query attention, `head_dim` of any width, tied or untied embeddings, a vocabulary of",
        "any size (rows that tensor parallelism adds never leave the run), weights in one safetensors file or many, in",
        "float64, float32, float16 or bfloat16.",
        "",
        "What an entry says *if asked* is there when the model's config says so.",
        "",
        "Rotary positions: `default`, `linear`, `llama3`, `yarn` and `longrope`, with every constant taken from the",
        "config, read from `rope_parameters` as well as from `rope_theta` and `rope_scaling`. Exports carry both",
        "spellings. Other kinds (`dynamic`) are refused.",
        "",
        "Experts are routed as each family's own code does it, and no token is dropped. What balances them in",
        "pretraining (auxiliary losses, updates of the bias by which experts are chosen) is not computed: a bias stays",
        "what it is. Layers that predict ahead (`num_nextn_predict_layers`) are converted and not trained.",
        "",
        "## What else is refused",
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


def _family_row(family: Family) -> str:
    attention = [_WINDOW[family.sliding_window]]
    for path, words in _PARTS.items():
        if family.traits.get(path):
            attention.append(words)
        elif path in family.keys:
            attention.append(words if path.startswith("mla.") else f"{words} if asked")
    blocks = "dense"
    if "moe.num_experts" in family.keys:
        shared = ", shared ones" if "moe.shared_ffn_hidden_size" in family.keys else ""
        some = "moe.dense_layers" in {*family.keys, *family.derived}
        blocks = f"experts{shared}{'; dense in some layers' if some else ''}"
    ahead = ", layers ahead" if "mtp_layers" in family.keys else ""
    said = ", ".join(filter(None, attention)) or "plain"
    return f"| `{family.name}` | `{family.hf_architecture}` | {said} | {blocks}{ahead} |"


def _refusals() -> Iterator[str]:
    everyone = all_families().values()
    said: dict[tuple[str, str], list[str]] = {}
    for family in everyone:
        for key, fixed in family.fixed.items():
            allowed = ", ".join("absent" if value is None else f"`{str(value).lower()}`" for value in fixed.allowed)
            training = " (to be trained)" if fixed.training else ""
            said.setdefault((key, f"{allowed}{training} | {fixed.why}"), []).append(family.name)
    for (key, rest), names in sorted(said.items()):
        who = "all" if len(names) == len(everyone) else ", ".join(names)
        yield f"| `{key}` | {who} | {rest} |"


if __name__ == "__main__":
    (REFERENCE / "config.md").write_text(config_page())
    (REFERENCE / "families.md").write_text(families_page())
