"""A vLLM server for rollouts; runs in vLLM's environment, with nothing but vLLM and its requirements.

As a script it is a server that ends with the process that started it. As a module it is the worker extension that
servers need (``--worker-extension-cls isthmus_vllm.RolloutWorker``, with the folder of this file in ``PYTHONPATH``).
"""

from __future__ import annotations

import hashlib
import os
import runpy
import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


class RolloutWorker:
    """Methods of vLLM's workers that a rollout calls; results are JSON."""

    vllm_config: Any
    model_runner: Any
    device: torch.device
    reload_weights: Any

    def isthmus_settings(self) -> dict[str, Any]:
        """The model's config and the settings that a rollout depends on."""
        model = self.vllm_config.model_config
        config = model.hf_config
        owner = getattr(self.vllm_config, "aux_output_config", model)  # vLLM before 0.32: the config of the model
        return {
            "model_type": config.model_type,
            "config": {name: getattr(config, name, None) for name in COMPARED_KEYS},
            "dtype": str(model.dtype).removeprefix("torch."),
            "logprobs_mode": model.logprobs_mode,
            "returns_routed_experts": bool(getattr(owner, "enable_return_routed_experts", False)),
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

        # Names as load_weights returns them, before layers with adapters are put around.
        parameters = {name.replace(".base_layer.", ".") for name, _ in model.named_parameters() if "lora_" not in name}
        if self.device.type == "cpu":
            for module in model.modules():  # else vLLM 0.32 does not pack the new weights of experts for its CPU kernel
                method: Any = getattr(module, "quant_method", None)
                if getattr(method, "moe_kernel", None) is not None:
                    method.moe_kernel = None
        model.load_weights = recorded  # vLLM only logs parameters that were not loaded
        try:
            self.reload_weights(weights_iterator=hashed())
        finally:
            del model.load_weights
        if self.device.type == "cpu":
            for module in model.modules():  # else vLLM 0.32 multiplies by the packed old weights of tied embeddings
                method = getattr(module, "quant_method", None)
                if hasattr(method, "tie_weights"):
                    method.process_weights_after_loading(module)
        return {"hashes": hashes, "missing": sorted(parameters - loaded)}

    def isthmus_hashes(self, folder: str) -> dict[str, Any]:
        """The hash of each tensor in the safetensors files of ``folder``, as this machine reads them."""
        from vllm.model_executor.model_loader.weight_utils import safetensors_weights_iterator

        files = [str(path) for path in sorted(Path(folder).glob("*.safetensors"))]
        hashes = {name: tensor_hash(tensor) for name, tensor in safetensors_weights_iterator(files, False)}
        return {"hashes": hashes, "missing": []}


COMPARED_KEYS = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
"""Keys of ``config.json`` that must be those of the policy."""


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
