"""Checkpoints in Megatron's ``torch_dist`` format, readable under any layout.

As in Megatron-LM, a checkpoint is a folder ``iter_0000010`` next to ``latest_checkpointed_iteration.txt``. It is
written to a temporary folder and renamed when all ranks are done and all files are complete.
"""

from __future__ import annotations

import re
import shutil
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException  # no subclass of Exception

from isthmus.atomic_write import TEMPORARY, rename, write_atomic
from isthmus.config.schema.parallel import ParallelConfig
from isthmus.engine.checkpoint.adapter_state import trained_entries, weights_of
from isthmus.engine.checkpoint.checkpoint_names import TRACKER
from isthmus.engine.checkpoint.fsdp_state import sharded_state
from isthmus.engine.checkpoint.optimizer_state import distributed_state, grad_scaler_state, set_num_updates
from isthmus.engine.lora.adapter import AdapterSet
from isthmus.engine.optim.adamw import float32_moments
from isthmus.engine.optim.optimizer import chain, distributed_optimizers, torch_optimizers
from isthmus.engine.parallel.ddp import gather_weights
from isthmus.engine.parallel.fsdp import FullyShardedDataParallel
from isthmus.engine.parallel.process_groups import agree
from isthmus.engine.step import Stepper
from isthmus.errors import DataError, IOFailure, IsthmusError, MissingInput, NoSpace, UsageError


@dataclass(slots=True)
class BestLoss:
    """The lowest validation loss after a step of a run."""

    loss: float | None = None
    step: int | None = None
    evaluations_since: int = 0

    def update(self, step: int, loss: float) -> bool:
        """Whether ``loss`` is the lowest so far. An evaluation that a resumed run repeats counts once."""
        if step == self.step:
            return False
        if self.loss is None or loss < self.loss:
            self.loss, self.step, self.evaluations_since = loss, step, 0
            return True
        self.evaluations_since += 1
        return False


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    step: int
    data: str
    """Fingerprint of the data and its order."""
    base: str = ""
    """Fingerprint of the frozen weights that the checkpoint of a run with adapters does not have."""
    best: BestLoss = field(default_factory=BestLoss)


class _SynchronousSave(TorchDistSaveShardedStrategy):
    """Megatron-Core's asynchronous writer forks, and can publish a file that a failed thread left incomplete."""

    def __init__(self) -> None:
        super().__init__("torch_dist", 1, thread_count=1)

    def save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> None:
        state, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, self.keep_only_main_replica)
        dcp.save(
            mcore_to_pyt_state_dict(state, False),
            storage_writer=dcp.FileSystemWriter(checkpoint_dir, thread_count=1, sync_files=True),
            planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
        )


def checkpoint_dir(root: Path, step: int) -> Path:
    return root / f"iter_{step:07d}"


def latest(root: Path) -> Path | None:
    """The newest published checkpoint, or None; raises DataError if the tracker file names a missing one."""
    tracker = root / TRACKER
    if not tracker.exists():
        return None
    text = tracker.read_text(encoding="utf-8", errors="replace").strip()
    if re.fullmatch("[0-9]{1,18}", text) is None or not checkpoint_dir(root, int(text)).is_dir():
        raise DataError(
            f"{tracker} contains {text!r}, which is not a checkpoint in {root}. Write an existing step into it."
        )
    return checkpoint_dir(root, int(text))


def _metadata() -> dict[str, Any]:
    return {
        "distrib_optim_sharding_type": "fully_reshardable",
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }


def _random_state(device: torch.device) -> ShardedObject:
    """One entry per (pp, tp) rank, as in Megatron-LM."""
    state = {"torch": torch.get_rng_state(), "tracker": get_cuda_rng_tracker().get_states()}
    if device.type == "cuda":
        state["device"] = torch.cuda.get_rng_state()
    return ShardedObject(
        "rng_state",
        [state],
        (
            parallel_state.get_pipeline_model_parallel_world_size(),
            parallel_state.get_tensor_model_parallel_world_size(),
        ),
        (parallel_state.get_pipeline_model_parallel_rank(), parallel_state.get_tensor_model_parallel_rank()),
        replica_id=parallel_state.get_data_parallel_rank(with_context_parallel=True),
    )


