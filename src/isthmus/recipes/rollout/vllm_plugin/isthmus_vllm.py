"""A vLLM server for rollouts; runs in vLLM's environment, with nothing but vLLM and its requirements.

As a script it is a server that ends with the process that started it. As a module it is the worker extension that
servers need (``--worker-extension-cls isthmus_vllm.RolloutWorker``, with the folder of this file in ``PYTHONPATH``).
Both ends of a weight transfer through a process group use its functions. Its engine is in ``isthmus_transfer.py``.
"""

from __future__ import annotations

import hashlib
import math
import os
import runpy
import signal
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

BACKEND = "isthmus"
"""Name of the engine in isthmus_transfer.py (``--weight-transfer-config '{"backend": "isthmus"}'``)."""
_ALIGNMENT = 16
"""Bytes: tensors in a buffer begin at multiples of it."""

if "vllm" in sys.modules:  # training imports this file too
    try:
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    except ImportError:  # vLLM before its weight transfer has files only
        pass
    else:
        WeightTransferEngineFactory.register_engine(BACKEND, "isthmus_transfer", "GroupTransferEngine")


class RolloutWorker:
    """Methods of vLLM's workers that a rollout calls; results are JSON."""

    vllm_config: Any
    model_runner: Any
    device: torch.device
    reload_weights: Any
    finish_weight_update: Any
    weight_transfer_engine: Any
    _weight_update_active: bool

    def isthmus_settings(self) -> dict[str, Any]:
        """The model's config and the settings that a rollout depends on."""
        model = self.vllm_config.model_config
        config = model.hf_config
        owner = getattr(self.vllm_config, "aux_output_config", model)  # vLLM before 0.32: the config of the model
        transfer = getattr(self.vllm_config, "weight_transfer_config", None)
        return {
            "model_type": config.model_type,
            "config": {name: getattr(config, name, None) for name in COMPARED_KEYS},
            "dtype": str(model.dtype).removeprefix("torch."),
            "logprobs_mode": model.logprobs_mode,
            "returns_routed_experts": bool(getattr(owner, "enable_return_routed_experts", False)),
            "weight_transfer": getattr(transfer, "backend", None),
        }

    def isthmus_reload(self, folder: str) -> dict[str, Any]:
        """Load the weights in ``folder``; returns the hash of each tensor, and the parameters that had none."""
        from vllm.model_executor.model_loader import get_model_loader

        model, config = self.model_runner.get_model(), self.vllm_config.model_config
        config.model, config.model_weights, config.revision = folder, "", None
        loader = get_model_loader(self.vllm_config.load_config)
        hashes: dict[str, str] = {}
        loaded: set[str] = set()

        def hashed() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in loader.get_all_weights(config, model):
                hashes[name] = tensor_hash(tensor)
                yield name, tensor

        load = model.load_weights

        def recorded(weights: Iterable[tuple[str, Tensor]]) -> Any:
            names = load(weights)
            loaded.update(names)
            return names

        parameters = parameter_names(model)
        prepare_loading(model, self.device)
        model.load_weights = recorded  # vLLM only logs parameters that were not loaded
        try:
            self.reload_weights(weights_iterator=hashed())
        finally:
            del model.load_weights
        finish_loading(model, self.device)
        return {"hashes": hashes, "missing": sorted(parameters - loaded)}

    def isthmus_end_update(self) -> None:
        """End the weight update of a run that was killed: vLLM refuses another one before."""
        if self._weight_update_active:
            self.finish_weight_update()

    def isthmus_received(self) -> dict[str, Any]:
        """As :meth:`isthmus_reload`, for the last weight update through a process group."""
        return self.weight_transfer_engine.received()

    def isthmus_hashes(self, folder: str) -> dict[str, Any]:
        """The hash of each tensor in the safetensors files of ``folder``, as this machine reads them."""
        from vllm.model_executor.model_loader.weight_utils import safetensors_weights_iterator

        files = [str(path) for path in sorted(Path(folder).glob("*.safetensors"))]
        hashes = {name: tensor_hash(tensor) for name, tensor in safetensors_weights_iterator(files, False)}
        return {"hashes": hashes, "missing": []}


