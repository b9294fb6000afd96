"""The time of a rank's own work in a step: the step without the waits for other ranks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

_COLLECTIVES = tuple(
    "allreduce allreduce_coalesced broadcast reduce barrier send recv recv_anysource gather scatter allgather "
    "allgather_coalesced _allgather_base allgather_into_tensor_coalesced reduce_scatter _reduce_scatter_base "
    "reduce_scatter_tensor_coalesced alltoall alltoall_base all_gather_single all_gather_single_coalesced "
    "all_to_all_single reduce_scatter_single reduce_scatter_single_coalesced _end_coalescing".split()
)
"""Methods of process groups, of all supported versions of torch."""
_WAITS = ("wait", "synchronize", "block_current_stream")
_STREAM_WAITS = ("wait_event",)
"""FSDP waits for its all-gathers with it, and ``wait_stream`` calls it."""
_Mark: TypeAlias = "float | torch.cuda.Event"


@dataclass(slots=True)
class WorkTime:
    """The marks of one step. On a GPU they are events in its stream, read later: the host waits for nothing."""

    device: torch.device
    spans: list[tuple[_Mark, _Mark]] = field(default_factory=list)
    """The step, then each wait in it."""

    @property
    def seconds(self) -> float:
        """The step without the waits; on a GPU only after it has reached the end of the step."""
        whole, *waits = (_seconds(*span) for span in self.spans)
        return max(0.0, whole - sum(waits))

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Measure the block. Its collectives are timed, which costs some microseconds each, in this block only."""
        thread, stream = threading.current_thread(), self._stream()
        waits: list[tuple[_Mark, _Mark]] = []

        def timed(wait: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                now = threading.current_thread()
                # Autograd's threads are none of Python's; a background save has its own collectives.
                if (type(now) is threading.Thread and now is not thread) or self._stream() != stream:
                    return wait(*args, **kwargs)
                started = self._mark()
                try:
                    return wait(*args, **kwargs)
                finally:
                    waits.append((started, self._mark()))

            return call

        methods: list[tuple[Any, tuple[str, ...]]] = [(dist.ProcessGroup, _COLLECTIVES), (dist.Work, _WAITS)]
        if self.device.type == "cuda":
            methods.append((torch.cuda.Stream, _STREAM_WAITS))
        with ExitStack() as stack:
            for owner, names in methods:
                for name in names:
                    if name in vars(owner):  # whose getattr would return it without its binding to an instance
                        stack.callback(setattr, owner, name, vars(owner)[name])
                        setattr(owner, name, timed(getattr(owner, name)))
            started = self._mark()
            yield
            self.spans[:] = [(started, self._mark()), *waits]

    def _mark(self) -> _Mark:
        if self.device.type == "cpu":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _stream(self) -> Any:
        return None if self.device.type == "cpu" else torch.cuda.current_stream()


def _seconds(start: Any, end: Any) -> float:
    return end - start if isinstance(start, float) else start.elapsed_time(end) / 1e3
