"""Tasks of a rank pool: every rank runs the task, and the pool returns the result of rank 0.

A task creates the process groups of its layout; :mod:`ranks.pool_worker` destroys them.
"""

from __future__ import annotations

import hashlib
import math
import os
import tempfile
import threading
import time
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies.torch import MCoreSavePlanner
from megatron.core.dist_checkpointing.validation import StrictHandling
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from torch.distributed import checkpoint as dcp
from torch.distributed.tensor import DTensor

from isthmus.config.schema import OptimConfig, RunConfig
from isthmus.convert.online import export_plan, export_weights
from isthmus.data.batching.batches import Batches, BatchSettings, BatchShard
from isthmus.engine.checkpoint import opened_checkpoint, run_state, save_load
from isthmus.engine.checkpoint.background_saves import Saves
from isthmus.engine.checkpoint.checkpoint_store import CheckpointStore
from isthmus.engine.checkpoint.checkpoint_writer import CheckpointWriter, SaveOptions, take_state
from isthmus.engine.layers.recompute import _Recomputed
from isthmus.engine.linear.quantized_weight import QuantizedWeight, dense
from isthmus.engine.optim.learning_rate import build_schedule
from isthmus.engine.optim.optimizer import build_optimizer, memory_stats, torch_optimizers
from isthmus.engine.optim.state_offload import StateOffload
from isthmus.engine.optim.update import reduce_and_scale_grads
from isthmus.engine.parallel.ddp import gather_weights
from isthmus.engine.parallel.live_parameters import live_tensors
from isthmus.engine.parallel.process_groups import gather_objects
from isthmus.engine.step import Stepper, _forward_step
from isthmus.errors import Diverged, IsthmusError
from isthmus.families.blocks.block import MicroBatch
from isthmus.files import checked_files
from isthmus.recipes.data.corpus import make_batches
from isthmus.recipes.model.adapter_export import export_adapter
from isthmus.recipes.model.hf_export import export_hf
from isthmus.recipes.model.load_model import load_model, model_logits
from isthmus.recipes.model.rank_model import RankModel, join_and_build
from isthmus.recipes.model.teacher_model import build_teacher
from isthmus.recipes.plan.activation_estimate import outside_bytes
from isthmus.recipes.plan.memory_estimate import estimate_memory
from isthmus.recipes.plan.model_plan import open_run_model, plan_model
from isthmus.recipes.reference_logps import compute_reference
from isthmus.recipes.registry import recipe_of
from isthmus.train.stop import StopFlag
from ranks.pool_worker import leave_groups, platform
from ranks.tiny import GLOBAL_BATCH_SIZE, SEQ_LENGTH, VALID_SAMPLES, open_samples

TOTAL_STEPS = 6
CLIP_GRAD = 1.8
"""Between the smallest and the largest gradient norm of these runs: some steps are clipped, others are not."""


@dataclass
class Training:
    """Model, stepper and batches of a rank."""

    model: RankModel
    stepper: Stepper
    batches: Batches
    valid: Batches
    config: RunConfig


