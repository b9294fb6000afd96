"""Estimates what a training step costs on GPUs, by part, and counts its kernels. Nothing is measured.

    python benchmarks/step_cost.py --models llama3-8b --gpus H100,MI300X
    python benchmarks/step_cost.py --models= --record

The first table has the fastest plan of ``isthmus plan`` for each model and GPU, with the shares of its time. The second
has the kernels of a step on a GPU that torch simulates, and is what ``--record`` writes. See docs/concepts/gpu-step.md.
"""

from __future__ import annotations

import argparse
import atexit
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from certificate import REPOSITORY, certificate, publish_result

TESTS = REPOSITORY / "tests"
MODELS = {"llama3-8b": (1, 8192, 16), "qwen3-30b-a3b": (1, 4096, 512), "deepseek-v3": (32, 4096, 4096)}
"""Preset -> nodes of 8 GPUs, tokens of a sequence, sequences of a step."""
GPUS = ("H100", "H200", "B200", "MI300X", "MI355X")
TRACED = {"llama3.2-1b": (1, 2), "qwen3-0.6b": (1, 2), "qwen3-30b-a3b": (1, 2), "deepseek-v3": (4, 5)}
"""Preset -> two numbers of layers, whose difference is a layer; deepseek-v3 has experts from the fourth."""


def plans(models: Sequence[str], gpus: Sequence[str], precision: str) -> list[list[str]]:
    """Rows of the first table."""
    from isthmus.tools.planner.planned_gpus import parse_machine
    from isthmus.tools.planner.planning import describe, make_plans

    rows = []
    for model in models:
        nodes, length, sequences = MODELS[model]
        settings = [
            f"data.seq_length={length}",
            f"train.global_batch_size={sequences}",
            f"train.precision={precision}",
        ]
        for gpu in gpus:
            result = make_plans(f"preset:{model}", None, settings, parse_machine(f"8x{gpu}", None, nodes), number=1)
            name = f"{model}, {8 * nodes} x {gpu}"
            if not result.best or (time := result.best[0].time) is None:
                rows.append([name, "does not fit"])
                continue
            shares = ", ".join(f"{part} {share:.0%}" for part, share in time.shares.items() if share >= 0.005)
            speed = f"{time.tokens_per_s_per_device:,.0f}"
            rows.append([name, describe(result.best[0], result.machine), f"{time.mfu:.0%}", speed, shares])
    return rows


def traced(models: Sequence[str], tokens: int) -> list[list[str]]:
    """Rows of the kernel table: of a layer; of the first model also of the rest of a micro batch and of a step."""
    sys.path.insert(0, str(TESTS))
    from fake_cuda.guard import Unavailable
    from fake_cuda.runner import FakeCuda
    from fake_cuda.step_kernels import kernels
    from shared_server import FOLDER

    folder = tempfile.mkdtemp(
        prefix="isthmus-step-cost-", suffix=f"-{os.getpid()}"
    )  # the server ends with this process
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.environ |= {FOLDER: folder, "HF_MODULES_CACHE": folder}
    rows: list[list[str]] = []
    try:
        fake = FakeCuda(Path(folder) / "log")
    except Unavailable as why:
        print(f"no kernels: {why}")
        return rows
    try:
        for model in models:
            fewer, more = TRACED[model]
            few, many = (
                fake.run(kernels, model=f"preset:{model}", tokens=tokens, layers=layers) for layers in (fewer, more)
            )
            micro_few, micro_many = (_difference(result["2"], result["1"]) for result in (few, many))
            layer = _difference(micro_many, micro_few)
            rows.append(_row(f"a layer of {model}, forward and backward", layer))
            if model == models[0]:
                rows.append(_row("the rest of a micro batch", _difference(micro_few, [fewer * n for n in layer])))
                rows.append(_row("the rest of a step", _difference(few["1"], micro_few)))
    finally:
        fake.close()
    return rows


COUNTS = ("outside of regions", "compiled regions", "synchronizations")


def _difference(left: list[int], right: list[int]) -> list[int]:
    return [a - b for a, b in zip(left, right, strict=True)]


def _row(name: str, numbers: list[int]) -> list[str]:
    return [name, *map(str, numbers)]


def show(heads: list[str], rows: list[list[str]]) -> None:
    """Print a Markdown table."""
    for cells in (heads, ["---", *["---:"] * (len(heads) - 1)], *rows):
        print("| " + " | ".join(cells) + " |")


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", default=",".join(MODELS), help="of the first table (default: %(default)s)")
    parser.add_argument("--gpus", default=",".join(GPUS), help="default: %(default)s")
    parser.add_argument("--precision", default="bf16", help="bf16 or fp8 (default: %(default)s)")
    parser.add_argument("--traced", default=",".join(TRACED), help="presets of the second table (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=1024, help="of a traced micro batch (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="write the kernels here")
    parser.add_argument("--record", action="store_true", help="write the kernels to benchmarks/results/")
    chosen = parser.parse_args(arguments)
    models, traced_models = (value.split(",") if value else [] for value in (chosen.models, chosen.traced))
    for names, known in ((models, MODELS), (traced_models, TRACED)):
        if unknown := sorted(set(names) - set(known)):
            parser.error(f"no settings for {', '.join(unknown)}; known are {', '.join(known)}")
    if models:
        rows = plans(models, chosen.gpus.split(","), chosen.precision)
        show(["model and GPUs", "plan", "MFU", "tokens/s per GPU", "shares of the time"], rows)
        print()
    if traced_models and (table := traced(traced_models, chosen.tokens)):
        show(["kernels of", *COUNTS], table)
        counts = {name: dict(zip(COUNTS, map(int, numbers), strict=True)) for name, *numbers in table}
        result = {"certificate": certificate([__file__, *arguments]), "tokens": chosen.tokens, "kernels": counts}
        publish_result("step-kernels", result, record=chosen.record, out=chosen.out)


if __name__ == "__main__":
    main(sys.argv[1:])
