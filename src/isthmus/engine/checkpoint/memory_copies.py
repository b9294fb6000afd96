"""Checkpoints in the host memory of the machines of a run, which outlive its processes.

The files are those of a checkpoint on the disk, on a tmpfs. A machine has the files that its ranks wrote and those of
another machine, its peer, so that the machines have all files together after the loss of one of them.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import socket
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import chain
from pathlib import Path
from typing import TypeAlias

import torch.distributed as dist

from isthmus.engine.checkpoint.checkpoint_folder import checkpoint_dir, write_errors
from isthmus.engine.checkpoint.checkpoint_writer import CheckpointWriter
from isthmus.engine.checkpoint.file_exchange import FileTransfer, exchange_files
from isthmus.engine.checkpoint.parts_gather import GatheredParts
from isthmus.engine.parallel.process_groups import agree, gather_objects
from isthmus.errors import IsthmusError, NoSpace, UsageError
from isthmus.files.atomic_write import TEMPORARY
from isthmus.files.file_checksums import CHECKSUMS, read_checksums

_STATE = ".distcp"
"""Suffix of the files of tensors; all others are small."""
_COPY = re.compile("iter_([0-9]{7,18})")
_LOADING = f"{TEMPORARY}loading"

Sizes: TypeAlias = dict[str, int]
"""Bytes of files by name."""


@dataclass(frozen=True, slots=True)
class _LocalCopy:
    """A copy on a machine."""

    present: Sizes
    """The files that this machine has."""
    listed: Sizes
    """All files of the checkpoint."""


@dataclass(slots=True)
class _OpenCopy:
    """The copy that is being loaded."""

    folder: Path
    listed: Sizes
    owners: dict[str, list[int]]
    """The machines that have each file."""


@dataclass(kw_only=True, slots=True)
class MemoryCopies:
    """The copies of one run on this machine; methods are collectives, and :func:`open_copies` makes it."""

    root: Path
    """Folder of this run on this machine."""
    machines: Sequence[Sequence[int]]
    """Ranks by machine; the first of a machine, its leader, does what one of them must do."""
    group: dist.ProcessGroup
    """All ranks, on the host."""
    incomplete_step: int | None = field(default=None, init=False)
    """Step of the newest copy of which :meth:`newest` misses files."""
    _open: _OpenCopy | None = field(default=None, init=False)

    @property
    def machine(self) -> int:
        """Number of this machine."""
        return next(number for number, ranks in enumerate(self.machines) if dist.get_rank() in ranks)

    @property
    def _leads(self) -> bool:
        return dist.get_rank() == self.machines[self.machine][0]

    def complete(self, writer: CheckpointWriter, group: dist.ProcessGroup | None = None) -> None:
        """Write the files of ``writer``, whose root is that of the copies, and exchange them with the peer.

        The copies of earlier steps are removed when all machines have this one.

        Raises:
            NoSpace, IOFailure: on every rank, if any rank fails to write; the earlier copies are intact.
        """
        group = group or self.group
        staging, step = writer.staging, writer.progress.step
        try:
            self._on_leaders(lambda: _make_empty(staging), group)
            self._exchange(writer, writer.write_state(group), group)
            self._on_leaders(lambda: self._publish(writer), group)
            self._on_leaders(lambda: self._remove_others(writer.final), group)
        except NoSpace as error:
            free = shutil.disk_usage(self.root).free / 2**30
            raise NoSpace(
                f"no room for the copy of step {step} in {self.root} ({free:.2f} GiB free on this machine). Enlarge "
                "its file system (mount -o remount,size=...), choose another checkpoint.memory_dir, or leave "
                "checkpoint.memory_every out; the copy before it is intact."
            ) from error
        finally:
            if self._leads:
                shutil.rmtree(staging, ignore_errors=True)

    def _exchange(self, writer: CheckpointWriter, gathered: GatheredParts, group: dist.ProcessGroup) -> None:
        """Write the small files, and copy all files to the machines that keep them."""
        staging = writer.staging
        with write_errors(staging):
            local = {name: (staging / name).stat().st_size for name in writer.written.parts()}
        files = gather_objects(local, group)
        small: Sizes = {}

        def finish() -> None:
            with write_errors(staging):
                writer.write_small_files(gathered)
                small.update(_sizes(staging, small=True))

        agree(finish if dist.get_rank() == 0 else lambda: None, group)
        small = gather_objects(small, group)[0]
        leaders = [ranks[0] for ranks in self.machines]
        transfers = [
            FileTransfer(name, size, 0, leader) for leader in leaders if leader for name, size in sorted(small.items())
        ]
        for rank, rank_files in enumerate(files):
            if (peer := self._peer(rank)) is not None:
                transfers += [FileTransfer(name, size, rank, peer) for name, size in sorted(rank_files.items())]
        exchange_files(staging, transfers, group)

    def _peer(self, rank: int) -> int | None:
        """The rank of another machine that keeps the files of ``rank``; None if there is one machine."""
        count = len(self.machines)
        if count == 1:
            return None
        number, ranks = next((number, ranks) for number, ranks in enumerate(self.machines) if rank in ranks)
        others = self.machines[(number + count // 2) % count]
        return others[ranks.index(rank) % len(others)]

    def _publish(self, writer: CheckpointWriter) -> None:
        shutil.rmtree(writer.final, ignore_errors=True)  # of a step that is repeated
        writer.staging.rename(writer.final)

    def _remove_others(self, kept: Path) -> None:
        for path in self.root.iterdir():
            if path != kept:
                shutil.rmtree(path, ignore_errors=True)

    def newest(self, *, after: int, everything: bool = False) -> Path | None:
        """A folder with the newest copy after step ``after`` of which the machines have all files together, or None.

        The folder has the small files; files of tensors that this machine does not have are sparse until
        :meth:`fetch` replaces those that its ranks read. With ``everything`` they are complete.
        """
        by_rank = gather_objects(self._local_copies() if self._leads else {}, self.group)
        copies = [by_rank[ranks[0]] for ranks in self.machines]
        self.incomplete_step = None
        for key in sorted({key for machine in copies for key in machine if key[0] > after}, reverse=True):
            of_machines = [machine.get(key) for machine in copies]
            listed = next(copy for copy in of_machines if copy is not None).listed
            owners = {
                name: [
                    number
                    for number, copy in enumerate(of_machines)
                    if copy is not None and copy.present.get(name) == size
                ]
                for name, size in listed.items()
            }
            if all(owners.values()):
                return self._prepare(key[0], listed, owners, everything=everything)
            self.incomplete_step = self.incomplete_step or key[0]
        return None

    def _local_copies(self) -> dict[tuple[int, str], _LocalCopy]:
        """The copies on this machine by step and content: a step that was repeated may have other bits."""
        copies: dict[tuple[int, str], _LocalCopy] = {}
        for path in self.root.iterdir():
            match = _COPY.fullmatch(path.name)
            checksums = None
            with suppress(IsthmusError):  # as if this machine did not have it
                checksums = read_checksums(path) if match else None
            if match and checksums is not None:
                listed = {name: sums.size for name, sums in checksums.items()}
                listed[CHECKSUMS] = (path / CHECKSUMS).stat().st_size
                content = " ".join(f"{name} {checksums[name].digest}" for name in sorted(checksums))
                copies[int(match[1]), content] = _LocalCopy(_sizes(path), listed)
        return copies

    def _prepare(self, step: int, listed: Sizes, owners: dict[str, list[int]], *, everything: bool) -> Path:
        """Make a folder of links to the local files of a copy, with its small files, or ``everything``."""
        source = checkpoint_dir(self.root, step)
        folder = checkpoint_dir(self.root / _LOADING, step)
        self._open = _OpenCopy(folder, listed, owners)

        def link() -> None:
            _make_empty(folder)
            for name, size in listed.items():
                if self.machine in owners[name]:
                    os.link(source / name, folder / name)
                else:
                    with (folder / name).open("wb") as file:
                        file.truncate(size)

        self._on_leaders(link, self.group)
        names = [name for name in listed if everything or not name.endswith(_STATE)]
        self._fetch([names] * len(self.machines))
        return folder

    def fetch(self, names: Collection[str]) -> None:
        """Complete the files of these names, which this rank reads, in the folder of :meth:`newest`.

        Without such a folder, nothing happens.
        """
        if self._open is None:
            return
        by_rank = gather_objects(set(names), self.group)
        self._fetch([sorted(set(chain.from_iterable(by_rank[rank] for rank in ranks))) for ranks in self.machines])

    def _fetch(self, names_by_machine: Sequence[Sequence[str]]) -> None:
        assert self._open is not None
        transfers, owners = list[FileTransfer](), self._open.owners
        for number, names in enumerate(names_by_machine):
            ranks = self.machines[number]
            missing = [name for name in names if number not in owners[name]]
            for turn, name in enumerate(missing):
                sources = self.machines[owners[name][turn % len(owners[name])]]
                source, target = sources[turn % len(sources)], ranks[turn % len(ranks)]
                transfers.append(FileTransfer(name, self._open.listed[name], source, target))
        exchange_files(self._open.folder, transfers, self.group)
        for number, names in enumerate(names_by_machine):
            for name in names:
                owners[name] = sorted({*owners[name], number})

    def loaded(self) -> None:
        """Remove the folder of :meth:`newest`; the copy itself stays."""
        self._open = None
        self._on_leaders(lambda: shutil.rmtree(self.root / _LOADING, ignore_errors=True), self.group)

    def clear(self) -> None:
        """Remove the copies so far."""
        self._on_leaders(lambda: _make_empty(self.root), self.group)

    def remove(self) -> None:
        """Remove all copies of this run."""
        self._on_leaders(lambda: shutil.rmtree(self.root, ignore_errors=True), self.group)

    def _on_leaders(self, stage: Callable[[], object], group: dist.ProcessGroup) -> None:
        def run() -> None:
            with write_errors(self.root):
                stage()

        agree(run if self._leads else lambda: None, group)


def open_copies(memory_dir: Path, run_name: str, run_id: str, *, timeout_s: float) -> MemoryCopies:
    """The copies of a run in ``memory_dir`` of each machine; a collective.

    Ranks that see the same folder are on one machine. Copies of an earlier run of this name, whose folder was deleted,
    are removed.

    Raises:
        UsageError: the folder is of another user, or on a file system that machines share.
    """
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
    root, token = memory_dir / f"{run_name}-{run_id}", gather_objects(secrets.token_hex(8), group)[0]
    presence = root / f"{TEMPORARY}ranks-{token}"

    def appear() -> None:
        with write_errors(root):
            root.mkdir(mode=0o700, exist_ok=True)
            if root.stat().st_uid != os.getuid():
                raise UsageError(f"{root} belongs to another user. Choose another checkpoint.memory_dir.")
            presence.mkdir(exist_ok=True)
            (presence / str(dist.get_rank())).touch()

    agree(appear, group)
    ranks = sorted(int(path.name) for path in presence.iterdir())
    hosts = gather_objects((ranks, socket.gethostname()), group)  # also a barrier
    machines = sorted({tuple(ranks) for ranks, _ in hosts})
    for machine in machines:
        if len(names := sorted({hosts[rank][1] for rank in machine})) > 1:
            raise UsageError(
                f"checkpoint.memory_dir={memory_dir} is one folder for the machines {', '.join(names)}, expected one "
                "for each. Choose a folder in the memory of each machine, such as /dev/shm."
            )
    copies = MemoryCopies(root=root, machines=machines, group=group)

    def remove_leftovers() -> None:
        shutil.rmtree(presence, ignore_errors=True)
        for path in memory_dir.glob(f"{run_name}-*"):
            if path != root and path.stat().st_uid == os.getuid():
                shutil.rmtree(path, ignore_errors=True)

    copies._on_leaders(remove_leftovers, group)
    return copies


def _make_empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def _sizes(folder: Path, *, small: bool = False) -> Sizes:
    return {
        path.name: path.stat().st_size
        for path in folder.iterdir()
        if path.is_file() and not (small and path.name.endswith(_STATE))
    }