def start(
    *,
    model: str,
    samples: str,
    precision: str = "fp32",
    recompute: str = "none",
    micro_batch_size: int = 1,
    global_batch_size: int = GLOBAL_BATCH_SIZE,
    packing: bool = True,
    mtp_loss_weight: float = 0.1,
    optim: dict[str, Any] | None = None,
    moe: dict[str, Any] | None = None,
    more: dict[str, Any] | None = None,
    dpo: dict[str, Any] | None = None,
    lora: dict[str, Any] | None = None,
    kto: dict[str, Any] | None = None,
    distill: dict[str, Any] | None = None,
    reward: dict[str, Any] | None = None,
    reference: str | None = None,
    fresh: bool = True,
    equal_lengths: bool = False,
    **parallel: Any,
) -> Training:
    """Build the model, optimizer and batches like a recipe, with the samples of a store.

    ``parallel``, ``optim``, ``moe``, ``lora`` and recipes are sections; ``more`` is added to ``train``. With ``dpo``
    and ``reward`` the samples are pairs, with ``kto`` answers. Reference log-probabilities are saved in folder
    ``reference``, and loaded from there unless ``fresh``. ``equal_lengths`` pads micro batches as in pipelines on GPUs.
    ``micro_batch_size`` is reduced where a rank would have fewer micro batches than there are pipeline stages.
    """
    sections = {"dpo": dpo, "kto": kto, "reward": reward, "distill": distill}
    config = RunConfig.model_validate(
        {
            "recipe": next((name for name, section in sections.items() if section is not None), "pretrain"),
            "out": "unused",
            "model": {"path": model},
            "data": {"files": ["unused"], "seq_length": SEQ_LENGTH},
            "parallel": parallel,
            "dpo": dpo or {},
            "lora": lora or {},
            "kto": kto or {},
            "distill": distill or {},
            "reward": reward or {},
            "moe": moe or {},
            "train": {
                "steps": TOTAL_STEPS,
                "recompute": recompute,
                "precision": precision,
                "mtp_loss_weight": mtp_loss_weight,
                **(more or {}),
            },
        }
    )
    built = join_and_build(config, plan := plan_model(open_run_model(config), config), platform(), precision)
    settings: dict[str, Any] = {
        "lr": 3e-3,
        "min_lr": 3e-4,
        "schedule": "cosine",
        "warmup_steps": 2,
        "decay_steps": None,
        "weight_decay": 0.1,
        "clip_grad": CLIP_GRAD,
        "beta1": 0.9,
        "beta2": 0.95,
        "eps": 1e-8,
    } | (optim or {})
    chosen = OptimConfig.model_construct(**settings)  # not validated: lr=0 is allowed here
    optimizer = build_optimizer(built.stages, chosen, config.train, family=built.plan.family)
    dp = config.parallel.dp(dist.get_world_size())
    sizes = BatchSettings(
        seq_length=SEQ_LENGTH,
        micro_batch_size=min(micro_batch_size, max(1, global_batch_size // (dp * config.parallel.pp))),
        global_batch_size=global_batch_size,
        packing=packing,
    )
    shard = BatchShard(
        dp_rank=built.position.dp_rank,
        dp_size=dp,
        pad_to_multiple_of=config.parallel.length_multiple,
        micro_batches_multiple_of=config.parallel.pp if config.parallel.vpp > 1 else 1,
        equal_lengths=equal_lengths,
    )
    in_order = replace(sizes, shuffle=False)
    store = open_samples(samples)
    schedule = build_schedule(optimizer, chosen, TOTAL_STEPS)
    teacher = build_teacher(config, plan, platform(), built.position, precision)
    recipe = recipe_of(config)
    stepper = Stepper(built.stages, optimizer, schedule, recipe.objective(config), teacher)
    batches = make_batches(config, store, sizes, shard)
    valid = make_batches(config, store.select(range(VALID_SAMPLES)), in_order, shard)
    if recipe.has_reference(config):
        path, parts = Path(reference or tempfile.mkdtemp()) / "reference.npz", {"train": batches, "valid": valid}
        compute_reference(stepper, parts, path, built.position, fresh=fresh, stop=StopFlag(), log=print)
    return Training(built, stepper, batches, valid, config)


def train(
    *,
    steps: int = TOTAL_STEPS,
    save_at: list[int] | None = None,
    root: str | None = None,
    keep: int = 2,
    resume: str | None = None,
    evaluate: bool = False,
    slow_rank: int | None = None,
    overflow_at: list[int] | None = None,
    exports: str | None = None,
    offload: bool | None = None,
    **layout: Any,
) -> dict[str, Any]:
    """Train up to step ``steps``; returns curves by step and a digest of the final state.

    With ``offload`` given there is an evaluation before each step, within :meth:`StateOffload.on_host` if it is true;
    ``evaluation_bytes`` are those of the state in it.

    Rank ``slow_rank`` sleeps before each stage, so that messages to it wait. In the steps ``overflow_at`` (from 0) the
    last rank has one infinite gradient. Folder ``exports`` gets the adapters before and after, and the merged model.
    """
    training = start(**layout)
    if exports is not None:
        export_adapter(training.model, training.config, Path(exports, "before"))
    if dist.get_rank() == slow_rank:
        for stage in training.stepper.model:
            stage.register_forward_pre_hook(lambda *_: time.sleep(0.02))
    stepper, parallel = training.stepper, training.model.plan.parallel
    first = 0
    if resume is not None:
        first = save_load.load(Path(resume), stepper, parallel).step
    curves = ("loss", "grad_norm", "lr", "loss_tokens", "mtp_loss", "load")
    result: dict[str, Any] = {"first": first, "metrics": [], **{curve: [] for curve in curves}}
    if evaluate:
        result["valid_before"] = stepper.evaluate(training.valid.eval_batches()).loss
    names = ("loss_scale", "skipped") if stepper.loss_scale is not None else ()
    result |= {name: [] for name in names}
    state = StateOffload(stepper.model, stepper.optimizer)
    for step in range(first, steps):
        if offload is not None:
            with state.on_host() if offload else nullcontext():
                result["evaluation_bytes"] = memory_stats(stepper.model, stepper.optimizer)
                stepper.evaluate(training.valid.eval_batches())
        _poison(stepper, now=step in (overflow_at or ()))
        done = stepper.train_step(training.batches.step(step))
        result["loss"].append(done.loss)
        result["grad_norm"].append(done.grad_norm)
        result["lr"].append(done.lr)
        result["metrics"].append(dict(done.metrics))
        result["mtp_loss"].append(done.metrics.get("mtp_loss"))
        result["loss_tokens"].append(done.loss_tokens)
        result["load"].append(None if done.load is None else done.load.metrics())
        for name in names:
            result[name].append(getattr(done, name))
        if step + 1 in (save_at or ()):
            progress = run_state.Progress(step=step + 1, data="these samples")
            save_load.save(Path(root or ""), stepper, progress, parallel, SaveOptions(keep=keep))
    if exports is not None:
        export_adapter(training.model, training.config, Path(exports, "adapter"))
        export_hf(training.model, Path(exports, "hf"), None, dtype=None, replace=False)
    if evaluate:
        result["valid_after"] = stepper.evaluate(training.valid.eval_batches()).loss
    return result | {"digest": _digest(training)}


def diverged_step(**settings: Any) -> dict[str, Any]:
    """A step with an infinite gradient after a good one: its error, and whether the weights changed."""
    training = start(**settings)
    training.stepper.train_step(training.batches.step(0))
    before = _digest(training)
    _poison(training.stepper, now=True)
    try:
        training.stepper.train_step(training.batches.step(1))
    except Diverged as error:
        return {"text": str(error), "unchanged": _digest(training) == before}
    raise AssertionError("the step was not refused")


def train_counting_shapes(**settings: Any) -> dict[str, Any]:
    """Train; ``shapes`` are the exchanges of shapes between stages, ``tokens`` those in micro batches, with padding."""
    exchange, forward = P2PCommunicator._communicate_shapes, _forward_step
    counts = {"shapes": 0, "tokens": 0}

    def count_exchange(*args: Any) -> Any:
        counts["shapes"] += 1
        return exchange(*args)

    def count_tokens(iterator: Any, *args: Any, **kwargs: Any) -> Any:
        batch = next(iterator)
        counts["tokens"] += batch.input_ids.numel()
        return forward(iter([batch]), *args, **kwargs)

    with (
        patch.object(P2PCommunicator, "_communicate_shapes", count_exchange),
        patch("isthmus.engine.step._forward_step", count_tokens),
    ):
        return train(**settings) | counts


def train_with_async_tp(**layout: Any) -> dict[str, Any]:
    """``train`` with ``parallel.async_tp``, and the calls of each operator of symmetric memory.

    The CPU computes the operators as torch does in its own tests, with a collective and a matmul.
    """
    from torch.distributed import _symmetric_memory as module

    calls: dict[str, int] = {}
    library = torch.library.Library("symm_mem", "IMPL")

    def count(name: str, kernel: Any) -> None:
        def counted(*args: Any, **kwargs: Any) -> Any:
            calls[name] = calls.get(name, 0) + 1
            return kernel(*args, **kwargs)

        library.impl(name, counted, "CPU")

    count("fused_all_gather_matmul", module._fused_all_gather_matmul_fallback)
    count("fused_matmul_reduce_scatter", module._fused_matmul_reduce_scatter_fallback)
    return train(**layout, async_tp=True) | {"calls": calls}


def _poison(stepper: Stepper, *, now: bool) -> None:
    def finalize(*args: Any, **kwargs: Any) -> None:
        reduce_and_scale_grads(*args, **kwargs)
        if now and dist.get_rank() == dist.get_world_size() - 1:
            # A gradient in the optimizer shard of this rank.
            buckets = [bucket for group in stepper.model[-1].bucket_groups for bucket in group.buckets]
            shard = buckets[-1].grad_data.chunk(parallel_state.get_data_parallel_world_size())
            shard[parallel_state.get_data_parallel_rank()][0] = math.inf

    stepper.model[0].config.finalize_model_grads_func = finalize


def _digest(training: Training) -> list[str]:
    """Hash per rank of weights, main weights, moments and step counts."""
    hasher = hashlib.blake2b(digest_size=16)

    def add(tensor: torch.Tensor) -> None:
        tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        hasher.update(dense(tensor).detach().contiguous().flatten().view(torch.uint8).cpu().numpy().data)

    gather_weights(training.model.stages)
    for _, tensor in sorted(live_tensors(training.model.stages).items()):
        add(tensor)
    for adam in torch_optimizers(training.stepper.optimizer):
        for parameter in (parameter for group in adam.param_groups for parameter in group["params"]):
            for tensor in (parameter, *(value for _, value in sorted(adam.state[parameter].items()))):
                add(tensor)
    digests: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(digests, hasher.hexdigest())
    return digests


def refusal(*, task: str, **settings: Any) -> dict[str, Any]:
    """The error that ``task`` raises, which must be the same on all ranks: class name, exit code and message."""
    try:
        result = globals()[task](**settings)
    except IsthmusError as error:
        mine = {"kind": type(error).__name__, "code": error.exit_code, "text": str(error)}
    else:
        raise AssertionError(f"{task} was not refused: {result}")
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, mine)
    assert all(other == gathered[0] for other in gathered), gathered
    return mine


def export(*, model: str, destination: str, precision: str = "fp32", dtype: str | None = None, **parallel: int) -> None:
    """Load a model folder and export it unchanged, like a run."""
    config = _plain_config(model, **parallel)
    built = join_and_build(config, plan_model(open_run_model(config), config), platform(), precision)
    chosen = None if dtype is None else getattr(torch, dtype)
    export_hf(built, Path(destination), None, dtype=chosen, replace=False)


def export_sharded(*, model: str, destination: str, max_shard_bytes: float, tp: int = 1, pp: int = 1) -> None:
    """Like :func:`export`, with files of at most ``max_shard_bytes``."""
    config = _plain_config(model, tp, pp)
    model_plan = plan_model(open_run_model(config), config)
    built = join_and_build(config, model_plan, platform(), "fp32", training=False)
    dtypes = {name: info.dtype for name, info in model_plan.source.tensors.items()}
    plan = export_plan(model_plan.family, model_plan.architecture, dtypes, max_shard_bytes=max_shard_bytes)
    folder = Path(destination)
    if built.position.rank == 0:
        folder.mkdir()
        plan.create(folder)
    dist.barrier()
    live = live_tensors(built.stages)
    export_weights(live, model_plan.family, model_plan.architecture, plan, folder, layout=built.layout)
    dist.barrier()


def _plain_config(model: str, tp: int = 1, pp: int = 1, **more: int) -> RunConfig:
    return RunConfig.model_validate(
        {
            "recipe": "pretrain",
            "out": "unused",
            "model": {"path": model},
            "data": {"files": ["unused"]},
            "parallel": {"tp": tp, "pp": pp, **more},
        }
    )


def logits_of(*, model: str, tokens: list[int], tp: int) -> list[list[float]]:
    """Logits of one sequence with tensor parallelism over ``tp`` ranks."""
    return model_logits(load_model(model, {"tp": tp}), torch.tensor(tokens)).tolist()


def random_streams(*, model: str, samples: str, root: str, tp: int) -> dict[str, Any]:
    """Draw random numbers after saving, after a new start and after loading the checkpoint, from each stream."""
    layout: dict[str, Any] = {"model": model, "samples": samples, "tp": tp}
    training = start(**layout)
    _draw()
    parallel = training.model.plan.parallel
    save_load.save(Path(root), training.stepper, run_state.Progress(step=1, data=""), parallel, SaveOptions(keep=1))
    expected = _draw()
    parallel_state.destroy_model_parallel()
    training = start(**layout)
    fresh = _draw()
    save_load.load(Path(root) / "iter_0000001", training.stepper, parallel)
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, {"expected": expected, "fresh": fresh, "loaded": _draw()})
    return {name: [rank[name] for rank in gathered] for name in ("expected", "fresh", "loaded")}


