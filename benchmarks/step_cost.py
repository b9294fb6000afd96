"""Estimates what a training step costs on a GPU: FLOPs, memory traffic and kernels of its parts. Nothing is measured.

    python benchmarks/step_cost.py --model preset:llama3.2-1b --tokens 8192

A part takes at least its FLOPs over the peak, or its bytes over the bandwidth of the memory, whichever is longer. Bytes
are those of kernels that fuse what can be fused and read and write each tensor once. See docs/concepts/gpu-step.md.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from certificate import REPOSITORY

TESTS = REPOSITORY / "tests"


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a micro batch, or of the step."""

    name: str
    flops: float = 0.0
    """Model FLOPs: those of ``isthmus.train.flops``."""
    bytes: float = 0.0
    """Read and written in the GPU's memory, where that takes longer than the FLOPs."""
    executed: float = 1.0
    """FLOPs that run over model FLOPs."""
    once_a_step: bool = False

    def seconds(self, tflops: float, tb_per_s: float) -> float:
        """At least."""
        return max(self.flops * self.executed / (tflops * 1e12), self.bytes / (tb_per_s * 1e12))


def parts(arch: Any, tokens: int, parameters: int) -> Iterator[Part]:
    """The parts of a bf16 step of a dense decoder on one GPU; a micro batch is one sample of ``tokens`` tokens."""
    from isthmus.train.flops import flops_per_batch

    hidden, wide, vocabulary = arch.hidden_size, arch.mlp.ffn_hidden_size, arch.vocab_size
    heads = (arch.attention.num_attention_heads + arch.attention.num_query_groups) * arch.attention.kv_channels
    gemms = 6.0 * tokens * sum(layer.matmul_weights for layer in arch.layers)
    loss = 6.0 * tokens * hidden * vocabulary
    yield Part("GEMMs of the layers", gemms)
    # The backward kernel computes the scores again: 5 matmuls where the count has 4.
    attention = flops_per_batch(arch, tokens, tokens**2) - gemms - loss
    yield Part("attention", attention, executed=7 / 6)
    yield Part("GEMMs of the output layer", loss)
    # Read twice and overwritten once; what the GEMMs write and read takes less time than their FLOPs.
    yield Part("softmax of the logits", bytes=2.0 * tokens * vocabulary * 3)
    # Elements a token: two norms and two residual sums of H, rotary embeddings, SwiGLU of 2F -> F; QK norms.
    elements = 22 * hidden + 8 * wide + heads * (9 if arch.attention.qk_norm else 4)
    yield Part("norms, residuals, rotary embeddings, activations", bytes=2.0 * tokens * elements * arch.num_layers)
    # Norm of the gradients 4, AdamW 16 read and 12 written, bf16 weights 6, zeros for the next step 4; clipping 8 more.
    yield Part("optimizer", bytes=42.0 * parameters, once_a_step=True)


def traced(model: str, tokens: int) -> list[list[str]]:
    """Rows of the kernel table: of a layer, of the rest of a micro batch, of the rest of a step."""
    sys.path.insert(0, str(TESTS))
    from fake_cuda.guard import Unavailable
    from fake_cuda.runner import FakeCuda
    from fake_cuda.step_kernels import kernels

    try:
        with tempfile.TemporaryDirectory() as folder:
            fake = FakeCuda(Path(folder) / "log")
            try:
                few, more = (fake.run(kernels, model=model, tokens=tokens, layers=layers) for layers in (2, 4))
            finally:
                fake.close()
    except Unavailable as why:
        print(f"no kernels: {why}")
        return []
    micro = {name: _difference(result["2"], result["1"]) for name, result in (("few", few), ("more", more))}
    layer = [item / 2 for item in _difference(micro["more"], micro["few"])]
    rest = _difference(micro["few"], [2 * item for item in layer])
    step = _difference(few["1"], micro["few"])
    rows = {"a layer, forward and backward": layer, "the rest of a micro batch": rest, "the rest of a step": step}
    return [[name, *(f"{item:g}" for item in values)] for name, values in rows.items()]


def _difference(left: list[float], right: list[float]) -> list[float]:
    return [a - b for a, b in zip(left, right, strict=True)]


def show(heads: list[str], rows: list[list[str]]) -> None:
    """Print a Markdown table."""
    for cells in (heads, ["---", *["---:"] * (len(heads) - 1)], *rows):
        print("| " + " | ".join(cells) + " |")


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="preset:llama3.2-1b", help="a dense preset (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=8192, help="of a micro batch (default: %(default)s)")
    parser.add_argument("--micro-batches", type=int, default=8, help="of a step (default: %(default)s)")
    parser.add_argument("--tflops", type=float, default=989.4, help="bf16 peak (default: %(default)s, H100 SXM)")
    parser.add_argument(
        "--tb-per-s", type=float, default=3.35, help="memory bandwidth (default: %(default)s, H100 SXM)"
    )
    chosen = parser.parse_args(arguments)
    from isthmus.config.model_file import read_model
    from isthmus.families.registry import family_for
    from isthmus.recipes.plan.parameter_counts import num_parameters

    config = read_model(chosen.model)
    family = family_for(config)
    arch = family.to_architecture(config)
    if arch.moe is not None or arch.latent is not None:
        parser.error(f"{chosen.model} has experts or latent attention, which these formulas do not count")
    results = list(parts(arch, chosen.tokens, num_parameters(family, arch)))
    rows, total_s, flops = [], 0.0, 0.0
    for part in results:
        count = 1 if part.once_a_step else chosen.micro_batches
        seconds = part.seconds(chosen.tflops, chosen.tb_per_s)
        total_s, flops = total_s + count * seconds, flops + count * part.flops
        per = "step" if part.once_a_step else "micro batch"
        rows.append(
            [f"{part.name}, per {per}", f"{part.flops / 1e12:.1f}", f"{part.bytes / 1e9:.1f}", f"{1e3 * seconds:.1f}"]
        )
    show(["part", "TFLOP", "GB", "ms at least"], rows)
    mfu = flops / total_s / (chosen.tflops * 1e12)
    print(f"\na step of {chosen.micro_batches} micro batches: {1e3 * total_s:.0f} ms at least, MFU {mfu:.0%} at most\n")
    if table := traced(chosen.model, chosen.tokens):
        show(["kernels of", "outside of regions", "compiled regions", "synchronizations"], table)


if __name__ == "__main__":
    main(sys.argv[1:])
