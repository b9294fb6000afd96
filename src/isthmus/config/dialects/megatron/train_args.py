"""Arguments of steps, batch sizes, precision, recomputation and the optimizer."""

from __future__ import annotations

from typing import Any

from isthmus.config.dialects.megatron.arguments import Arguments, WrittenArguments
from isthmus.config.dialects.megatron.known_args import SETTINGS
from isthmus.config.dialects.translation import Translation
from isthmus.errors import UsageError

_MODULES = ("core_attn", "mlp", "moe", "layernorm", "moe_act")
_SCHEDULES = {
    "cosine": "cosine",
    "linear": "linear",
    "constant": "constant",
    "WSD": "wsd",
    "inverse-square-root": "inverse_sqrt",
}
DROPOUT = ("train.attention_dropout", "train.hidden_dropout")
_OPTIMIZER = tuple(f"optim.{name}" for name in ("lr", "min_lr", "weight_decay", "clip_grad", "beta1", "beta2", "eps"))


def put_train(args: Arguments, translation: Translation, *, model: bool) -> None:
    """Without ``model``, ``args`` do not describe the model, which has its own dropout rates."""
    batch = _put_batch(args, translation)
    steps = _put_steps(args, translation, batch)
    args.put(translation, "train.seed", *(name for name in DROPOUT if model or args.is_explicit(SETTINGS[name])))
    if args.get("deterministic_mode"):
        args.put(translation, "train.deterministic")
    _put_precision(args, translation)
    _put_recompute(args, translation)
    if args.get("mtp_num_layers"):
        args.put(translation, "train.mtp_loss_weight")
    _put_profile(args, translation, steps)
    _put_optimizer(args, translation)
    _put_schedule(args, translation, steps, batch)


def _put_batch(args: Arguments, translation: Translation) -> int | None:
    micro = args.get("micro_batch_size")
    if micro is None:
        args.errors.append("--micro-batch-size  is missing")
        return None
    args.put(translation, "train.micro_batch_size")
    batch: int | None = args.get("global_batch_size")
    source = args.source("global_batch_size")
    world = translation.world
    if batch is None and world.nproc_per_node is not None:
        sizes = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
        ranks = world.nproc_per_node * world.nnodes
        for name in sizes:
            ranks //= args.get(name)
        batch, source = (
            micro * max(1, ranks),
            f"not given: a micro batch on each of {max(1, ranks)} data parallel ranks",
        )
    if batch is None:
        args.errors.append("--global-batch-size  is missing, and its default needs the number of ranks")
        return None
    translation.put("train.global_batch_size", batch, source)
    return batch


