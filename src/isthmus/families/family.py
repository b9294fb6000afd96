"""Family: how the config and tensors of one Hugging Face architecture map to Megatron-Core, as data."""

from __future__ import annotations

import fnmatch
import functools
import itertools
import re
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from isthmus.errors import DataError, UsageError
from isthmus.families.architecture import Architecture, Dropout, from_settings
from isthmus.families.blocks.block import check_sizes
from isthmus.families.config_keys import Derived, Fixed, Key, dropout_rate, dropout_rates, with_defaults, without
from isthmus.families.nested import Nested
from isthmus.families.rules.rope_config import read_rotary, write_rotary
from isthmus.families.rules.rule import Rule, Shape, copy
from isthmus.families.rules.sliding_window import Pattern, Window, read_window, write_window

# What the file of a family imports.
__all__ = ["IGNORABLE", "SCORE", "Derived", "Family", "Fixed", "Key", "Placement", "dropout_rate", "is_scored"]
__all__ += ["dropout_rates", "with_defaults", "without"]

IGNORABLE = ("rotary_emb.inv_freq", "attn.masked_bias")
"""Suffixes of buffers that old checkpoints contain."""
_SCORED = "ForSequenceClassification"
SCORE = copy("output_layer.weight", "score.weight", "1", "H")
"""The score head of a reward model, in place of the output layer."""


def is_scored(hf: Mapping[str, Any]) -> bool:
    """Whether a ``config.json`` is that of a classifier, such as a reward model."""
    return str(_first(hf.get("architectures"))).endswith(_SCORED)


