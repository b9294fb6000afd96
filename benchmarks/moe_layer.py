"""One MoE layer, forward and backward: Isthmus compared with a loop over its experts, Megatron-Core and transformers.

    python benchmarks/moe_layer.py --record

All have the same weights, tokens and routing. Contestants run in alternation in one process, and medians are reported.
Weight gradients are accumulated over micro batches: in float32 for the first three, in the dtype of the weights for
transformers. Outputs and gradients are compared before the clock starts. Row "matmuls only" is the time of the experts'
matmuls, which is a lower bound for all contestants. See README.md.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from certificate import certificate, cores, publish_result
from rounds import CpuWatch

CONTESTANTS = {
    "isthmus": "all experts of the layer in one autograd function",
    "isthmus-loop": "the same routing and weights, one expert after the other through its modules",
    "megatron-core": "SequentialMLP and linear layers of megatron-core, unmodified, with the same routing",
    "transformers-eager": "the block of transformers, experts one after the other",
    "transformers-grouped": "the block of transformers, with torch's grouped_mm",
}
MATMULS_ONLY = "matmuls only"
"""The row of the lower bound, which is not a layer."""
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"hidden_size": 512, "num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 192},
    "mixtral": {"hidden_size": 512, "num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 1024},
}
GPU_SHAPES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"hidden_size": 2048, "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 1536},
    "mixtral": {"hidden_size": 4096, "num_local_experts": 16, "num_experts_per_tok": 2, "intermediate_size": 4096},
}
TINY: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"hidden_size": 32, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "mixtral": {"hidden_size": 32, "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 24},
}
DTYPES = ("fp32", "bf16")
MOST_FOR_OTHERS = 0.05
"""Largest share of CPU time that other processes may use; beyond it the result is not a valid measurement."""
AGREEMENT = {"fp32": 1e-5, "bf16": 5e-2}
"""Mean difference from Isthmus, relative to the mean magnitude; in bfloat16 some tokens go to other experts."""


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--precision", default=",".join(DTYPES), help="default: %(default)s")
    parser.add_argument("--models", default=",".join(SHAPES), help="default: %(default)s")
    parser.add_argument("--only", default=",".join(CONTESTANTS), help="contestants, with commas (default: all)")
    parser.add_argument("--tokens", default="256,2048", help="of a micro batch (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="runs of each (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=cores(), help="default: all cores")
    parser.add_argument("--platform", default="cpu", help="cpu, or auto for a GPU with larger layers (default: cpu)")
    parser.add_argument("--quick", action="store_true", help="tiny layers, to check that the benchmark runs")
    parser.add_argument("--out", type=Path, help="write the result here")
    parser.add_argument("--record", action="store_true", help="write the result to benchmarks/results/")
    chosen = parser.parse_args(arguments)
    for name, known in (("precision", DTYPES), ("models", SHAPES), ("only", CONTESTANTS)):
        setattr(chosen, name, getattr(chosen, name).split(","))
        if unknown := set(getattr(chosen, name)) - set(known):
            parser.error(f"not known: {', '.join(sorted(unknown))}")
    chosen.tokens = [32] if chosen.quick else [int(tokens) for tokens in chosen.tokens.split(",")]
    if chosen.record and chosen.quick:
        parser.error("--quick is not a measurement and is not recorded")
    return chosen


def contestants(
    family: str, sizes: dict[str, Any], precision: str, device: Any
) -> dict[str, tuple[Callable[[Any], Any], Any]]:
    """For each contestant (function of hidden states [T, H], module with its weights); all weights are equal."""
    import torch
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.moe.experts import SequentialMLP
    from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
    from transformers import AutoConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    from isthmus.config.schema import MoeConfig
    from isthmus.engine.decoder.model_config import transformer_config
    from isthmus.engine.decoder.spec import mlp_modules
    from isthmus.engine.moe.moe_layer import MoeBlock
    from isthmus.families.registry import all_families

    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    hf_config = AutoConfig.for_model(family, num_attention_heads=8, num_key_value_heads=8, num_hidden_layers=1, **sizes)
    arch = all_families()[family].to_architecture(hf_config.to_dict())
    assert arch.moe is not None
    config = transformer_config(arch, dtype=dtype, device=device)
    modules = mlp_modules(arch.mlp, moe=True, limit=None)
    block = MoeBlock(
        config, modules, shared=modules, moe=arch.moe, settings=MoeConfig(), norm=lambda _: torch.nn.Identity()
    ).to(device)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.normal_(std=0.05)
    _with_buffers(block)
    modules = mlp_modules(arch.mlp, moe=True, limit=None)
    modules.linear_fc1, modules.linear_fc2 = ColumnParallelLinear, RowParallelLinear
    core_experts = SequentialMLP(arch.moe.num_experts, config, modules, get_default_pg_collection()).to(device)
    core_experts.load_state_dict(block.experts.state_dict(), strict=False)
    _with_buffers(core_experts)

    def loop(hidden: Any, shares: Any, groups: Any) -> Any:
        sizes = groups.on_host
        outputs = []
        parts = zip(reversed(block.experts.local_experts), hidden.split(sizes), shares.split(sizes), strict=True)
        for expert, part, share in parts:
            inner = expert.activation_func(expert.linear_fc1(part)[0]) * share[:, None].to(part.dtype)
            outputs.append(expert.linear_fc2(inner)[0])
        return torch.cat(outputs)

    def run_core(hidden: Any, shares: Any, groups: Any) -> Any:
        sizes = groups.on_host
        reversed_parts = [
            torch.cat(item.split(sizes)[::-1]) for item in (hidden, shares)
        ]  # Megatron-Core has the opposite order of experts
        outputs, _ = core_experts(reversed_parts[0], groups.counts.flip(0), reversed_parts[1])
        return torch.cat(outputs.split(sizes[::-1])[::-1])

    def with_routing(experts: Callable[..., Any]) -> Callable[[Any], Any]:
        return lambda hidden: block.dispatch(hidden, *block.router(hidden), experts, lambda: None)

    values: dict[str, tuple[Callable[[Any], Any], Any]] = {
        "isthmus": (with_routing(block.experts), block),
        "isthmus-loop": (with_routing(loop), block),
        "megatron-core": (with_routing(run_core), core_experts),
    }
    kind = Qwen3MoeSparseMoeBlock if family == "qwen3_moe" else MixtralSparseMoeBlock
    for name, kernel in (("transformers-eager", "eager"), ("transformers-grouped", "grouped_mm")):
        theirs_config = AutoConfig.for_model(family, norm_topk_prob=False, **sizes)
        theirs_config._experts_implementation = kernel
        theirs = kind(theirs_config).to(device, dtype)
        experts = block.experts.local_experts
        with torch.no_grad():
            theirs.gate.weight.copy_(block.router.weight)
            theirs.experts.gate_up_proj.copy_(torch.stack([expert.linear_fc1.weight for expert in experts]))
            theirs.experts.down_proj.copy_(torch.stack([expert.linear_fc2.weight for expert in experts]))
        values[name] = (_block_output(theirs), theirs)
    return values


def _block_output(block: Any) -> Callable[[Any], Any]:
    def run(hidden: Any) -> Any:
        out = block(hidden[None])
        return (out[0] if isinstance(out, tuple) else out)[0]

    return run


def expert_matmuls(block: Any, hidden: Any) -> Callable[[], None]:
    """The six matmuls of each expert, forward and backward, on its number of routed tokens."""
    import torch

    with torch.no_grad():
        _, chosen = block.router(hidden)
        counts = torch.bincount(chosen.flatten(), minlength=len(block.experts.local_experts)).tolist()
    work = []
    for expert, count in zip(block.experts.local_experts, counts, strict=True):
        weights = expert.linear_fc1.weight, expert.linear_fc2.weight
        first, second = (weight.detach() for weight in weights)
        of_first, of_second = (weight.main_grad for weight in weights)
        x, inner, wide, out = (hidden.new_zeros(count, size) for size in (*second.shape, first.shape[0], len(second)))
        work.append((first, second, of_first, of_second, x, inner, wide, out))

    def add(to: Any, left: Any, right: Any) -> None:
        if left.dtype == to.dtype:
            torch.addmm(to, left, right, out=to)
        else:
            to.add_(torch.mm(left, right))

    def run() -> None:
        for first, second, of_first, of_second, x, inner, wide, out in work:
            torch.mm(x, first.t(), out=wide)
            torch.mm(inner, second.t(), out=out)
            torch.mm(out, second, out=inner)
            torch.mm(wide, first, out=x)
            add(of_second, out.t(), inner)
            add(of_first, wide.t(), x)

    return run


def _with_buffers(module: Any) -> None:
    import torch

    for parameter in module.parameters():
        parameter.main_grad = torch.zeros(parameter.shape, device=parameter.device)


def measure(chosen: argparse.Namespace) -> dict[str, Any]:
    """Run all contestants and return the result, without its certificate."""
    import torch

    torch.set_num_threads(chosen.threads)
    from isthmus.config.schema import ParallelConfig
    from isthmus.engine.parallel.process_groups import close_groups, open_groups
    from isthmus.platforms.detect import detect

    platform = detect(chosen.platform)
    device = torch.device(platform.device_type)
    open_groups(ParallelConfig(), platform, seed=0)
    rows: list[dict[str, Any]] = []
    shapes = TINY if chosen.quick else GPU_SHAPES if device.type == "cuda" else SHAPES
    for family in chosen.models:
        for precision in chosen.precision:
            built = contestants(family, shapes[family], precision, device)
            peak = platform.peak_tflops(precision)
            layers = {name: built[name] for name in chosen.only}
            for tokens in chosen.tokens:
                result = _turns(layers, built["isthmus"], shapes[family], chosen.rounds, precision, tokens, family)
                for row in result:
                    row["tflops"] = flops(shapes[family], tokens) / row["time_s"] / 1e12
                    row["mfu"] = None if peak is None else row["tflops"] / peak
                rows += result
    close_groups()
    disturbed = [row for row in rows if row["others_cpu_use"] > MOST_FOR_OTHERS]
    return {
        "contestants": CONTESTANTS,
        "models": {family: shapes[family] for family in chosen.models},
        "settings": {"rounds": chosen.rounds, "threads": chosen.threads},
        "quiet": not disturbed,
        "rows": rows,
    }


def flops(sizes: dict[str, Any], tokens: int) -> float:
    """Of the experts' matmuls and the router, forward and backward."""
    experts = sizes.get("num_experts") or sizes["num_local_experts"]
    width = sizes.get("moe_intermediate_size") or sizes["intermediate_size"]
    return 3.0 * 2 * tokens * sizes["hidden_size"] * (3 * sizes["num_experts_per_tok"] * width + experts)


