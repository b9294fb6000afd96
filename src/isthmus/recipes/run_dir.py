"""The run folder: its files, and the checkpoint to resume from."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isthmus.data.readers.data_names import PARTIAL
from isthmus.errors import (
    DataError,
    Hang,
    IOFailure,
    IsthmusError,
    MissingInput,
    OutputError,
    OutputExists,
    Preempted,
    disk_errors,
)
from isthmus.files.atomic_write import TEMPORARY, write_atomic
from isthmus.files.checked_files import ChecksumVerifier
from isthmus.files.folder_lock import LOCK, locked_folder
from isthmus.files.remote_files import is_url, refuse_url
from isthmus.hf.model_folder import ADAPTER_FILE, read_json

if TYPE_CHECKING:
    from isthmus.engine.checkpoint.checkpoint_store import CheckpointStore

RUN_RECORD = "run_record.json"
"""What shapes the result of the run, in the run folder and in each checkpoint."""
ENVIRONMENT = "environment.json"
"""Machine and versions of the newest start of the run."""

_STORED = f"{TEMPORARY}store-"
"""Prefix of folders with a copy of the small files of a checkpoint in a store."""


class RunDir:
    """The folder of a run. It also contains ``metrics.jsonl``, ``samples.jsonl``, ``tensorboard/`` and ``profile/``."""

    def __init__(self, root: Path, store: str | None = None) -> None:
        """``store``: the setting ``checkpoint.store``."""
        self.root = root
        self._store_url = store
        self.config: Path = root / "config.yaml"
        """All settings; a folder with this file is a run folder."""
        self.checkpoints: Path = root / "checkpoints"
        self.data: Path = root / "data"
        """The tokenized data."""
        self.reference: Path = root / "reference.npz"
        """dpo: log-probabilities of the answers under the reference model."""
        self.copies_id: Path = root / "memory_copies.id"
        """Identifies the copies of the state in the memory of machines."""

    @property
    def copies_name(self) -> str:
        """Prefix of the folders with copies of the state of runs in this folder."""
        return f"isthmus-{hashlib.sha256(str(self.root.resolve()).encode()).hexdigest()[:12]}"

    @cached_property
    def store(self) -> CheckpointStore | None:
        """The object store with the checkpoints of this run; None if they are in ``checkpoints``."""
        from isthmus.engine.checkpoint.checkpoint_store import CheckpointStore

        return None if self._store_url is None else CheckpointStore(self._store_url)

    def checkpoint(self, step: int) -> Path:
        """The checkpoint of a step; from a store, a copy without its data files, in a temporary folder."""
        from isthmus.engine.checkpoint.checkpoint_folder import checkpoint_dir

        return checkpoint_dir(self.checkpoints, step) if self.store is None else self._fetched(self.store, step)

    def is_own(self, checkpoint: Path) -> bool:
        """Whether it is a checkpoint of this run, and not of another one that this run began from."""
        from isthmus.engine.checkpoint.checkpoint_store import address_of

        if self.store is not None:
            return address_of(checkpoint).startswith(f"{self.store.url}/")
        return checkpoint.parent.resolve() == self.checkpoints.resolve()

    def _fetched(self, store: CheckpointStore, step: int) -> Path:
        folder = hashlib.sha256(store.url.encode()).hexdigest()[:16]
        return store.fetch(step, self.root.absolute() / f"{_STORED}{folder}")

    def _newest(self) -> Path | None:
        from isthmus.engine.checkpoint.checkpoint_folder import latest

        if self.store is None:
            return latest(self.checkpoints)
        step = self.store.latest()
        return None if step is None else self._fetched(self.store, step)

    def gemm_tuning(self, rank: int) -> Path:
        """GEMM kernels that a rank has measured; PyTorch adds the number of its GPU to the name."""
        return self.root.absolute() / f"gemm_tuning_rank{rank}_gpu.csv"

    def export(self, step: int | None = None) -> Path:
        """The exported Hugging Face model: ``hf``, or ``hf-step-0000100`` during the run."""
        return self.root / ("hf" if step is None else f"hf-step-{step:07d}")

    def adapter(self, step: int | None = None) -> Path:
        """The exported adapter of PEFT: ``adapter``, or ``adapter-step-0000100`` during the run."""
        return self.root / ("adapter" if step is None else f"adapter-step-{step:07d}")

    def checkpoint_to_resume(self, resume: str) -> Path | None:
        """The checkpoint to resume from: ``auto`` the newest, ``never`` None, else the path or URL ``resume``.

        A run that began from a checkpoint of another run, and has one of its own, continues from its own. Of a
        checkpoint in a store this is a copy without its data files, which are read from there.
        """
        # A command that was killed before its first file leaves the lock or a temporary file.
        occupied = self.root.exists() and (
            not self.root.is_dir() or any(not path.name.startswith((LOCK, TEMPORARY)) for path in self.root.iterdir())
        )
        if occupied and not self.config.is_file():
            raise OutputExists(
                f"{self.root} exists already and is not a run folder. Remove it or choose another folder with --out."
            )
        newest: Path | None = None
        # A damaged tracker file, for example, does not matter if another checkpoint is named.
        with suppress(*(() if resume in ("auto", "never") else (DataError,))):
            newest = self._newest() if occupied or self.store is not None else None
        exported = self.export().exists() or self.adapter().exists()
        if occupied and newest is None and exported and resume in ("auto", "never"):
            raise OutputExists(
                f"{self.root} contains the finished export of a run without checkpoints, which a new run replaces. "
                "Remove it or choose another folder with --out."
            )
        if newest is not None and resume == "never":
            place, other = (self.root, "folder with --out") if self.store is None else (self.store.url, "store")
            raise OutputExists(
                f"{place} contains a run with checkpoints and checkpoint.resume is 'never'. Choose another {other}, or "
                "checkpoint.resume=auto to resume it."
            )
        if resume in ("auto", "never"):
            return newest
        chosen, ours = Path(resume), self.root.resolve()
        inside = _is_below(resume, self.store.url) if self.store is not None else chosen.resolve().is_relative_to(ours)
        if newest is not None and not inside and (read_record(newest) or {}).get("began_from") == resume:
            return newest
        if is_url(resume):
            return self._fetched_from(resume)
        from isthmus.engine.checkpoint.checkpoint_folder import latest

        if not chosen.is_dir():
            raise MissingInput(f"checkpoint.resume={resume}: no such folder. Name an iter_NNNNNNN folder, or 'auto'.")
        if (chosen / ".metadata").is_file():
            return chosen
        below = latest(chosen)
        if below is None:
            raise MissingInput(f"checkpoint.resume={resume} has no checkpoint. Name an iter_NNNNNNN folder.")
        return below

    def _fetched_from(self, url: str) -> Path:
        """A checkpoint, or the newest one below a URL."""
        from isthmus.engine.checkpoint.checkpoint_store import find_checkpoint

        return self._fetched(*find_checkpoint(url))

    def interrupted(self) -> str:
        """The message of a run that was killed: what it lost, and the checkpoint from which it resumes."""
        from isthmus.config.load import load_recorded
        from isthmus.engine.checkpoint.checkpoint_folder import latest

        newest: Path | str | None = None
        with suppress(IsthmusError, OSError):
            if self._store_url is None and self.config.is_file():  # the command line may not have the settings
                self._store_url = load_recorded(self.config).checkpoint.store
            if self.store is None:
                newest = latest(self.checkpoints)
            elif step := self.store.latest():
                newest = self.store.address(step)
        if newest is None:
            return "killed before its first checkpoint; its progress is lost. The same command starts again."
        return f"killed; the progress since its last checkpoint is lost. The same command resumes from {newest}."

    def locked(self) -> AbstractContextManager[None]:
        """Create the folder and lock it for the block; raises as :class:`isthmus.files.folder_lock.FolderLock`."""
        return locked_folder(self.root)

    @contextmanager
    def checking(self, config: str) -> Iterator[None]:
        """Write the config for the checks before the first step; a new run folder is removed if they fail.

        An existing ``config.yaml`` describes the earlier steps and is kept until :meth:`begin`.
        """
        if self.config.is_file():
            yield
            return
        try:
            write_atomic(self.config, config)
            yield
        except Preempted:
            raise  # the same command resumes with the prepared data
        except BaseException as error:
            if isinstance(error, (Hang, OutputError, IOFailure)) and any(self.data.glob(f"*{PARTIAL}")):
                raise  # the same command resumes with the tokenized parts
            shutil.rmtree(self.data, ignore_errors=True)
            for file in (self.reference, self.config):
                with suppress(OSError):
                    file.unlink()
            raise

    def begin(
        self, config: str, record: Mapping[str, Any], *, fresh: bool, environment: Mapping[str, Any] | None = None
    ) -> None:
        """Write config, run record and ``environment``, remove temporary files; ``fresh`` also removes metrics of an
        earlier start.
        """
        with disk_errors(self.root):
            write_atomic(self.config, config)
            write_record(self.root, record)
            write_atomic(self.root / ENVIRONMENT, json.dumps(environment or {}, indent=1) + "\n")
            for leftover in [*self.root.glob(f"{TEMPORARY}*"), *self.checkpoints.glob(f"{TEMPORARY}*")]:
                if leftover.name.startswith(_STORED):  # this run may have been resumed from it
                    continue
                if leftover.is_dir():
                    shutil.rmtree(leftover, ignore_errors=True)
                else:
                    leftover.unlink()
            if fresh:
                for name in ("metrics.jsonl", "samples.jsonl"):
                    (self.root / name).unlink(missing_ok=True)
                for name in ("tensorboard", "profile"):
                    shutil.rmtree(self.root / name, ignore_errors=True)


def _is_below(text: str, url: str) -> bool:
    return f"{text}/".startswith(f"{url}/")


def exported_model(path: Path) -> Path:
    """The exported model of a run folder; other paths as they are.

    A converted checkpoint has a folder ``hf`` too, with the config only.
    """
    from isthmus.convert.open_model import checkpoint_folder

    refuse_url(path)
    exported = RunDir(path).export()
    is_run = (exported / "config.json").is_file() and not (path / "config.json").is_file()
    return exported if is_run and checkpoint_folder(path) is None else path


def exported_adapter(path: Path) -> Path:
    """The exported adapter of a run folder; other paths as they are."""
    refuse_url(path)
    exported = RunDir(path).adapter()
    return exported if (exported / ADAPTER_FILE).is_file() and not (path / ADAPTER_FILE).is_file() else path


def write_record(folder: Path, record: Mapping[str, Any]) -> None:
    """Write a run record, see :mod:`isthmus.recipes.plan.run_record`."""
    write_atomic(folder / RUN_RECORD, json.dumps(record, indent=1, sort_keys=True) + "\n")


def read_record(checkpoint: Path) -> dict[str, Any] | None:
    """None for a checkpoint of an older version; DataError if the file is damaged."""
    path = checkpoint / RUN_RECORD
    ChecksumVerifier().check(path)
    return read_json(path) if path.is_file() else None