def save_both_ways(*, model: str, samples: str, root: str, **layout: Any) -> list[str]:
    """Save step 1, by torch too, then in the background, slowly, and step 2 meanwhile; returns the log."""
    training = start(model=model, samples=samples, **layout)
    stepper, parallel, options = training.stepper, training.model.plan.parallel, SaveOptions(keep=2)
    stepper.train_step(training.batches.step(0))
    progress = run_state.Progress(step=1, data="these samples")
    save_load.save(Path(root, "synchronous"), stepper, progress, parallel, options)
    state = take_state(Path(root), stepper, progress, parallel, options).state
    planner = MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
    by_torch = dcp.FileSystemWriter(Path(root, "torch"), thread_count=1)
    dcp.save(state, storage_writer=by_torch, planner=planner)
    log, saved = list[str](), list[int]()
    saves = Saves(
        Path(root, "asynchronous"),
        parallel,
        asynchronous=True,
        saved=lambda step, _path: saved.append(step),
        log=log.append,
    )
    write, released = CheckpointWriter._write, threading.Event()
    with patch.object(CheckpointWriter, "_write", lambda *args: (released.wait(), write(*args))[1]):
        saves.save(stepper, progress, options)
        stepper.train_step(training.batches.step(1))
        assert not saved and saves.ended() == 0.0
        threading.Timer(0.2, released.set).start()
        saves.save(stepper, run_state.Progress(step=2, data="these samples"), options)
        assert saved == [1]
        saves.finish()
    assert saved == [1, 2]
    return log


