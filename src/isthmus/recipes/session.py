"""A run's live parts: platform, ranks, model with its weights, optimizer; and the way back to Hugging Face."""

from __future__ import annotations

import os
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from isthmus.config.schema import RunConfig
from isthmus.convert.hf_weights import HfWeights, open_weights
from isthmus.convert.megatron_args import megatron_args
from isthmus.convert.online import export_plan, export_weights, import_weights
from isthmus.convert.source import RandomWeights
from isthmus.convert.stored import HF_PART
from isthmus.engine.groups import ParallelSizes, Position, agree, barrier, open_groups, world_from_environment
from isthmus.errors import UsageError
from isthmus.families.architecture import Architecture
from isthmus.families.family import Family
from isthmus.families.registry import family_for
from isthmus.families.shard import Layout
from isthmus.hf.folder import ModelFolder, write_model_files
from isthmus.hf.staged import StagedFolder, disk_errors
from isthmus.hf.tokenizer import Tokenizer
from isthmus.platforms.base import Platform
from isthmus.platforms.detect import detect
from isthmus.recipes.layout import check_experts, check_layout

if TYPE_CHECKING:
    from isthmus.engine.overlap import Overlap

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Blueprint:
    """What is known of a run before any rank starts: cheap to make, and most mistakes show here."""

    source: ModelFolder
    weights: HfWeights
    family: Family
    architecture: Architecture
    sizes: ParallelSizes


def blueprint(config: RunConfig) -> Blueprint:
    """Read the model's config and check the layout against it.

    Raises:
        MissingInput, DataError, UnsafeInput: the model folder is absent or damaged.
        UsageError: the family is not known or the model not one that can be trained, the weights are quantised in a way
            that is not read, or the layout does not fit.
    """
    source = ModelFolder.open(config.model.path)
    family = family_for(source.config)
    weights = open_weights(source, family)
    architecture = weights.arch
    if architecture.mtp_layers:
        raise UsageError(
            f"{config.model.path}: its weights have layers that predict ahead (num_nextn_predict_layers="
            f"{architecture.mtp_layers}), which are converted but not trained. Leave their tensors out of the folder."
        )
    _, world_size, _ = world_from_environment()
    parallel = config.parallel.model_dump(exclude={"overlap_grad_reduce", "overlap_param_gather"})
    parallel["sp"] = config.parallel.sequence_parallel
    sizes = ParallelSizes(**parallel, world_size=world_size)
    check_layout(architecture, sizes)
    check_experts(architecture, config.moe)
    return Blueprint(source, weights, family, architecture, sizes)


def check_training(config: RunConfig, plans: Blueprint) -> None:
    """Refuse what only matters to a run that trains.

    Raises:
        UsageError: the model's config asks for what training does not do, or samples may outgrow its positions.
    """
    plans.family.check_training(plans.source.config)
    longest, architecture = config.data.seq_length, plans.architecture
    if architecture.position == "learned" and longest > architecture.max_position_embeddings:
        raise UsageError(
            f"data.seq_length={longest} is more than the {architecture.max_position_embeddings} positions that "
            f"this model has learned ({architecture.family}). Use {architecture.max_position_embeddings} or less."
        )


