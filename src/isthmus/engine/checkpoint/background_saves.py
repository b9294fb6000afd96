"""The checkpoints of a run, written one after the other, beside training if asked."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TypeAlias

import torch
import torch.distributed as dist

from isthmus.config.schema.parallel import ParallelConfig
from isthmus.engine.checkpoint.checkpoint_store import CheckpointStore
from isthmus.engine.checkpoint.checkpoint_writer import CheckpointWriter, SaveOptions, take_state
from isthmus.engine.checkpoint.host_buffer import HostBuffer
from isthmus.engine.checkpoint.parts_gather import PartsGather
from isthmus.engine.checkpoint.run_state import Progress
from isthmus.engine.parallel.process_groups import agree
from isthmus.engine.step import Stepper
from isthmus.errors import IsthmusError, error_of, explain

Completion: TypeAlias = Callable[[CheckpointWriter, dist.ProcessGroup | None], None]
"""Writes a checkpoint and publishes it; a collective."""


def _to_disk(writer: CheckpointWriter, group: dist.ProcessGroup | None) -> None:
    writer.complete(group)


@dataclass(slots=True)
class _Write:
    """A checkpoint that a thread writes."""

    writer: CheckpointWriter
    complete: Completion
    started_s: float
    seconds: float = 0.0
    ended: threading.Event = field(default_factory=threading.Event)
    error: IsthmusError | None = None

    def run(self, group: dist.ProcessGroup) -> None:
        try:
            self.complete(self.writer, group)
        except BaseException as error:  # reported by the training thread
            self.error = error if isinstance(error, IsthmusError) else error_of(*explain(error))
        finally:
            self.seconds = time.monotonic() - self.started_s
            self.ended.set()

    def result(self) -> None:
        if self.ended.is_set() and self.error is not None:
            raise self.error


def _event(device: torch.device) -> torch.cuda.Event | None:
    """The kernels that training has launched so far: an update, or a gather of weights; None on a CPU."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


@contextmanager
def copies_beside(device: torch.device, ready: torch.cuda.Event | None) -> Iterator[None]:
    """Copies of a thread from a GPU wait for the kernels before ``ready``, but not for those of training after it."""
    if ready is None:
        yield
        return
    torch.cuda.set_device(device)
    stream = torch.cuda.Stream(device)
    stream.wait_event(ready)
    with torch.cuda.stream(stream):
        yield


class Saves:
    """Saves of one rank. With ``asynchronous`` a save only copies the state to host memory before it returns.

    A thread then writes the copy. Its collectives have a group of their own, on the host. A save waits for the one
    before it.
    """

    def __init__(
        self,
        root: Path,
        parallel: ParallelConfig,
        *,
        asynchronous: bool,
        saved: Callable[[int, Path | str], None],
        log: Callable[[str], None],
        store: CheckpointStore | None = None,
        complete: Completion = _to_disk,
    ) -> None:
        """``saved`` gets the step and the path or URL of a complete checkpoint; ``store`` is in place of ``root``."""
        self._store = store
        self._root, self._parallel, self._saved, self._log = root, parallel, saved, log
        self._asynchronous, self._complete = asynchronous, complete
        self._host = HostBuffer()
        self._gathered = PartsGather()
        self._group: dist.ProcessGroup | None = None
        self._group_beside: dist.ProcessGroup | None = None
        self._write: _Write | None = None
        self.last_step: int | None = None
        """Step of the newest state that was saved, or is being written."""
        self.duration_s: float = 0.0
        """Seconds of the newest complete save."""

    def save(self, stepper: Stepper, progress: Progress, options: SaveOptions, *, wait: bool = False) -> None:
        """Save the present state, once; a collective. ``wait`` until it is published.

        Raises:
            NoSpace, IOFailure: on every rank, if any rank failed to write this checkpoint, or the one before it.
        """
        if self.last_step == progress.step:
            return self.finish() if wait else None
        if self._write is not None and not self._write.ended.is_set():
            before = self._write.writer.progress.step
            self._log(f"the checkpoint of step {progress.step} waits for that of step {before}, which is being written")
        self.finish()
        started_s = time.monotonic()
        background = self._asynchronous and not wait
        host = self._host if background else None
        writer = take_state(self._root, stepper, progress, self._parallel, options, host, self._gathered, self._store)
        self.last_step = progress.step
        if not background:
            self._complete(writer, None)
            self.duration_s = time.monotonic() - started_s
            self._saved(progress.step, writer.address)
            return None
        if self._group is None:
            self._group = self._new_group()
        self._write = _Write(writer, self._complete, started_s)
        # A daemon: a write that hangs does not keep the process alive.
        threading.Thread(target=self._write.run, args=(self._group,), name="checkpoint", daemon=True).start()
        return None

    def prepare(
        self, stepper: Stepper, progress: Progress, options: SaveOptions
    ) -> tuple[dist.ProcessGroup, Callable[[], None]]:
        """Refer to the present state, to save it beside the next step; a collective.

        Returns a group of all ranks, and a function that saves the state before the weights change: a collective of the
        group for another thread than that of training, which raises NoSpace or IOFailure on every rank if any rank
        failed to write.
        """
        if self._group_beside is None:
            self._group_beside = self._new_group()
        group, device = self._group_beside, stepper.device
        writer: CheckpointWriter | None = None
        if self.last_step != progress.step:
            writer = take_state(self._root, stepper, progress, self._parallel, options, store=self._store)
        ready = _event(device)

        def save() -> None:
            if self._write is not None:
                self._write.ended.wait()
                agree(self._write.result if writer is None else lambda: None, group)
            if writer is not None:
                with copies_beside(device, ready):
                    self._complete(writer, group)

        return group, save

    def _new_group(self) -> dist.ProcessGroup:
        """All ranks, on the host, for collectives of another thread than that of training; a collective."""
        timeout = timedelta(seconds=self._parallel.timeout_s)
        return dist.new_group(backend="gloo", timeout=timeout)

    def ended(self) -> float:
        """1 if the write on this rank has ended, the number of ranks if it failed, else 0.

        When the sum over all ranks reaches their number, all call :meth:`conclude`.
        """
        if self._write is None or not self._write.ended.is_set():
            return 0.0
        return 1.0 if self._write.error is None else float(dist.get_world_size())

    def finish(self) -> None:
        """Wait for the checkpoint that is being written, if any; a collective.

        Raises:
            NoSpace, IOFailure: on every rank, if any rank failed to write.
        """
        if self._write is not None:
            self._write.ended.wait()
            self.conclude()

    def conclude(self) -> None:
        """Report the checkpoint whose write has ended or failed on any rank; a collective. Raises as ``finish``."""
        write, self._write = self._write, None
        assert write is not None
        agree(write.result)
        self.duration_s = write.seconds
        self._saved(write.writer.progress.step, write.writer.address)

    def close(self, timeout_s: float) -> None:
        """After a failure of training: give the write of this rank time to end."""
        if self._write is not None:
            self._write.ended.wait(timeout_s)
