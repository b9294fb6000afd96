"""A small server whose workers take part in weight transfers, with the engine of vLLM's workers."""

from __future__ import annotations

import importlib
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from isthmus.recipes.rollout.vllm_plugin import isthmus_vllm
from unit.recipes.rollout.fake_vllm import FakeVllm

SHAPES = {"model.embed_tokens.weight": (5, 3), "model.norm.weight": (3,), "lm_head.weight": (7, 3)}


class TensorModel:
    """The model of a worker: its parameters are the tensors that it loads."""

    def __init__(self) -> None:
        self.values: dict[str, Tensor] = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
        self.ignored = ""
        self.loads = 0

    def named_parameters(self) -> list[tuple[str, Tensor]]:
        return list(self.values.items())

    def modules(self) -> list[Any]:
        return []

    def load_weights(self, tensors: Iterator[tuple[str, Tensor]]) -> set[str]:
        self.loads += 1
        loaded = {name: tensor.clone() for name, tensor in tensors if name != self.ignored}
        self.values |= loaded
        return set(loaded)


class EngineBase:
    """What the engine inherits in vLLM."""

    init_info_cls: Any
    update_info_cls: Any

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: Any) -> None:
        self.parallel_config, self.model_config = vllm_config.parallel_config, None
        self.device, self.model = device, model

    def parse_update_info(self, info: dict[str, Any]) -> Any:
        return self.update_info_cls(**info)


@contextmanager
def engine_module() -> Iterator[Any]:
    """The module of the engine, with what it uses of vLLM."""
    with pytest.MonkeyPatch.context() as patch:
        base, reload = ModuleType("base"), ModuleType("reload")
        vars(base)["WeightTransferEngine"] = EngineBase
        vars(reload).update(initialize_layerwise_reload=lambda model: None)
        vars(reload).update(finalize_layerwise_reload=lambda model, config: None)
        patch.setitem(sys.modules, "vllm.distributed.weight_transfer.base", base)
        patch.setitem(sys.modules, "vllm.model_executor.model_loader.reload", reload)
        patch.setitem(sys.modules, "isthmus_vllm", isthmus_vllm)
        yield importlib.import_module("isthmus.recipes.rollout.vllm_plugin.isthmus_transfer")


class GroupVllm(FakeVllm):
    """A server with two workers, which take part in weight transfers as those of vLLM do."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.settings["weight_transfer"] = isthmus_vllm.BACKEND
        self.models = [TensorModel(), TensorModel()]
        self.paths: list[str] = []
        self.fails_at = ""
        """Path of requests that end with an error."""
        self.hangs_s = 0.0
        """Seconds without an answer to a bucket, after the workers have died."""
        self.alters: str | None = None
        """Name of a tensor of which the second worker reports another hash."""
        self._is_updating = False
        self._engines = []
        for rank, model in enumerate(self.models):
            parallel = SimpleNamespace(data_parallel_index=0, world_size=2, rank=rank)
            config = SimpleNamespace(parallel_config=parallel)
            self._engines.append(module.GroupTransferEngine(None, config, torch.device("cpu"), model))

    def reply(self, path: str, body: Any) -> tuple[int, Any]:
        if path == "/get_world_size":
            return 200, {"world_size": 2}
        if path == "/collective_rpc" and body["method"] == "isthmus_end_update":
            if self._is_updating:
                self._transfer("/finish_weight_update", {})
            return 200, {"results": [None, None]}
        if path == "/collective_rpc" and body["method"] == "isthmus_received":
            results = [engine.received() for engine in self._engines]
            if self.alters:
                results[1]["hashes"] = results[1]["hashes"] | {self.alters: "0" * 64}
            return 200, {"results": results}
        if not path.endswith(("_engine", "_update", "_weights")):
            return super().reply(path, body)
        self.paths.append(path.removeprefix("/"))
        if self.hangs_s and path == "/update_weights":
            self._run("shutdown")
            time.sleep(self.hangs_s)
            return 200, {}
        if path == self.fails_at:
            self._is_updating = self._is_updating and path != "/update_weights"
            return 500, {"error": {"message": "out of memory"}}
        try:
            return self._transfer(path, body)
        except Exception as error:
            self._is_updating = False
            return 500, {"error": {"message": str(error)}}

    def _transfer(self, path: str, body: Any) -> tuple[int, Any]:
        if path == "/init_weight_transfer_engine":
            info = self._engines[0].init_info_cls(**body["init_info"])
            self._run("init_transfer_engine", info)
        elif path == "/start_weight_update":
            assert not self._is_updating
            self._run("start_weight_update")
            self._is_updating = True
        elif path == "/update_weights":
            assert self._is_updating
            self._run("update_weights", body["update_info"])
        elif path == "/finish_weight_update":
            assert self._is_updating
            self._run("finish_weight_update")
            self._is_updating = False
        else:
            self._run("shutdown")
        return 200, {}

    def _run(self, method: str, *arguments: Any) -> None:
        """Call a method of both workers at the same time."""
        errors: list[Exception] = []

        def call(engine: Any) -> None:
            try:
                getattr(engine, method)(*arguments)
            except Exception as error:
                errors.append(error)

        threads = [threading.Thread(target=call, args=(engine,)) for engine in self._engines]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
