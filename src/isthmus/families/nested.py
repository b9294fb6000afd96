"""Multimodal models: a language model in a section of the config, beside towers that are passed through.

The towers (vision, audio) and the projectors of their outputs keep their tensors bit for bit, and their sections of the
config. The language model is that of a family of its own, under other tensor names.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from isthmus.errors import DataError, UsageError
from isthmus.families.rules.rule import HfPart, Rule

if TYPE_CHECKING:
    from isthmus.families.family import Family

_SECTION, _TIED = "text_config", "tie_word_embeddings"
LLAVA_NAMES = {"model.": "language_model.model.", "lm_head.": "language_model.lm_head."}
"""Prefixes in the files of most multimodal models."""
LLAVA_MODULES = {"language_model.model.": "model.language_model.", "language_model.lm_head": "lm_head"}
"""Paths of transformers for these prefixes."""
LLAVA_TOWERS = ("vision_tower.*", "multi_modal_projector.*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Nested:
    """Where a multimodal model has its language model, and what else it has."""

    text: Family
    """The language model as a model of its own."""
    towers: tuple[str, ...]
    """Patterns of the names of all other tensors."""
    tied: bool | None
    """``tie_word_embeddings`` of a config without this key, which counts outside of the section; None: that of the
    section counts."""
    aliases: Mapping[str, str]
    """Other names in the section of the language model's ``model_type``."""
    others: tuple[Family, ...] = ()
    """The same class around other language models."""

    def is_tower(self, tensor: str) -> bool:
        """Whether a tensor belongs to no language model."""
        return any(fnmatch.fnmatchcase(tensor, pattern) for pattern in self.towers)

    def language_config(self, hf: Mapping[str, Any], *, has_head: bool = False) -> dict[str, Any]:
        """The config of the language model alone; DataError without the section.

        If the file has an output layer (``has_head``), it is only tied to the embedding if the config has the key:
        transformers, whose default may be to tie them, does not do so with tensors that differ.
        """
        section = hf.get(_SECTION)
        if not isinstance(section, Mapping):
            raise DataError(f"config.json: {_SECTION} must be the object of the language model, got {section!r:.60}.")
        found = {**section, "model_type": self.text.name}
        if self.tied is not None:
            found[_TIED] = self.tied and not has_head if hf.get(_TIED) is None else hf[_TIED]
        return found

    def with_language_config(self, hf: Mapping[str, Any], language: Mapping[str, Any]) -> dict[str, Any]:
        """The inverse of ``language_config``: ``hf`` with another language model, and its other sections."""
        section = hf.get(_SECTION) or {}
        kept = ("architectures",) if self.tied is None else ("architectures", _TIED)
        own = {key: value for key, value in language.items() if key not in kept}
        config = {**hf, _SECTION: own | {key: section[key] for key in kept if key in section}}
        if self.tied is not None and language.get(_TIED, False) != self.language_config(config)[_TIED]:
            config[_TIED] = language[_TIED]
        changed = language.get("dtype") if language.get("dtype") != section.get("dtype") else None
        dtype = changed or hf.get("dtype", hf.get("torch_dtype"))
        return config if dtype is None else config | {"dtype": dtype, "torch_dtype": dtype}

    def of_config(self, family: Family, hf: Mapping[str, Any]) -> Family:
        """The family around the language model of this config; UsageError if the class is not supported around it."""
        kind = (hf.get(_SECTION) or {}).get("model_type", self.text.name)
        kind = self.aliases.get(kind, kind)
        around = {each.nested.text.name: each for each in (family, *self.others) if each.nested is not None}
        if kind not in around:
            raise UsageError(
                f"config.json: {family.name} with {_SECTION}.model_type={kind!r:.60} is not supported; "
                f"{' and '.join(around)} are."
            )
        return around[kind]


def multimodal(
    name: str,
    hf_architecture: str,
    *texts: Family,
    towers: tuple[str, ...] = LLAVA_TOWERS,
    tied: bool | None,
    names: Mapping[str, str] = LLAVA_NAMES,
    module_names: Mapping[str, str] = LLAVA_MODULES,
    aliases: Mapping[str, str] | None = None,
) -> Family:
    """The family of a multimodal class around one of ``texts``, by default the first.

    ``names`` are prefixes of the language model's tensors and what they are here; ``module_names`` is the family's. The
    others are fields of :class:`Nested`.
    """
    first, *rest = (
        replace(
            text,
            name=name,
            hf_architecture=hf_architecture,
            rules=tuple(_prefixed(rule, names) for rule in text.rules),
            module_names={**module_names, **text.module_names},
            nested=Nested(text=text, towers=towers, tied=tied, aliases=aliases or {}),
        )
        for text in texts
    )
    assert first.nested is not None
    return replace(first, nested=replace(first.nested, others=tuple(rest)))


def _prefixed(rule: Rule, names: Mapping[str, str]) -> Rule:
    def rename(part: HfPart) -> HfPart:
        old = next((prefix for prefix in names if part.name.startswith(prefix)), "")
        return replace(part, name=names.get(old, "") + part.name.removeprefix(old))

    return replace(rule, parts=tuple(map(rename, rule.parts)))