def use_threads(platform: Platform, threads: int | None) -> str | None:
    """Give each rank of a CPU run its share of the cores, unless the user has said otherwise; returns the reason."""
    if threads is not None:
        torch.set_num_threads(threads)
        return f"{threads} threads a rank (train.threads)"
    if platform.device_type != "cpu" or "OMP_NUM_THREADS" in os.environ:
        return None
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    share = max(1, len(os.sched_getaffinity(0)) // ranks_here)
    torch.set_num_threads(share)
    return f"{share} threads a rank ({ranks_here} ranks on this machine's {len(os.sched_getaffinity(0))} cores)"


@dataclass(frozen=True, slots=True)
class Session:
    """One rank's part of a run."""

    blueprint: Blueprint
    platform: Platform
    position: Position
    dtype: torch.dtype
    model: Any
    """The decoder, or the data-parallel wrapper around it."""

    @property
    def layout(self) -> Layout:
        """Which slices of each tensor this rank holds."""
        from isthmus.engine.model import padded_vocab_size

        sizes = self.blueprint.sizes
        return Layout(
            tp_rank=self.position.tp_rank,
            tp_size=sizes.tp,
            etp_rank=self.position.etp_rank,
            etp_size=sizes.expert_tp,
            padded_vocab_size=padded_vocab_size(self.blueprint.architecture.vocab_size, sizes.tp),
        )

    def export(self, destination: Path, tokenizer: Tokenizer, *, dtype: torch.dtype | None, replace: bool) -> None:
        """Write a Hugging Face model folder; every rank calls it and writes its own slices, none gathers the model.

        Args:
            destination: appears whole or not at all.
            tokenizer: written anew where the source's files would not tokenize as it did; else they are copied.
            dtype: of the tensors; None keeps each tensor's dtype in the source.
            replace: whether an earlier export of this run may go, once the new one is complete.

        Raises:
            NoSpace, IOFailure: on every rank, when any could not write; nothing is published.
        """
        from isthmus.engine.model import live_tensors
        from isthmus.engine.names import expert_of
        from isthmus.engine.overlap import gather_weights

        plans = self.blueprint
        kept = {name: info.dtype for name, info in plans.weights.source.tensors.items()}
        plan = export_plan(plans.family, plans.architecture, dtype or (kept if kept else torch.float32))
        staged = StagedFolder(destination, replace=replace)
        main = self.position.rank == 0

        def begin() -> None:
            if main:
                staged.create()
                plan.create(staged.path)

        gather_weights([self.model])

        def write() -> None:
            place = self.position
            first_copy = {False: place.dp_rank == 0, True: place.edp_rank == 0}  # experts have copies of their own
            live = live_tensors(self.model)
            if not plans.sizes.fsdp:  # else all have to help, and no expert has copies of its own
                live = {name: live[name] for name in live if first_copy[expert_of(name) is not None]}
            export_weights(
                live, plans.family, plans.architecture, plan, staged.path,
                layout=self.layout, writes=place.dp_rank == 0 or not plans.sizes.fsdp,
            )  # fmt: skip

        def finish() -> None:
            if main:
                with disk_errors(staged.path):
                    self._write_small_files(staged.path, tokenizer, dtype)
                staged.publish()

        try:
            for stage in (begin, write, finish):
                agree(stage)
        except BaseException:
            if main:
                staged.discard()
            raise
        barrier()

    def write_config(self, checkpoint: Path, tokenizer: Tokenizer) -> None:
        """Put the config and the tokenizer into a checkpoint, so that it is exported without any other folder.

        Raises:
            OSError: the disk refuses.
        """
        folder = checkpoint / HF_PART
        folder.mkdir()
        self._write_small_files(folder, tokenizer, self.dtype)

    def megatron_args(self, step: int) -> Namespace:
        """Which model a checkpoint of this run holds, as Megatron-LM says it."""
        from isthmus.engine.model import padded_vocab_size

        arch = self.blueprint.architecture
        padded = padded_vocab_size(arch.vocab_size, self.blueprint.sizes.tp)
        args = megatron_args(arch, self.dtype, padded_vocab_size=padded)
        args.iteration = step
        return args

    def _write_small_files(self, folder: Path, tokenizer: Tokenizer, dtype: torch.dtype | None) -> None:
        plans = self.blueprint
        written = str(dtype).removeprefix("torch.") if dtype else None
        config = plans.family.to_hf_config(plans.architecture, plans.source.config, dtype=written)
        write_model_files(folder, plans.source, config)
        if tokenizer.differs_from_files:
            tokenizer.save(folder)


def open_session(
    config: RunConfig, plans: Blueprint, platform: Platform, precision: str, *, training: bool = True
) -> Session:
    """Join the ranks and build this rank's part of the model; see :func:`build_session`."""
    position = open_groups(plans.sizes, platform, seed=config.train.seed)
    return build_session(config, plans, platform, position, precision, training=training)


def build_session(
    config: RunConfig,
    plans: Blueprint,
    platform: Platform,
    position: Position,
    precision: str,
    *,
    training: bool = True,
) -> Session:
    """Build this rank's stage of the model and fill it straight from the model folder.

    Args:
        config: says where the weights come from and what is recomputed.
        plans: the architecture and its layout.
        platform: of this process.
        position: of this rank, from ``open_groups``.
        precision: ``fp32`` or ``bf16``.
        training: whether gradients are wanted, in buffers that the distributed optimizer shares out; with
            ``parallel.fsdp`` each rank holds rows of weights and gradients either way.

    Raises:
        MissingInput, DataError: the folder holds no weights (and ``model.init`` is not ``random``) or not the right.
    """
    from isthmus.engine.fsdp import build_sharded
    from isthmus.engine.model import build_model, live_tensors, transformer_config
    from isthmus.engine.optimizer import wrap_data_parallel
    from isthmus.engine.routing import MoeSettings

    dtype = DTYPES[precision]
    settings = transformer_config(
        plans.architecture,
        plans.sizes,
        dtype=dtype,
        recompute=config.train.recompute,
        experts=MoeSettings(**config.moe.model_dump()),
    )
    build = build_sharded if plans.sizes.fsdp else build_model
    model: Any = build(plans.architecture, settings)
    if training and not plans.sizes.fsdp:
        model = wrap_data_parallel(model, _overlap(config, platform))
    session = Session(plans, platform, position, dtype, model)
    source = plans.weights.source
    if config.model.init == "random":
        source = RandomWeights(plans.family, plans.architecture, config.train.seed)
    import_weights(live_tensors(model), plans.family, plans.architecture, source, layout=session.layout)
    return session


def _overlap(config: RunConfig, platform: Platform) -> Overlap:
    """What was asked for; else all of it on a GPU, and nothing on a CPU, whose cores compute and exchange in turns."""
    from isthmus.engine.overlap import Overlap

    grads, weights = config.parallel.overlap_grad_reduce, config.parallel.overlap_param_gather
    grads = platform.device_type != "cpu" or bool(weights) if grads is None else grads
    return Overlap(grad_reduce=grads, param_gather=grads if weights is None else weights)


def load_model(hf_dir: Path | str, parallel: dict[str, int] | None = None, *, precision: str = "fp32") -> Any:
    """A Hugging Face model folder as a Megatron-Core decoder with its weights, for evaluation or a loop of your own.

    Args:
        hf_dir: config.json and safetensors.
        parallel: ``tp`` and ``pp``; the ranks are those of the environment (one when started alone).
        precision: ``fp32`` or ``bf16``.

    Returns:
        This rank's :class:`isthmus.engine.model.Decoder`.
    """
    config = RunConfig.model_validate(
        {
            "recipe": "pretrain",
            "out": "unused",
            "model": {"path": str(hf_dir)},
            "data": {"files": ["unused"]},
            # Not over the sequence as well: its length would have to be a multiple of tp.
            "parallel": {"sp": False, **(parallel or {})},
        }
    )
    session = open_session(config, blueprint(config), detect(), precision, training=False)
    return session.model.eval()


@torch.no_grad()
def model_logits(model: Any, input_ids: torch.Tensor) -> torch.Tensor:
    """Logits [S, V] in float32 of one sequence, int64 [S], of a model that has all its stages on this rank's line."""
    from isthmus.engine.attention import Segments

    input_ids = input_ids.to(next(model.parameters()).device)
    length = input_ids.numel()
    logits: torch.Tensor = model(input_ids, torch.arange(length, device=input_ids.device), Segments((length,)))
    return logits.float().cpu()
