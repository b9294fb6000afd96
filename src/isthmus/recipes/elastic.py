"""The data parallel size of a run with ``parallel.elastic``, whose machines may change from start to start."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from isthmus.config.schema import RunConfig
from isthmus.errors import UsageError
from isthmus.platforms import rank_env
from isthmus.recipes.plan.validation import with_recorded_batch_size
from isthmus.recipes.run_dir import RUN_RECORD, RunDir


@dataclass(frozen=True, slots=True)
class Fit:
    """What a run uses of its ranks."""

    ranks: int
    micro_batch_size: int


def fit(config: RunConfig, world_size: int) -> Fit:
    """The largest number of ranks whose data parallel size divides the global batch, with tp, pp, cp and ep as set.

    The micro batch becomes smaller if its size does not divide the sequences of a rank.

    Raises:
        UsageError: no number of ranks up to ``world_size`` fits.
    """
    parallel, train = config.parallel, config.train
    smallest = parallel.tp * parallel.pp * parallel.cp
    for ranks in range(world_size // smallest * smallest, 0, -smallest):
        try:
            parallel.check_world_size(ranks)
        except UsageError:
            continue
        sequences, rest = divmod(train.global_batch_size, parallel.dp(ranks))
        # The interleaved schedule needs a multiple of pp micro batches.
        divisor = parallel.pp if parallel.vpp > 1 else 1
        if rest or sequences % divisor:
            continue
        sizes = range(min(train.micro_batch_size, sequences // divisor), 0, -1)
        size = next(size for size in sizes if sequences // divisor % size == 0)
        return Fit(ranks, size)
    raise UsageError(
        f"parallel.elastic: no number of ranks up to {world_size} fits the layout {parallel.describe(world_size)} and "
        f"train.global_batch_size={train.global_batch_size}. Start at least {smallest} ranks, or choose a batch size "
        "with more divisors."
    )


def with_fitting_ranks(config: RunConfig) -> tuple[RunConfig, list[str]]:
    """The config for the ranks of this start, and a message; ends this process if its rank is not needed.

    The world size in the environment becomes that of the run.
    """
    if not config.parallel.elastic:
        return config, []
    started, rank = rank_env.world_size(), rank_env.rank()
    config = with_recorded_batch_size(config, _folder_with_record(config))
    use = fit(config, started)
    before, batch = config.train.micro_batch_size, config.train.global_batch_size
    if rank >= use.ranks:
        kept = f"train.global_batch_size={batch} fits {use.ranks} of {started} ranks (parallel.elastic)"
        print(f"rank {rank} ends: {kept}", file=sys.stderr, flush=True)
        raise SystemExit(0)
    rank_env.use_ranks(use.ranks)
    size = use.micro_batch_size
    message = (
        f"elastic: {use.ranks} of {started} ranks, {config.parallel.describe(use.ranks)}, train.micro_batch_size={size}"
        f"{'' if size == before else f' in place of {before}'}; train.global_batch_size={batch} and the order of the "
        "samples are the same with any number of ranks"
    )
    train = config.train.model_copy(update={"micro_batch_size": size})
    return config.model_copy(update={"train": train}), [message]


def _folder_with_record(config: RunConfig) -> Path | None:
    """The checkpoint to resume from, or the run folder, which a run that has only copies in memory resumes."""
    run_dir = RunDir(Path(config.out), config.checkpoint.store)
    checkpoint = run_dir.checkpoint_to_resume(config.checkpoint.resume)
    if checkpoint is None and config.checkpoint.memory_every and (run_dir.root / RUN_RECORD).is_file():
        return run_dir.root
    return checkpoint