COMPARED_KEYS = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
"""Keys of ``config.json`` that must be those of the policy."""


def parameter_names(model: Any) -> set[str]:
    """Names as ``load_weights`` returns them, before layers with adapters are put around."""
    return {name.replace(".base_layer.", ".") for name, _ in model.named_parameters() if "lora_" not in name}


def prepare_loading(model: Any, device: torch.device) -> None:
    """Reset the kernels of experts: else vLLM 0.32 does not pack new weights for its CPU kernel."""
    for module in model.modules() if device.type == "cpu" else ():
        method: Any = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def finish_loading(model: Any, device: torch.device) -> None:
    """Pack tied embeddings: else vLLM 0.32 multiplies by the packed old weights on a CPU."""
    for module in model.modules() if device.type == "cpu" else ():
        method: Any = getattr(module, "quant_method", None)
        if hasattr(method, "tie_weights"):
            method.process_weights_after_loading(module)


def open_group(store: dist.Store, rank: int, size: int, *, device: torch.device, address: str, timeout_s: float) -> Any:
    """A process group of training (rank 0) and workers, apart from the default groups of both.

    Gloo listens at ``address`` of this machine. NCCL chooses its interface (``NCCL_SOCKET_IFNAME``).
    """
    timeout = timedelta(seconds=timeout_s)
    if device.type == "cpu":
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._timeout, options._devices = timeout, [gloo.create_device(hostname=address)]
        return gloo(store, rank, size, options)
    c10d: Any = dist.distributed_c10d  # builds for CPUs have no NCCL
    nccl, variable = c10d.ProcessGroupNCCL, "TORCH_NCCL_BLOCKING_WAIT"
    options = nccl.Options()
    options._timeout = timeout
    previous = os.environ.get(variable)
    os.environ[variable] = "1"  # a wait that times out raises; else the watchdog ends the process
    try:
        return nccl(store, rank, size, options)
    finally:
        del os.environ[variable]
        if previous is not None:
            os.environ[variable] = previous


def close_group(group: Any) -> None:
    """Abort what NCCL does in the group; gloo ends it when the other end closes its connections."""
    if group is not None and not isinstance(group, dist.ProcessGroupGloo):
        group.abort()


def broadcast_from_training(group: Any, buffer: Tensor, timeout_s: float) -> Any:
    """Start the broadcast of rank 0; returns its work."""
    options: Any = dist.BroadcastOptions()
    options.rootRank, options.timeout = 0, timedelta(seconds=timeout_s)
    return group.broadcast([buffer], options)


def aligned_bytes(dtype: torch.dtype, shape: Sequence[int]) -> int:
    """Bytes of a tensor in a buffer."""
    return -(-dtype.itemsize * math.prod(shape) // _ALIGNMENT) * _ALIGNMENT


def tensor_views(buffer: Tensor, dtypes: Sequence[torch.dtype], shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """The tensors in ``buffer`` (uint8), one after another."""
    views, start = [], 0
    for dtype, shape in zip(dtypes, shapes, strict=True):
        size = dtype.itemsize * math.prod(shape)
        views.append(buffer[start : start + size].view(dtype).view(tuple(shape)))
        start += aligned_bytes(dtype, shape)
    return views


def tensor_hash(tensor: Tensor) -> str:
    """SHA-256 of the tensor's bytes."""
    content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(content.numpy().data).hexdigest()


def main() -> None:
    """Serve with vLLM's arguments until the standard input is closed, also if the parent is killed."""
    os.setsid()

    def watch() -> None:
        sys.stdin.buffer.read()
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")


if __name__ == "__main__":
    main()
