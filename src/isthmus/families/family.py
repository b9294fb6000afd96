"""A family: the tensors and the config of one Hugging Face architecture in Megatron-Core's words, as data."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from isthmus.errors import DataError, UsageError
from isthmus.families.architecture import Architecture
from isthmus.families.rope import read_rope, write_rope
from isthmus.families.rule import Rule, Shape
from isthmus.families.window import Window, read_window, write_window

_REQUIRED = object()


@dataclass(frozen=True, slots=True)
class Key:
    """One setting of ``config.json``: its name, its type, and what its absence (or null) means to transformers."""

    hf: str
    kind: type = int
    default: Any = _REQUIRED
    null: Callable[[Mapping[str, Any]], Any] | None = None

    def read(self, hf: Mapping[str, Any]) -> Any:
        """The value, checked.

        Raises:
            DataError: absent though required, of the wrong type, or a count that is not positive.
        """
        value = hf.get(self.hf, None if self.default is _REQUIRED else self.default)
        if value is None and self.null is not None:
            value = self.null(hf)
        if value is None:
            raise DataError(f"config.json: {self.hf} is missing.")
        fits = isinstance(value, int | float if self.kind is float else self.kind)
        if self.kind is not bool and fits:
            fits = not isinstance(value, bool) and value >= (1 if self.kind is int else 0)
        if not fits:
            raise DataError(f"config.json: {self.hf} must be a {_TYPE_WORDS[self.kind]}, got {value!r}.")
        return self.kind(value)


@dataclass(frozen=True, slots=True)
class Fixed:
    """The values a setting may have (absence and null count as the first), and why no other will do."""

    allowed: tuple[Any, ...]
    why: str


@dataclass(frozen=True, slots=True)
class Placement:
    """A rule at work in one layer: the canonical tensor, and the Hugging Face tensors of its parts by name."""

    canonical: str
    rule: Rule
    hf: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Everything that is particular to one ``model_type``. Both directions are read off the same fields."""

    name: str
    """The ``model_type`` of the Hugging Face config."""
    hf_architecture: str
    keys: Mapping[str, Key]
    """Fields of the Architecture by their Hugging Face keys."""
    rules: tuple[Rule, ...]
    fixed: Mapping[str, Fixed] = field(default_factory=dict)
    traits: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the Architecture that every model of the family has and no config mentions."""
    sliding_window: Window = "never"
    sliding_window_default: int | None = None
    ignorable: tuple[str, ...] = ()
    """Endings of Hugging Face names that may be present and are not weights."""

    def to_architecture(self, hf: Mapping[str, Any]) -> Architecture:
        """Read a Hugging Face config.

        Raises:
            DataError: a setting is missing, has the wrong type, or the numbers do not fit together.
            UsageError: a setting asks for something that is not built, with the reason.
        """
        for key, fixed in self.fixed.items():
            value = hf.get(key)
            if value is not None and value not in fixed.allowed:
                raise UsageError(f"config.json: {key}={_short(value)} is not supported for {self.name}: {fixed.why}.")
        values = {name: key.read(hf) for name, key in self.keys.items()}
        heads, groups = values["num_attention_heads"], values["num_query_groups"]
        if heads % groups:
            raise DataError(f"config.json: num_key_value_heads={groups} does not divide num_attention_heads={heads}.")
        rotary_base, rope_scaling = read_rope(hf)
        window = read_window(self.sliding_window, hf, self.sliding_window_default, values["num_layers"])
        return Architecture(
            family=self.name,
            rotary_base=rotary_base,
            rope_scaling=rope_scaling,
            sliding_window=window,
            **values,
            **self.traits,
        )

    def to_hf_config(
        self, arch: Architecture, base: Mapping[str, Any] | None = None, *, dtype: str | None = None
    ) -> dict[str, Any]:
        """Write a Hugging Face config of ``arch``.

        What ``base`` (the config a model came with) says already in its own way is left as it is, down to the keys it
        leaves out; whatever else it holds is carried along. ``dtype`` is a torch name such as ``bfloat16``.
        """
        known = dict(base or {})
        # Remote code is not carried along: the tensors are those of the plain architecture.
        known.pop("auto_map", None)
        config = known | {"architectures": [self.hf_architecture], "model_type": self.name}
        for name, key in self.keys.items():
            value = getattr(arch, name)
            if not known or key.read(known) != value:
                config[key.hf] = value
        if not known:
            config |= {key: fixed.allowed[0] for key, fixed in self.fixed.items() if fixed.allowed[0] is not None}
        if not known or self.to_architecture(known).sliding_window != arch.sliding_window:
            config |= write_window(self.sliding_window, arch.sliding_window, arch.num_layers)
        config |= write_rope(arch, known)
        if dtype is not None:
            config |= {"dtype": dtype, "torch_dtype": dtype}
        return config

    def placements(self, arch: Architecture) -> dict[str, Placement]:
        """Every tensor of the whole model by canonical name, in the order of the rules, layer after layer."""
        found: dict[str, Placement] = {}
        held = (rule for rule in self.rules if rule.holds(arch))
        for layered, group in itertools.groupby(held, key=lambda rule: "{layer}" in rule.canonical):
            rules = list(group)
            for layer in range(arch.num_layers if layered else 1):
                for rule in rules:
                    name = rule.canonical.format(layer=layer)
                    found[name] = Placement(name, rule, tuple(part.name.format(layer=layer) for part in rule.parts))
        return found

    def hf_shapes(self, arch: Architecture) -> dict[str, Shape]:
        """Name and shape of every tensor in the Hugging Face model, in the order of the rules."""
        return {
            name: shape
            for placement in self.placements(arch).values()
            for name, shape in zip(placement.hf, placement.rule.part_shapes(arch), strict=True)
        }


_TYPE_WORDS = {int: "positive whole number", float: "number that is not negative", bool: "boolean"}


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
