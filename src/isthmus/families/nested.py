"""Multimodal models: a language model in a section of the config, beside towers that are passed through.

The towers (vision, audio) and the projectors of their outputs keep their tensors bit for bit, and their sections of the
config. The language model is that of a family of its own, under other tensor names.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from isthmus.errors import DataError

Tied = bool | None | Literal["either"]
_SECTION, _TIED = "text_config", "tie_word_embeddings"


@dataclass(frozen=True, slots=True, kw_only=True)
class Nested:
    """Where a multimodal model has its language model, and what else it has."""

    model_type: str
    """Model type of the language model as a model of its own."""
    towers: tuple[str, ...]
    """Patterns of the names of all other tensors."""
    tied: Tied
    """``tie_word_embeddings`` of a config without this key, which counts outside of the section; None: that of the
    section counts; ``either``: true in one of both places."""
    aliases: tuple[str, ...] = ()
    """Other names of ``model_type`` in the section."""
    other_names: Mapping[str, str] = field(default_factory=dict)
    """Prefixes of tensor names in the files of other programs, and those of the family, which exports have."""
    tied_names: tuple[str, ...] = ()
    """Other names of ``tie_word_embeddings`` outside of the section, which count before it; in the section they do not
    count."""
    outside: tuple[str, ...] = ()
    """Patterns of keys, for classes that also read configs without a section, in which the language model's settings
    are outside of it: patterns of the other keys. Exports have the section."""

    def is_around(self, hf: Mapping[str, Any]) -> bool:
        """Whether the language model of a config is this one; without its ``model_type`` any is."""
        section = hf.get(_SECTION)
        kind = section.get("model_type") if isinstance(section, Mapping) else None
        return kind in (None, self.model_type, *self.aliases)

    def renamed(self, names: Iterable[str]) -> dict[str, str]:
        """The names of the family for tensor names of a file."""
        new_names = {}
        for name in names:
            old = next((prefix for prefix in self.other_names if name.startswith(prefix)), "")
            new_names[name] = self.other_names.get(old, "") + name.removeprefix(old)
        return new_names

    def is_tower(self, tensor: str) -> bool:
        """Whether a tensor belongs to no language model."""
        return any(fnmatch.fnmatchcase(tensor, pattern) for pattern in self.towers)

    def language_config(self, hf: Mapping[str, Any], *, has_head: bool = False) -> dict[str, Any]:
        """The config of the language model alone; DataError without the section.

        If the file has an output layer (``has_head``), it is only tied to the embedding if the config has the key:
        transformers, whose default may be to tie them, does not do so with tensors that differ.
        """
        hf, section = self._sections(hf)
        if not isinstance(section, Mapping):
            raise DataError(f"config.json: {_SECTION} must be the object of the language model, got {section!r:.60}.")
        config = {**section, "model_type": self.model_type}
        if self.tied == "either":
            config[_TIED] = bool(hf.get(_TIED) or section.get(_TIED))
        elif self.tied is not None:
            tied = next((hf[name] for name in (*self.tied_names, _TIED) if hf.get(name) is not None), None)
            config = {name: value for name, value in config.items() if name not in self.tied_names}
            config[_TIED] = self.tied and not has_head if tied is None else tied
        return config

    def with_language_config(self, hf: Mapping[str, Any], language: Mapping[str, Any]) -> dict[str, Any]:
        """The inverse of ``language_config``: ``hf`` with another language model, and its other sections."""
        hf, section = self._sections(hf)
        section = section or {}
        section_keys = {key: value for key, value in language.items() if key != "architectures"}
        names = (_TIED, *self.tied_names)
        if self.tied is not None:
            section_keys = {key: value for key, value in section_keys.items() if key not in names}
        kept_keys = ("architectures", "model_type", *(() if self.tied in (None, "either") else names))
        config = {**hf, _SECTION: section_keys | {key: section[key] for key in kept_keys if key in section}}
        if self.tied == "either" and _TIED in section:
            config[_SECTION][_TIED] = section[_TIED] and language.get(_TIED, False)
        if self.tied is not None and language.get(_TIED, False) != self.language_config(config)[_TIED]:
            config |= {name: language[_TIED] for name in names if name == _TIED or name in config}
        changed = language.get("dtype") if language.get("dtype") != section.get("dtype") else None
        dtype = changed or hf.get("dtype", hf.get("torch_dtype"))
        return config if dtype is None else config | {"dtype": dtype, "torch_dtype": dtype}

    def _sections(self, hf: Mapping[str, Any]) -> tuple[Mapping[str, Any], Any]:
        """The config without settings of the language model, and its section."""
        if hf.get(_SECTION) is not None or not self.outside or not hf:
            return hf, hf.get(_SECTION)
        outer = {
            key: value
            for key, value in hf.items()
            if any(fnmatch.fnmatchcase(key, pattern) for pattern in self.outside)
        }
        shared = (_TIED, "dtype", "torch_dtype")
        section = {key: value for key, value in hf.items() if key not in outer and key not in shared}
        return outer | {key: hf[key] for key in shared if key in hf}, section
