"""Checkpoint state of a run with adapters: these, and the tensors of the base that are trained."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, TypeAlias

from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from torch import Tensor, nn

from isthmus.engine.checkpoint.optimizer_state import is_tensor, local_entries
from isthmus.engine.lora.attach import adapter_tensors
from isthmus.engine.lora.low_rank import AdapterTensor

Entry: TypeAlias = ShardedTensor | ShardedTensorFactory


def trained_entries(stage: Any, metadata: dict[str, Any]) -> dict[str, Entry]:
    """The checkpoint entry of each trained parameter of a stage; an adapter's has the name of PEFT."""
    base_entries = {
        name: entry for name, entry in stage.sharded_state_dict(metadata=metadata).items() if is_tensor(entry)
    }
    entries: dict[str, Entry] = {
        name: entry
        for name, entry in base_entries.items()
        if isinstance(entry.data, nn.Parameter) and entry.data.requires_grad and ".lora." not in name
    }
    for tensor in adapter_tensors([stage]):
        linear = tensor.adapter.linear
        expert = "" if linear.expert is None else f".{linear.expert}"
        name = f"{linear.module}{expert}.{tensor.role}"
        entries[name] = _entry(f"adapters.{name}", tensor)
    return entries


def weights_of(entries: dict[str, Entry]) -> dict[str, ShardedTensor]:
    """The values of the parameters; loading them sets the parameters in place."""
    weights: dict[str, ShardedTensor] = {}
    for name, entry in entries.items():
        parts = local_entries(entry, entry.data.detach().view(-1), 0, stacked=False)
        weights |= {f"{name}.{n}": replace(part, replica_id=entry.replica_id) for n, part in enumerate(parts)}
    return weights


def _entry(key: str, tensor: AdapterTensor) -> Entry:
    if getattr(tensor.parameter, "allreduce", True):
        rank = parallel_state.get_tensor_model_parallel_rank()
        copy = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    else:
        rank = parallel_state.get_expert_tensor_parallel_rank()
        copy = parallel_state.get_expert_data_parallel_rank()
    replica = (0, rank if tensor.replicated else 0, copy)

    def pieces(key: str, data: Tensor, replica_id: Any, _flat: Any = None) -> list[ShardedTensor]:
        return list(_pieces(key, data, replica_id, tensor))

    if len(tensor.pieces) == 1:
        (piece,) = pieces(key, tensor.parameter, replica)
        return replace(piece, data=tensor.parameter)
    return ShardedTensorFactory(key, tensor.parameter, pieces, lambda _: tensor.parameter, replica)


def _pieces(key: str, data: Tensor, replica: Any, tensor: AdapterTensor) -> Iterator[ShardedTensor]:
    shape = tensor.adapter.shape(tensor.role)
    for (rows, *columns), local in tensor.pieces:
        part = data[local]
        full_shape, offset = shape, (rows.start or 0, *(column.start or 0 for column in columns))
        if (step := rows.step or 1) > 1:  # entries have no steps: rows start, start + step, ... get an index of an axis
            part, full_shape = part[:, None], (shape[0] // step, step, *shape[1:])
            offset = (*divmod(rows.start, step), *offset[1:])
        yield ShardedTensor(
            key=key,
            data=part,
            dtype=part.dtype,
            local_shape=tuple(part.shape),
            global_shape=full_shape,
            global_offset=offset,
            axis_fragmentations=None,
            replica_id=replica,
        )
