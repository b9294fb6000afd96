"""An inferred family as a module for ``families/models``, which a maintainer can commit."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from isthmus.errors import UsageError
from isthmus.families.registry import shipped_families

Data = Mapping[str, Any]
_NAME = re.compile(r"[A-Za-z_]\w*")
_WHY = "the mapping was verified with this value only"
_WHERE = "where this dropout applies was not verified; set it to 0 with model.config"
_THERE = {"inverse": "1 / value", "inverse_root": "value**-0.5"}
_BACK = {"inverse": "1 / value", "inverse_root": "value**-2"}
_HEADER = '''"""{name}: {about}"""

from dataclasses import replace
from math import inf

from isthmus.families.inferred.json_family import AllEqual
from isthmus.families.family import Derived, Family, Fixed, Key
{models}from isthmus.families.rules import expert_tensors
from isthmus.families.multimodal import multimodal
from isthmus.families.rules.rule import HfPart, Rule, copy, gate_up, qkv, renamed
from isthmus.families.rules.sliding_window import read_window
'''


def write_module(data: Data) -> str:
    """Python source with the constant ``FAMILY``; ``data`` is that of ``json_family``, ``related_family`` or
    ``nested_family``.

    Lines may be longer than a formatter makes them.
    """
    language = data.get("language", data)
    related = "like" in language
    about = f"{language['like']} with other settings." if related else "inferred by isthmus convert --learn."
    donors = sorted({language["like"], *(donor for donor, _ in language["settings_of"].values())}) if related else []
    body = _related(language) if related else _inferred(language)
    if language is not data:
        body = f"_LANGUAGE{body.removeprefix('FAMILY')}\n{_nested(data)}"
    models = "".join(map(_import, donors))
    lines = _HEADER.format(name=data["name"], about=about, models=models).splitlines()
    used = [line for line in lines if not line.startswith("from") or _used(line, body)]
    return "\n".join(["\n".join(_only_used(line, body) for line in used), "", body, ""])


def _import(family: str) -> str:
    """The line that imports the module of a family, which has its name."""
    shipped = shipped_families().get(family)
    if shipped is None:
        raise UsageError(
            f"--keep FILE.py: the family {family} is that of another package. Keep the result in a folder."
        )
    package, _, module = shipped.module.rpartition(".")
    return f"from {package} import {module}\n"


def _used(line: str, body: str) -> bool:
    return any(re.search(rf"\b{name}\b", body) for name in line.partition(" import ")[2].split(", "))


def _only_used(line: str, body: str) -> str:
    start, middle, names = line.partition(" import ")
    if not line.startswith("from"):
        return line
    return start + middle + ", ".join(name for name in names.split(", ") if re.search(rf"\b{name}\b", body))


def _nested(data: Data) -> str:
    nested = data["nested"]
    fields = {
        "towers": repr(tuple(nested["towers"])),
        "tied": repr(nested["tied"]),
        "names": "{}",
        "module_names": repr(nested["module_names"]),
        "other_names": "{}",
    }
    first = f"    {data['name']!r},\n    {data['hf_architecture']!r},\n    _LANGUAGE,\n"
    return f"FAMILY = multimodal(\n{first}{_fields(fields)})"


def _related(data: Data) -> str:
    base = f"{data['like']}.FAMILY"
    changed = {*data["traits"], *data["derived"], *data["settings_of"]}
    ways: dict[str, list[str]] = {"keys": [], "derived": []}
    for name, hf in data["keys"].items():
        ways["keys"].append(f"{name!r}: replace({base}.keys[{name!r}], hf={hf!r}, aliases=())")
    for name, (donor, kind) in data["settings_of"].items():
        ways[kind].append(f"{name!r}: {donor}.FAMILY.{kind}[{name!r}]")
    ways["derived"] += _derived(data["derived"], {})
    defaults = {name: entry["default"] for name, entry in data["settings"].items() if "default" in entry}
    required = tuple(name for name, entry in data["settings"].items() if "default" not in entry)
    fields = {
        "name": repr(data["name"]),
        "hf_architecture": repr(data["hf_architecture"]),
        "scored_class": "None",
        "auto_map": "{}",
        "dropout": "{}",
        "keys": _changed(f"{base}.keys", changed, ways["keys"]),
        "derived": _changed(f"{base}.derived", changed, ways["derived"]),
        "traits": _changed(
            f"{base}.traits", changed, [f"{name!r}: {value!r}" for name, value in data["traits"].items()]
        ),
        "fixed": _changed(f"{base}.fixed", (), _fixed(data["fixed"])),
        "defaults": repr(defaults),
        "required": repr(required),
        "rules": f"renamed({base}.rules, {dict(data['tensor_names'])!r})",
    }
    return f"FAMILY = replace(\n    {base},\n{_fields(fields)})"


def _inferred(data: Data) -> str:
    absent = {key["hf"]: key.get("default") for key in data["keys"].values()}
    window = data["window"]
    derived = _derived(data["derived"], absent)
    if window.get("unrotated") == "full_attention":
        layers = _expression(data["keys"]["num_layers"]["hf"], absent)
        arguments = f"{window['style']!r}, hf, {window.get('default')!r}, {layers}, {window.get('every')!r}"
        reader = f"lambda hf: read_window({arguments})[1]"
        derived.append(f"'unrotated_layers': Derived({reader}, lambda _value, _arch: {{}})")
    fields = {
        "name": repr(data["name"]),
        "hf_architecture": repr(data["hf_architecture"]),
        "keys": _dict([f"{name!r}: {_key(key, absent)}" for name, key in data["keys"].items()]),
        "derived": _dict(derived),
        "traits": _dict([f"{name!r}: {value!r}" for name, value in data["traits"].items()]),
        "fixed": _dict(_fixed(data["fixed"])),
        "dropout": "{}",
        "sliding_window": repr(window["style"]),
        "sliding_window_default": repr(window.get("default")),
        "sliding_window_pattern": repr(window.get("every")),
        "rope_defaults": repr(data["rope"]["defaults"]),
        "rope_names": repr(data["rope"]["names"]),
        "ignorable": "()",
        "rules": "(\n        " + "\n        ".join(f"{_rule(rule)}," for rule in data["rules"]) + "\n    )",
    }
    return f"FAMILY = Family(\n{_fields(fields)})"


def _fields(fields: Mapping[str, str]) -> str:
    return "".join(f"    {name}={source},\n" for name, source in fields.items())


def _dict(entries: Iterable[str]) -> str:
    return "{" + "".join(f"\n        {entry}," for entry in entries) + "\n    }"


def _changed(base: str, without: Collection[str], entries: Sequence[str]) -> str:
    entries_of_base = base
    if without:
        entries_of_base = f"{{name: each for name, each in {base}.items() if name not in {sorted(without)!r}}}"
    return f"{entries_of_base} | {_dict(entries)}" if entries else entries_of_base


def _expression(formula: str, absent: Data) -> str:
    """A formula of ``json_family`` in Python."""

    def setting(match: re.Match[str]) -> str:
        return f"hf.get({match[0]!r}, {absent.get(match[0])!r})"

    return _NAME.sub(setting, formula).replace("/", "//")


def _derived(formulas: Mapping[str, str], absent: Data) -> list[str]:
    return [
        f"{name!r}: Derived(lambda hf: {_expression(formula, absent)}, lambda _value, _arch: {{}})"
        for name, formula in formulas.items()
    ]


def _key(entry: Data, absent: Data) -> str:
    meaning, default = entry.get("as"), entry.get("default")
    if meaning == "first_dense":
        return f"replace(expert_tensors.first_dense(default={default or 0}), hf={entry['hf']!r})"
    if meaning == "number_of_experts":
        width = _expression(entry["of"], absent)
        shared = f"expert_tensors.shared_width({entry['hf']!r}, default={default or 0})"
        return f"replace({shared}, decode=lambda number, hf: number * {width})"
    arguments = [repr(entry["hf"])]
    arguments += [f"kind={entry['kind']}"] if "kind" in entry else []
    arguments += [f"{name}={entry[name]!r}" for name in ("default", "optional") if name in entry]
    arguments += [f"null=lambda hf: {_expression(entry['null'], absent)}"] if "null" in entry else []
    if meaning is not None:
        arguments += [f"decode=lambda value, _hf: {_THERE[meaning]}", f"encode=lambda value, _arch: {_BACK[meaning]}"]
    return f"Key({', '.join(arguments)})"


def _fixed(entries: Mapping[str, Data]) -> list[str]:
    lines = []
    for name, entry in entries.items():
        if "sum_of" in entry:
            continue  # a maintainer knows which size it repeats
        allowed = f"AllEqual(({entry['each']!r},))" if "each" in entry else f"({entry['is']!r},)"
        if entry.get("training", False):
            why, more = _WHERE, "training=True"
        else:
            why, more = _WHY, "strict=True"
        lines.append(f"{name!r}: Fixed({allowed}, {why!r}, absent={entry['absent']!r}, {more})")
    return lines


def _rule(entry: Data) -> str:
    parts = [(name, tuple(symbols)) for name, *symbols in entry["parts"]]
    options = {name: value for name, value in entry.items() if name not in ("canonical", "parts")}
    names = [repr(name) for name, _ in parts]
    tail = [repr(symbol) for symbol in parts[0][1][1:]]
    if len(parts) == 1:
        return _call("copy", [repr(entry["canonical"]), *names, *map(repr, parts[0][1])], options)
    if options.get("shard") == "heads" and options.get("strands") == "G":
        arguments = {name: value for name, value in options.items() if name not in ("shard", "strands")}
        return _call("qkv", [repr(entry["canonical"]), *names, *tail], arguments)
    if options.get("shard") == "gate_up" and len(parts) == 2:
        arguments = {name: value for name, value in options.items() if name != "shard"} | {"width": parts[0][1][0]}
        return _call("gate_up", [repr(entry["canonical"]), *names, *tail], arguments)
    sources = ", ".join(f"HfPart({name!r}, {symbols!r})" for name, symbols in parts)
    return _call("Rule", [f"canonical={entry['canonical']!r}", f"parts=({sources},)"], options)


def _call(function: str, arguments: Sequence[str], options: Data) -> str:
    return f"{function}({', '.join([*arguments, *(f'{name}={value!r}' for name, value in options.items())])})"
