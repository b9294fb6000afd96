"""The language model of a model type without a family: the whole model, or a section of its config beside towers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from isthmus.errors import UsageError
from isthmus.families.inferred.json_family import FORMAT
from isthmus.families.inferred.nested import SECTION, TIED, LanguageSection
from isthmus.families.nested import Nested
from isthmus.families.rules.rule import Shape
from isthmus.tools.learn.config_inference import SIZE_WORDS

Data = dict[str, Any]
_TABLE = ("vocab_size", "hidden_size")
_OUTPUT = re.compile(r"head|out|unembed")


def find_section(
    model_type: str,
    hf_architecture: str,
    config: Mapping[str, Any],
    shapes: Mapping[str, Shape],
    default_tied: bool | None,
    modules: tuple[str, str],
) -> LanguageSection:
    """Where a small multimodal model has its language model.

    Args:
        model_type: of the whole model.
        hf_architecture: its class.
        config: of the small model, completed by transformers.
        shapes: of all tensors in its file.
        default_tied: ``tie_word_embeddings`` outside of the section by default; None: there is no such setting.
        modules: paths of the embedding and of the output layer in the class.

    Raises:
        UsageError: the language model's tensors are not together, or the config contradicts its output layer.
    """
    section = config[SECTION]
    embedding, head = _language_names(section, shapes)
    root = embedding.removesuffix(".weight").rpartition(".")[0] + "."
    language = {name for name in shapes if name.startswith(root)}
    if head is not None:  # and its bias
        language |= {name for name in shapes if name.startswith(f"{head.removesuffix('.weight')}.")}
    tied = head is None
    if config.get(TIED, default_tied) == tied:
        outer = default_tied
    elif section.get(TIED, tied) == tied:
        outer = None
    else:
        raise UsageError(f"config.json: {TIED} is {not tied}, and the model has the opposite.")
    towers = _patterns(shapes.keys() - language, language)
    nested = Nested(model_type=str(section.get("model_type")), towers=towers, tied=outer)
    return LanguageSection(model_type, hf_architecture, nested, _module_names(embedding, head, modules))


def _language_names(section: Mapping[str, Any], shapes: Mapping[str, Shape]) -> tuple[str, str | None]:
    """The embedding, and the output layer's weight if there is one."""
    table = tuple(next((section[word] for word in SIZE_WORDS[name] if section.get(word)), 0) for name in _TABLE)
    wide = [name for name, shape in shapes.items() if shape == table and name.endswith(".weight")]
    heads = [name for name in wide if _OUTPUT.search(name.removesuffix(".weight").rpartition(".")[2])]
    embeddings = []
    for name in wide:
        root = name.removesuffix(".weight").rpartition(".")[0]
        layer = re.compile(rf"{re.escape(root)}\.\w+\.0\..*")
        if name not in heads and root and any(map(layer.fullmatch, shapes)):
            embeddings.append(name)
    if len(embeddings) != 1 or len(heads) > 1:
        raise UsageError(
            f"{SECTION} must describe a language model with one embedding {list(table)} beside its layers, and at most "
            f"one output layer; found {', '.join([*embeddings, *heads]) or 'none'}."
        )
    return embeddings[0], next(iter(heads), None)


def _patterns(towers: Iterable[str], language_tensors: Iterable[str]) -> tuple[str, ...]:
    """The shortest prefixes of the names of towers that no tensor of the language model has, as patterns."""
    language = tuple(language_tensors)
    patterns: dict[str, None] = {}
    for name in sorted(towers):
        parts = name.split(".")
        prefixes = (".".join(parts[:count]) + "." for count in range(1, len(parts)))
        prefix = next(
            (candidate for candidate in prefixes if not any(other.startswith(candidate) for other in language)), None
        )
        patterns[name if prefix is None else f"{prefix}*"] = None
    return tuple(patterns)


def _module_names(embedding: str, head: str | None, modules: tuple[str, str]) -> dict[str, str]:
    """Prefixes of tensor names that differ in the module paths of transformers."""
    names = {}
    for tensor, path, end in ((embedding, modules[0], "."), (head, modules[1], "")):
        if tensor is None or tensor == f"{path}.weight":
            continue
        ours, theirs = tensor.removesuffix(".weight"), path
        if end:
            ours, theirs = ours.rpartition(".")[0], theirs.rpartition(".")[0]
        names[f"{ours}{end}"] = f"{theirs}{end}"
    return names


def nested_data(section: LanguageSection, language: Data, fixed: Mapping[str, Any], tied: Mapping[str, Any]) -> Data:
    """The data of the whole model.

    ``fixed`` are the settings outside of the sections, some of which repeat one of the section. ``tied`` is the entry
    of ``tie_word_embeddings`` in the section, like one of ``fixed``.
    """
    assert section.nested is not None
    nested = {"tied": section.nested.tied, "towers": list(section.nested.towers)}
    return {
        "format": FORMAT,
        "name": section.name,
        "hf_architecture": section.hf_architecture,
        "nested": nested | {"module_names": dict(section.module_names)},
        "fixed": dict(fixed),
        "fixed_in_section": {TIED: dict(tied)},
        "language": {name: value for name, value in language.items() if name != "proof"},
        "proof": language["proof"],
    }