def _turns(
    layers: dict[str, Any], ours: Any, sizes: dict[str, Any], rounds: int, precision: str, tokens: int, family: str
) -> list[dict[str, Any]]:
    import torch

    generator = torch.Generator().manual_seed(1)
    weight = next(ours[1].parameters())
    hidden = torch.randn(tokens, sizes["hidden_size"], generator=generator).to(weight.device, weight.dtype)
    upstream = torch.randn(hidden.shape, generator=generator).to(hidden)
    wait = torch.cuda.synchronize if weight.is_cuda else lambda: None

    def step(run: Callable[[Any], Any]) -> Any:
        x = hidden.clone().requires_grad_()
        out = run(x)
        out.backward(upstream)
        return out.detach(), x.grad

    expected = step(ours[0])
    agreement = {}
    for name, (run, _) in layers.items():
        got = step(run)
        difference = max(((a - b).abs().mean() / b.abs().mean()).item() for a, b in zip(got, expected, strict=True))
        if difference > AGREEMENT[precision]:
            raise SystemExit(f"{name} differs from Isthmus by {difference:.1e}")
        agreement[name] = difference
    turns = {name: partial(step, run) for name, (run, _) in layers.items()} | {
        MATMULS_ONLY: expert_matmuls(ours[1], hidden)
    }
    times: dict[str, list[float]] = {name: [] for name in turns}
    cpu_times: dict[str, list[float]] = {name: [] for name in turns}
    watch = CpuWatch()
    for _ in range(rounds):
        for name, turn in turns.items():
            started_s, cpu_s = time.perf_counter(), time.process_time()
            for _ in range(3):
                turn()
            wait()
            times[name].append((time.perf_counter() - started_s) / 3)
            cpu_times[name].append((time.process_time() - cpu_s) / 3)
    others = watch.shares()["others_cpu_use"]
    rows = []
    for name in turns:
        median_s = statistics.median(times[name])
        row = {"contestant": name, "model": family, "precision": precision, "tokens": tokens, "time_s": median_s}
        row |= {"time_s_rounds": times[name], "tokens_per_s": tokens / median_s, "others_cpu_use": others}
        row |= {"cpu_time_s": statistics.median(cpu_times[name]), "max_difference_from_isthmus": agreement.get(name)}
        if "isthmus" in times:
            row["times_isthmus"] = median_s / statistics.median(times["isthmus"])
        rows.append(row)
        print(
            f"{family:<10} {precision} {tokens:>5} {name:<22}{median_s * 1e3:>9.2f} ms"
            f"{row['cpu_time_s'] * 1e3:>9.2f} ms of CPU time",
            flush=True,
        )
    return rows


def main(arguments: list[str]) -> None:
    chosen = parse(arguments)
    certified = certificate(["benchmarks/moe_layer.py", *arguments])
    result = {"benchmark": "moe-layer", "certificate": certified} | measure(chosen)
    publish_result("moe-layer", result, record=chosen.record, out=chosen.out)


if __name__ == "__main__":
    main(sys.argv[1:])
