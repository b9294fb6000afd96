"""The copies of the state of a run that its machines keep in memory (``checkpoint.memory_every``)."""

from __future__ import annotations

import secrets
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

from isthmus.engine.checkpoint.background_saves import Saves
from isthmus.engine.checkpoint.checkpoint_writer import SaveOptions
from isthmus.engine.checkpoint.memory_copies import MemoryCopies, open_copies
from isthmus.engine.checkpoint.run_state import Progress
from isthmus.engine.parallel.process_groups import gather_objects
from isthmus.engine.step import Stepper
from isthmus.errors import counted
from isthmus.files.atomic_write import write_atomic
from isthmus.recipes.plan.validation import RunContext, with_recorded_batch_size
from isthmus.recipes.registry import recipe_of
from isthmus.train.reporter import Reporter


@dataclass(frozen=True, slots=True)
class RunCopies:
    """The copies of a run, and their saves; without ``checkpoint.memory_every``, its methods do nothing."""

    copies: MemoryCopies | None
    saves: Saves | None
    run_id: str

    @classmethod
    def open(cls, context: RunContext, reporter: Reporter, *, main: bool) -> RunCopies:
        """A collective, after the run folder is locked."""
        settings, run_dir = context.config.checkpoint, context.run_dir
        if settings.memory_every is None:
            return cls(None, None, "")
        run_id = ""
        if main:
            saved = run_dir.copies_id.read_text().strip() if run_dir.copies_id.is_file() else ""
            run_id = saved or secrets.token_hex(8)
        run_id = gather_objects(run_id)[0]
        folder, timeout_s = Path(settings.memory_dir), context.config.parallel.timeout_s
        copies = open_copies(folder, run_dir.copies_name, run_id, timeout_s=timeout_s)
        saves = Saves(
            copies.root,
            context.plan.parallel,
            asynchronous=settings.asynchronous,
            saved=lambda _step, _path: None,
            log=reporter.log,
            complete=copies.complete,
        )
        machines = counted(len(copies.machines), "machine")
        kept = "each also with those of a peer" if len(copies.machines) > 1 else "they do not survive its loss"
        every = counted(settings.memory_every, "step")
        reporter.log(f"copies in memory: every {every}, on {machines}, {kept}")
        return cls(copies, saves, run_id)

    def resumed(self, context: RunContext, reporter: Reporter) -> RunContext:
        """The context with the newest copy as the checkpoint to resume from, if it is newer than that on the disk.

        A collective. A run that names its checkpoint, or begins anew, removes the copies.
        """
        if self.copies is None:
            return context
        config, disk = context.config, context.resume
        if config.checkpoint.resume != "auto":
            self.copies.clear()
            return context
        step = 0 if disk is None else int(disk.name.rpartition("_")[2])
        everything = recipe_of(config).generates_answers  # which also reads entries of its own
        folder = self.copies.newest(after=step, everything=everything)
        otherwise = "the start" if disk is None else str(disk)
        if folder is None:
            if (incomplete := self.copies.incomplete_step) is not None:
                reporter.log(
                    f"the machines do not have all files of the copy of step {incomplete} in memory: resuming from "
                    f"{otherwise}"
                )
            return context
        newer = int(folder.name.rpartition("_")[2])
        reporter.log(f"resuming from the copy of step {newer} in memory, which is newer than {otherwise}")
        return replace(context, resume=folder, config=with_recorded_batch_size(config, folder))

    def begin(self, context: RunContext) -> None:
        """On rank 0: identify the copies in the run folder."""
        if self.copies is not None:
            write_atomic(context.run_dir.copies_id, self.run_id)

    def fetch(self, names: Collection[str]) -> None:
        """Get files of a checkpoint from other machines, if it is a copy."""
        if self.copies is not None:
            self.copies.fetch(names)

    def loaded(self) -> None:
        if self.copies is not None:
            self.copies.loaded()

    def contains(self, folder: Path) -> bool:
        """Whether a checkpoint is a copy of this run."""
        return self.copies is not None and folder.is_relative_to(self.copies.root)

    def save(self, stepper: Stepper, progress: Progress, options: SaveOptions) -> None:
        """Copy the state; a collective."""
        assert self.saves is not None
        self.saves.save(stepper, progress, options)

    def ended(self) -> float:
        """As :meth:`Saves.ended`."""
        return 0.0 if self.saves is None else self.saves.ended()

    def conclude(self) -> None:
        assert self.saves is not None
        self.saves.conclude()

    def remove(self) -> None:
        """Remove the copies of a run whose state is on the disk; a collective."""
        if self.copies is not None and self.saves is not None:
            self.saves.finish()
            self.copies.remove()

    def close(self, timeout_s: float) -> None:
        """After a failure of training: give a copy that is being written time to end."""
        if self.saves is not None:
            self.saves.close(timeout_s)