def _state(stepper: Stepper, *, is_loading: bool) -> dict[str, Any]:
    """The sharded state to save or load; for loading, ``optimizers`` is always a list."""
    if stepper.device.type == "cuda":
        torch.cuda.synchronize()  # moments in host memory may still be copied
    if isinstance(whole := stepper.model[0], FullyShardedDataParallel):  # without pipeline stages
        (adam,) = torch_optimizers(stepper.optimizer)
        return sharded_state(whole, adam, is_loading=is_loading)
    gather_weights(stepper.model)
    # Keyed by stage; keys in the files have model-wide layer numbers.
    if stepper.model[0].module.adapters is None:
        entries = {name: stage.sharded_state_dict(metadata=_metadata()) for name, stage in _stages(stepper).items()}
        state = entries
    else:
        entries = {name: trained_entries(stage, _metadata()) for name, stage in _stages(stepper).items()}
        state = {name: weights_of(of_stage) for name, of_stage in entries.items()}
    stacked = not stepper.model[0].module.frozen
    states = [distributed_state(each, entries, stacked=stacked) for each in distributed_optimizers(stepper.optimizer)]
    if is_loading:
        return state | {"optimizers": states}
    if not states:  # all tensors of this rank are frozen
        states = [grad_scaler_state(chain(stepper.optimizer)[0])]
    # Several are keyed by number, like Megatron-Core's chain, which would also save empty ones and fail.
    return state | {"optimizer": states[0] if len(states) == 1 else dict(enumerate(states))}


def _described(stepper: Stepper) -> list[str] | None:
    """The tensors of the adapters of all stages; None without adapters."""
    adapters: AdapterSet | None = stepper.model[0].module.adapters
    return None if adapters is None else adapters.described()


def _stages(stepper: Stepper) -> dict[str, Any]:
    if len(stepper.model) == 1:
        return {"model": stepper.model[0].module}
    return {f"model{number}": stage.module for number, stage in enumerate(stepper.model)}


def save(
    root: Path,
    stepper: Stepper,
    progress: Progress,
    parallel: ParallelConfig,
    *,
    keep: int,
    keep_best: bool = False,
    args: Namespace | None = None,
    write_beside: Callable[[Path], None] | None = None,
) -> Path:
    """Write weights, optimizer, random state and data position; every rank calls it.

    Args:
        parallel: saved with it; the random state is only restored under the same layout.
        keep: number of checkpoints to keep; older ones are removed when this one is complete.
        keep_best: keep that of ``progress.best`` in addition.
        args: model description for Megatron-LM and for conversion.
        write_beside: writes more files into the folder, on rank 0.

    Raises:
        NoSpace, IOFailure: on every rank, if any rank fails to write; nothing is published.
    """
    final = checkpoint_dir(root, progress.step)
    staging = root / f"{TEMPORARY}{final.name}"
    main = dist.get_rank() == 0

    def prepare() -> None:
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)

    _on_main(prepare, staging)
    state = _saved_state(stepper, progress, parallel, args)
    content = {name: value for name, value in _metadata().items() if name != "dp_cp_group"}

    def write() -> None:
        with write_errors(staging):
            dist_checkpointing.save(state, str(staging), _SynchronousSave(), content_metadata=content)
            if main:
                if write_beside is not None:
                    write_beside(staging)
                check_files(staging)

    try:
        agree(write)
    except IsthmusError:
        if main:
            shutil.rmtree(staging, ignore_errors=True)
        raise
    best = progress.best.step if keep_best else None
    _on_main(lambda: _publish(staging, final, progress.step, keep, best), staging)
    return final


def _saved_state(
    stepper: Stepper, progress: Progress, parallel: ParallelConfig, args: Namespace | None
) -> dict[str, Any]:
    """Everything in a checkpoint except the files beside it."""
    with float32_moments(torch_optimizers(stepper.optimizer), loading=False):
        state = _state(stepper, is_loading=False)
    state |= {
        "rng_state": _random_state(stepper.device),
        "checkpoint_version": 3.0,
        "iteration": progress.step,
        "isthmus": {
            "progress": asdict(progress),
            "layout": _layout(parallel),
            "skipped": stepper.skipped,
            "frozen": sorted(stepper.model[0].module.frozen),
            "adapters": _described(stepper),
            "muon": _by_muon(stepper),
        },
    }
    return state if args is None else state | {"args": args}


