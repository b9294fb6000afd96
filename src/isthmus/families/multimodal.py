"""The family of a multimodal class, made of the families of its language models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from isthmus.families.family import Family
from isthmus.families.nested import Nested, Tied
from isthmus.families.rules.rule import Rule

LLAVA_NAMES = {"model.": "language_model.model.", "lm_head.": "language_model.lm_head."}
"""Prefixes of the tensors of a language model, and what they are in the files of most multimodal models."""
LLAVA_MODULES = {"language_model.model.": "model.language_model.", "language_model.lm_head": "lm_head"}
"""These prefixes in the module paths of transformers."""
LLAVA_TOWERS = ("vision_tower.*", "multi_modal_projector.*")
LLAVA_OTHER_NAMES = {
    "model.language_model.": "language_model.model.",
    "model.vision_tower.": "vision_tower.",
    "model.multi_modal_projector.": "multi_modal_projector.",
    "lm_head.": "language_model.lm_head.",
}


def multimodal(
    name: str,
    hf_architecture: str,
    *language_models: Family,
    towers: tuple[str, ...] = LLAVA_TOWERS,
    tied: Tied,
    names: Mapping[str, str] = LLAVA_NAMES,
    module_names: Mapping[str, str] = LLAVA_MODULES,
    other_names: Mapping[str, str] = LLAVA_OTHER_NAMES,
    aliases: tuple[str, ...] = (),
    outside: tuple[str, ...] = (),
    tied_names: tuple[str, ...] = (),
) -> Family:
    """The family of a multimodal class around one of the language models, the first if the config names none.

    ``names`` are prefixes of the language models' tensors and what they are here, ``module_names`` is the family's
    field. The others are fields of :class:`~isthmus.families.nested.Nested`; ``aliases`` of the first language model.
    """
    first, *others = (
        replace(
            text,
            name=name,
            hf_architecture=hf_architecture,
            rules=tuple(_prefixed_rule(rule, names) for rule in text.rules),
            unused=tuple(_prefixed_rule(rule, names) for rule in text.unused),
            passed_through=tuple(_prefixed(pattern, names) for pattern in text.passed_through),
            module_names={**module_names, **text.module_names},
            nested=Nested(
                model_type=text.name,
                towers=towers,
                tied=tied,
                aliases=aliases if text is language_models[0] else (),
                other_names=other_names,
                outside=outside,
                tied_names=tied_names,
            ),
            language_model=text,
        )
        for text in language_models
    )
    return replace(first, variants=tuple(others))


def _prefixed_rule(rule: Rule, names: Mapping[str, str]) -> Rule:
    return replace(rule, parts=tuple(replace(part, name=_prefixed(part.name, names)) for part in rule.parts))


def _prefixed(name: str, names: Mapping[str, str]) -> str:
    old = next((prefix for prefix in names if name.startswith(prefix)), "")
    return names.get(old, "") + name.removeprefix(old)
