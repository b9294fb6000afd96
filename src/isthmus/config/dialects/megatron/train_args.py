"""How long, how much at once, in which numbers, and with which optimizer."""

from __future__ import annotations

from typing import Any

from isthmus.config.dialects.megatron.arguments import Arguments
from isthmus.config.dialects.translation import Translation

_OPTIM = {
    "lr": "lr",
    "min_lr": "min_lr",
    "weight_decay": "weight_decay",
    "clip_grad": "clip_grad",
    "beta1": "adam_beta1",
    "beta2": "adam_beta2",
    "eps": "adam_eps",
}
_MODULES = {"core_attn": "core_attn", "mlp": "mlp", "moe": "moe", "shared_experts": None, "layernorm": None}
_SCHEDULES = {"cosine": "cosine", "linear": "linear", "constant": "constant", "WSD": "wsd"}


def put_train(args: Arguments, translation: Translation) -> None:
    """Steps, batch sizes, precision, recomputation and the optimizer."""
    batch = _put_batch(args, translation)
    steps = _put_steps(args, translation, batch)
    translation.put("train.seed", args.get("seed"), args.words("seed"))
    _put_precision(args, translation)
    _put_recompute(args, translation)
    if args.get("mtp_num_layers"):
        words = args.words("mtp_loss_scaling_factor")
        translation.put("train.mtp_loss_weight", args.get("mtp_loss_scaling_factor"), words)
    _put_profile(args, translation, steps)
    _put_optimizer(args, translation)
    _put_schedule(args, translation, steps, batch)


def _put_batch(args: Arguments, translation: Translation) -> int | None:
    micro = args.get("micro_batch_size")
    if micro is None:
        args.complaints.append("--micro-batch-size  is missing")
        return None
    translation.put("train.micro_batch_size", micro, args.words("micro_batch_size"))
    batch: int | None = args.get("global_batch_size")
    words = args.words("global_batch_size")
    world = translation.world
    if batch is None and world.nproc_per_node is not None:
        sizes = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
        ranks = world.nproc_per_node * world.nnodes
        for name in sizes:
            ranks //= args.get(name)
        batch, words = micro * max(1, ranks), f"not said: a micro batch of each of {max(1, ranks)} data parallel ranks"
    if batch is None:
        args.complaints.append(
            "--global-batch-size  is missing, and the number of ranks is not known to derive it from"
        )
        return None
    translation.put("train.global_batch_size", batch, words)
    return batch


