"""Description of a decoder-only model in Megatron-Core's terms, independent of Megatron-Core."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, replace
from typing import Any, ClassVar

from isthmus.families.blocks.attention import Attention, SlidingWindow, WindowAttention
from isthmus.families.blocks.block import NO_SETTING, Mixer, Recurrence, check_sizes, setting_fields, settings_of
from isthmus.families.blocks.ends import Embedding, Head
from isthmus.families.blocks.feed_forward import Experts, Mlp
from isthmus.families.blocks.indexer import KeyIndexer
from isthmus.families.blocks.kinds import RECURRENCES
from isthmus.families.blocks.latent_attention import Latent, LatentAttention
from isthmus.families.blocks.layer import Form, Layer
from isthmus.families.blocks.norm import Norm
from isthmus.families.blocks.rotary import Rotary

WINDOWED = "w"
"""Suffix of the symbols of sliding-window layers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Dropout:
    """Dropout rates in training, in [0, 1)."""

    attention: float = 0.0
    """Rate of attention probabilities."""
    hidden: float = 0.0
    """Rate of the outputs of attention and of the feed-forward block, before they are added to the residual stream."""
    embedding: float = 0.0
    """Rate of the sum of token and position embeddings."""


@dataclass(frozen=True, kw_only=True)
class LayerPattern:
    """Which blocks each layer has, and how they are joined."""

    prefix: ClassVar[str] = ""

    num_layers: int
    mixers: tuple[tuple[str, ...], ...] = ()
    """Mixers of each layer: one, none, or several whose outputs are added. Empty: attention in every layer."""
    layers_without_mlp: tuple[int, ...] = ()
    """Layers, counted from 0, without a feed-forward block."""
    unrotated_layers: tuple[int, ...] = ()
    """Layers, counted from 0, without rotary embedding."""
    key_sharing_layers: int = 0
    """The last layers, which have queries only: keys and values are those of the last layer before them with the same
    reach, a window or none."""
    form: Form = "pre"
    form_without_attention: Form | None = None
    """Form of layers whose mixers do not include attention; None: ``form``."""
    residual_multiplier: float = 1.0
    """Multiplier of the outputs of attention and feed-forward block."""
    layer_scalars: bool = False
    """The output of each layer, with its residual, is multiplied by a number of the layer that is not trained."""
    mtp_layers: int = 0
    """Multi-token prediction layers (arXiv 2412.19437). They follow the last layer and have attention."""
    mtp_hidden_first: bool = False
    """In the inputs of MTP layers, the hidden state comes before the embedding of the next token."""

    def __post_init__(self) -> None:
        """Reset fields without effect, so that equal models compare equal."""
        if not self.mtp_layers:
            object.__setattr__(self, "mtp_hidden_first", False)
        if all(mixers == ("attention",) for mixers in self.mixers):
            object.__setattr__(self, "mixers", ())

    def mixers_of(self, layer: int) -> tuple[str, ...]:
        """The mixers of a layer, counted from 0."""
        return self.mixers[layer] if layer < len(self.mixers) else ("attention",)

    def form_with(self, mixers: Sequence[str]) -> Form:
        """Form of a layer with these mixers."""
        other = self.form_without_attention
        return self.form if other is None or "attention" in mixers else other


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Everything that determines the tensors and the computation of a decoder-only model.

    It has one block of each kind and the pattern of the layers, whose blocks are in :attr:`layers`. The fields of all
    blocks are its settings, by which families and Megatron-LM's arguments name them: see :func:`from_settings`.
    """

    prefix: ClassVar[str] = ""

    family: str
    hidden_size: int
    vocab_size: int
    """Rows of the embedding, without tensor-parallel padding."""
    max_position_embeddings: int
    init_std: float = 0.02
    pattern: LayerPattern = field(metadata=NO_SETTING)
    norm: Norm = field(metadata=NO_SETTING)
    embedding: Embedding = field(default=Embedding(), metadata=NO_SETTING)
    rotary: Rotary = field(default=Rotary(), metadata=NO_SETTING)
    attention: Attention = field(metadata=NO_SETTING)
    """Attention of layers without a window."""
    windows: SlidingWindow = field(default=SlidingWindow(), metadata=NO_SETTING)
    recurrences: tuple[Recurrence, ...] = field(default=(), metadata=NO_SETTING)
    """A block of each kind of mixer other than attention."""
    mlp: Mlp = field(metadata=NO_SETTING)
    moe: Experts | None = field(default=None, metadata=NO_SETTING)
    head: Head = field(default=Head(), metadata=NO_SETTING)

    def __post_init__(self) -> None:
        """Refuse senseless sizes, and mixers without their block."""
        pattern = self.pattern
        kinds = {"attention", *(kind for block in self.recurrences for kind in block.kinds)}
        if missing := sorted({kind for mixers in pattern.mixers for kind in mixers} - kinds):
            raise TypeError(f"the model has {', '.join(missing)} layers, and no settings of such a block")
        if any(block.hidden_size != self.hidden_size for block in (self.attention, self.mlp, *self.recurrences)):
            raise TypeError("blocks have another hidden_size than the model: change it with with_settings")
        experts = 0 if self.moe is None else self.moe.num_experts
        heads = self.attention.num_attention_heads
        check_sizes(layers=pattern.num_layers + pattern.mtp_layers, heads=heads, experts=experts)

    @property
    def num_layers(self) -> int:
        """Layers, without MTP layers."""
        return self.pattern.num_layers

    @functools.cached_property
    def layers(self) -> tuple[Layer, ...]:
        """The layers without MTP layers."""
        return tuple(map(self._layer, range(self.num_layers)))

    @functools.cached_property
    def mtp(self) -> tuple[Layer, ...]:
        """The MTP layers."""
        return tuple(self._layer(self.num_layers + number) for number in range(self.pattern.mtp_layers))

    @property
    def all_layers(self) -> tuple[Layer, ...]:
        """Layers, then MTP layers."""
        return self.layers + self.mtp

    @functools.cached_property
    def first_equals(self) -> tuple[int, ...]:
        """For each layer, then each MTP layer, the number of the first layer that is equal to it."""
        numbers: dict[Layer, int] = {}
        return tuple(numbers.setdefault(layer, layer.number) for layer in self.all_layers)

    @property
    def distinct_layers(self) -> tuple[Layer, ...]:
        """One of each kind of layer, in order."""
        return tuple(self.all_layers[number] for number in dict.fromkeys(self.first_equals))

    @functools.cached_property
    def symbols(self) -> Mapping[str, int]:
        """The size of each symbol in the shapes of tensor rules, see :mod:`isthmus.families.rules.rule`."""
        sizes = {
            "V": self.vocab_size,
            "H": self.hidden_size,
            "P": self.max_position_embeddings + self.embedding.position_offset,
            "Iw": self.embedding.layer_input_size,
            "Ia": self.embedding.layer_input_size * self.num_layers,
            "1": 1,
            "2": 2,
            "4": 4,
        }
        full, windowed = self.attention_kinds[0], self.attention_kinds[-1]
        sizes |= {symbol + WINDOWED: size for symbol, size in windowed.symbols().items()}
        for block in (full, *self.recurrences, self.mlp, self.moe):
            sizes |= {} if block is None else block.symbols()
        return sizes

    @functools.cached_property
    def attention_kinds(self) -> tuple[Attention, ...]:
        """Attention without a window and, if its sizes or its rotary embedding differ, with one."""
        full = replace(self.attention, rotary=self.rotary)
        return tuple(dict.fromkeys((full, replace(self._windowed, rotary=self.windows.rotary(self.rotary)))))

    @property
    def rotary_kinds(self) -> tuple[Attention, ...]:
        """The ``attention_kinds`` whose rotary embeddings differ: one or two."""
        first, *others = self.attention_kinds
        differ = (kind for kind in others if (kind.rotary, kind.kv_channels) != (first.rotary, first.kv_channels))
        return first, *differ

    @property
    def latent(self) -> Latent | None:
        """Sizes of latent attention; None: attention is not latent."""
        return self.attention.latent if isinstance(self.attention, LatentAttention) else None

    @property
    def _windowed(self) -> Attention:
        sizes = self.windows.window_attention
        return self.attention if sizes is None or self.windows.sliding_window is None else sizes.apply(self.attention)

    @property
    def has_dense_mlp(self) -> bool:
        """Whether some layer may have a dense feed-forward block."""
        return self.moe is None or bool(self.moe.dense_layers)

    @property
    def longest_with_state(self) -> int | None:
        """Most tokens of a sequence that all layers continue from their state in generation; None: any number."""
        limits = {mixer.longest_with_state for layer in self.layers for mixer in layer.mixers}
        return min((limit for limit in limits if limit is not None), default=None)

    def key_source(self, layer: int) -> int | None:
        """The layer whose keys and values a layer, both from 0, attends to; None: its own."""
        first = self.num_layers - self.pattern.key_sharing_layers
        if not first <= layer < self.num_layers:
            return None
        return max(other for other in range(first) if self.windows.of(other) == self.windows.of(layer))

    def _layer(self, number: int) -> Layer:
        kinds = self.pattern.mixers_of(number)
        return Layer(
            number=number,
            hidden_size=self.hidden_size,
            form=self.pattern.form_with(kinds),
            norm=self.norm,
            mixers=tuple(self._attention(number) if kind == "attention" else self._mixer(kind) for kind in kinds),
            feed_forward=None if number in self.pattern.layers_without_mlp else self._feed_forward(number),
            input_size=self.embedding.layer_input_size,
            is_mtp=number >= self.num_layers,
        )

    def _mixer(self, kind: str) -> Mixer:
        return next(replace(block, kind=kind) for block in self.recurrences if kind in block.kinds)

    def _attention(self, number: int) -> Attention:
        window = self.windows.of(number)
        attention, rotary = self.attention, self.rotary
        if window is not None:
            attention, rotary = self._windowed, self.windows.rotary(rotary)
        rotates = self.embedding.position == "rope" and number not in self.pattern.unrotated_layers
        attention = replace(
            attention,
            rotary=rotary if rotates else None,
            window=window,
            window_kind=self.windows.window_kind,
            key_source=self.key_source(number),
        )
        if isinstance(attention, LatentAttention) and (indexer := attention.indexer) is not None:
            attention = replace(attention, has_indexer=number not in indexer.shared_layers)
        return attention

    def _feed_forward(self, number: int) -> Mlp | Experts:
        limits = self.mlp.swiglu_limits
        shares = self.mlp.sharing_layers_wide and self.key_source(number) is not None
        mlp = replace(self.mlp, is_wide=shares, limit=limits[number] if number < len(limits) else None)
        if self.moe is None or number in self.moe.dense_layers:
            return mlp
        limits = self.moe.swiglu_limits
        return replace(self.moe, mlp=mlp, limit=limits[number] if number < len(limits) else None)

    @functools.cached_property
    def settings(self) -> Mapping[str, Any]:
        """Every setting by name; those of blocks that the model does not have are missing."""
        settings: dict[str, Any] = {}
        for component in (self, *self._components()):
            prefix = f"{component.prefix}." if component.prefix else ""
            settings |= {prefix + name: value for name, value in settings_of(component).items()}
        return settings

    def setting(self, name: str) -> Any:
        """A setting by its name, such as ``moe.top_k``, or a block by its prefix; None if the model has no such block.

        Raises:
            KeyError: there is no such setting.
        """
        if name in self.settings:
            return self.settings[name]
        if name not in SETTINGS and name not in PREFIXES:
            raise KeyError(name)
        block = next((part for part in self._components() if name and part.prefix == name), None)
        return None if block is None else type(block)(**settings_of(block))

    def _components(self) -> list[Any]:
        """Whatever has settings, besides the architecture itself."""
        components: list[Any] = [self.pattern, self.norm, self.embedding, self.rotary, self.attention, self.windows]
        if isinstance(self.attention, LatentAttention):
            components += filter(None, (self.attention.latent, self.attention.indexer))
        components += filter(None, (self.windows.window_attention, *self.recurrences, self.mlp, self.moe))
        return [*components, self.head]

    def first_layers(self, layers: int) -> Architecture:
        """The model of the first ``layers`` layers."""
        shared = self.pattern.key_sharing_layers - (self.num_layers - layers)
        changed: dict[str, Any] = {"num_layers": layers, "key_sharing_layers": max(0, shared)}
        for name, value in self.settings.items():
            if name == "mixers" or name.endswith("swiglu_limits"):  # an entry for each layer
                changed[name] = value[:layers]
            elif name.endswith("_layers") and isinstance(value, tuple):  # numbers of layers
                changed[name] = tuple(layer for layer in value if layer < layers)
        return self.with_settings(changed)

    def with_settings(self, settings: Mapping[str, Any]) -> Architecture:
        """This model with other settings; a prefix, such as ``moe``, replaces or removes the whole block."""
        remaining = {name: value for name, value in self.settings.items() if name.partition(".")[0] not in settings}
        return from_settings({**remaining, **settings})


_PLAIN = (LayerPattern, Norm, Embedding, Rotary, Attention, SlidingWindow, Mlp, Head)
_OPTIONAL = (Latent, KeyIndexer, WindowAttention, *RECURRENCES, Experts)


COMPONENTS: tuple[Any, ...] = (Architecture, *_PLAIN, *_OPTIONAL)
"""Every class with settings."""


def _settings_of(component: Any) -> dict[str, Any]:
    prefix = f"{component.prefix}." if component.prefix else ""
    return {prefix + entry.name: entry.default for entry in setting_fields(component)}


SETTINGS: Mapping[str, Any] = {
    name: default for component in COMPONENTS for name, default in _settings_of(component).items()
}
"""Name of every setting, with its default or ``dataclasses.MISSING``."""
PREFIXES = frozenset(name.partition(".")[0] for name in SETTINGS if "." in name)
"""Prefixes of the settings of blocks that not every model has."""
REQUIRED = frozenset(name for name, default in SETTINGS.items() if default is MISSING and "." not in name)
"""Settings without a default of every model."""


def from_settings(settings: Mapping[str, Any]) -> Architecture:
    """Build an architecture from its settings by name, such as ``num_layers`` and ``moe.top_k``.

    The prefix of a block, such as ``moe``, names all of its settings: its value is a block or None.

    Raises:
        DataError: the model has more layers, heads or experts than can be enumerated.
        TypeError: a setting is unknown, or a required one is missing.
    """
    settings = dict(settings)
    for prefix in settings.keys() & PREFIXES:
        if (block := settings.pop(prefix)) is not None:
            settings |= {f"{prefix}.{name}": value for name, value in settings_of(block).items()}
    if unknown := sorted(settings.keys() - SETTINGS.keys()):
        raise TypeError(f"unknown settings of an architecture: {', '.join(unknown)}")
    if missing := sorted(REQUIRED - settings.keys()):
        raise TypeError(f"an architecture needs the settings {', '.join(missing)}")
    hidden = settings["hidden_size"]
    parts = {component: _values(component, settings) for component in (*_PLAIN, *_OPTIONAL)}

    def optional(component: type[Any], **resolved_values: Any) -> Any:
        return component(**parts[component], **resolved_values) if parts[component] else None

    if parts[KeyIndexer] and not parts[Latent]:
        raise TypeError("an indexer (indexer.*) needs latent attention (mla.*)")
    attention = Attention(hidden_size=hidden, **parts[Attention])
    if (latent := optional(Latent)) is not None:
        attention = LatentAttention(hidden_size=hidden, **parts[Attention], latent=latent, indexer=optional(KeyIndexer))
    recurrences = (optional(kind, hidden_size=hidden) for kind in RECURRENCES)
    return Architecture(
        **{name: settings[name] for name in _settings_of(Architecture) if name in settings},
        pattern=LayerPattern(**parts[LayerPattern]),
        norm=Norm(**parts[Norm]),
        embedding=Embedding(**parts[Embedding]),
        rotary=Rotary(**parts[Rotary]),
        attention=attention,
        windows=SlidingWindow(**parts[SlidingWindow], window_attention=optional(WindowAttention)),
        recurrences=tuple(block for block in recurrences if block is not None),
        mlp=Mlp(hidden_size=hidden, **parts[Mlp]),
        moe=optional(Experts, hidden_size=hidden),
        head=Head(**parts[Head]),
    )


def _values(component: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of one component, without its prefix."""
    prefix = f"{component.prefix}." if component.prefix else ""
    return {
        entry.name: settings[prefix + entry.name]
        for entry in setting_fields(component)
        if prefix + entry.name in settings
    }