def stored_checkpoints(*, model: str, samples: str, root: str, store: str) -> dict[str, Any]:
    """Save two steps to a store, load the first one, and then with a damaged data file."""
    training = start(model=model, samples=samples, tp=2)
    stepper, parallel, target = training.stepper, training.model.plan.parallel, CheckpointStore(store)
    addresses: list[str] = []
    saves = Saves(
        Path(root),
        parallel,
        asynchronous=True,
        saved=lambda _, address: addresses.append(str(address)),
        log=print,
        store=target,
    )
    weights: list[dict[str, torch.Tensor]] = []
    for step in (1, 2):
        stepper.train_step(training.batches.step(step))
        weights.append({name: tensor.clone() for name, tensor in live_tensors(training.model.stages).items()})
        saves.save(stepper, run_state.Progress(step=step, data=""), SaveOptions(keep=2))
    saves.finish()
    folder = target.fetch(1, Path(root) / f"copy-{dist.get_rank()}")
    progress = save_load.load(folder, stepper, parallel)
    live = live_tensors(training.model.stages)
    equal = all(torch.equal(live[name], tensor) for name, tensor in weights[0].items())
    changed = any(not torch.equal(live[name], tensor) for name, tensor in weights[1].items())
    if dist.get_rank() == 0:
        content = bytearray(target.objects.read("iter_0000001/__1_0.distcp"))
        content[len(content) // 2] ^= 1
        target.objects.write("iter_0000001/__1_0.distcp", bytes(content))
    dist.barrier()
    try:
        save_load.load(folder, stepper, parallel)
        refusal = ""
    except IsthmusError as error:
        refusal = f"{error.exit_code} {error}"
    ranks = gather_objects((equal, changed, progress.step, refusal))
    return {"ranks": ranks, "addresses": addresses, "latest": target.latest()}


def stored_in_s3(*, environment: dict[str, str], **settings: Any) -> dict[str, Any]:
    with patch.dict(os.environ, environment):
        return stored_checkpoints(**settings)


def index_readers(*, model: str, samples: str, root: str) -> list[dict[str, int]]:
    """What each rank read and sent in three saves, of which the second has the same parts, and a load."""
    training = start(model=model, samples=samples)
    stepper, parallel, options = training.stepper, training.model.plan.parallel, SaveOptions(keep=3)
    saves = Saves(Path(root), parallel, asynchronous=False, saved=lambda *_: None, log=print)
    sent = []
    for step in (1, 2, 3):
        stepper.train_step(training.batches.step(step))
        more = {"more": ShardedObject("more", step, (2,), (dist.get_rank(),))} if step == 3 else {}
        saves.save(stepper, run_state.Progress(step=step, data=""), replace(options, more_state=more))
        sent.append(saves._gathered.num_sent)
    with patch.object(opened_checkpoint, "check_folder", wraps=opened_checkpoint.check_folder) as full_check:
        with patch.object(opened_checkpoint, "_checked_index", wraps=opened_checkpoint._checked_index) as index:
            with patch.object(checked_files, "read_checksums", wraps=checked_files.read_checksums) as lists:
                progress = save_load.load(Path(root) / "iter_0000002", stepper, parallel)
    read = [call.args[0].name for call in lists.call_args_list].count("iter_0000002")
    counts = {"full_checks": full_check.call_count, "indices": index.call_count, "lists": read, "step": progress.step}
    return gather_objects({**counts, **{f"sent {n}": count for n, count in enumerate(sent, 1)}})


def _draw() -> list[float]:
    """One number of the stream that tp ranks share, and one of the stream per rank."""
    shared = torch.rand(1).item()
    with get_cuda_rng_tracker().fork():
        return [shared, torch.rand(1).item()]


def save_and_export(*, model: str, samples: str, root: str, destination: str, **layout: Any) -> None:
    """Train for two steps, then write a checkpoint and an export."""
    training = start(model=model, samples=samples, **layout)
    for step in range(2):
        training.stepper.train_step(training.batches.step(step))
    progress = run_state.Progress(step=2, data="these samples")
    save_load.save(Path(root), training.stepper, progress, training.model.plan.parallel, SaveOptions(keep=1))
    export_hf(training.model, Path(destination), None, dtype=None, replace=False)


def load_strictly(*, model: str, checkpoint_folder: str, tp: int = 1, pp: int = 1) -> dict[str, Any]:
    """Load a converted checkpoint with megatron-core into a model of zeros.

    Returns:
        ``max_difference`` from the tensors loaded from the model folder, over all ranks, and the number of ``tensors``.
    """
    config = _plain_config(model, tp, pp)
    (live,) = join_and_build(
        config, plan_model(open_run_model(config), config), platform(), "fp32", training=False
    ).stages
    expected = {name: tensor.clone() for name, tensor in live_tensors(live).items()}
    with torch.no_grad():
        for parameter in live.parameters():
            parameter.zero_()
    # Some norms of experts and of latent attention have two names in the file; the model loads one of them.
    two_names = live.architecture.moe is not None or live.architecture.latent is not None
    strict = StrictHandling.RAISE_UNEXPECTED if two_names else StrictHandling.RAISE_ALL
    state = dist_checkpointing.load({"model": live.sharded_state_dict()}, checkpoint_folder, strict=strict)
    live.load_state_dict(state["model"])
    difference = max((tensor - expected[name]).abs().max().item() for name, tensor in live_tensors(live).items())
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, (difference, len(expected)))
    return {
        "max_difference": max(difference for difference, _ in gathered),
        "tensors": sum(count for _, count in gathered),
    }


