"""Runs transformers or the plain PyTorch model in the GPU benchmarks: autocast over float32 weights, fused AdamW."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from rounds import turn_files
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function

from gpu_turns.cases import Absent, Turn
from gpu_turns.measure import Step, row
from gpu_turns.plain_model import load_plain

MicroBatch = tuple[Tensor, Tensor, tuple[int, ...]]
"""Ids and shifted labels, int64 [B, S], -100 without loss; and the tokens of each sample."""
CHAT_SAMPLES = 16
"""Samples of a padded micro batch."""


def build(turn: Turn, device: torch.device) -> tuple[nn.Module, Callable[[Tensor, Tensor], Tensor]]:
    """The model, and the function that computes the sum of its losses."""
    backend = "eager" if turn.dry else "inductor"
    if turn.model == "plain":
        plain = load_plain(turn.model_folder, device)
        if turn.precision == "fp8":
            _use_fp8(plain, emulate=turn.dry)
        for block in plain.model.layers if turn.compiled else ():
            block.compile(backend=backend)
        if turn.compiled:
            plain.sum_of_losses = torch.compile(plain.sum_of_losses, backend=backend)
        return plain, plain
    from transformers import AutoModelForCausalLM

    if turn.attention == "flash_attention_2" and find_spec("flash_attn") is None:
        raise Absent("the package flash-attn is not installed")
    model: Any = AutoModelForCausalLM.from_pretrained(
        turn.model_folder, dtype=torch.float32, attn_implementation=turn.attention
    ).to(device)
    model.config.use_cache = False
    if turn.compiled:
        model.compile(backend=backend)
    item = torch.ones((), device=device)

    def losses(ids: Tensor, labels: Tensor) -> Tensor:
        # The mask of causal attention without padding is not needed: padding comes last and has no loss.
        loss: Tensor = model(input_ids=ids, labels=labels, shift_labels=labels, num_items_in_batch=item).loss
        return loss

    return model, losses


def _use_fp8(model: nn.Module, *, emulate: bool) -> None:
    if find_spec("torchao") is None:
        raise Absent("the package torchao is not installed")
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig(emulate=emulate)
    convert_to_float8_training(model, config=config, module_filter_fn=lambda module, name: name != "lm_head")


def micro_batches(turn: Turn, vocabulary: int) -> Iterator[MicroBatch]:
    """Sequences of random tokens, or padded chats, without end."""
    if not turn.chats:
        generator = torch.Generator().manual_seed(0)
        while True:
            tokens = torch.randint(vocabulary, (1, turn.seq_length + 1), generator=generator)
            yield tokens[:, :-1], tokens[:, 1:], (turn.seq_length,)
    from isthmus.data.store.indexed_dataset import open_indexed
    from isthmus.data.store.sample_store import SampleStore

    store = SampleStore.from_indexed(open_indexed(Path(turn.folder) / "samples"))
    first = 0
    while True:
        samples = [store[(first + k) % len(store)] for k in range(CHAT_SAMPLES)]
        first += CHAT_SAMPLES
        lengths = tuple(len(tokens) - 1 for tokens, _ in samples)
        ids = torch.zeros(CHAT_SAMPLES, max(lengths), dtype=torch.int64)
        labels = torch.full_like(ids, -100)
        for k, (tokens, mask) in enumerate(samples):
            full = torch.from_numpy(tokens.astype("int64"))
            ids[k, : lengths[k]] = full[:-1]
            labels[k, : lengths[k]] = full[1:].where(torch.from_numpy(mask[1:].astype(bool)), -100)
        yield ids, labels, lengths


def run(spec: dict[str, Any]) -> dict[str, Any]:
    """Train and return the row."""
    turn = Turn(**spec)
    from isthmus.families.registry import family_for
    from isthmus.platforms.detect import detect
    from isthmus.platforms.environment import apply_env
    from isthmus.train.flops import flops_per_batch

    platform = detect(turn.platform)
    apply_env(platform)
    platform.prepare_process()  # the memory allocator has the same settings for all contestants
    device = torch.device(platform.device_type)
    try:
        model, losses = build(turn, device)
    except Absent as absent:
        return {"absent": str(absent)}
    config = json.loads((turn.model_folder / "config.json").read_text())
    arch = family_for(config).to_architecture(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    batches = micro_batches(turn, arch.vocab_size)

    def train_step() -> Step:
        started_s = time.perf_counter()
        micro = [next(batches) for _ in range(turn.accumulation)]
        counts = [int((labels >= 0).sum()) for _, labels, _ in micro]
        total = torch.zeros((), device=device)
        for ids, labels, _ in micro:
            with torch.autocast(platform.device_type, torch.bfloat16):
                loss = losses(ids.to(device), labels.to(device)) / sum(counts)
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        value = float(total)  # waits for the device
        lengths = [length for _, _, item in micro for length in item]
        flops = flops_per_batch(arch, sum(lengths), sum(length**2 for length in lengths), sum(counts))
        return Step(time.perf_counter() - started_s, sum(lengths), flops, value)

    steps = [train_step()]
    startup_s = time.time() - turn.started_s
    steps += [train_step() for _ in range(turn.warmup_steps + turn.timed_steps - 1)]
    result = row(steps[turn.warmup_steps :], platform, turn.precision, startup_s, platform.memory_gib())
    return result | {"first_loss": steps[0].loss, "profile": profiled(train_step, model, turn.profiled_steps)}


def profiled(step: Callable[[], Step], model: nn.Module, steps: int) -> dict[str, float]:
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


if __name__ == "__main__":
    spec, result_file = turn_files()
    result_file.write_text(json.dumps(run(spec)))
