"""A run's live parts: platform, ranks, model with its weights, optimizer; and the way back to Hugging Face."""

from __future__ import annotations

import math
import os
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from isthmus.config.schema import RunConfig
from isthmus.config.schema.parallel import ParallelConfig
from isthmus.convert.hf.hf_weights import OpenedHfWeights, config_dtype, open_weights
from isthmus.convert.legacy.megatron_args import megatron_args
from isthmus.convert.online import export_plan, export_weights, import_weights
from isthmus.convert.open_model import HF_SUBFOLDER
from isthmus.convert.weight_source import RandomWeights
from isthmus.engine.parallel.process_groups import (
    Position,
    agree,
    barrier,
    open_groups,
    world_from_environment,
)
from isthmus.errors import UsageError, disk_errors
from isthmus.families.architecture import Architecture
from isthmus.families.family import Family
from isthmus.families.registry import family_for
from isthmus.families.rules.shard import Layout, check_tp_size
from isthmus.hf.model_folder import ModelFolder, write_model_files
from isthmus.hf.staged_folder import StagedFolder
from isthmus.hf.tokenizer.tokenizer import Tokenizer
from isthmus.platforms.base import Platform, RunShape
from isthmus.recipes.setup.layout_checks import (
    check_experts,
    check_fsdp_precision,
    check_layout,
    check_micro_batches,
    check_stages,
)
from isthmus.recipes.setup.model_source import open_source
from isthmus.recipes.setup.run_tokenizer import with_tokens_of

if TYPE_CHECKING:
    from isthmus.engine.layers.fp8_linear import Fp8Recipe
    from isthmus.engine.parallel.ddp import Overlap

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}
"""Of weights and activations, by precision; fp8 is what products are taken in."""


@dataclass(frozen=True, slots=True)
class Blueprint:
    """What is known of a run before any rank starts: cheap to make, and most mistakes show here."""

    source: ModelFolder
    weights: OpenedHfWeights
    family: Family
    architecture: Architecture
    parallel: ParallelConfig
    world_size: int


def blueprint(config: RunConfig, *, world_size: int | None = None) -> Blueprint:
    """Read the model's config and check the layout against it.

    Args:
        config: the run's.
        world_size: ranks of the run; None: as many as the environment says.

    Raises:
        MissingInput, DataError, UnsafeInput: the model folder is absent or damaged.
        UsageError: the family is not known or the model not one that can be trained, the weights are quantised in a way
            that is not read, or the layout does not fit.
    """
    source = open_source(config.model)
    family = family_for(source.config)
    weights = open_weights(source, family)
    architecture = weights.arch
    # What the model itself cannot be cut into is told before how many ranks there are.
    check_tp_size(architecture, config.parallel.tp)
    check_stages(architecture, config.parallel.pp, config.parallel.vpp)
    if world_size is None:
        _, world_size, _ = world_from_environment()
    config.parallel.check_world_size(world_size)
    check_layout(architecture, config.parallel)
    check_experts(architecture, config.moe)
    return Blueprint(source, weights, family, architecture, config.parallel, world_size)


def check_training(config: RunConfig, plans: Blueprint) -> None:
    """Refuse what only matters to a run that trains.

    Raises:
        UsageError: the model's config asks for what training does not do, samples may outgrow its positions, or the
            batch cannot be dealt out over virtual stages.
    """
    plans.family.check_training(plans.source.config)
    check_micro_batches(config.train, plans.parallel, plans.world_size)
    longest, architecture = config.data.seq_length, plans.architecture
    if architecture.position == "learned" and longest > architecture.max_position_embeddings:
        raise UsageError(
            f"data.seq_length={longest} is more than the {architecture.max_position_embeddings} positions that "
            f"this model has learned ({architecture.family}). Use {architecture.max_position_embeddings} or less."
        )
    _check_recomputed(config, plans)
    if config.train.precision is not None:
        check_fsdp_precision(plans.parallel, config.train.precision)


def check_schedule(config: RunConfig, steps: int) -> None:
    """Refuse a warm-up or a final fall that the run is too short for, known only now where its length is in epochs.

    Raises:
        UsageError: naming the settings.
    """
    warmup, decay = config.optim.warmup_steps, config.optim.decay_steps or 0
    if warmup >= steps or warmup + decay > steps:
        falls = f" and optim.decay_steps={decay} do" if decay else " does"
        raise UsageError(
            f"optim.warmup_steps={warmup}{falls} not fit in the {steps} steps that train.epochs="
            f"{config.train.epochs:g} is of this data. Lower it, or raise train.epochs."
        )