def _put_steps(args: Arguments, translation: Translation, batch: int | None) -> int | None:
    steps: int | None = args.get("train_iters")
    source = args.source("train_iters")
    if steps is None and args.has("train_samples") and batch:
        steps, source = max(1, args.get("train_samples") // batch), args.source("train_samples", "global_batch_size")
    if steps is None:
        args.errors.append("--train-iters  is missing (or --train-samples)")
        return None
    exit_step: int | None = args.get("exit_interval")
    if exit_step is not None and exit_step < steps:
        why = f"Megatron-LM stops at step {exit_step} of {steps}, Isthmus does not. Set train.steps={exit_step}."
        translation.remark(args.source("exit_interval"), "mistake", why)
    translation.put("train.steps", steps, source)
    interval = args.get("eval_interval")
    seen = not args.has("eval_iters") or args.get("eval_iters") > 0
    if interval and seen and interval != steps:  # validation after the last step needs no setting
        args.put(translation, "train.eval_every")
    if args.is_explicit("eval_iters") and seen:
        translation.remark(args.source("eval_iters"), "different", "Evaluation uses the whole validation set.")
    return steps


_BLOCK_RECIPES = ("blockwise", "mxfp8")
"""Values of ``--fp8-recipe`` that are also values of ``train.fp8_scaling``."""


def _put_precision(args: Arguments, translation: Translation) -> None:
    halves = [name for name in ("fp16", "bf16") if args.get(name)]
    if len(halves) > 1:
        args.errors.append("--fp16 --bf16  exclude each other: give one of them")
    if args.get("fp8"):
        if args.get("fp16"):
            args.errors.append(f"--fp16 {args.source('fp8')}  exclude each other: use --bf16 with FP8")
        source = args.source("fp8", "fp8_recipe")
        translation.put("train.precision", "fp8", source)
        if args.get("fp8") not in ("hybrid", "e4m3"):
            args.errors.append(f"{args.source('fp8')}  must be hybrid or e4m3")
        args.put(translation, "train.fp8_format")
        recipe = args.get("fp8_recipe")
        if recipe in _BLOCK_RECIPES:
            translation.put("train.fp8_scaling", recipe, source)
        if recipe == "blockwise":
            why = "The scales of blocks are float32; Transformer Engine rounds them to powers of two by default."
            translation.remark(args.source("fp8_recipe"), "different", why)
        elif recipe not in ("tensorwise", *_BLOCK_RECIPES):
            option = args.source("fp8_recipe") if args.has("fp8_recipe") else "--fp8-recipe delayed (the default)"
            why = "FP8 uses current scaling, one scale per tensor (train.fp8_scaling=tensorwise) or per row (rowwise)."
            translation.remark(option, "different", why)
        return
    precision = halves[0] if halves else "fp32"
    translation.put("train.precision", precision, args.source(*halves))
    if precision == "fp16":
        if args.get("loss_scale"):
            why = "The loss scale is dynamic and starts at train.initial_loss_scale."
            translation.remark(args.source("loss_scale"), "unsupported", why)
        args.put(translation, "train.initial_loss_scale", "train.loss_scale_window")


def _put_recompute(args: Arguments, translation: Translation) -> None:
    how, method, layers = (args.get(f"recompute_{what}") for what in ("granularity", "method", "num_layers"))
    source = args.source(
        "recompute_granularity",
        "recompute_method",
        "recompute_num_layers",
        "checkpoint_activations",
        "recompute_modules",
    )
    if args.get("checkpoint_activations") or (how is None and method is not None):
        how = "full"  # older releases had no granularity
    if how is None and args.get("recompute_activations"):
        how, source = "selective", args.source("recompute_activations")
    if how is None and args.get("moe_layer_recompute"):
        source = args.source("moe_layer_recompute")
        translation.put("train.recompute", "selective", source)
        translation.put("train.recompute_modules", ["moe"], source)
        return
    if how == "full" and method == "block" and layers == 0:
        translation.put("train.recompute", "none", source)
    elif how not in (None, "full", "selective"):
        args.errors.append(f"{source}  must be full or selective")
    elif how == "full":
        translation.put("train.recompute", "full", source)
        if method == "block" and layers is not None:
            translation.put("train.recompute_layers", layers, source)
        elif layers is not None and layers > 1:
            translation.remark(
                source, "different", "Each layer is recomputed from its own input, without groups of layers."
            )
    elif how == "selective":
        translation.put("train.recompute", "selective", source)
        asked = args.get("recompute_modules") or ["core_attn"]
        known = [module for module in asked if module in _MODULES]
        if missing := [module for module in asked if module not in _MODULES]:
            why = f"Isthmus recomputes {', '.join(_MODULES)}, not {', '.join(missing)}."
            translation.remark(source, "unsupported", why)
        translation.put("train.recompute_modules", known or ["core_attn"], source)


def _put_profile(args: Arguments, translation: Translation, steps: int | None) -> None:
    if not args.get("profile"):
        return
    first, last = args.get("profile_step_start") + 1, args.get("profile_step_end")
    source = args.source("profile", "profile_step_start", "profile_step_end")
    if steps is not None and first > steps:
        translation.remark(source, "mistake", f"The profile starts at step {first}, but the run has {steps} steps.")
    elif last >= first:
        translation.put("train.profile", f"{first}-{min(last, steps or last)}", source)


def _put_optimizer(args: Arguments, translation: Translation) -> None:
    if args.get("optimizer") not in ("adam", "adamw"):
        source = args.source("optimizer")
        known = "use --optimizer adam, which is AdamW, or optim.optimizer=muon in the config"
        args.errors.append(f"{source}  is not supported: {known}")
    if not args.has("lr"):
        args.errors.append("--lr  is missing")
    args.put(translation, *_OPTIMIZER)
    if args.get("optimizer_cpu_offload"):
        source = args.source("optimizer_cpu_offload")
        why = "Adam's moments are in host memory; main weights and the update stay on the GPU."
        args.put(translation, "optim.offload")
        translation.remark(source, "different", why)
    start, end = args.get("start_weight_decay"), args.get("end_weight_decay")
    if start is not None and end is not None:
        source = args.source("weight_decay_incr_style", "start_weight_decay", "end_weight_decay")
        translation.put("optim.weight_decay", end, source)
        if start != end:
            translation.remark(source, "unsupported", f"Weight decay is constant: {end:g}.")


def _put_schedule(args: Arguments, translation: Translation, steps: int | None, batch: int | None) -> None:
    style, source = args.get("lr_decay_style"), args.source("lr_decay_style")
    if (schedule := _SCHEDULES.get(style)) is None:
        args.errors.append(f"{source}  is not supported; use {', '.join(_SCHEDULES)}")
        return
    translation.put("optim.schedule", schedule, source)
    if steps is None or batch is None:
        return
    decay = _steps(args, "lr_decay", batch, steps)
    if args.get("lr_warmup_fraction") is not None:
        warmup, source = int(args.get("lr_warmup_fraction") * decay), args.source("lr_warmup_fraction")
    else:
        warmup, source = _steps(args, "lr_warmup", batch, 0), args.source("lr_warmup_iters", "lr_warmup_samples")
    if warmup >= steps:
        why = f"The warm-up of {warmup} steps is longer than the run of {steps}; it is set to {steps - 1}."
        translation.remark(source, "mistake", why)
        warmup = steps - 1
    translation.put("optim.warmup_steps", warmup, source)
    if schedule == "wsd":
        source = args.source("lr_wsd_decay_iters", "lr_wsd_decay_samples")
        decay_steps = min(_steps(args, "lr_wsd_decay", batch, 1), steps - warmup)
        translation.put("optim.decay_steps", decay_steps, source)
        if args.get("lr_wsd_decay_style") != "linear":
            option = args.source("lr_wsd_decay_style") if args.has("lr_wsd_decay_style") else source
            translation.remark(option, "different", "The final decay is linear.")
    source = args.source("lr_decay_iters", "lr_decay_samples")
    if decay != steps and schedule in ("cosine", "linear"):
        translation.put("optim.schedule_steps", max(decay, warmup + 1), source)
    elif decay != steps and schedule == "wsd":
        translation.remark(source, "different", f"The final decay ends at the last step, {steps}, not at {decay}.")
    if args.get("lr_warmup_init"):
        translation.remark(args.source("lr_warmup_init"), "different", "The warm-up starts at 0.")


def _steps(args: Arguments, name: str, batch: int, default: int) -> int:
    """Steps given in iterations or in samples."""
    iterations: Any = args.get(f"{name}_iters")
    samples: Any = args.get(f"{name}_samples")
    if samples:
        return max(1, int(samples) // batch)
    return int(iterations) if iterations else default


def write_train(written: WrittenArguments, *, mtp: bool) -> None:
    """``mtp``: the model has MTP layers. The dropout rates are not null."""
    train, optim = written.config.train, written.config.optim
    if train.steps is None:
        raise UsageError(f"train.epochs={train.epochs:g}: Megatron-LM counts steps. Give train.steps=N.")
    written.put("train.steps", "train.global_batch_size", "train.micro_batch_size")
    written.set("eval_interval", train.eval_every or train.steps, "train.eval_every")  # it has no usable default
    same = ("data.seed",) if written.config.data.seed == train.seed else ()
    written.set("seed", train.seed or None, "train.seed", *same)
    if not train.seed:
        written.remark("train.seed", "different", "Megatron-LM has no seed 0, so it is the default, 1234.")
    written.put("train.deterministic", *DROPOUT)
    _write_precision(written)
    _write_recompute(written)
    if mtp:
        written.put("train.mtp_loss_weight")
    if steps := train.profiled_steps:
        written.set("profile", True, "train.profile")
        written.set("use_pytorch_profiler", True)
        written.set("profile_step_start", steps[0] - 1)
        written.set("profile_step_end", steps[-1])
    written.put(*_OPTIMIZER, "optim.offload")
    style = next((style for style, schedule in _SCHEDULES.items() if schedule == optim.schedule), None)
    if style is None:
        raise UsageError(
            f"optim.schedule={optim.schedule}: Megatron-LM has only {', '.join(_SCHEDULES.values())}. Use one of them."
        )
    written.set("lr_decay_style", style, "optim.schedule")
    written.set("lr_warmup_iters", optim.warmup(train.steps), "optim.warmup_steps", "optim.warmup_fraction")
    written.set("lr_decay_iters", optim.schedule_steps, "optim.schedule_steps")
    written.set("lr_wsd_decay_iters", optim.decay_steps, "optim.decay_steps")
    written.set("lr_wsd_decay_style", None if optim.decay_steps is None else "linear")


def _write_precision(written: WrittenArguments) -> None:
    precision = written.config.train.precision
    if precision == "fp16":
        written.set("fp16", True, "train.precision")
        written.put("train.initial_loss_scale", "train.loss_scale_window")
    else:
        written.set("bf16", precision != "fp32", "train.precision")
    if precision == "fp8":
        written.put("train.fp8_format")
        scaling = written.config.train.fp8_scaling
        if scaling in _BLOCK_RECIPES:
            written.set("fp8_recipe", scaling, "train.fp8_scaling")
        else:
            written.set("fp8_recipe", "tensorwise")


def _write_recompute(written: WrittenArguments) -> None:
    train = written.config.train
    if train.recompute == "none":
        return
    written.set("recompute_granularity", train.recompute, "train.recompute", "train.recompute_layers")
    if train.recompute == "full":
        written.set("recompute_method", "uniform" if train.recompute_layers is None else "block")
        written.set("recompute_num_layers", train.recompute_layers or 1)
    else:
        known = [module for module in train.recompute_modules if module in _MODULES]
        written.set("recompute_modules", known, "train.recompute_modules")
        if missing := [module for module in train.recompute_modules if module not in _MODULES]:
            written.remark("train.recompute_modules", "unsupported", f"Megatron-LM has no {', '.join(missing)}.")