def _on_main(stage: Callable[[], None], staging: Path) -> None:
    """Run ``stage`` on rank 0; every rank waits for it and raises its error."""

    def run() -> None:
        with write_errors(staging):
            stage()

    agree(run if dist.get_rank() == 0 else lambda: None)


def _publish(staging: Path, final: Path, step: int, keep: int, best: int | None = None) -> None:
    shutil.rmtree(final, ignore_errors=True)
    rename(staging, final)
    write_atomic(final.parent / TRACKER, str(step))
    # A run resumed from an earlier step leaves folders with higher numbers, which are older: they are removed first.
    kept = {final} if best is None else {final, checkpoint_dir(final.parent, best)}
    others = sorted(
        (path for path in final.parent.glob("iter_*") if path not in kept), key=lambda path: (path < final, path)
    )
    for old in others[: max(0, len(others) + 1 - keep)]:
        shutil.rmtree(old, ignore_errors=True)


def _layout(parallel: ParallelConfig) -> dict[str, Any]:
    names = ("tp", "pp", "vpp", "cp", "ep", "etp", "fsdp")
    layout = {name: getattr(parallel, name) for name in names}
    return layout | {"sp": parallel.sequence_parallel, "world_size": dist.get_world_size()}


def check_files(folder: Path) -> None:
    """Check that all files exist and have the length in the index.

    Raises:
        MissingInput: the folder or its index is missing.
        DataError: a file is missing or truncated, or the index is unreadable.
    """
    index = folder / ".metadata"
    if not index.is_file():
        raise MissingInput(
            f"{folder} has no torch_dist checkpoint: .metadata is missing. Choose a folder that has one."
        )
    if not (folder / "common.pt").is_file():
        raise DataError(f"{folder / 'common.pt'} is missing. Resume from another checkpoint.")
    try:
        storage = dcp.FileSystemReader(folder).read_metadata().storage_data
    except Exception as error:  # a damaged pickle raises almost any
        raise DataError(f"{index} cannot be read ({error}). Resume from another checkpoint.") from error
    ends: dict[str, int] = {}
    for entry in storage.values():
        ends[entry.relative_path] = max(ends.get(entry.relative_path, 0), entry.offset + entry.length)
    for name, end in ends.items():
        size = (folder / name).stat().st_size if (folder / name).is_file() else -1
        if size < end:
            found = "is missing" if size < 0 else f"has {size} bytes"
            raise DataError(f"{folder / name} {found}, {end} are needed. Resume from another checkpoint.")


def load(folder: Path, stepper: Stepper, parallel: ParallelConfig) -> Progress:
    """Load a checkpoint of any layout; every rank calls it.

    Raises:
        MissingInput, DataError: the checkpoint is missing, truncated or of another model.
        UsageError: other tensors were trained, or by another optimizer.
    """
    check_files(folder)
    with read_errors(folder):
        common = dist_checkpointing.load_common_state_dict(str(folder))
    if "isthmus" not in common:
        raise DataError(f"{folder} was not written by an Isthmus run, so its data position is unknown.")
    _check_same_training(common["isthmus"], stepper, folder)
    same_layout = common["isthmus"]["layout"] == _layout(parallel)
    with read_errors(folder), float32_moments(torch_optimizers(stepper.optimizer), loading=True):
        state = _state(stepper, is_loading=True)
        if same_layout:
            state["rng_state"] = _random_state(stepper.device)
        loaded = dist_checkpointing.load(state, str(folder), validate_access_integrity=False)
        in_place = isinstance(stepper.model[0], FullyShardedDataParallel) or _described(stepper) is not None
        for name, stage in () if in_place else _stages(stepper).items():
            stage.load_state_dict(loaded[name])
    saved = common["optimizer"].get(0, common["optimizer"])  # several optimizers are keyed by number
    done = common["isthmus"]["progress"]
    progress = Progress(**{**done, "best": BestLoss(**done.get("best", {}))})
    stepper.skipped = common["isthmus"].get("skipped", 0)
    stepper.schedule.step(increment=progress.step - stepper.skipped)
    for adam in torch_optimizers(stepper.optimizer):
        set_num_updates(adam, progress.step - stepper.skipped)
    for optimizer in chain(stepper.optimizer):
        if getattr(optimizer, "grad_scaler", None) is not None and "grad_scaler" in saved:
            optimizer.grad_scaler.load_state_dict(saved["grad_scaler"])
    if same_layout:
        _restore_random_state(loaded["rng_state"][0], stepper.device)
    return progress


