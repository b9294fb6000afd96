"""Compiled regions: Triton is not there, so they run eagerly; a trace shows each as one kernel."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from fake_cuda.trace import silence, tell


@functools.cache
def install() -> None:
    """Let runs find a compiler, as on a machine with a GPU."""
    from isthmus.engine import compiled

    module: Any = compiled
    call = module._Region.__call__

    def call_region(region: Any, *args: Any) -> Any:
        if not (isinstance(args[0], FakeTensor) and module.compiles(args[0])):
            return call(region, *args)
        for tensor in filter(lambda argument: isinstance(argument, Tensor), args):
            region.check_gradients([tensor])
        with silence():
            results = region.function(*args)
        tell("kernel", f"region {region.name}")
        tell("made", results)
        return results

    module._Region.__call__ = call_region
    module.find_compiler = lambda device: ("Triton", "")
