"""Runs Isthmus in the fine-tuning benchmark: model, optimizer, stepper and batches of the sft recipe.

Styles: ``alone`` has ``micro_batch_size`` samples per micro batch, ``packed`` as many packed sequences.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rounds import turn_files

from isthmus.config.schema import RunConfig
from isthmus.data.batching.batches import Batches, BatchSettings
from isthmus.engine.parallel.process_groups import close_groups
from isthmus.platforms.detect import detect
from isthmus.platforms.environment import apply_env
from isthmus.recipes.model.rank_model import join_and_build
from isthmus.recipes.plan.model_plan import open_run_model, plan_model
from isthmus.train.flops import flops_per_batch
from sft.ceiling_process import CeilingProcess
from sft.clock import Clock
from sft.workload import Turn


def run(turn: Turn) -> dict[str, Any]:
    """Train and return the result of the run."""
    config = RunConfig.model_validate(
        {
            "recipe": "sft",
            "out": "unused",
            "model": {"path": str(turn.model)},
            "data": {"files": ["unused"], "seq_length": turn.seq_length},
            "optim": {"lr": turn.lr, "schedule": "constant"},
            "lora": {}
            if turn.lora_rank is None
            else {"rank": turn.lora_rank, "alpha": 2 * turn.lora_rank, "quantize": turn.quantize},
        }
    )
    plan = plan_model(open_run_model(config), config)
    platform = detect("cpu")
    apply_env(platform)
    platform.prepare_process()
    model = join_and_build(config, plan, platform, turn.precision)
    from isthmus.engine.optim.learning_rate import build_schedule
    from isthmus.engine.optim.optimizer import build_optimizer
    from isthmus.engine.step import Stepper

    optimizer = build_optimizer(model.stages, config.optim)
    stepper = Stepper(model.stages, optimizer, build_schedule(optimizer, config.optim, 10000))
    packed = turn.style == "packed"
    batches = Batches(
        turn.samples(),
        BatchSettings(
            seq_length=turn.seq_length,
            micro_batch_size=turn.micro_batch_size,
            global_batch_size=turn.micro_batch_size * turn.accumulation,
            packing=packed,
            shuffle=packed,
        ),
    )
    ceiling: CeilingProcess | None = None
    clock, step, executed, model_flops = Clock(turn), 0, 0.0, 0.0
    while not clock.enough:
        micro_batches = batches.step(step)
        clock.losses.append(stepper.train_step(micro_batches).loss)
        num_tokens = sum(batch.num_tokens for batch in micro_batches)
        clock.step_done(num_tokens)
        if step >= turn.warmup_steps:
            squares = sum(length**2 for batch in micro_batches for length in batch.lengths)
            loss_tokens = sum(batch.num_loss_tokens for batch in micro_batches)
            flops = flops_per_batch(plan.architecture, num_tokens, squares, loss_tokens)
            executed += flops
            model_flops += flops_per_batch(plan.architecture, num_tokens, squares)
            if ceiling is not None:
                ceiling.step_done(flops, clock.times_s[-1])
        elif step == turn.warmup_steps - 1 and turn.ceiling is not None:
            ceiling = CeilingProcess(turn.ceiling)
        clock.restart()
        step += 1
    timed_s = sum(clock.times_s)
    # Closed before the clock reads CPU times: those of a child count as ours once it has been waited for.
    shares = {} if ceiling is None else ceiling.close()
    rates = {"executed_gflops": executed / timed_s / 1e9, "all_logits_gflops": model_flops / timed_s / 1e9}
    result = clock.result() | shares | rates
    if turn.profile:
        from sft.step_profile import profile_step

        result["profile"] = profile_step(lambda: stepper.train_step(batches.step(step)), optimizer)
    return result


if __name__ == "__main__":
    spec, result_file = turn_files()
    result = run(Turn(**spec))
    Path(result_file).write_text(json.dumps(result))
    close_groups()
