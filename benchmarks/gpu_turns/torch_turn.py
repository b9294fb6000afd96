"""Runs transformers or the plain PyTorch model in the GPU benchmarks: autocast over float32 weights, fused AdamW."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function

from gpu_turns.cases import LEARNING_RATE, Absent, Turn
from gpu_turns.measure import append_run, append_step
from gpu_turns.plain_model import load_plain
from gpu_turns.rows import append

MicroBatch = tuple[Tensor, Tensor, tuple[int, ...]]
"""Ids and shifted labels, int64 [B, S], -100 without loss; and the tokens of each sample."""
PADDED_TOKENS = 8192
"""Most tokens of a padded micro batch, with padding, unless one sample has more."""


def flash_attention() -> str:
    """transformers' name of the attention: flash-attn where it is installed, or else torch's kernels."""
    return "sdpa" if find_spec("flash_attn") is None else "flash_attention_2"


def build(turn: Turn, device: torch.device) -> tuple[nn.Module, Callable[[Tensor, Tensor], Tensor]]:
    """The model, and the function that computes the sum of its losses."""
    backend = "eager" if turn.dry else "inductor"
    if turn.model == "plain":
        plain = load_plain(Path(turn.weights), device)
        if turn.precision == "fp8":
            _use_fp8(plain, emulate=turn.dry)
        layers = plain.model.layers
        for index, block in enumerate(layers):
            layers[index] = _selective(block) if turn.recompute else block
            layers[index].compile(backend=backend)
        plain.sum_of_losses = torch.compile(plain.sum_of_losses, backend=backend)
        return plain, plain
    from transformers import AutoModelForCausalLM

    # Padding comes last and has no loss, so that causal attention needs no mask.
    attention = "sdpa" if turn.chats or device.type == "cpu" else flash_attention()
    model: Any = AutoModelForCausalLM.from_pretrained(turn.weights, dtype=torch.float32, attn_implementation=attention)
    model.to(device)
    model.config.use_cache = False
    model.compile(backend=backend)
    item = torch.ones((), device=device)

    def losses(ids: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = model(input_ids=ids, labels=labels, shift_labels=labels, num_items_in_batch=item).loss
        return loss

    return model, losses


def _use_fp8(model: nn.Module, *, emulate: bool) -> None:
    if find_spec("torchao") is None:
        raise Absent("the package torchao is not installed")
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig(emulate=emulate)
    convert_to_float8_training(model, config=config, module_filter_fn=lambda module, name: name != "lm_head")


def _selective(block: nn.Module) -> nn.Module:
    """The block with torchtitan's selective recomputation: attention and every second matmul are saved."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    aten = torch.ops.aten
    attention = [name for name in dir(aten) if name.startswith("_scaled_dot_product") and "backward" not in name]
    saved = {getattr(aten, name).default for name in attention}

    def contexts() -> Any:
        matmuls = [0, 0]

        def policy(context: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
            is_matmul = operator == aten.mm.default
            matmuls[context.is_recompute] += is_matmul
            save = operator in saved or (is_matmul and matmuls[context.is_recompute] % 2 == 1)
            return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)

    return checkpoint_wrapper(block, context_fn=contexts, preserve_rng_state=False)


def micro_batches(turn: Turn) -> Iterator[list[MicroBatch]]:
    """The micro batches of each step; packed chats are padded, those of similar length together."""
    for step in torch.load(Path(turn.tokens) / "steps.pt"):
        yield [part for micro in step for part in (_padded(micro) if turn.chats else [_row(micro)])]


def _row(micro: dict[str, Any]) -> MicroBatch:
    return micro["ids"][None], micro["labels"][None], tuple(micro["lengths"])


def _padded(micro: dict[str, Any]) -> Iterator[MicroBatch]:
    lengths = micro["lengths"]
    pairs = zip(micro["ids"].split(lengths), micro["labels"].split(lengths), strict=True)
    ordered = sorted(pairs, key=lambda pair: len(pair[0]))
    pad = partial(nn.utils.rnn.pad_sequence, batch_first=True)
    while ordered:
        longest = len(ordered[-1][0])
        group, ordered = ordered[-max(1, PADDED_TOKENS // longest) :], ordered[: -max(1, PADDED_TOKENS // longest)]
        ids, labels = zip(*group, strict=True)
        yield pad([*ids]), pad([*labels], padding_value=-100), tuple(map(len, ids))


def run(spec: dict[str, Any]) -> None:
    """Train, and profile the last steps."""
    turn = Turn(**spec)
    from isthmus.families.registry import family_for
    from isthmus.platforms.detect import detect
    from isthmus.platforms.environment import apply_env
    from isthmus.train.flops import flops_per_batch

    platform = detect(turn.platform)
    apply_env(platform)
    platform.prepare_process()  # the memory allocator has the same settings for all contestants
    device = torch.device(platform.device_type)
    model, losses = build(turn, device)
    config = json.loads((Path(turn.weights) / "config.json").read_text())
    arch = family_for(config).to_architecture(config)
    adam: dict[str, Any] = {"lr": LEARNING_RATE, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0}
    optimizer = torch.optim.AdamW(model.parameters(), **adam, fused=True)
    batches = micro_batches(turn)
    append_run(platform, turn, attention=getattr(model, "_attn_implementation", "sdpa"))

    def train_step(*, recorded: bool) -> None:
        started_s = time.perf_counter()
        micro = next(batches)
        counts = [int((labels >= 0).sum()) for _, labels, _ in micro]
        total = torch.zeros((), device=device)
        for ids, labels, _ in micro:
            with torch.autocast(platform.device_type, torch.bfloat16):
                loss = losses(ids.to(device), labels.to(device)) / sum(counts)
            loss.backward()
            total += loss.detach()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        value, norm_value = torch.stack([total, norm]).tolist()  # waits for the device
        lengths = [length for _, _, item in micro for length in item]
        flops = flops_per_batch(arch, sum(lengths), sum(length**2 for length in lengths), sum(counts))
        if recorded:
            time_s = time.perf_counter() - started_s
            append_step(time_s, sum(lengths), flops, value, norm_value, platform.memory_gib())

    for _ in range(turn.steps):
        train_step(recorded=True)
    if turn.profiled_steps:
        append("profile", shares=profiled(partial(train_step, recorded=False), model, turn.profiled_steps))


def profiled(step: Callable[[], None], model: nn.Module, steps: int) -> dict[str, float]:
    """Share of the time of ``steps`` steps by part; the rows are those of ``train.profile``."""
    from isthmus.train.step_profile import costs_of, weight_uses

    on_device = next(model.parameters()).is_cuda
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_device else [])]
    with profile(activities=activities, record_shapes=True, profile_memory=True) as profiler:
        for number in range(steps):
            with record_function(f"step {number}"):
                step()
    shapes = {name.replace("self_attn", "attention"): tuple(p.shape) for name, p in model.named_parameters()}
    costs = costs_of(profiler.events() or (), weight_uses(shapes))
    return {name: cost.seconds / costs.wall_s for name, cost in costs.rows.items()}
