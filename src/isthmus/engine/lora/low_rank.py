"""Low-rank adapters of a linear layer (LoRA, arXiv 2106.09685; DoRA, arXiv 2402.09353), with the meaning of PEFT.

Each linear layer of transformers has an adapter of its own, also where several form one weight W here. The A of all of
them are joined, and B has the rows of this rank's W, with zeros where a row belongs to another adapter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from torch import Tensor, nn
from torch.nn import functional

from isthmus.engine.layers.recompute import recompute_if
from isthmus.engine.linear.quantized_weight import dense
from isthmus.engine.lora.adapter import Adapter, Role
from isthmus.engine.lora.exchange import Exchange
from isthmus.engine.lora.input_dropout import input_dropout, with_this_batch
from isthmus.families.rules.shard import Index, TensorSlice


@dataclass(frozen=True, slots=True)
class AdapterTensor:
    """A tensor of an adapter, and this rank's part of it."""

    adapter: Adapter
    role: Role
    parameter: nn.Parameter
    pieces: tuple[tuple[Index, Index], ...]
    """Rectangles of the whole tensor, and the same elements of the parameter."""
    replicated: bool
    """Every tensor-parallel rank has the same part."""


class LowRank(nn.Module):
    """The adapters of a linear layer of this rank."""

    def __init__(
        self,
        adapters: Sequence[Adapter],
        pieces: Sequence[TensorSlice],
        weight: Tensor,
        exchange: Exchange,
        *,
        dora: bool = False,
        dropout: float = 0.0,
    ) -> None:
        """``pieces`` are the slices of Hugging Face tensors that form ``weight`` [rows, columns], this rank's W.

        Parameters have the dtype and device of ``weight``. They are not initialized.
        """
        super().__init__()
        self.adapters: tuple[Adapter, ...] = tuple(adapters)
        self.exchange = exchange
        self.dora = dora
        self.dropout = dropout
        self.spans: list[list[tuple[slice, slice]]] = []
        """Rows of each adapter's B, and the same rows of W."""
        self.columns: slice = slice(0, self.adapters[0].linear.inputs)
        like: dict[str, Any] = {"dtype": weight.dtype, "device": weight.device}
        for adapter in self.adapters:
            adapter_pieces = [piece for piece in pieces if piece.part in dict(adapter.linear.parts)]
            self.spans.append([(adapter.linear.rows_and_columns(piece)[0], piece.local[0]) for piece in adapter_pieces])
            for piece in adapter_pieces:
                self.columns = adapter.linear.rows_and_columns(piece)[1]
            self._add(adapter, "lora_A", torch.empty(adapter.rank, weight.size(1), **like))
            if adapter_pieces:  # with fewer query groups than ranks, a rank may have no rows of the keys
                rows = sum(local.stop - local.start for _, local in self.spans[-1])
                self._add(adapter, "lora_B", torch.empty(rows, adapter.rank, **like))
                if dora:
                    self._add(adapter, "lora_magnitude_vector", torch.empty(rows, **like))
        order = [row for spans in self.spans for _, local in spans for row in range(local.start, local.stop)]
        self.num_rows: int = weight.size(0)
        self.rows: Tensor | None
        """Rows of W that the joined rows of all B belong to; None if they are all rows in order."""
        rows = (
            None
            if order == list(range(self.num_rows))
            else torch.tensor(order, dtype=torch.int64, device=weight.device)
        )
        self.register_buffer("rows", rows, persistent=False)
        self.squares: Tensor | None
        """DoRA: sum of squares of each row of W, float32."""
        self.register_buffer("squares", None, persistent=False)

    def _add(self, adapter: Adapter, role: Role, tensor: Tensor) -> None:
        parameter = nn.Parameter(tensor)
        axis = self.exchange.sharded_axis(role)
        if axis is not None:
            set_tensor_model_parallel_attributes(parameter, True, axis, 1)
        self.exchange.sum_grads(parameter, role)
        self.register_parameter(_name(adapter, role), parameter)

    def _of(self, role: Role) -> list[Tensor]:
        """The tensors of all adapters; without rows if this rank has no rows of an adapter."""
        tensors = [getattr(self, _name(adapter, role), None) for adapter in self.adapters]
        return [
            getattr(self, _name(adapter, "lora_A")).new_empty(0, *adapter.shape(role)[1:]) if tensor is None else tensor
            for adapter, tensor in zip(self.adapters, tensors, strict=True)
        ]

    def joined_a(self) -> Tensor:
        """[sum of ranks, columns]"""
        tensors = self._of("lora_A")
        return tensors[0] if len(tensors) == 1 else torch.cat(tensors)

    def joined_b(self, *, float32: bool = False) -> Tensor:
        """[rows, sum of ranks], multiplied by the scales."""
        tensors = [b.float() if float32 else b for b in self._of("lora_B")]
        scaled = [b * adapter.scale for b, adapter in zip(tensors, self.adapters, strict=True)]
        joined = scaled[0] if len(scaled) == 1 else torch.block_diag(*scaled)
        return self._in_rows(joined, joined.new_zeros(self.num_rows, joined.size(1)))

    def _in_rows(self, values: Tensor, others: Tensor) -> Tensor:
        return values if self.rows is None else others.index_copy(0, self.rows, values)

    def forward(self, out: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """The output [..., rows] of the layer with adapters, from its output without them and its input.

        A row-parallel layer's ``out`` is the sum over the ranks.
        """
        hidden = self.exchange.low_rank(self._project(x))
        b = self.joined_b()
        out = torch.addmm(out.flatten(0, -2), hidden.flatten(0, -2), b.t()).view_as(out)
        return out * self._gain(weight) if self.dora else out

    def _project(self, x: Tensor) -> Tensor:
        """``A x`` of this rank's columns; each linear layer of transformers has a dropout of its own."""
        if not (self.dropout and self.training):
            return functional.linear(x, self.joined_a())
        return torch.cat(
            [
                self._dropped_project(x, *adapter_and_a)
                for adapter_and_a in zip(self.adapters, self._of("lora_A"), strict=True)
            ],
            dim=-1,
        )

    def _dropped_project(self, x: Tensor, adapter: Adapter, a: Tensor) -> Tensor:
        def dropped() -> list[Tensor]:
            module, first = adapter.linear.module, self.columns.start
            return [input_dropout(x, self.dropout, module=module, first_channel=first)]

        inputs = dropped()
        with recompute_if(True, inputs, with_this_batch(dropped)):  # else each linear layer would keep a copy of x
            return functional.linear(inputs[0], a)

    def _gain(self, weight: Tensor) -> Tensor:
        """DoRA: magnitude over norm of each row [rows]. As in PEFT, the norm has no gradient."""
        magnitude = torch.cat(self._of("lora_magnitude_vector"))
        norms = self._norms(weight)
        gain = magnitude / (norms if self.rows is None else norms[self.rows])
        return self._in_rows(gain, gain.new_ones(self.num_rows))

    @torch.no_grad()
    def _norms(self, weight: Tensor) -> Tensor:
        """Norms of the rows of ``W + B A``, without computing this matrix."""
        assert self.squares is not None
        a, b = self.joined_a(), self.joined_b()
        cross = functional.linear(dense(weight), a).float() * 2 + b.float() @ (a.float() @ a.float().t())
        more = self.exchange.sum_columns((cross * b.float()).sum(1))
        return (self.squares + more).sqrt().to(weight.dtype)

    @torch.no_grad()
    def reset_magnitudes(self, weight: Tensor) -> None:
        """DoRA: set the magnitudes to the norms of the rows, so that they change nothing; a collective over tp.

        ``weight`` must not change afterwards.
        """
        squares = torch.linalg.vector_norm(dense(weight), dim=1, dtype=torch.float32).square()
        self.squares = self.exchange.sum_columns(squares)
        norms = self._norms(weight)
        norms = norms if self.rows is None else norms[self.rows]
        magnitudes = self._of("lora_magnitude_vector")
        for magnitude, values in zip(magnitudes, norms.split([len(vector) for vector in magnitudes]), strict=True):
            magnitude.copy_(values)

    @torch.no_grad()
    def merged(self, weight: Tensor) -> Tensor:
        """``weight`` with the adapters, float32; with DoRA a collective over tp."""
        merged_weight = dense(weight).float() + self.joined_b(float32=True) @ self.joined_a().float()
        if self.dora:
            norms = self.exchange.sum_columns(merged_weight.square().sum(1)).sqrt()
            magnitude = torch.cat(self._of("lora_magnitude_vector")).float()
            merged_weight *= self._in_rows(magnitude, norms.clone()).div_(norms)[:, None]
        return merged_weight

    def tensors(self) -> Iterator[AdapterTensor]:
        """This rank's tensors of all adapters."""
        for adapter, spans in zip(self.adapters, self.spans, strict=True):
            all_elements = (slice(None), slice(None))
            pieces = [((slice(None), self.columns), all_elements)]
            a = getattr(self, _name(adapter, "lora_A"))
            yield AdapterTensor(adapter, "lora_A", a, tuple(pieces), self._replicated("lora_A"))
            for role in ("lora_B", "lora_magnitude_vector") if self.dora else ("lora_B",):
                parameter = getattr(self, _name(adapter, role), None)
                if parameter is None:
                    continue
                pieces, first = [], 0
                for rows, local in spans:
                    end = first + local.stop - local.start
                    tail = (slice(None),) * (parameter.dim() - 1)
                    pieces.append(((rows, *tail), (slice(first, end), *tail)))
                    first = end
                yield AdapterTensor(adapter, role, parameter, tuple(pieces), self._replicated(role))

    def _replicated(self, role: Role) -> bool:
        return self.exchange.sharded_axis(role) is None


def _name(adapter: Adapter, role: Role) -> str:
    return f"{adapter.linear.module.rpartition('.')[2]}_{role}"