def _put_steps(args: Arguments, translation: Translation, batch: int | None) -> int | None:
    steps: int | None = args.get("train_iters")
    words = args.words("train_iters")
    if steps is None and args.said("train_samples") and batch:
        steps, words = max(1, args.get("train_samples") // batch), args.words("train_samples", "global_batch_size")
    if steps is None:
        args.complaints.append("--train-iters  is missing, and so is --train-samples")
        return None
    leaves: int | None = args.get("exit_interval")
    if leaves is not None and leaves < steps:
        why = f"The run would stop at step {leaves} of {steps}. Here it takes all; set train.steps={leaves} for that."
        translation.remark(args.words("exit_interval"), "mistaken", why)
    translation.put("train.steps", steps, words)
    interval = args.get("eval_interval")
    seen = not args.said("eval_iters") or args.get("eval_iters") > 0
    if interval and seen:
        translation.put("train.eval_every", interval, args.words("eval_interval"))
    if args.said_of_this_run("eval_iters") and seen:
        translation.remark(args.words("eval_iters"), "otherwise", "Evaluation takes all of the held-out samples.")
    return steps


def _put_precision(args: Arguments, translation: Translation) -> None:
    halves = [name for name in ("fp16", "bf16") if args.get(name)]
    if len(halves) > 1:
        args.complaints.append("--fp16 --bf16  exclude each other")
    if args.get("fp8"):
        if args.get("fp16"):
            args.complaints.append(f"--fp16 {args.words('fp8')}  exclude each other; FP8 goes with --bf16")
        words = args.words("fp8", "fp8_recipe")
        translation.put("train.precision", "fp8", words)
        if args.get("fp8") not in ("hybrid", "e4m3"):
            args.complaints.append(f"{args.words('fp8')}  is hybrid or e4m3")
        translation.put("train.fp8_format", args.get("fp8"), args.words("fp8"))
        if args.get("fp8_recipe") != "tensorwise":
            said = args.words("fp8_recipe") if args.said("fp8_recipe") else "--fp8-recipe delayed (the default)"
            why = "A scale is of the matrix at hand, one for each (fp8_scaling: tensorwise); rowwise is there too."
            translation.remark(said, "otherwise", why)
        return
    precision = halves[0] if halves else "fp32"
    translation.put("train.precision", precision, args.words(*halves))
    if precision == "fp16":
        if args.get("loss_scale"):
            why = "The loss scale changes by itself, from train.initial_loss_scale on."
            translation.remark(args.words("loss_scale"), "not at all", why)
        for ours in ("initial_loss_scale", "loss_scale_window"):
            translation.put(f"train.{ours}", args.get(ours), args.words(ours))


def _put_recompute(args: Arguments, translation: Translation) -> None:
    how, method, layers = (args.get(f"recompute_{what}") for what in ("granularity", "method", "num_layers"))
    words = args.words(
        "recompute_granularity",
        "recompute_method",
        "recompute_num_layers",
        "checkpoint_activations",
        "recompute_modules",
    )
    if args.get("checkpoint_activations") or (how is None and method is not None):
        how = "full"  # of old, when there was nothing else
    if how is None and args.get("recompute_activations"):
        how, words = "selective", args.words("recompute_activations")
    if how is None and args.get("moe_layer_recompute"):
        words = args.words("moe_layer_recompute")
        translation.put("train.recompute", "selective", words)
        translation.put("train.recompute_modules", ["moe"], words)
        return
    if how == "full" and method == "block" and layers == 0:
        translation.put("train.recompute", "none", words)
    elif how not in (None, "full", "selective"):
        args.complaints.append(f"{words}  is full or selective")
    elif how == "full":
        translation.put("train.recompute", "full", words)
        if method == "block" and layers is not None:
            translation.put("train.recompute_layers", layers, words)
        elif layers is not None and layers > 1:
            translation.remark(words, "otherwise", "Every layer is computed again from its own input, none in groups.")
    elif how == "selective":
        translation.put("train.recompute", "selective", words)
        asked = args.get("recompute_modules") or ["core_attn"]
        found = [module for module in asked if _MODULES.get(module)]
        if missing := [module for module in asked if not _MODULES.get(module)]:
            why = f"What is computed again is core_attn, mlp or moe, so not {', '.join(missing)}."
            translation.remark(words, "not at all", why)
        translation.put("train.recompute_modules", found or ["core_attn"], words)


def _put_profile(args: Arguments, translation: Translation, steps: int | None) -> None:
    if not args.get("profile"):
        return
    first, last = args.get("profile_step_start") + 1, args.get("profile_step_end")
    words = args.words("profile", "profile_step_start", "profile_step_end")
    if steps is not None and first > steps:
        translation.remark(words, "mistaken", f"The profile would begin at step {first}, and the run has {steps}.")
    elif last >= first:
        translation.put("train.profile", f"{first}-{min(last, steps or last)}", words)


def _put_optimizer(args: Arguments, translation: Translation) -> None:
    if args.get("optimizer") not in ("adam", "adamw"):
        words = args.words("optimizer")
        args.complaints.append(f"{words}  is not built; there is AdamW, which --optimizer adam is too")
    if not args.said("lr"):
        args.complaints.append("--lr  is missing")
    for ours, theirs in _OPTIM.items():
        if args.get(theirs) is not None:
            translation.put(f"optim.{ours}", args.get(theirs), args.words(theirs))
    if args.get("optimizer_cpu_offload"):
        words = args.words("optimizer_cpu_offload")
        why = "Adam's running means are in the machine's memory; main weights and the update stay on the GPU."
        translation.put("optim.offload", True, words)
        translation.remark(words, "otherwise", why)
    start, end = args.get("start_weight_decay"), args.get("end_weight_decay")
    if start is not None and end is not None:
        words = args.words("weight_decay_incr_style", "start_weight_decay", "end_weight_decay")
        translation.put("optim.weight_decay", end, words)
        if start != end:
            translation.remark(words, "not at all", f"Weight decay stays what it is; {end:g} is taken.")


def _put_schedule(args: Arguments, translation: Translation, steps: int | None, batch: int | None) -> None:
    style, words = args.get("lr_decay_style"), args.words("lr_decay_style")
    if (schedule := _SCHEDULES.get(style)) is None:
        args.complaints.append(f"{words}  is not built; give {', '.join(_SCHEDULES)}")
        return
    translation.put("optim.schedule", schedule, words)
    if steps is None or batch is None:
        return
    decay = _steps(args, "lr_decay", batch, steps)
    if args.get("lr_warmup_fraction") is not None:
        warmup, words = int(args.get("lr_warmup_fraction") * decay), args.words("lr_warmup_fraction")
    else:
        warmup, words = _steps(args, "lr_warmup", batch, 0), args.words("lr_warmup_iters", "lr_warmup_samples")
    if warmup >= steps:
        why = f"The warm-up of {warmup} steps does not end within the run of {steps}: {steps - 1} are taken."
        translation.remark(words, "mistaken", why)
        warmup = steps - 1
    translation.put("optim.warmup_steps", warmup, words)
    if schedule == "wsd":
        words = args.words("lr_wsd_decay_iters", "lr_wsd_decay_samples")
        fall = min(_steps(args, "lr_wsd_decay", batch, 1), steps - warmup)
        translation.put("optim.decay_steps", fall, words)
        if args.get("lr_wsd_decay_style") != "linear":
            said = args.words("lr_wsd_decay_style") if args.said("lr_wsd_decay_style") else words
            translation.remark(said, "otherwise", "The final fall is a straight line.")
    words = args.words("lr_decay_iters", "lr_decay_samples")
    if decay != steps and schedule in ("cosine", "linear"):
        translation.put("optim.schedule_steps", max(decay, warmup + 1), words)
    elif decay != steps and schedule == "wsd":
        translation.remark(words, "otherwise", f"The final fall ends at step {steps}, the last, not at {decay}.")
    if args.get("lr_warmup_init"):
        translation.remark(args.words("lr_warmup_init"), "otherwise", "The learning rate rises from 0.")


def _steps(args: Arguments, name: str, batch: int, otherwise: int) -> int:
    """Steps that are said as iterations or as samples."""
    iterations: Any = args.get(f"{name}_iters")
    samples: Any = args.get(f"{name}_samples")
    if samples:
        return max(1, int(samples) // batch)
    return int(iterations) if iterations else otherwise