def load_legacy(*, model: str, checkpoint_folder: str, tp: int = 1, pp: int = 1) -> dict[str, Any]:
    """Load the legacy file of this rank with ``strict=True``, like Megatron-LM; see :func:`load_strictly`."""
    config = _plain_config(model, tp, pp)
    built = join_and_build(config, plan_model(open_run_model(config), config), platform(), "fp32", training=False)
    (live,), position = built.stages, built.position
    expected = {name: tensor.clone() for name, tensor in live_tensors(live).items()}
    with torch.no_grad():
        for parameter in live.parameters():
            parameter.zero_()
    stage = parallel_state.get_pipeline_model_parallel_rank()
    folder = Path(checkpoint_folder) / (f"mp_rank_{position.tp_rank:02d}" + (f"_{stage:03d}" if pp > 1 else ""))
    state = torch.load(folder / "model_optim_rng.pt", weights_only=False)
    live.load_state_dict(state["model"], strict=True)
    difference = max((tensor - expected[name]).abs().max().item() for name, tensor in live_tensors(live).items())
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, (difference, state["args"].tensor_model_parallel_size))
    return {"max_difference": max(difference for difference, _ in gathered), "tp": gathered[0][1]}


def run_cases(*, task: str, cases: list[dict[str, Any]], **shared: Any) -> list[Any]:
    """The results of ``task`` for each case, run one after another in the same processes."""
    results = []
    for case in cases:
        parallel_state.destroy_model_parallel()
        leave_groups()
        results.append(globals()[task](**shared | case))
    return results


