"""What every block answers: its linear layers, FLOPs, memory, symbols of tensor shapes, and a small version."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any, ClassVar, Literal, TypeVar

from isthmus.errors import DataError

MAX_INT = 2**31 - 1
"""Largest integer of a config."""
MAX_LAYERS, MAX_HEADS, MAX_EXPERTS = 4096, 1 << 16, 1 << 17
"""Largest sizes of a model; experts in all its layers."""


BlockType = TypeVar("BlockType", bound="Block")


def check_sizes(*, layers: int, heads: int = 1, experts: int = 0) -> None:
    """Refuse a model with more layers, heads, or experts in all layers, than can be enumerated in seconds."""
    sizes = (
        ("layers", layers, MAX_LAYERS),
        ("attention heads", heads, MAX_HEADS),
        ("experts in all layers", layers * experts, MAX_EXPERTS),
    )
    for name, size, most in sizes:
        if size > most:
            raise DataError(f"the config has {size:,} {name}; at most {most:,} are supported. Correct it.")


NO_SETTING: Mapping[str, bool] = {"setting": False}
"""Metadata of fields that are no settings of a model: other blocks, and what is known of the blocks of a layer only."""


def setting_fields(component: type[Any]) -> Iterator[Field[Any]]:
    """The fields of a component that are settings of a model."""
    return (entry for entry in fields(component) if entry.metadata.get("setting", True))


def settings_of(component: Any) -> dict[str, Any]:
    """The settings of a component by name, without its prefix."""
    return {entry.name: getattr(component, entry.name) for entry in setting_fields(type(component))}


@dataclass(frozen=True, slots=True)
class Linear:
    """A weight [``out``, ``inside``] of a tensor-parallel rank that each token is multiplied by."""

    out: float
    inside: float
    split: Literal["column", "row"] | None = None
    """Which dimension tensor-parallel ranks split; None: each rank has the whole weight."""
    fp8: bool = True
    """Whether ``train.precision=fp8`` computes it in FP8."""

    @property
    def weights(self) -> float:
        return self.out * self.inside


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """What the activations of a layer on a rank depend on, besides the layer."""

    num_tokens: int
    """Tokens of a context-parallel rank."""
    bytes_per_element: int
    """Bytes of an activation; FP8 matmuls save bfloat16."""
    longest: int = 0
    """Tokens of a sample."""
    tp: int = 1
    sp: bool = False
    cp: int = 1
    ep: int = 1
    etp: int = 1
    recomputed: frozenset[str] = frozenset()
    """Modules of ``train.recompute_modules``."""
    on_gpu: bool = False
    """Activations are compiled, so that any of them saves only its input."""

    @property
    def outside(self) -> int:
        """Tokens outside of tensor-parallel blocks."""
        return self.num_tokens // self.tp if self.sp else self.num_tokens


@dataclass(frozen=True, slots=True)
class RehearsalSizes:
    """Sizes of the blocks of a rehearsal, which a parallel layout divides."""

    heads: int
    """Attention heads; tensor parallelism divides them."""
    groups: int
    head_dim: int
    ffn_hidden_size: int
    tp: int
    ep: int
    etp: int
    expert_size: int | None = None
    """Width of an expert; None: as narrow as the layout allows."""
    least: int = 16
    """Smallest width of a head or state."""

    @property
    def hidden_size(self) -> int:
        return self.heads * self.head_dim


@dataclass(frozen=True, kw_only=True)
class Block(ABC):
    """Base class. Formulas are for one layer and hold for a single rank unless they have ``tp``."""

    prefix: ClassVar[str] = ""
    """Prefix of the names of its settings, such as ``moe`` of ``moe.top_k``; empty: none."""

    hidden_size: int = field(default=0, metadata=NO_SETTING, repr=False)
    """Width of its inputs and outputs."""

    @abstractmethod
    def linears(self, tp: int = 1) -> list[Linear]:
        """Its weights of linear layers on one of ``tp`` ranks."""

    @property
    def convolution_weights(self) -> int:
        """Weights of the convolutions of a token."""
        return 0

    @property
    def matmul_weights(self) -> int:
        """Weights in a token's matmuls and convolutions, without norms and biases."""
        return round(sum(linear.weights for linear in self.linears())) + self.convolution_weights

    def symbols(self) -> Mapping[str, int]:
        """Sizes of the symbols in the tensor rules that belong to this kind of block."""
        return {}

    def divided_sizes(self) -> Iterable[tuple[str, int]]:
        """Name and number of what tensor parallelism divides."""
        return ()

    def tp_mismatch(self, tp: int) -> str | None:
        """Why ``tp`` ranks cannot share the block, None if they can."""
        for name, size in self.divided_sizes():
            if tp < 1 or size % tp:
                return f"does not divide {name}={size}"
        return None

    def invalid_reason(self) -> str | None:
        """Why its sizes contradict each other, None if they do not."""
        return None

    @abstractmethod
    def small(self: BlockType, sizes: RehearsalSizes) -> BlockType:
        """The same kind of block with small sizes, for rehearsals."""


