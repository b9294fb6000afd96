"""Writing a checkpoint in two stages: take the state of a step, then write files, which may happen beside training.

A checkpoint is written to a temporary folder, and renamed when all ranks are done and all files are complete.
"""

from __future__ import annotations

import copy
import shutil
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystem, _StoragePrefix

from isthmus.config.schema.parallel import ParallelConfig
from isthmus.engine.checkpoint.checkpoint_checks import check_files
from isthmus.engine.checkpoint.checkpoint_folder import checkpoint_dir, publish, write_errors
from isthmus.engine.checkpoint.checkpoint_index import CheckpointIndex, written_index
from isthmus.engine.checkpoint.checkpoint_store import CheckpointStore
from isthmus.engine.checkpoint.common_state import common_object
from isthmus.engine.checkpoint.host_buffer import HostBuffer
from isthmus.engine.checkpoint.index_file import INDEX, write_index
from isthmus.engine.checkpoint.parts_gather import GatheredParts, PartsGather
from isthmus.engine.checkpoint.run_state import Progress, saved_state, sharding_metadata
from isthmus.engine.parallel.process_groups import agree
from isthmus.engine.step import Stepper
from isthmus.engine.tensor_names import COMMON_FILE
from isthmus.engine.upstream.megatron_features import saves_common_state_object
from isthmus.errors import IOFailure, IsthmusError
from isthmus.files.atomic_write import TEMPORARY
from isthmus.files.file_checksums import WrittenBlocks, checksums_of_stream, write_checksums


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveOptions:
    keep: int
    """Number of checkpoints to keep; older ones are removed when a new one is complete."""
    keep_best: bool = False
    """Keep that of ``Progress.best`` in addition."""
    args: Namespace | None = None
    """Model description for Megatron-LM and for conversion."""
    more_state: Mapping[str, Any] = field(default_factory=dict)
    """Further sharded entries."""
    write_beside: Callable[[Path], None] | None = None
    """Writes more files into the folder, on rank 0."""


class _HashedFiles(FileSystem):
    """Hashes files while they are written, on the disk or in a store."""

    def __init__(self, written: WrittenBlocks, store: CheckpointStore | None, step: int) -> None:
        self.written, self.store, self.step = written, store, step

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        name = Path(path).name
        here = super().create_stream(path, mode) if self.store is None else self.store.create(self.step, name)
        with here as stream:
            yield self.written.wrap(cast(BinaryIO, stream), Path(path).name) if mode == "wb" else stream