def saved_activations(*, model: str, samples: str, **layout: Any) -> dict[str, Any]:
    """Bytes that autograd saves for one micro batch on this rank, and the estimate of the formula.

    The formula is ``Layer.saved_bytes`` (families/blocks/layer.py), with ``outside_bytes`` for the rest. Each storage
    counts once; weights do not count.
    """
    training = start(model=model, samples=samples, **layout)
    stepper, plans = training.stepper, training.model.plan
    (batch, *_) = training.batches.step(0)
    (stage,) = stepper.model
    stage.train()
    weights = {parameter.untyped_storage().data_ptr() for parameter in stage.parameters()}
    saved: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage  # a reference, so that the address is not reused
        return tensor

    pack_recomputed = _Recomputed.pack

    def pack_in_block(block: _Recomputed, tensor: torch.Tensor) -> Any:
        """A block of ``recompute_if`` saves either the tensor or what computes it again."""
        packed = pack_recomputed(block, tensor)
        cells = [cell.cell_contents for cell in block.compute.__closure__ or ()]
        for remaining in [packed] if packed is tensor else cells:
            if isinstance(remaining, torch.Tensor):
                pack(remaining)
        return packed

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        with patch.object(_Recomputed, "pack", pack_in_block):
            _forward_step(iter([batch]), stage)
    settings = layout.get("more") or {}
    architecture, recompute = plans.architecture, layout.get("recompute", "none")
    modules = settings.get("recompute_modules", ["core_attn"])
    micro_batch = MicroBatch(
        num_tokens=batch.input_ids.numel(),
        bytes_per_element=training.model.dtype.itemsize,
        tp=plans.parallel.tp,
        sp=plans.parallel.sequence_parallel,
        recomputed=frozenset(modules if recompute == "selective" else ()),
    )
    full = settings.get("recompute_layers", architecture.num_layers) if recompute == "full" else 0
    inputs = full * micro_batch.outside * architecture.hidden_size * micro_batch.bytes_per_element
    layers = sum(sum(layer.saved_bytes(micro_batch).values()) for layer in architecture.layers[full:])
    ends = {"loss_tokens": int(batch.loss_mask.sum()), "first": True, "last": True}
    expected = inputs + layers + outside_bytes(architecture, micro_batch, **ends)
    return {"measured": sum(storage.nbytes() for storage in saved.values()), "expected": expected}