def _check_recomputed(config: RunConfig, plans: Blueprint) -> None:
    train, architecture = config.train, plans.architecture
    here = math.ceil(architecture.num_layers / (plans.parallel.pp * plans.parallel.vpp))
    if train.recompute_layers is not None and train.recompute_layers > here:
        raise UsageError(
            f"train.recompute_layers={train.recompute_layers} is more than the {here} layers of a pipeline stage. "
            f"Use {here} or less, or leave it out for all."
        )
    moe = [architecture.is_moe(layer) for layer in range(architecture.num_layers)]
    for name, there in {"moe": any(moe), "mlp": not all(moe)}.items():
        if train.recompute == "selective" and name in train.recompute_modules and not there:
            what = "mixtures of experts" if name == "moe" else "dense feed-forward blocks"
            raise UsageError(
                f"train.recompute_modules names {name}, and this model has no {what} ({architecture.family}). "
                "Leave it out."
            )


def check_precision(platform: Platform, precision: str) -> None:
    """Refuse what the hardware cannot compute in.

    Raises:
        UsageError: with the reason.
    """
    supported, reason = platform.supports(precision)
    if not supported:
        raise UsageError(f"train.precision={precision} cannot be used here: {reason}. Leave it out or use fp32.")


def run_shape(plans: Blueprint, ranks_here: int) -> RunShape:
    """What the environment of a run hangs on."""
    parallel = plans.parallel
    return RunShape(
        nodes=math.ceil(plans.world_size / ranks_here),
        fsdp=parallel.fsdp,
        tp_or_cp=parallel.tp > 1 or parallel.cp > 1,
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
    model: list[Any]
    """This rank's stages, one or ``parallel.vpp`` of them: decoders, or the data-parallel wrappers around them."""
    said: tuple[str, ...] = ()
    """What was decided in building it, for the user."""

    @property
    def layout(self) -> Layout:
        """Which slices of each tensor this rank holds."""
        from isthmus.engine.model_config import padded_vocab_size

        parallel = self.blueprint.parallel
        return Layout(
            tp_rank=self.position.tp_rank,
            tp_size=parallel.tp,
            etp_rank=self.position.etp_rank,
            etp_size=parallel.expert_tp,
            padded_vocab_size=padded_vocab_size(self.blueprint.architecture.vocab_size, parallel.tp),
        )

    def _exported(self) -> dict[str, torch.Tensor]:
        """This rank's tensors, with the copies that files have for layers ahead."""
        from isthmus.engine.megatron_model import copied_tensors, live_tensors

        live, copies = live_tensors(self.model), copied_tensors(self.model)
        if copies and not self.position.is_first_stage:
            del live["embedding.word_embeddings.weight"]  # the first stage writes it
        return live | copies

    def export(self, destination: Path, tokenizer: Tokenizer, *, dtype: torch.dtype | None, replace: bool) -> None:
        """Write a Hugging Face model folder; every rank calls it and writes its own slices, none gathers the model.

        Args:
            destination: appears whole or not at all.
            tokenizer: written anew where the source's files would not tokenize as it did; else they are copied.
            dtype: of the tensors; None keeps each tensor's dtype in the source. Where that has no weights it is the one
                that its config names.
            replace: whether an earlier export of this run may go, once the new one is complete.

        Raises:
            NoSpace, IOFailure: on every rank, when any could not write; nothing is published.
        """
        from isthmus.engine.checkpoint.checkpoint_names import expert_of
        from isthmus.engine.parallel.ddp import gather_weights

        plans = self.blueprint
        kept = {name: info.dtype for name, info in plans.weights.source.tensors.items()}
        dtypes = dtype or kept or config_dtype(plans.source.config, torch.float32)
        plan = export_plan(plans.family, plans.architecture, dtypes)
        staged = StagedFolder(destination, replace=replace)
        main = self.position.rank == 0

        def begin() -> None:
            if main:
                staged.create()
                plan.create(staged.path)

        gather_weights(self.model)

        def write() -> None:
            place = self.position
            # Experts have copies of their own.
            first_copy = {False: place.dp_rank == place.cp_rank == 0, True: place.edp_rank == 0}
            live = self._exported()
            if not plans.parallel.fsdp:  # else all have to help, and no expert has copies of its own
                live = {name: live[name] for name in live if first_copy[expert_of(name) is not None]}
            export_weights(
                live, plans.family, plans.architecture, plan, staged.path,
                layout=self.layout, writes=first_copy[False] or not plans.parallel.fsdp,
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
        folder = checkpoint / HF_SUBFOLDER
        folder.mkdir()
        self._write_small_files(folder, tokenizer, self.dtype)

    def megatron_args(self, step: int) -> Namespace:
        """Which model a checkpoint of this run holds, as Megatron-LM says it."""
        from isthmus.engine.model_config import padded_vocab_size

        arch = self.blueprint.architecture
        padded = padded_vocab_size(arch.vocab_size, self.blueprint.parallel.tp)
        args = megatron_args(arch, self.dtype, padded_vocab_size=padded)
        args.iteration = step
        return args

    def _write_small_files(self, folder: Path, tokenizer: Tokenizer, dtype: torch.dtype | None) -> None:
        plans = self.blueprint
        written = str(dtype).removeprefix("torch.") if dtype else None
        config = plans.family.to_hf_config(plans.architecture, plans.source.config, dtype=written)
        own = tokenizer.folder == plans.source.path
        config = config if own else with_tokens_of(tokenizer, config)
        write_model_files(folder, plans.source, config, None if own else tokenizer.files)
        if tokenizer.differs_from_files:
            tokenizer.save(folder)


def open_session(
    config: RunConfig, plans: Blueprint, platform: Platform, precision: str, *, training: bool = True
) -> Session:
    """Join the ranks and build this rank's part of the model; see :func:`build_session`."""
    position = open_groups(plans.parallel, platform, seed=config.train.seed, timeout_s=config.parallel.timeout_s)
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
    """Build this rank's stages of the model and fill them straight from the model folder.

    Args:
        config: says where the weights come from and what is recomputed.
        plans: the architecture and its layout.
        platform: of this process.
        position: of this rank, from ``open_groups``.
        precision: ``fp32``, ``bf16``, ``fp16`` or ``fp8``.
        training: whether gradients are wanted, in buffers that the distributed optimizer shares out; with
            ``parallel.fsdp`` each rank holds rows of weights and gradients either way.

    Raises:
        MissingInput, DataError: the folder holds no weights (and ``model.init`` is not ``random``) or not the right.
    """
    from isthmus.engine.layers.linear import use_fp8
    from isthmus.engine.megatron_model import build_stages, copied_tensors, live_tensors
    from isthmus.engine.model_config import transformer_config
    from isthmus.engine.optim.optimizer import wrap_data_parallel
    from isthmus.engine.parallel.fsdp import build_sharded

    dtype = DTYPES[precision]
    settings = transformer_config(
        plans.architecture,
        plans.parallel,
        dtype=dtype,
        train=config.train,
        moe=config.moe,
        mtp=True,
    )
    fsdp = plans.parallel.fsdp
    model: list[Any] = (
        [build_sharded(plans.architecture, settings)] if fsdp else build_stages(plans.architecture, settings)
    )
    said: tuple[str, ...] = ()
    if precision == "fp8":
        said = use_fp8(torch.nn.ModuleList(model), fp8_recipe(config, platform))
    if training and not fsdp:
        model = [wrap_data_parallel(stage, _overlap(config, platform)) for stage in model]
    session = Session(plans, platform, position, dtype, model, said)
    source = plans.weights.source
    if config.model.init == "random":
        source = RandomWeights(plans.family, plans.architecture, config.train.seed)
    import_weights(live_tensors(model), plans.family, plans.architecture, source, layout=session.layout)
    if config.model.init != "random" and plans.architecture.mtp_layers:
        agree(lambda: _check_copies(session, copied_tensors(model)))
    return session


def _check_copies(session: Session, shared: dict[str, torch.Tensor]) -> None:
    """See that what layers ahead share with the model is the same in the files, which hold it twice.

    Raises:
        UsageError: naming the tensor that is another.
    """
    plans = session.blueprint
    read = {name: torch.empty_like(tensor) for name, tensor in shared.items()}
    import_weights(read, plans.family, plans.architecture, plans.weights.source, layout=session.layout)
    placements = plans.family.placements(plans.architecture)
    for name, tensor in shared.items():
        if not torch.equal(read[name], tensor):
            raise UsageError(
                f"{plans.weights.source}: {placements[name].hf[0]} is not the model's own, and layers that predict "
                "ahead share it in training (arXiv 2412.19437). Leave the tensors of these layers out of the folder."
            )


def fp8_recipe(config: RunConfig, platform: Platform) -> Fp8Recipe:
    """How ``train.fp8_scaling`` and ``train.fp8_format`` round, in the types of the platform."""
    from isthmus.engine.layers.fp8_linear import Fp8Recipe

    e4m3, e5m2 = platform.fp8_types()
    return Fp8Recipe(config.train.fp8_scaling, e4m3, e5m2 if config.train.fp8_format == "hybrid" else e4m3)


def _overlap(config: RunConfig, platform: Platform) -> Overlap:
    """What was asked for; else all of it on a GPU, and nothing on a CPU, whose cores compute and exchange in turns."""
    from isthmus.engine.parallel.ddp import Overlap

    grads, weights = config.parallel.overlap_grad_reduce, config.parallel.overlap_param_gather
    grads = platform.device_type != "cpu" or bool(weights) if grads is None else grads
    return Overlap(grad_reduce=grads, param_gather=grads if weights is None else weights)
