"""Engine for vLLM's weight transfer: workers receive buckets of tensors from training through a process group.

vLLM calls its methods for the requests ``/init_weight_transfer_engine``, ``/start_weight_update``, ``/update_weights``
(one for each bucket) and ``/finish_weight_update``.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from isthmus_vllm import (
    aligned_bytes,
    broadcast_from_training,
    close_group,
    finish_loading,
    open_group,
    parameter_names,
    prepare_loading,
    tensor_hash,
    tensor_views,
)
from vllm.distributed.weight_transfer.base import WeightTransferEngine


@dataclass
class GroupInfo:
    """Where the rendezvous store of training listens."""

    host: str
    port: int
    world_size: int
    timeout_s: float


@dataclass
class BucketInfo:
    """The tensors of a bucket, in their order."""

    names: Sequence[str]
    dtypes: Sequence[str]
    shapes: Sequence[Sequence[int]]
    timeout_s: float


class GroupTransferEngine(WeightTransferEngine):
    """Loads tensors that rank 0 of a process group broadcasts."""

    init_info_cls = GroupInfo
    update_info_cls = BucketInfo
    supports_draft_weight_update = False

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._group: Any = None
        self._is_updating = False
        self._hashes: dict[str, str] = {}
        self._loaded: set[str] = set()
        self._parameters: set[str] = set()

    def init_transfer_engine(self, init_info: GroupInfo) -> None:
        """Join the group of training, in place of an earlier one."""
        self.shutdown()
        timeout, parallel = timedelta(seconds=init_info.timeout_s), self.parallel_config
        rank = 1 + parallel.data_parallel_index * parallel.world_size + parallel.rank
        with socket.create_connection((init_info.host, init_info.port), init_info.timeout_s) as connection:
            address = str(connection.getsockname()[0])
        store = dist.TCPStore(init_info.host, init_info.port, is_master=False, timeout=timeout, wait_for_workers=False)
        store.set(f"joins/{rank}", "")  # training opens its end when all workers do
        self._group = open_group(
            store, rank, init_info.world_size, device=self.device, address=address, timeout_s=init_info.timeout_s
        )

    def start_weight_update(self) -> None:
        """Let vLLM expect new weights of all layers."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        if self._is_updating:  # of a transfer that broke off: layers would count the weights that they have twice
            self.finish_weight_update()
        self._hashes, self._loaded, self._parameters = {}, set(), parameter_names(self.model)
        prepare_loading(self.model, self.device)
        self._is_updating = True
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive a bucket and load its tensors."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: BucketInfo) -> None:
        """As :meth:`update_weights`; after an error the group is closed, so that training does not wait for it."""
        try:
            if self._group is None:
                raise RuntimeError("no process group with training: init_weight_transfer_engine comes first")
            dtypes = [getattr(torch, name) for name in update_info.dtypes]
            sizes = [aligned_bytes(*pair) for pair in zip(dtypes, update_info.shapes, strict=True)]
            buffer = torch.empty(sum(sizes), dtype=torch.uint8, device=self.device)
            broadcast_from_training(self._group, buffer, update_info.timeout_s).wait()
            tensors = list(zip(update_info.names, tensor_views(buffer, dtypes, update_info.shapes), strict=True))
            self._hashes |= {name: tensor_hash(tensor) for name, tensor in tensors}
            self._loaded |= set(self.model.load_weights(iter(tensors)) or ())
        except BaseException:
            self.shutdown()
            raise

    def finish_weight_update(self) -> None:
        """Let vLLM process what it has received."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)
        self._is_updating = False
        finish_loading(self.model, self.device)

    def received(self) -> dict[str, Any]:
        """The hash of each tensor of the last update, and the parameters for which there was none."""
        return {"hashes": self._hashes, "missing": sorted(self._parameters - self._loaded)}

    def shutdown(self) -> None:
        """Close the group."""
        close_group(self._group)
        self._group = None