def _check_same_training(saved: dict[str, Any], stepper: Stepper, folder: Path) -> None:
    """Raise UsageError if other tensors were trained, or by another optimizer; ``saved`` is written by :func:`save`."""
    if saved.get("adapters") != _described(stepper):
        raise UsageError(
            f"{folder} was saved with other adapters (section lora). Resume with the same settings, or start a new run "
            "with lora.path."
        )
    if saved.get("frozen", []) != sorted(stepper.model[0].module.frozen):
        setting = "train.freeze" if saved.get("adapters") is None else "lora.modules_to_save"
        raise UsageError(
            f"{folder} was saved with another {setting}, so it has the optimizer state of other tensors. Resume "
            f"with the same {setting}, or start a new run from its exported model."
        )
    if saved.get("muon", False) != _by_muon(stepper):
        before, now = ("adamw", "muon") if _by_muon(stepper) else ("muon", "adamw")
        raise UsageError(
            f"{folder} has the optimizer state of {before}, and this run uses {now}. Resume with the same "
            "optim.optimizer, or start a new run from its exported model."
        )


def _by_muon(stepper: Stepper) -> bool:
    return hasattr(stepper.optimizer, "muon")


def _restore_random_state(state: dict[str, Any], device: torch.device) -> None:
    torch.set_rng_state(state["torch"])
    get_cuda_rng_tracker().set_states(state["tracker"])
    if "device" in state and device.type == "cuda":
        torch.cuda.set_rng_state(state["device"])


# "unexpected pos": torch's zip writer finds fewer bytes in the file than it wrote.
_SIGNS_OF_NO_SPACE = ("No space left", "Disk quota", "File too large", "ENOSPC", "unexpected pos")


@contextmanager
def write_errors(stage: Path) -> Iterator[None]:
    """Translate errors to NoSpace, IOFailure or IsthmusError."""
    try:
        yield
    except (Exception, CheckpointException) as error:
        text = str(error)
        if any(sign in text for sign in _SIGNS_OF_NO_SPACE):
            free = shutil.disk_usage(stage.parent).free / 2**30
            raise NoSpace(
                f"no room for the checkpoint in {stage.parent} ({free:.2f} GiB free). Free some, lower "
                "checkpoint.keep, or choose another --out; the checkpoint before it is intact."
            ) from error
        if isinstance(error, OSError | CheckpointException):
            message = f"the checkpoint could not be written to {stage.parent}: {_lines(error)[-1]}"
            raise IOFailure(message) from error
        raise IsthmusError(f"saving to {stage.parent} failed: {type(error).__name__}: {text}") from error


@contextmanager
def read_errors(folder: Path) -> Iterator[None]:
    """Translate errors to IOFailure or DataError; the files are complete."""
    try:
        yield
    except OSError as error:
        raise IOFailure(f"{folder} cannot be read: {error.strerror or error}.") from error
    except (Exception, CheckpointException) as error:
        lines = _lines(error)
        message = lines[-1] if isinstance(error, CheckpointException) else lines[0]
        # torch lists every tensor of the checkpoint
        message = message if len(message) <= 200 else f"{message[:200]}..."
        raise DataError(
            f"{folder} cannot be loaded: it is damaged, or of another model ({message}). "
            "Resume from another checkpoint, or start a new run with --out."
        ) from error


def _lines(error: BaseException) -> list[str]:
    return [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