@dataclass(frozen=True, slots=True)
class Placement:
    """A rule applied to one layer and expert: the names of the canonical tensor and of the Hugging Face tensors."""

    canonical: str
    rule: Rule
    hf: tuple[str, ...]
    """Name of each part's tensor."""
    expert: int = 0
    """Number of the expert in its layer."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Family:
    """Everything specific to one ``model_type``. Import and export use the same fields."""

    name: str
    """The ``model_type`` of the Hugging Face config."""
    hf_architecture: str
    scored_class: str | None = None
    """The class of its reward models, if it is not named like ``hf_architecture``."""
    keys: Mapping[str, Key]
    """Hugging Face key of each field of the Architecture; ``moe.top_k`` is a field of its Experts."""
    rules: tuple[Rule, ...]
    fixed: Mapping[str, Fixed] = field(default_factory=dict)
    dropout: Mapping[str, Key] = field(default_factory=lambda: dropout_rates(attention="attention_dropout"))
    """Hugging Face key of each field of :class:`~isthmus.families.architecture.Dropout`."""
    traits: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the Architecture that are the same for every model of the family and are not in its configs. With a
    ``rotary_base`` the configs have no rotary settings."""
    derived: Mapping[str, Derived] = field(default_factory=dict)
    sliding_window: Window = "never"
    sliding_window_default: int | None = None
    sliding_window_pattern: Pattern | None = None
    """The layers with full attention, unless the config lists them; by depth, the first n layers have it."""
    rope_defaults: Mapping[str, Any] = field(default_factory=dict)
    """Defaults of the rotary settings."""
    rope_names: Mapping[str, str] = field(default_factory=dict)
    """The family's names of ``rope_theta`` and ``partial_rotary_factor``, if they differ."""
    flat_rope: bool = True
    """Exports also have the rotary keys from before ``rope_parameters``, which classes with settings for each kind of
    layer misread."""
    untrainable: str | None = None
    """Why the model can be evaluated and converted but not trained."""
    ignorable: tuple[str, ...] = IGNORABLE
    """Suffixes of Hugging Face tensors that are not weights and may be present."""
    other_names: Mapping[str, str] = field(default_factory=dict)
    """Substrings of tensor names in files of other programs, and what they are in those of the family; they count only
    in names that the family does not have."""
    unused: tuple[Rule, ...] = ()
    """Rules of tensors that published files have and the model does not use."""
    module_names: Mapping[str, str] = field(default_factory=dict)
    """Substrings of tensor names that differ in the module paths of transformers."""
    unadapted: tuple[str, ...] = ()
    """Ends of the paths of linear layers that PEFT refuses to adapt in models of this type."""
    swapped_experts: bool = False
    """transformers has routed experts as [experts, inputs, out], without the attribute ``is_transposed`` by which PEFT
    knows it: in PEFT's files the transpose of B has the place of A, and that of A the place of B."""
    short_factors_in_transformers: bool = False
    """transformers uses the short factors of longrope at every length. Isthmus uses the long ones beyond the original
    length, as transformers does for Phi-3."""
    passed_through: tuple[str, ...] = ()
    """Patterns of the names of tensors that are not computed, such as those of some MTP layers. They are copied."""
    passed_layers: str = ""
    """End of the name of a tensor that only such MTP layers have, if they are numbered after the last layer."""
    auto_map: Mapping[str, str] = field(default_factory=dict)
    """The ``auto_map`` of an export with modelling files, for families that transformers does not have."""
    own_code: bool = False
    """transformers has no class, published models bring their own: exports keep ``architectures``, ``auto_map`` and the
    modelling files."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Settings of configs that lack them, before the defaults of the keys."""
    spelling: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None
    """Makes a config that has other settings than transformers writes one with these; exports keep what still holds."""
    required: tuple[str, ...] = ()
    """Settings that transformers derives from others if a config lacks them, which is not supported."""
    data: Mapping[str, Any] | None = None
    """The contents of its file if it was inferred (``families/inferred/json_family.py``)."""
    nested: Nested | None = None
    """Layout of a multimodal model: where its language model is, which most other fields describe."""
    language_model: Family | None = None
    """Family of the language model alone, of a multimodal model."""
    variants: tuple[Family, ...] = ()
    """The same class of multimodal models around other language models."""

    def language_config(self, hf: Mapping[str, Any], tensors: Container[str] | None = None) -> Mapping[str, Any]:
        """The part of a config that describes the language model: a section of a multimodal model's, else all of it.

        ``tensors`` as in :meth:`to_architecture`. A UsageError for a multimodal reward model.
        """
        if self.nested is None:
            return hf
        if is_scored(hf):
            raise UsageError(
                f"config.json: a multimodal reward model ({_first(hf['architectures'])}) is not supported. Train one "
                f"from its language model, which is of type {self.nested.model_type}."
            )
        has_head = tensors is not None and any(name in tensors for name in self.output_names)
        return self.nested.language_config(hf, has_head=has_head)

    def to_architecture(self, hf: Mapping[str, Any], tensors: Container[str] | None = None) -> Architecture:
        """Read a Hugging Face config.

        ``tensors`` are the names in the checkpoint, if known: MTP layers without tensors are not counted, because
        configs saved by transformers count MTP layers that the checkpoint does not have.

        Raises:
            DataError: a setting is missing or has the wrong type, or settings contradict each other.
            UsageError: a setting is not supported, with the reason.
        """
        hf = self.language_config(hf, tensors)
        hf = {**self.defaults, **hf} if self.defaults else hf
        hf = hf if self.spelling is None else self.spelling(hf)
        present_keys = hf.keys() | ({"rope_parameters"} if "rope_theta" in hf else set())
        if lacking := [name for name in self.required if name not in present_keys]:
            raise UsageError(f"config.json lacks {', '.join(lacking)}, which transformers derives. Add it.")
        self._check_fixed(hf, training=False)
        check_sizes(layers=self.keys["num_layers"].read(hf))  # before they are enumerated
        values = dict(self.traits) | {name: key.read(hf) for name, key in self.keys.items()}
        values |= {name: derived.read(hf) for name, derived in self.derived.items()}
        if "mla.qk_rope_head_dim" in values:  # the classes of transformers overwrite head_dim
            values["kv_channels"] = values["mla.qk_nope_head_dim"] + values["mla.qk_rope_head_dim"]
        for prefix in ("", "window_attention."):
            heads, groups = (
                values.get(prefix + name) or values[name] for name in ("num_attention_heads", "num_query_groups")
            )
            if heads % groups:
                of = " of sliding-window layers" if prefix else ""
                raise DataError(
                    f"config.json: num_key_value_heads={groups} does not divide num_attention_heads={heads}{of}."
                )
        if values.get("position", "rope") == "rope" and "rotary_base" not in self.traits:
            context = {"max_position_embeddings": values["max_position_embeddings"]}
            head = values.get("mla.qk_rope_head_dim", values["kv_channels"])
            windowed = values.get("window_attention.kv_channels") or head
            values |= read_rotary(context | dict(hf), self.rope_defaults, self.rope_names, head, windowed)
        values["score_head"] = is_scored(hf)
        if values["score_head"]:
            values["tie_embeddings"] = False
            if (labels := len(hf.get("id2label") or range(hf.get("num_labels", 2)))) != 1:
                raise UsageError(f"config.json: a classifier of {labels} labels is not a reward model, which has 1.")
        window, full = self._window(hf, values["num_layers"])
        values = {"sliding_window": window, "full_attention_layers": full} | values
        arch = from_settings({"family": self.name, **values})
        for block in (arch.moe, *arch.recurrences):
            if block is not None and (why := block.invalid_reason()) is not None:
                raise DataError(f"config.json: {why}.")
        if tensors is None or not arch.pattern.mtp_layers:
            return arch
        present = {
            placed.canonical.split(".")[2]
            for placed in self.placements(arch).values()
            if _layer_axis(placed.rule) == "{mtp}" and placed.hf[0] in tensors
        }
        return arch.with_settings({"mtp_layers": len(present)})

    def copied_tensors(self, names: Iterable[str]) -> set[str]:
        """Tensors of a file that are copied and not computed: of towers, or of other MTP layers."""
        end, all_names, nested = self.passed_layers, set(names), self.nested
        layers = tuple(name.removesuffix(end) for name in all_names if end and name.endswith(end))
        copied = {name for name in all_names if layers and name.startswith(layers)}
        copied |= {name for name in all_names if nested is not None and nested.is_tower(name)}
        return copied | {name for pattern in self.passed_through for name in fnmatch.filter(all_names, pattern)}

    @property
    def scored_architecture(self) -> str:
        """The class of reward models in transformers, which has it for some families only."""
        return self.scored_class or re.sub("(ForCausalLM|LMHeadModel)$", _SCORED, self.hf_architecture)

    @property
    def has_code(self) -> bool:
        """Whether its models run with modelling files beside them, in which each expert has linear layers."""
        return self.own_code or bool(self.auto_map)

    @property
    def output_names(self) -> set[str]:
        """Hugging Face names of the tensors of the output layer alone."""
        rules = (rule for rule in self.rules if rule.canonical.startswith("output_layer.") and not rule.alias)
        return {part.name for rule in rules for part in rule.parts}

    def check_training(self, hf: Mapping[str, Any]) -> None:
        """Raise UsageError for unsupported settings that only affect training, such as router noise."""
        if self.untrainable is not None:
            raise UsageError(f"{self.name} cannot be trained: {self.untrainable}. Use a model of another family.")
        self._check_fixed(self.language_config(hf), training=True)

    def read_dropout(self, hf: Mapping[str, Any]) -> Dropout:
        """The dropout rates of a Hugging Face config; DataError for a rate outside of [0, 1)."""
        hf = self.language_config(hf)
        rates = {name: key.read(hf) for name, key in self.dropout.items()}
        for name, rate in rates.items():
            if rate >= 1:
                raise DataError(f"config.json: {self.dropout[name].hf} must be below 1, got {rate:g}.")
        return Dropout(**rates)

    def _check_fixed(self, hf: Mapping[str, Any], *, training: bool) -> None:
        for key, fixed in self.fixed.items():
            if fixed.training == training:
                fixed.check(key, hf, self.name)

    def _window(self, hf: Mapping[str, Any], num_layers: int) -> tuple[int | None, tuple[int, ...]]:
        if "mixers" in self.derived and self.sliding_window == "never":  # which reads layer_types
            return None, ()
        return read_window(
            self.sliding_window, hf, self.sliding_window_default, num_layers, self.sliding_window_pattern
        )

    def to_hf_config(
        self,
        arch: Architecture,
        base: Mapping[str, Any] | None = None,
        *,
        dtype: str | None = None,
        dropout: Dropout | None = None,
    ) -> dict[str, Any]:
        """The Hugging Face config of ``arch``; ``dropout`` None keeps the rates of ``base``, or is no dropout.

        Settings and absent keys of ``base``, the original config, are kept if they mean the same. Its other keys are
        copied, from another family's config only the token ids and the dtype. ``dtype`` is a torch name such as
        ``bfloat16``.
        """
        if self.nested is not None and self.language_model is not None:
            inner = self.nested.language_config(base) if base and base.get("model_type") == self.name else base
            language = self.language_model.to_hf_config(arch, inner, dtype=dtype, dropout=dropout)
            outer = {} if base is inner else {key: value for key, value in (base or {}).items() if key != "auto_map"}
            outer |= {"architectures": [self.hf_architecture], "model_type": self.name}
            return self.nested.with_language_config(outer, language)
        known = {**self.defaults, **base} if base else {}
        own_class = self._kept_class(arch, known)
        if own_class is None:  # the export has the tensors of the family's class in transformers
            known.pop("auto_map", None)
        name = own_class or (self.scored_architecture if arch.head.score_head else self.hf_architecture)
        config = known | {"architectures": [name], "model_type": self.name}
        if arch.head.score_head:
            config |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
        if known.get("model_type", self.name) != self.name:
            config = {key: value for key, value in config.items() if key in _SHARED_KEYS}
            known = {}
        known, config, keeps_rotary = self._respelled(arch, known, config)
        for name, key in self.keys.items():
            value = arch.setting(name)
            if not known or key.read(known) != value:
                config[key.hf] = key.write(value, arch)
                config |= {name: config[key.hf] for name in key.aliases if name in known}
        for name, derived in self.derived.items():
            value = arch.setting(name)
            if not known or derived.read(known) != value:
                config |= derived.write(value, arch)
        if not known:
            config |= {key: fixed.allowed[0] for key, fixed in self.fixed.items() if fixed.allowed[0] is not None}
            dropout = dropout or Dropout()
        for name, key in self.dropout.items() if dropout is not None else ():
            if not known or key.read(known) != getattr(dropout, name):
                config[key.hf] = getattr(dropout, name)
        window = (arch.windows.sliding_window, arch.windows.full_attention_layers)
        if not known or self._window(known, self.keys["num_layers"].read(known)) != window:
            config |= write_window(self.sliding_window, *window, arch.num_layers)
        if arch.embedding.position == "rope" and "rotary_base" not in self.traits and not keeps_rotary:
            config = self._with_rotary(arch, known, config)
        if self.auto_map:
            config["auto_map"] = dict(self.auto_map)
        dtype = dtype or config.get("dtype", config.get("torch_dtype"))
        return config if dtype is None else config | {"dtype": dtype, "torch_dtype": dtype}

    def _with_rotary(self, arch: Architecture, known: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
        """``config`` with the rotary settings of ``arch``, which keep the spelling of ``known``."""
        context = {"max_position_embeddings": arch.max_position_embeddings}
        rotary = write_rotary(arch, context | dict(known), self.rope_defaults, self.rope_names)
        if self.flat_rope:
            return {**config, **rotary}
        plain = {key: value for key, value in config.items() if key != "rope_scaling"}
        return plain | {key: rotary[key] for key in rotary if key == "rope_parameters" or key in plain}

    def _respelled(
        self, arch: Architecture, known: dict[str, Any], config: dict[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any], bool]:
        """``known`` in the newer spelling, the config to change, and whether its rotary settings are those of ``arch``.

        A config with other rotary settings gets all of the newer spelling, which modelling files do not read.
        """
        if self.spelling is None or not known:
            return known, config, False
        newer = dict(self.spelling(known))
        if _rotary_of(self.to_architecture(known)) == _rotary_of(arch):
            return newer, config, True
        if self.own_code:
            raise UsageError(
                f"config.json: rotary settings of {self.name} cannot be changed, as its modelling files read them in a "
                "form of their own. Keep those of the source."
            )
        return newer, {**newer, **{name: config[name] for name in ("architectures", "model_type")}}, False

    def _kept_class(self, arch: Architecture, hf: Mapping[str, Any]) -> str | None:
        """The class of a config whose model keeps its code."""
        keeps = self.own_code and not arch.head.score_head and hf.get("model_type") == self.name
        return _first(hf.get("architectures")) if keeps else None

    @functools.lru_cache(maxsize=2)  # noqa: B019 - families live as long as the process
    def placements(self, arch: Architecture) -> Mapping[str, Placement]:
        """Every tensor of the model by canonical name, in the order of the rules, layer after layer."""
        placements: dict[str, Placement] = {}
        layers = arch.all_layers
        rules = [rule.for_heads(arch) for rule in self.rules if rule.applies(arch)]
        if arch.head.score_head:
            rules = [*(rule for rule in rules if not rule.canonical.startswith("output_layer.")), SCORE]
        for axis, group in itertools.groupby(rules, key=_layer_axis):
            axis_rules = list(group)
            for layer in range({"{layer}": arch.num_layers, "{mtp}": arch.pattern.mtp_layers}.get(axis, 1)):
                # MTP layers are numbered from 0 in canonical names, and after the last layer in Hugging Face names.
                hf_layer = arch.num_layers + layer
                kinds = layers[hf_layer if axis == "{mtp}" else layer].kinds
                numbers = {"{layer}": layer, "{mtp}": layer, "{depth}": layer}
                hf_numbers = {**numbers, "{mtp}": hf_layer}
                layer_rules = [rule for rule in axis_rules if rule.applies_to_layer(kinds)]
                for is_expert, same in itertools.groupby(layer_rules, key=lambda rule: rule.is_expert):
                    experts = range(arch.moe.num_experts if is_expert and arch.moe is not None else 1)
                    # A large model has 100,000 tensors of experts: the numbers of layers are filled in once for all.
                    names = [
                        (
                            rule,
                            _numbered(rule.canonical, numbers),
                            [_numbered(part.name, hf_numbers) for part in rule.parts],
                        )
                        for rule in same
                    ]
                    for expert, (rule, canonical, hf) in itertools.product(map(str, experts), names):
                        name = canonical.replace("{expert}", expert)
                        parts = tuple(part.replace("{expert}", expert) for part in hf)
                        placements[name] = Placement(name, rule, parts, int(expert))
        return MappingProxyType(placements)

    def unused_tensors(self, arch: Architecture) -> set[str]:
        """Names of tensors that files may have and the model does not use."""
        kinds = [layer.kinds for layer in arch.layers]
        return {
            part.name.format(layer=layer)
            for rule in self.unused
            for layer, layer_kinds in enumerate(kinds)
            if rule.applies_to_layer(layer_kinds)
            for part in rule.parts
        }

    def hf_shapes(self, arch: Architecture) -> dict[str, Shape]:
        """Name and shape of every tensor in the Hugging Face model, in the order of the rules."""
        all_shapes: dict[str, Shape] = {}
        shapes_of: dict[int, dict[str, Shape]] = {}  # thousands of tensors have the same rule
        for placement in self.placements(arch).values():
            if id(placement.rule) not in shapes_of:
                shapes_of[id(placement.rule)] = placement.rule.hf_shapes(arch)
            shapes = shapes_of[id(placement.rule)]
            names = zip(placement.rule.parts, placement.hf, strict=True)
            all_shapes |= {name: shapes[part.name] for part, name in names}
        return all_shapes


_SHARED_KEYS = ("architectures", "model_type", "bos_token_id", "eos_token_id", "pad_token_id", "dtype", "torch_dtype")


def _rotary_of(arch: Architecture) -> tuple[Any, ...]:
    return arch.rotary, arch.windows.rotary(arch.rotary)


def _numbered(name: str, numbers: Mapping[str, int]) -> str:
    """A name with its placeholders replaced by numbers."""
    for placeholder, number in numbers.items():
        name = name.replace(placeholder, str(number))
    return name


def _layer_axis(rule: Rule) -> str:
    """The placeholder in the rule's names that numbers layers; empty if there is none."""
    return next((axis for axis in ("{layer}", "{mtp}") if axis in rule.canonical), "")


def _first(values: Any) -> Any:
    return values[0] if isinstance(values, list) and values else None