@dataclass(frozen=True, kw_only=True)
class Mixer(Block):
    """A block that mixes the tokens of a sample."""

    kinds: ClassVar[tuple[str, ...]] = ()
    """Names in ``mixers`` of a layer."""
    kind: str = field(default="", metadata=NO_SETTING, repr=False)

    @property
    def rule_kinds(self) -> tuple[str, ...]:
        """What it adds to the kinds of a layer, by which tensor rules select layers."""
        return (self.kind,)

    @property
    def input_and_output_multipliers(self) -> tuple[float, float]:
        """Multipliers of the input and of the output of the block."""
        return 1.0, 1.0

    @abstractmethod
    def mixing_flops(self, num_tokens: int, sum_squared_lengths: int) -> float:
        """FLOPs of the forward pass beside those of :attr:`matmul_weights`."""

    def selection_flops(self, num_tokens: int, sum_squared_lengths: int) -> float:
        """FLOPs that have no backward pass."""
        return 0.0

    @abstractmethod
    def saved_bytes(self, batch: MicroBatch) -> dict[str, int]:
        """Bytes of activations kept for the backward pass, by part."""

    def buffer_elements(self, batch: MicroBatch) -> int:
        """Upper bound of temporary elements in the backward pass; 0: other blocks have more."""
        return 0

    @abstractmethod
    def state_elements(self, num_tokens: int, tp: int = 1) -> int:
        """Elements that generation keeps for a sample of ``num_tokens`` tokens: keys and values, or a state.

        Those of a tensor-parallel rank, with ``tp`` ranks.
        """

    @property
    def longest_with_state(self) -> int | None:
        """Most tokens of a sequence that generation continues from its state; None: any number.

        Longer sequences are computed again for each token.
        """
        return None


@dataclass(frozen=True, kw_only=True)
class Recurrence(Mixer):
    """A mixer whose work grows linearly with the tokens."""

    @property
    def scan_flops(self) -> int:
        """FLOPs of a token in the recurrence."""
        return 0

    @property
    def scan_depth(self) -> int:
        """The recurrence takes about as long as a matmul [inner channels, depth]: the tokens of a chunk, and reads and
        updates of the state. 0: none."""
        return 0

    @property
    @abstractmethod
    def inner_channels(self) -> int:
        """Columns of the input of the output projection."""

    def mixing_flops(self, num_tokens: int, sum_squared_lengths: int) -> float:
        return float(self.scan_flops) * num_tokens

    @abstractmethod
    def _channels(self, batch: MicroBatch) -> tuple[int, int, int]:
        """Elements of a token that are saved: of projections, of convolutions; and float32 elements of all tokens."""

    def saved_bytes(self, batch: MicroBatch) -> dict[str, int]:
        """Outputs of the input projection and of the convolution, the input of the output projection, divided by tp.

        In float32, time steps, the output of the scan and some of its states. Recomputing ``core_attn`` keeps only the
        first and the last.
        """
        projected, convolved, float32 = self._channels(batch)
        element = batch.num_tokens * batch.bytes_per_element
        terms = {f"{self.kind}: outer projections": element * (projected + self.inner_channels) // batch.tp}
        if "core_attn" not in batch.recomputed:
            terms[f"{self.kind}: convolution"] = element * convolved // batch.tp
            terms[f"{self.kind}: float32"] = 4 * float32 // batch.tp
        return terms

    def _chunk_bytes(self, batch: MicroBatch) -> int:
        """Temporary bytes of one chunk of the scan."""
        return 0

    def buffer_elements(self, batch: MicroBatch) -> int:
        """Gradients of what the block keeps, and a chunk."""
        projected, convolved, float32 = self._channels(batch)
        element = batch.num_tokens * batch.bytes_per_element
        kept = element * (projected + self.inner_channels) // batch.tp + element * convolved // batch.tp
        return (kept + 4 * float32 // batch.tp + self._chunk_bytes(batch)) // batch.bytes_per_element


def common_heads(count: int, heads: int) -> int:
    """Largest number of heads that divides ``count`` and is divided by every layout that divides ``heads``."""
    return math.gcd(count, heads)
