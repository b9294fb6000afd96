"""A family: the tensors and the config of one Hugging Face architecture in Megatron-Core's words, as data."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from isthmus.errors import DataError, UsageError
from isthmus.families.architecture import Architecture, Mla, Moe
from isthmus.families.rules.rope_config import read_rotary, write_rotary
from isthmus.families.rules.rule import Rule, Shape, field_of
from isthmus.families.rules.sliding_window import Window, read_window, write_window

_REQUIRED = object()


@dataclass(frozen=True, slots=True)
class Key:
    """One setting of ``config.json``: its name, its type, and what its absence (or null) means to transformers."""

    hf: str
    kind: type = int
    default: Any = _REQUIRED
    null: Callable[[Mapping[str, Any]], Any] | None = None
    choices: Mapping[Any, Any] | None = None
    """For words and switches: what each of them means here; of two with one meaning the first is written."""
    least: int = 1
    """For whole numbers."""
    optional: bool = False
    """Null is a value of its own: None."""
    aliases: tuple[str, ...] = ()
    """Other names under which configs have it."""
    decode: Callable[[Any, Mapping[str, Any]], Any] | None = None
    """The field of the Architecture from the setting and the config around it, where they are not the same."""
    encode: Callable[[Any, Architecture], Any] | None = None
    """The other way round."""

    def read(self, hf: Mapping[str, Any]) -> Any:
        """The value, checked.

        Raises:
            DataError: absent though required, of the wrong type, or a number that is too small.
            UsageError: a word whose meaning is not built.
        """
        said = next((name for name in (self.hf, *self.aliases) if name in hf), self.hf)
        value = hf.get(said, None if self.default is _REQUIRED else self.default)
        if value is None and self.null is not None:
            value = self.null(hf)
        if value is None and self.optional:
            return None
        if value is None:
            raise DataError(f"config.json: {self.hf} is missing.")
        if self.choices is not None:
            if value not in self.choices:
                raise UsageError(
                    f"config.json: {self.hf}={_short(value)} is not supported; {_either(self.choices)} is."
                )
            return self.choices[value]
        fits = isinstance(value, int | float if self.kind is float else self.kind)
        if self.kind in (int, float) and fits:
            fits = not isinstance(value, bool) and value >= (self.least if self.kind is int else 0)
        if not fits:
            words = _TYPE_WORDS[self.kind] if self.least else "whole number that is not negative"
            raise DataError(f"config.json: {self.hf} must be a {words}, got {value!r}.")
        value = self.kind(value)
        try:
            return value if self.decode is None else self.decode(value, hf)
        except ZeroDivisionError:
            raise DataError(f"config.json: {self.hf} must not be 0.") from None

    def write(self, value: Any, arch: Architecture) -> Any:
        """What the config says for ``value``."""
        if self.choices is not None:
            words = [word for word, meaning in self.choices.items() if meaning == value]
            if not words:
                raise UsageError(f"config.json has no word for {value} under {self.hf}; {_either(self.choices)} is.")
            return words[0]
        return value if self.encode is None or value is None else self.encode(value, arch)


@dataclass(frozen=True, slots=True)
class Fixed:
    """The values a setting may have (absence and null count as the first), and why no other will do."""

    allowed: tuple[Any, ...]
    why: str
    training: bool = False
    """It has no bearing on tensors and logits, and is refused only of a model that is to be trained."""
    absent: Any = None
    """What absence means, where it does not mean the first."""
    strict: bool = False
    """Null is a value like any other, and allowed only if it is listed."""


@dataclass(frozen=True, slots=True)
class Derived:
    """A field of the Architecture that no single setting says."""

    read: Callable[[Mapping[str, Any]], Any]
    write: Callable[[Any, Architecture], Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Placement:
    """A rule at work in one layer: the canonical tensor, and the Hugging Face tensors of its parts by name."""

    canonical: str
    rule: Rule
    hf: tuple[str, ...]
    """Name of the tensor that each part lies in."""
    expert: int = 0
    """Number of the expert in its layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Everything that is particular to one ``model_type``. Both directions are read off the same fields."""

    name: str
    """The ``model_type`` of the Hugging Face config."""
    hf_architecture: str
    keys: Mapping[str, Key]
    """Fields of the Architecture, ``moe.top_k`` being one of its Moe, by their Hugging Face keys."""
    rules: tuple[Rule, ...]
    fixed: Mapping[str, Fixed] = field(default_factory=dict)
    traits: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the Architecture that every model of the family has and no config mentions."""
    derived: Mapping[str, Derived] = field(default_factory=dict)
    """Fields that several settings together say."""
    sliding_window: Window = "never"
    sliding_window_default: int | None = None
    sliding_window_pattern: int | None = None
    """Of so many layers one has no window, where the config lists none."""
    rope_defaults: Mapping[str, Any] = field(default_factory=dict)
    """Rotary settings of a config that says nothing of them."""
    rope_names: Mapping[str, str] = field(default_factory=dict)
    """What the family calls ``rope_theta`` and ``partial_rotary_factor``, where it does not call them so."""
    ignorable: tuple[str, ...] = ()
    """Endings of Hugging Face names that may be present and are not weights."""
    auto_map: Mapping[str, str] = field(default_factory=dict)
    """Classes that travel with an export as files, where transformers has none of its own."""
    data: Mapping[str, Any] | None = None
    """The file that it was read from, see ``families/discover/json_family.py``; None for a module of this package."""

    def to_architecture(self, hf: Mapping[str, Any], tensors: Container[str] | None = None) -> Architecture:
        """Read a Hugging Face config.

        Args:
            hf: the config.
            tensors: names of those that are there, if that is known. A config counts layers that predict ahead even
                where there are none, as in what transformers saves: those without any tensor are left out.

        Raises:
            DataError: a setting is missing, has the wrong type, or the numbers do not fit together.
            UsageError: a setting asks for something that is not built, with the reason.
        """
        self._refuse(hf, training=False)
        values = dict(self.traits) | {name: key.read(hf) for name, key in self.keys.items()}
        values |= {name: derived.read(hf) for name, derived in self.derived.items()}
        heads, groups = values["num_attention_heads"], values["num_query_groups"]
        if heads % groups:
            raise DataError(f"config.json: num_key_value_heads={groups} does not divide num_attention_heads={heads}.")
        if values.get("position", "rope") == "rope":
            context = {"max_position_embeddings": values["max_position_embeddings"]}
            head = values.get("mla.qk_rope_head_dim", values["kv_channels"])
            values |= read_rotary(context | dict(hf), self.rope_defaults, self.rope_names, head)
        values["sliding_window"], values["full_attention_layers"] = self._window(hf, values["num_layers"])
        for name, kind in _INNER.items():
            inner = {path: values.pop(path) for path in list(values) if path.startswith(f"{name}.")}
            if inner:
                values[name] = kind(**{path.removeprefix(f"{name}."): value for path, value in inner.items()})
        if (moe := values.get("moe")) is not None and (why := moe.misfit()) is not None:
            raise DataError(f"config.json: {why}.")
        arch = Architecture(family=self.name, **values)
        if tensors is None or not arch.mtp_layers:
            return arch
        placed = self.placements(arch).values()
        there = {
            place.canonical.split(".")[2]
            for place in placed
            if _axis(place.rule) == "{ahead}" and place.hf[0] in tensors
        }
        return replace(arch, mtp_layers=len(there))

    def check_training(self, hf: Mapping[str, Any]) -> None:
        """Refuse to train a model whose config asks for what training does not do.

        Raises:
            UsageError: naming the setting, with the reason.
        """
        self._refuse(hf, training=True)

    def _refuse(self, hf: Mapping[str, Any], *, training: bool) -> None:
        for key, fixed in self.fixed.items():
            value = hf.get(key, fixed.absent)
            if fixed.training != training or (value is None and not fixed.strict):
                continue
            if value not in fixed.allowed:
                raise UsageError(f"config.json: {key}={_short(value)} is not supported for {self.name}: {fixed.why}.")

    def _window(self, hf: Mapping[str, Any], num_layers: int) -> tuple[int | None, tuple[int, ...]]:
        return read_window(
            self.sliding_window, hf, self.sliding_window_default, num_layers, self.sliding_window_pattern
        )

    def to_hf_config(
        self, arch: Architecture, base: Mapping[str, Any] | None = None, *, dtype: str | None = None
    ) -> dict[str, Any]:
        """Write a Hugging Face config of ``arch``.

        What ``base`` (the config a model came with) says already in its own way is left as it is, down to the keys it
        leaves out; whatever else it holds is carried along, of another family's config what all of them have alike.
        ``dtype`` is a torch name such as ``bfloat16``; None keeps that of ``base``.
        """
        known = dict(base or {})
        # Remote code is not carried along: the tensors are those of the plain architecture.
        known.pop("auto_map", None)
        config = known | {"architectures": [self.hf_architecture], "model_type": self.name}
        if known.get("model_type", self.name) != self.name:
            config = {key: value for key, value in config.items() if key in _ALIKE}
            known = {}
        for name, key in self.keys.items():
            value = field_of(arch, name)
            if not known or key.read(known) != value:
                config[key.hf] = key.write(value, arch)
                config |= {name: config[key.hf] for name in key.aliases if name in known}
        for name, derived in self.derived.items():
            value = field_of(arch, name)
            if not known or derived.read(known) != value:
                config |= derived.write(value, arch)
        if not known:
            config |= {key: fixed.allowed[0] for key, fixed in self.fixed.items() if fixed.allowed[0] is not None}
        window = (arch.sliding_window, arch.full_attention_layers)
        if not known or self._window(known, self.keys["num_layers"].read(known)) != window:
            config |= write_window(self.sliding_window, *window, arch.num_layers)
        if arch.position == "rope":
            context = {"max_position_embeddings": arch.max_position_embeddings}
            config |= write_rotary(arch, context | known, self.rope_defaults, self.rope_names)
        if self.auto_map:
            config["auto_map"] = dict(self.auto_map)
        dtype = dtype or config.get("dtype", config.get("torch_dtype"))
        return config if dtype is None else config | {"dtype": dtype, "torch_dtype": dtype}

    def placements(self, arch: Architecture) -> dict[str, Placement]:
        """Every tensor of the whole model by canonical name, in the order of the rules, layer after layer."""
        found: dict[str, Placement] = {}
        held = (rule for rule in self.rules if rule.holds(arch))
        for axis, group in itertools.groupby(held, key=_axis):
            rules = list(group)
            layers = {"{layer}": arch.num_layers, "{ahead}": arch.mtp_layers}.get(axis, 1)
            for layer in range(layers):
                behind = arch.num_layers + layer
                moe = arch.is_moe(behind if axis == "{ahead}" else layer)
                here = [rule for rule in rules if rule.layers == "all" or rule.layers == ("moe" if moe else "dense")]
                for of_expert, same in itertools.groupby(here, key=lambda rule: rule.of_expert):
                    alike = list(same)
                    experts = arch.moe.num_experts if of_expert and arch.moe is not None else 1
                    for expert in range(experts):
                        for rule in alike:
                            numbers = {"layer": layer, "expert": expert, "ahead": layer}
                            name = rule.canonical.format(**numbers)
                            numbers["ahead"] = behind
                            hf = tuple(part.name.format(**numbers) for part in rule.parts)
                            found[name] = Placement(name, rule, hf, expert)
        return found

    def hf_shapes(self, arch: Architecture) -> dict[str, Shape]:
        """Name and shape of every tensor in the Hugging Face model, in the order of the rules."""
        found: dict[str, Shape] = {}
        shapes_of: dict[int, dict[str, Shape]] = {}  # one rule speaks for thousands of tensors
        for placement in self.placements(arch).values():
            if id(placement.rule) not in shapes_of:
                shapes_of[id(placement.rule)] = placement.rule.hf_shapes(arch)
            shapes = shapes_of[id(placement.rule)]
            names = zip(placement.rule.parts, placement.hf, strict=True)
            found |= {name: shapes[part.name] for part, name in names}
        return found


_TYPE_WORDS = {int: "positive whole number", float: "number that is not negative", bool: "boolean"}
_ALIKE = ("architectures", "model_type", "bos_token_id", "eos_token_id", "pad_token_id", "dtype", "torch_dtype")
_INNER: Mapping[str, Callable[..., Any]] = {"moe": Moe, "mla": Mla}


def _axis(rule: Rule) -> str:
    """The number in the rule's names that counts layers, if one does."""
    return next((axis for axis in ("{layer}", "{ahead}") if axis in rule.canonical), "")


def _either(words: Iterable[Any]) -> str:
    return " or ".join(map(str, words))


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
