"""Compares the memory estimate with the memory of ranks: traced on fake GPUs, and of processes on a CPU.

    python benchmarks/planner_memory.py --record

On fake GPUs the ranks are those of large layouts (tests/fake_cuda). On a CPU all ranks of small layouts run; their
memory is that of live tensors.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from certificate import REPOSITORY, certificate, result_path, write_result

TESTS = REPOSITORY / "tests"
_ELEMENTWISE = {"recompute": "selective", "recompute_modules": ["layernorm", "mlp_act", "rope"]}
_LORA = {"lora": {"rank": 16}}
GPU_RANKS: dict[str, dict[str, Any]] = {
    "0.6B on one GPU, tied, 4 samples": {
        "model": "qwen3-0.6b", "rank": 0, "size": 1, "train": {"micro_batch_size": 4},
    },
    "1B on one GPU, seq 8192": {"model": "llama3.2-1b", "rank": 0, "size": 1, "seq_length": 8192},
    "8B on 8, recompute of half": {
        "model": "llama3.1-8b", "rank": 3, "size": 8, "seq_length": 8192,
        "train": {"recompute": "full", "recompute_layers": 16},
    },
    "8B tp=2 without sp": {"model": "llama3.1-8b", "rank": 1, "size": 8, "tp": 2, "sp": False},
    "8B tp=4, elementwise recomputed": {
        "model": "llama3.1-8b", "rank": 1, "size": 8, "tp": 4, "train": _ELEMENTWISE, "seq_length": 8192,
    },
    "8B mlp recomputed": {
        "model": "llama3.1-8b", "rank": 1, "size": 8, "tp": 4, "seq_length": 8192,
        "train": {"recompute": "selective", "recompute_modules": ["mlp"]},
    },
    "8B, 128k tokens, tp=8 cp=8": {
        "model": "llama3.1-8b", "rank": 9, "size": 64, "tp": 8, "cp": 8, "seq_length": 131072,
    },
    "8B, 128k tokens, tp=8 cp=8, recompute": {
        "model": "llama3.1-8b", "rank": 9, "size": 64, "tp": 8, "cp": 8, "seq_length": 131072,
        "train": {"recompute": "full"},
    },
    "8B, 32k tokens, cp=8, recompute": {
        "model": "llama3.1-8b", "rank": 7, "size": 8, "cp": 8, "seq_length": 32768, "train": {"recompute": "full"},
    },
    "8B fp8 tp=4": {"model": "llama3.1-8b", "rank": 5, "size": 8, "tp": 4, "precision": "fp8"},
    "7B, biases, vocabulary of 152k": {"model": "qwen2.5-7b", "rank": 1, "size": 8, "tp": 2},
    "34B tp=8 pp=2 vpp=3": {
        "model": "yi-34b", "rank": 3, "size": 16, "tp": 8, "pp": 2, "vpp": 3, "micro_batches": 8,
    },
    "70B fsdp on 64, recompute": {
        "model": "llama3.1-70b", "rank": 5, "size": 64, "fsdp": True, "layers": 6, "train": {"recompute": "full"},
    },
    "8B fsdp on 8": {"model": "llama3.1-8b", "rank": 5, "size": 8, "fsdp": True, "layers": 8},
    "8B fsdp tp=2": {"model": "llama3.1-8b", "rank": 5, "size": 8, "fsdp": True, "tp": 2, "layers": 8},
    "70B LoRA tp=8": {"model": "llama3.1-70b", "rank": 2, "size": 8, "tp": 8, "sections": _LORA},
    "8B LoRA": {"model": "llama3.1-8b", "rank": 0, "size": 1, "sections": _LORA},
    "8B LoRA, recompute": {
        "model": "llama3.1-8b", "rank": 0, "size": 1, "sections": _LORA, "train": {"recompute": "full"},
    },
    "8B offload": {"model": "llama3.1-8b", "rank": 0, "size": 8, "tp": 2, "sections": {"optim": {"offload": True}}},
    "125M experts on one GPU": {"model": "gpt2-125m-moe", "rank": 0, "size": 1, "seq_length": 1024},
    "Mixtral tp=2 ep=8 pp=2": {"model": "mixtral-8x7b", "rank": 0, "size": 32, "tp": 2, "ep": 8, "etp": 1, "pp": 2},
    "30B-A3B ep=8, recompute": {
        "model": "qwen3-30b-a3b", "rank": 0, "size": 8, "ep": 8, "train": {"recompute": "full"},
    },
    "30B-A3B ep=8 LoRA": {"model": "qwen3-30b-a3b", "rank": 0, "size": 8, "ep": 8, "sections": _LORA},
    "V2-Lite ep=8, experts recomputed": {
        "model": "deepseek-v2-lite", "rank": 0, "size": 8, "ep": 8,
        "train": {"recompute": "selective", "recompute_modules": ["moe"]},
    },
    "V2-Lite ep=8": {"model": "deepseek-v2-lite", "rank": 0, "size": 8, "ep": 8},
    "V2-Lite tp=2 ep=4": {"model": "deepseek-v2-lite", "rank": 0, "size": 8, "tp": 2, "ep": 4, "etp": 1},
    "V3 pp=16 ep=64": {"model": "deepseek-v3", "rank": 100, "size": 2048, "pp": 16, "ep": 64},
    "V3 pp=16 ep=64, last stage with MTP": {"model": "deepseek-v3", "rank": 2047, "size": 2048, "pp": 16, "ep": 64},
    "V3 pp=16 ep=64 tp=4, recompute": {
        "model": "deepseek-v3", "rank": 0, "size": 2048, "pp": 16, "ep": 64, "tp": 4, "etp": 1,
        "train": {"recompute": "full"},
    },
}  # fmt: skip


LLAMA: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 8192, "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32, "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
}  # fmt: skip
MIXTRAL = LLAMA | {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
DEEPSEEK = LLAMA | {
    "model_type": "deepseek_v2", "kv_lora_rank": 64, "q_lora_rank": None, "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16, "v_head_dim": 32, "head_dim": 16, "num_key_value_heads": 8, "n_routed_experts": 8,
    "num_experts_per_tok": 2, "moe_intermediate_size": 256, "n_shared_experts": 1, "first_k_dense_replace": 1,
    "topk_method": "greedy",
}  # fmt: skip
_FULL = {"sections": {"train": {"recompute": "full"}}}
CPU_LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    1: {"one rank": {}, "one rank, LoRA": {"sections": _LORA}, "one rank, experts": {"model": MIXTRAL}},
    2: {
        "dp=2": {}, "dp=2, fp32": {"precision": "fp32"}, "tp=2": {"tp": 2}, "pp=2": {"pp": 2}, "cp=2": {"cp": 2},
        "fsdp": {"fsdp": True}, "fsdp, recompute": {"fsdp": True, **_FULL}, "dp=2, recompute": _FULL,
        "dp=2, elementwise recomputed": {"sections": {"train": _ELEMENTWISE}},
        "dp=2, 4 samples": {"sections": {"train": {"micro_batch_size": 4}}}, "dp=2, LoRA": {"sections": _LORA},
        "dp=2, Muon": {"sections": {"optim": {"optimizer": "muon"}}}, "ep=2": {"model": MIXTRAL, "ep": 2},
        "MLA, ep=2": {"model": DEEPSEEK, "ep": 2}, "pp=2 vpp=2": {"pp": 2, "vpp": 2, "micro_batches": 4},
    },
    4: {"tp=2 pp=2": {"tp": 2, "pp": 2}, "tp=2 cp=2": {"tp": 2, "cp": 2},
        "tp=2 ep=2 etp=1": {"model": MIXTRAL, "tp": 2, "ep": 2, "etp": 1}},
}  # fmt: skip
QUICK = "8B, first stage"


def gpu_rows(only: str) -> Iterator[dict[str, Any]]:
    """Traced and estimated bytes of each rank on a fake GPU."""
    from fake_cuda.guard import Unavailable
    from fake_cuda.runner import FakeCuda, TaskFailed
    from fake_cuda.step_memory import RANKS, memory

    try:
        with tempfile.TemporaryDirectory() as folder:
            fake = FakeCuda(Path(folder) / "log")
            try:
                for name, rank in (RANKS | GPU_RANKS).items():
                    if only not in name:
                        continue
                    try:
                        results = fake.run(memory, **rank)
                    except TaskFailed as error:
                        print(f"{name}: {error}", file=sys.stderr)
                        continue
                    yield _row(name, results["estimate"]["total"], results["peak"], results["text"])
            finally:
                fake.close()
    except Unavailable as why:
        print(f"no fake GPU: {why}", file=sys.stderr)


def cpu_rows(only: str) -> Iterator[dict[str, Any]]:
    """Measured and estimated bytes of the CPU rank that needs most, of each layout."""
    from ranks.rank_pool import RankPool

    for size, layouts in CPU_LAYOUTS.items():
        with tempfile.TemporaryDirectory() as folder:
            pool = RankPool(size, Path(folder))
            try:
                for name, layout in layouts.items():
                    if only in name:
                        results = pool.run("ranks.memory_tasks.step_memory", **{"model": LLAMA} | layout)
                        most = max(results, key=lambda rank: int(rank["measured"]))
                        yield _row(name, most["estimated"], most["measured"], most["text"])
            finally:
                pool.close()


def _search_rows(only: str) -> Iterator[dict[str, Any]]:
    """CPU seconds of a search over 16,384 ranks, without imports."""
    from isthmus.tools.planner.planned_gpus import parse_machine
    from isthmus.tools.planner.planning import make_plans

    for model in ("llama3.1-70b", "deepseek-v3"):
        if only in model:
            machine = parse_machine("8xH100", None, 2048)
            started, cpu = time.perf_counter(), time.process_time()
            result = make_plans(f"preset:{model}", None, ["data.seq_length=4096"], machine)
            seconds = {"seconds": time.perf_counter() - started, "cpu_seconds": time.process_time() - cpu}
            print(model, seconds, f"{result.evaluated} estimates", flush=True)
            yield {"model": model, "ranks": machine.world_size, "estimates": result.evaluated, **seconds}


def _row(name: str, estimated: int, measured: int, text: str) -> dict[str, Any]:
    row = {
        "layout": name, "estimated_gib": estimated / 2**30, "measured_gib": measured / 2**30,
        "error": estimated / measured - 1, "parts": text,
    }  # fmt: skip
    print(f"{row['error']:+7.1%}  {row['measured_gib']:9.3f} GiB  {name}  [{text}]", flush=True)
    return row


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", metavar="TEXT", help="only layouts whose name contains it")
    parser.add_argument("--quick", action="store_true", help="one layout of each kind")
    parser.add_argument("--record", action="store_true", help="write the result into benchmarks/results")
    chosen = parser.parse_args(arguments)
    sys.path.insert(0, str(TESTS))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(REPOSITORY / "src"), str(TESTS)])
    certified = certificate(sys.argv)
    only = QUICK if chosen.quick else chosen.only
    result = {"certificate": certified, "search": list(_search_rows("" if not chosen.only else only))}
    result |= {"cpu_ranks": list(cpu_rows(only)), "fake_gpu_ranks": list(gpu_rows(only))}
    rows = [*result["cpu_ranks"], *result["fake_gpu_ranks"]]
    worst = max((abs(row["error"]) for row in rows), default=0.0)
    print(f"{len(rows)} layouts, largest error {worst:.1%}")
    if chosen.record:
        write_result(result_path("planner-memory", certified), result | {"largest_error": worst})


if __name__ == "__main__":
    main(sys.argv[1:])
