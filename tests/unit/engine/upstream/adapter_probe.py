"""Checks the CPU adapter and prints the results as JSON. Run as a process, because the adapter stays installed."""

from __future__ import annotations

import json
import types
from typing import Any

import torch

from isthmus.engine.upstream import cpu_adapter
from isthmus.errors import UsageError


def as_megatron(code: str, **variables: Any) -> Any:
    """The value of an expression in a module of Megatron-Core."""
    module = types.ModuleType("megatron.core.probe")
    module.__dict__.update(variables, torch=torch)
    return eval(code, module.__dict__)


def main() -> None:
    values: dict[str, Any] = {}
    cuda: Any = torch.cuda
    available, initialized = cuda.is_available, cuda.is_initialized
    cuda.is_available = cuda.is_initialized = lambda: True
    try:
        cpu_adapter.install()
    except UsageError as error:
        values["refused"] = str(error)
    cuda.is_available, cuda.is_initialized = available, initialized
    values["untouched"] = torch.zeros.__class__.__name__

    cpu_adapter.install()
    once = torch.zeros, torch.Tensor.type, cuda.current_device
    cpu_adapter.install()
    values["once"] = once == (torch.zeros, torch.Tensor.type, cuda.current_device)

    values["made"] = {
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
    values["meta"] = str(torch.zeros(2, device="meta").device)
    with torch.device("meta"):
        values["in meta"] = [str(torch.zeros(2).device), str(torch.arange(2).device), str(torch.tensor(1.0).device)]
    values["moved"] = str(torch.ones(2).cuda().device)

    values["type for megatron"] = as_megatron("x.type()", x=torch.ones(2))
    values["type for us"] = torch.ones(2).type()
    values["cast for megatron"] = str(as_megatron("x.type(torch.int64)", x=torch.ones(2)).dtype)

    event, stream = cuda.Event(enable_timing=True), cuda.current_stream()
    event.record()
    event.synchronize()
    stream.wait_stream(cuda.Stream())
    with cuda.stream(stream):
        cuda.synchronize()
    values["query"] = event.query()

    state = cuda.get_rng_state()
    drawn = torch.rand(3)
    cuda.set_rng_state(state)
    values["random"] = bool(torch.equal(drawn, torch.rand(3)))
    values["available"] = cuda.is_available()
    print(json.dumps(values))


if __name__ == "__main__":
    main()