@dataclass(frozen=True, slots=True)
class CheckpointWriter:
    """The state of one step, on its way into files."""

    staging: Path
    final: Path
    """In a store, the folder of this name has the checkpoint."""
    progress: Progress
    best: int | None
    """The step to keep in addition."""
    options: SaveOptions
    state: dict[str, Any]
    """State of this rank by checkpoint key: live tensors or copies of them."""
    common: dict[str, Any]
    """What is not sharded."""
    copied: bool
    gathered: PartsGather = field(default_factory=PartsGather)
    """Shared by the saves of a run, of which the parts rarely change."""
    store: CheckpointStore | None = None
    """The object store with the checkpoint; ``staging`` then has only the files of rank 0."""
    written: WrittenBlocks = field(default_factory=WrittenBlocks)

    @property
    def address(self) -> Path | str:
        """Path or URL of the complete checkpoint."""
        return self.final if self.store is None else self.store.address(self.progress.step)

    def complete(self, group: dist.ProcessGroup | None = None) -> None:
        """Write the files and publish them; a collective of ``group``, by default of all groups' own.

        Raises:
            NoSpace, IOFailure: on every rank, if any rank fails to write; nothing is published.
        """
        try:
            on_main(self._begin, self.staging, group)
            gathered = self.write_state(group)
            on_main(lambda: self._publish(gathered), self.staging, group)
        except IsthmusError:
            if dist.get_rank() == 0:
                shutil.rmtree(self.staging, ignore_errors=True)
            raise

    def _begin(self) -> None:
        shutil.rmtree(self.staging, ignore_errors=True)
        self.staging.mkdir(parents=True)
        if self.store is not None:
            self.store.begin(self.progress.step)

    def write_state(self, group: dist.ProcessGroup | None) -> GatheredParts:
        """Write the file of each rank; a collective, whose result is complete on rank 0."""
        parts: list[CheckpointIndex] = []
        agree(lambda: parts.append(self._write()), group)
        checksums = {name: checksums_of_stream(blocks) for name, blocks in self.written.parts().items()}
        return self.gathered.gather(parts[0], checksums, group)

    def _write(self) -> CheckpointIndex:
        """Write the file of this rank, as ``dcp.save`` does, which gathers the plans of all ranks first."""
        storage = self._storage()
        if self.copied:  # already on the host; the copies would wait for the stream of training
            storage.per_thread_copy_ahead = 0
        storage.fs = _HashedFiles(self.written, self.store, self.progress.step)
        planner = MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
        with write_errors(self.staging):
            planner.set_up_planner(self.state, is_coordinator=dist.get_rank() == 0)
            plan = replace(planner.create_local_plan(), storage_data=_StoragePrefix(f"__{dist.get_rank()}_"))
            results = storage.write_data(planner.finish_plan(plan), planner).wait()
            return written_index(plan.items, {result.index: result.storage_data for result in results})

    def _storage(self) -> dcp.FileSystemWriter:
        return dcp.FileSystemWriter(self.staging, thread_count=1, sync_files=self.store is None)

    def write_small_files(self, gathered: GatheredParts) -> CheckpointIndex:
        """Write all other files, on rank 0; returns the index."""
        index = gathered.index()
        write_index(self.staging / INDEX, index, self._storage().storage_meta())
        torch.save(self.common, str(self.staging / COMMON_FILE))
        save_config(CheckpointingConfig("torch_dist", 1), str(self.staging))
        if self.options.write_beside is not None:
            self.options.write_beside(self.staging)
        write_checksums(self.staging, listed=gathered.checksums)
        return index

    def _publish(self, gathered: GatheredParts) -> None:
        index = self.write_small_files(gathered)
        keep, step = self.options.keep, self.progress.step
        if self.store is not None:
            sizes = {name: checksums.size for name, checksums in gathered.checksums.items()}
            if too_short := [name for name, end in index.ends().items() if sizes.get(name, -1) < end]:
                raise IOFailure(f"{too_short[0]} of {self.address} was not written whole; nothing is published.")
            self.store.publish(self.staging, step, sizes, keep, self.best)
            shutil.rmtree(self.staging, ignore_errors=True)
            return
        check_files(self.staging)
        publish(self.staging, self.final, step, keep, self.best)


def take_state(
    root: Path,
    stepper: Stepper,
    progress: Progress,
    parallel: ParallelConfig,
    options: SaveOptions,
    host: HostBuffer | None = None,
    gathered: PartsGather | None = None,
    store: CheckpointStore | None = None,
) -> CheckpointWriter:
    """Begin a checkpoint with the present state; a collective. No file is written yet.

    Args:
        host: copy the tensors there, so that training may change them before they are written.
        gathered: of the saves before.
        store: write the checkpoint there; ``root`` then has temporary files only.
    """
    final = checkpoint_dir(root, progress.step)
    staging = root / f"{TEMPORARY}{final.name}"
    content = {name: value for name, value in sharding_metadata().items() if name != "dp_cp_group"}
    # As dist_checkpointing.save, which writes files between its collectives: a failed rank would block the others.
    # Megatron-Core's own asynchronous writer forks, and can publish a file that a failed thread left incomplete.
    saved = saved_state(stepper, progress, parallel, options.args) | {"content_metadata": content}
    saved |= options.more_state
    sharded, common = save_preprocess(saved)
    if host is not None:
        common = copy.deepcopy(common)
    if saves_common_state_object():
        sharded["common_state"] = common_object(common, dist.get_rank())
    state, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded, keep_only_main_replica=True)
    if host is not None:
        state = host.copied(state)
    best = progress.best.step if options.keep_best else None
    live = mcore_to_pyt_state_dict(state, False)
    gather = PartsGather() if gathered is None else gathered
    return CheckpointWriter(staging, final, progress, best, options, live, common, host is not None, gather, store)


def on_main(stage: Callable[[], None], staging: Path, group: dist.ProcessGroup | None = None) -> None:
    """Run ``stage`` on rank 0; every rank waits for it and raises its error."""

    def run() -> None:
        with write_errors(staging):
            stage()

    agree(run if dist.get_rank() == 0 else lambda: None, group)
