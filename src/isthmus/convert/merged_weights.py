"""Weights of a model with a LoRA adapter merged into them, computed slice by slice in float32."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from isthmus.convert.coverage import describe_problems
from isthmus.convert.weight_source import TensorSpec, WeightSource
from isthmus.errors import DataError, UsageError
from isthmus.families.adapted_linears import HfLinear, all_linears, module_path
from isthmus.families.architecture import Architecture
from isthmus.families.family import Family
from isthmus.families.rules.rule import Shape
from isthmus.families.rules.shard import TensorSlice
from isthmus.hf.peft_folder import PeftFolder
from isthmus.hf.tensors.finite import check_cast, check_merge, is_finite
from isthmus.hf.tensors.safetensors_format import TensorInfo, bounds_of, row_chunks

Index = tuple[slice, ...]
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class _Part:
    """A tensor of the base as a part of a linear layer; an embedding is the layer whose weight is [width, rows]."""

    linear: HfLinear
    part: int = 0
    transposed: bool = False
    stacked: bool = False

    def rows_and_columns(self, index: Index) -> tuple[slice, slice]:
        return self.linear.rows_and_columns(TensorSlice(self.part, index, index, self.transposed, self.stacked))

    def matrices(self, tensor: Tensor, index: Index) -> Iterator[tuple[int | None, Tensor]]:
        """Expert and matrix [out, inputs] of each linear layer in a slice, as views."""
        first = index[0].start if self.stacked else self.linear.expert
        for number, matrix in enumerate(tensor if self.stacked else [tensor]):
            yield None if first is None else first + number, matrix.mT if self.transposed else matrix


class MergedWeights:
    """A source of the merged weights, under the names and dtypes of the base; ``arch`` is the merged model's.

    Rows of a DoRA layer are scaled to its magnitudes, and tensors of ``modules_to_save`` replace those of the base.
    Embedding and output layer that are tied in the base are no longer tied if the adapter changes one of them only.
    """

    def __init__(
        self, source: WeightSource, family: Family, arch: Architecture, adapter: PeftFolder, factor: float = 1.0
    ) -> None:
        """Match all tensors of the adapter with those of the base; DataError if it belongs to another base.

        ``factor`` multiplies ``B @ A``; with 0, only ``modules_to_save`` change.
        """
        self._source, self._adapter, self._factor = source, adapter, factor
        untied = arch.with_settings({"tie_embeddings": False})
        shapes = family.hf_shapes(untied)
        self._parts, self._replaced = _parts(family, untied, shapes, adapter)
        experts = _experts(arch)
        saved = {
            name: shapes[tensor] if part is None else (experts, part.linear.out, part.linear.inputs)
            for tensor, (name, part) in self._replaced.items()
        }
        _check((part.linear for part in self._parts.values()), saved, adapter, experts, source)
        if not factor:
            self._parts = {}
        self._norms: dict[str, Tensor] = {}
        self.tensors: dict[str, TensorSpec | TensorInfo] = dict(source.tensors)
        names = {rule.canonical: rule.parts[0].name for rule in family.rules if not rule.alias}
        self._embedding, self._head = names["embedding.word_embeddings.weight"], names.get("output_layer.weight")
        self.arch: Architecture = arch
        self.notes: tuple[str, ...] = ()
        """Decisions for the user."""
        changed = {self._embedding, self._head} & (self._parts.keys() | self._replaced.keys())
        if arch.head.tie_embeddings and changed and self._head is not None and not self._still_tied(changed):
            self.arch = untied
            self.tensors[self._head] = source.tensors[self._embedding]
            self.notes = ("embedding and output layer differ after merging: they are no longer tied",)

    def __str__(self) -> str:
        return f"{self._source} with {self._adapter}"

    def read(self, name: str, index: Index | None = None, *, into: Tensor | None = None) -> Tensor:
        """Reads this slice of the base and the factors of its module only."""
        if name not in self._parts and name not in self._replaced:
            return self._base(name, index, into)
        tensor = self._base(name, index) if name not in self._parts else self._merged(name, index)
        # Round first, so that values do not depend on the target's dtype.
        rounded = tensor.to(self.tensors[name].dtype)
        check_cast(name, rounded, tensor)
        return rounded if into is None else into.detach().copy_(rounded)

    def _merged(self, name: str, index: Index | None) -> Tensor:
        tensor = self._scaled_sum(name, index)
        if not is_finite(tensor):
            check_merge(name, tensor, self._base(name, index), self._adapter)
        return tensor

    def _scaled_sum(self, name: str, index: Index | None) -> Tensor:
        tensor, part = self._sum(name, index), self._parts[name]
        magnitude = self._adapter.factors(part.linear, part.linear.expert).magnitude
        if magnitude is None:
            return tensor
        if name not in self._norms:  # of whole rows, of which a slice can be a part
            shape = bounds_of((part.linear.out, part.linear.inputs), None)
            norms = [self._row_norms(name, slice(*rows)) for (rows, _), _ in row_chunks(shape, 4, _CHUNK_BYTES)]
            self._norms[name] = torch.cat(norms)
        factor = (magnitude / self._norms[name])[_full(index, self.tensors[name].shape)[part.transposed]]
        tensor *= factor if part.transposed else factor[:, None]
        return tensor

    def _row_norms(self, name: str, rows: slice) -> Tensor:
        if self._parts[name].transposed:
            return torch.linalg.norm(self._sum(name, (slice(None), rows)), dim=0)
        return torch.linalg.norm(self._sum(name, (rows,)), dim=1)

    def _sum(self, name: str, index: Index | None) -> Tensor:
        """The base plus ``scale * B @ A``, in float32."""
        part, full = self._parts[name], _full(index, self.tensors[name].shape)
        tensor = self._base(name, full).float()
        rows, columns = part.rows_and_columns(full)
        for expert, matrix in part.matrices(tensor, full):
            factors = self._adapter.factors(part.linear, expert)
            delta = factors.b[rows] @ factors.a[:, columns]
            delta *= factors.scale * self._factor
            matrix += delta
        return tensor

    def _base(self, name: str, index: Index | None, into: Tensor | None = None) -> Tensor:
        if name not in self._replaced:
            # An output layer that is no longer tied starts from the embedding.
            inner = self._embedding if name == self._head and name not in self._source.tensors else name
            return self._source.read(inner, index, into=into)
        saved, part = self._replaced[name]
        if part is None:
            return self._adapter.read_saved(saved, index)
        rows, columns = part.rows_and_columns(_full(index, self.tensors[name].shape))
        expert = part.linear.expert or 0
        return self._adapter.read_saved(saved, (slice(expert, expert + 1), rows, columns))[0]

    def _still_tied(self, changed: set[str | None]) -> bool:
        """Whether the adapter changes embedding and output layer to the same values."""
        if self._adapter.config.ensure_weight_tying and self._head not in changed:
            return True
        if len(changed) < 2 or not changed <= self._replaced.keys():
            return False
        shape = self.tensors[self._embedding].shape
        chunks = [(slice(*rows),) for (rows, _), _ in row_chunks(bounds_of(shape, None), 4, _CHUNK_BYTES)]
        assert self._head is not None
        return all(torch.equal(self._base(self._embedding, rows), self._base(self._head, rows)) for rows in chunks)


def _parts(
    family: Family, arch: Architecture, shapes: Mapping[str, Shape], adapter: PeftFolder
) -> tuple[dict[str, _Part], dict[str, tuple[str, _Part | None]]]:
    """The tensors that an adapter changes, and those that tensors of ``modules_to_save`` replace."""
    placements = family.placements(arch)
    rules = {name: placed.rule for placed in placements.values() for name in placed.hf if not placed.rule.alias}
    expert_parts = {
        placements[canonical].hf[part]: _Part(linear, part, linear.transposed, placements[canonical].rule.stacked)
        for canonical, linears in all_linears(family, arch).items()
        for linear in linears
        for part, _ in linear.parts
        if linear.expert is not None
    }
    parts: dict[str, _Part] = {}
    replaced: dict[str, tuple[str, _Part | None]] = {}
    for name, shape in shapes.items():
        part = expert_parts.get(name)
        if part is not None and part.linear.module in adapter.modules:
            parts[name] = part
        elif part is not None and not part.stacked and part.linear.module in adapter.saved:
            replaced[name] = (part.linear.module, part)
        # Files of older versions have the names of the base's files.
        for path in (module_path(family, name), name.removesuffix(".weight")):
            if path in adapter.modules and name not in parts and len(shape) == 2:
                transposed = rules[name].transposed or adapter.modules[path].embedding
                out, inputs = shape[::-1] if transposed else shape
                parts[name] = _Part(HfLinear(path, out, inputs, (name,), ((0, 0),)), 0, transposed)
            suffix = ".weight" if name.endswith(".weight") else ""
            if path + suffix in adapter.saved and name not in replaced:
                replaced[name] = (path + suffix, None)
    return parts, replaced


def linears_with_adapter(
    adapter: PeftFolder, family: Family, arch: Architecture, base: object
) -> dict[str, tuple[HfLinear, ...]]:
    """The linear layers of the base that have an adapter, by canonical weight name.

    UsageError if others that the model has are adapted, such as embeddings; DataError if the adapter belongs to another
    base. Tensors of ``modules_to_save`` are not checked.
    """
    adapted = {
        canonical: tuple(linear for linear in linears if linear.module in adapter.modules)
        for canonical, linears in all_linears(family, arch).items()
    }
    adapted = {canonical: linears for canonical, linears in adapted.items() if linears}
    trained = {linear.module for linears in adapted.values() for linear in linears}
    modules = {module_path(family, name) for name in family.hf_shapes(arch.with_settings({"tie_embeddings": False}))}
    if others := [module for module in adapter.modules if module in modules - trained]:
        raise UsageError(
            f"{adapter} adapts {others[0]}, which cannot have an adapter in training. Merge it first: isthmus merge "
            f"BASE {adapter} OUT"
        )
    _check([linear for linears in adapted.values() for linear in linears], None, adapter, _experts(arch), base)
    return adapted


def _check(
    linears: Iterable[HfLinear], saved: Mapping[str, Shape] | None, adapter: PeftFolder, experts: int, base: object
) -> None:
    """Raise DataError unless the adapter has these linear layers, no others, and tensors of these shapes."""
    modules = {linear.module: linear for linear in linears}
    unexpected = [module for module in adapter.modules if module not in modules]
    expected: dict[str, Shape] = {}
    if saved is not None:
        unexpected += [name for name in adapter.saved if name not in saved]
        expected |= saved
    for module, linear in modules.items():
        tensors = adapter.modules[module]
        width = tensors.rank * (1 if linear.expert is None else experts)
        inputs, out = (linear.out, linear.inputs) if linear.swapped else (linear.inputs, linear.out)
        expected |= {tensors.a: (width, inputs), tensors.b: (out, width)}
        if tensors.magnitude is not None:
            expected[tensors.magnitude] = (linear.out,)
    problems = describe_problems(
        unexpected=unexpected,
        misshapen=[
            f"{name} is {list(adapter.shape(name))}, not {list(shape)}"
            for name, shape in expected.items()
            if adapter.shape(name) != shape
        ],
    )
    if problems:
        base_name = adapter.config.base_model_name_or_path
        hint = f"It was trained on {base_name}." if base_name else "Give the base that it was trained on."
        raise DataError(f"{adapter} is not an adapter of {base}: {problems}. {hint}")


def _experts(arch: Architecture) -> int:
    return arch.moe.num_experts if arch.moe is not None else 1


def _full(index: Index | None, shape: tuple[int, ...]) -> Index:
    """Slices with start and stop for all dimensions."""
    steps = [cut.step for cut in index or ()] + [None] * len(shape)
    return tuple(slice(low, high, step) for (low, high), step in zip(bounds_of(shape, index), steps, strict=False))
