"""The shared server with the guard preloaded: each line of stdin is a task, which runs in a fork; see :mod:`runner`."""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(TESTS))

from shared_server import serve  # noqa: E402

_IMPORTED_FOR_ALL = (
    "isthmus.engine.parallel.process_groups",  # first: it quiets megatron-core
    "isthmus.engine.decoder.decoder",
    "isthmus.engine.decoder.model_config",
    "isthmus.engine.lora.attach",
    "isthmus.engine.moe.gemm_choice",
    "isthmus.engine.optim.learning_rate",
    "isthmus.engine.optim.optimizer",
    "isthmus.engine.parallel.fsdp",
    "isthmus.engine.step",
    "isthmus.recipes.model.rank_model",
    "isthmus.hf.tiny_model",  # for the known keys of a config
    "isthmus.platforms.detect",
    "megatron.core.transformer.transformer_block",
    "megatron.core.transformer.multi_token_prediction",
    "torch._dynamo",
    "torch._meta_registrations",
    "fake_cuda.world",
)


def main() -> None:
    gc.disable()  # imports leave no garbage: a sixth of their time
    for name in _IMPORTED_FOR_ALL:
        importlib.import_module(name)
    importlib.import_module("isthmus.families.registry").all_families()  # imports them
    gc.freeze()
    gc.enable()
    serve()
    os.environ.pop("LD_PRELOAD")
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print goes to the log
    for line in sys.stdin:
        read, write = os.pipe()
        if not (child := os.fork()):
            _run(json.loads(line), write)
        os.close(write)
        with os.fdopen(read) as pipe:
            reply = pipe.read()
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(reply or json.dumps({"error": f"the process ended with code {code}"}), file=replies, flush=True)


def _run(request: dict[str, Any], write: int) -> None:
    """Run a task and write its result. Does not return."""
    try:
        from fake_cuda import gpu
        from fake_cuda.fake_tensors import FakeGpuMode

        gpu.install(gpu.GPUS[request["gpu"]])
        module, _, name = request["task"].rpartition(".")
        task = getattr(importlib.import_module(module), name)
        with FakeGpuMode():
            reply = {"result": task(**request["settings"])}
        text = json.dumps(reply)
    except BaseException:
        text = json.dumps({"error": traceback.format_exc()})
    with os.fdopen(write, "w") as pipe:
        pipe.write(text)
    os._exit(0)


if __name__ == "__main__":
    main()
