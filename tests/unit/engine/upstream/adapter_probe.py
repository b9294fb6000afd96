"""Checks the CPU adapter and prints the results as JSON. Run as a process, because the adapter stays installed."""

from __future__ import annotations

import json
import types
from typing import Any

import torch

from isthmus.engine.upstream import cpu_adapter
from isthmus.errors import UsageError


def as_megatron(code: str, **given: Any) -> Any:
    """The value of an expression in a module of Megatron-Core."""
    module = types.ModuleType("megatron.core.probe")
    module.__dict__.update(given, torch=torch)
    return eval(code, module.__dict__)


def main() -> None:
    found: dict[str, Any] = {}
    cuda: Any = torch.cuda
    available, initialized = cuda.is_available, cuda.is_initialized
    cuda.is_available = cuda.is_initialized = lambda: True
    try:
        cpu_adapter.install()
    except UsageError as error:
        found["refused"] = str(error)
    cuda.is_available, cuda.is_initialized = available, initialized
    found["untouched"] = torch.zeros.__class__.__name__

    cpu_adapter.install()
    once = torch.zeros, torch.Tensor.type, cuda.current_device
    cpu_adapter.install()
    found["once"] = once == (torch.zeros, torch.Tensor.type, cuda.current_device)

    found["made"] = {
        name: str(factory(*arguments, device=device).device)
        for name, factory, arguments in [
            ("tensor", torch.tensor, ([1.0],)),
            ("zeros", torch.zeros, (2,)),
            ("empty", torch.empty, (2,)),
            ("ones", torch.ones, (2,)),
            ("full", torch.full, ((2,), 1.0)),
            ("arange", torch.arange, (2,)),
            ("rand", torch.rand, (2,)),
            ("randn", torch.randn, (2,)),
        ]
        for device in ("cuda", torch.device("cuda", 0), cuda.current_device())
    }
    found["meta"] = str(torch.zeros(2, device="meta").device)
    with torch.device("meta"):
        found["in meta"] = [str(torch.zeros(2).device), str(torch.arange(2).device), str(torch.tensor(1.0).device)]
    found["moved"] = str(torch.ones(2).cuda().device)

    found["type for megatron"] = as_megatron("x.type()", x=torch.ones(2))
    found["type for us"] = torch.ones(2).type()
    found["cast for megatron"] = str(as_megatron("x.type(torch.int64)", x=torch.ones(2)).dtype)

    event, stream = cuda.Event(enable_timing=True), cuda.current_stream()
    event.record()
    event.synchronize()
    stream.wait_stream(cuda.Stream())
    with cuda.stream(stream):
        cuda.synchronize()
    found["query"] = event.query()

    state = cuda.get_rng_state()
    drawn = torch.rand(3)
    cuda.set_rng_state(state)
    found["random"] = bool(torch.equal(drawn, torch.rand(3)))
    found["available"] = cuda.is_available()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
