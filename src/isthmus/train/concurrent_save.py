"""Saving the state before a step beside the step, for a stop request that cannot wait until the step ends.

Pipeline stages work on different micro batches at the same time and wait for each other, so no rank may abandon a step.
But weights and optimizer state do not change before the end of the backward pass: a thread of each rank can save them,
and end the process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NoReturn

import torch
import torch.distributed as dist

from isthmus.errors import IsthmusError, error_of, explain

_PERIOD_S = 0.5
"""Between two votes of the ranks."""


class ConcurrentSave:
    """A context manager around a step. Its thread votes with those of the other ranks whether to save and leave.

    A rank votes against it from :meth:`before_update` on, so either all ranks save the state before the step, or none
    does. The threads use a group of their own.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        is_late: Callable[[], bool],
        save: Callable[[], None],
        leave: Callable[[IsthmusError | None], NoReturn],
    ) -> None:
        """``save`` is a collective of the threads; ``leave`` ends the process, with the error of ``save``."""
        self._group, self._is_late, self._save, self._leave = group, is_late, save, leave
        self._unchanged = threading.Lock()
        """Held while the state must not change: by the thread, or forever by the training thread that changes it."""
        self._updating = threading.Event()
        self._thread = threading.Thread(target=self._run, name="save beside step", daemon=True)

    def __enter__(self) -> ConcurrentSave:
        self._thread.start()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.before_update()
            self._thread.join()

    def before_update(self) -> None:
        """To be called after the backward pass; does not return if the ranks have decided to save."""
        if not self._updating.is_set():
            self._unchanged.acquire()
            self._updating.set()

    def _run(self) -> None:
        while True:
            self._updating.wait(_PERIOD_S)
            is_held = self._unchanged.acquire(blocking=False)
            votes = torch.tensor([is_held and self._is_late(), not is_held], dtype=torch.int64)
            try:
                dist.all_reduce(votes, group=self._group)
            except RuntimeError:  # a rank was lost, which the training thread and the heartbeat report
                if is_held:
                    self._unchanged.release()
                return
            late, updating = votes.tolist()
            if late and not updating:
                self._save_and_leave()
            if is_held:
                self._unchanged.release()
            if updating == dist.get_world_size():
                return

    def _save_and_leave(self) -> None:
        failure: IsthmusError | None = None
        try:
            self._save()
        except BaseException as error:
            failure = error if isinstance(error, IsthmusError) else error_of(*explain(error))
        self._leave(failure)