def build_messages(**layout: Any) -> list[str]:
    """Messages of building the model."""
    return list(start(**layout).model.messages)


def estimated_and_actual_memory(**layout: Any) -> list[dict[str, Any]]:
    """The memory estimate and the actual numbers of each rank."""
    training = start(**layout)
    built, optimizer = training.model, training.stepper.optimizer
    config = RunConfig.model_validate(
        {
            "recipe": "pretrain", "out": "unused", "model": {"path": layout["model"]}, "train": {"steps": 1},
            "data": {"files": ["unused"], "seq_length": SEQ_LENGTH}, "parallel": built.plan.parallel,
            "optim": layout.get("optim", {}), "lora": layout.get("lora", {}),
        }
    )  # fmt: skip
    estimate = estimate_memory(built.plan, config, layout.get("precision", "fp32"))
    moments = [
        tensor
        for adam in torch_optimizers(optimizer)
        for state in adam.state.values()
        for name, tensor in state.items()
        if name != "step"
    ]
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in moments]
    parameters = [parameter for stage in built.stages for parameter in stage.parameters()]
    mine = {
        "parameters": sum(parameter.numel() for parameter in parameters),
        "moments": sum(tensor.numel() * tensor.element_size() for tensor in local),
        "estimate": {"parameters": estimate.parameters, "optimizer": estimate.optimizer, "weights": estimate.weights},
        "weights": sum(
            sum(item.nbytes for item in (entry.elements if isinstance(entry, QuantizedWeight) else (entry,)))
            for entry in parameters
        ),
    }
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, mine)
    return gathered
