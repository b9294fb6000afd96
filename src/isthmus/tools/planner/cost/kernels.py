"""The time of GEMMs, attention and memory-bound kernels of a GPU.

The constants are fitted to published throughput (``benchmarks/planner_throughput.py``), and the same for all parts.
"""

from __future__ import annotations

from isthmus.errors import UsageError
from isthmus.platforms.parts import Part

UNMEASURED = 0.65
"""Share of its peak that the fastest GEMM of a part reaches, if none was published."""
GEMM_SHARE = 0.92
"""Speed of GEMMs within a step relative to the fastest one: the GPU is warm and other kernels compete for power."""
HALF_TILES, HALF_DEPTH = 100, 800
"""Output tiles of 128 x 256, and depth, at which a GEMM has half of its speed: partly filled last waves, prologue."""
FORWARD_ATTENTION, BACKWARD_ATTENTION = 0.48, 0.42
"""Speed of attention relative to the fastest GEMM, for wide heads. The backward pass has 5 matmuls for 2 forward."""
WIDE_HEAD = 64
"""Keys and values of a head with so many channels have half of that speed: softmax costs the same for each pair."""
MEMORY_SHARE = 0.8
"""Share of the data sheet's memory bandwidth that elementwise kernels reach."""
QUANTIZE_BYTES = 6.0
"""Bytes of an element of an activation or gradient that is read for its scale and rounded to FP8, in both layouts."""
LAUNCH_S = 4e-6
"""Least time of a kernel."""

_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 2}


class Kernels:
    """The kernels of one part and precision; all methods return seconds."""

    def __init__(self, part: Part, precision: str) -> None:
        """Raises UsageError if the part has no such precision."""
        if precision not in part.peak_tflops:
            others = ", ".join(name for name in part.peak_tflops if name in _BYTES)
            raise UsageError(
                f"train.precision={precision}: the {part.name} computes in {others}. Use one of these, or another GPU."
            )
        self.part = part
        self.precision = precision
        self.element: int = _BYTES[precision]
        wide = "bf16" if precision == "fp8" else precision
        self.rates: dict[bool, float] = {
            True: GEMM_SHARE * fastest_gemm(part, precision),
            False: GEMM_SHARE * fastest_gemm(part, wide),
        }
        """FLOP/s of large GEMMs, by whether they are in FP8 if the precision is fp8."""
        self.bytes_per_s: float = MEMORY_SHARE * part.memory_gb_s * 1e9

    def gemm(self, m: float, n: float, k: float, *, groups: float = 1, fp8: bool = True, sum_bytes: int = 0) -> float:
        """[m, k] times [k, n], ``groups`` times. ``sum_bytes``: of an element of a sum to which the product is added.

        2 m n k FLOPs at a speed that falls for few output tiles and little depth, but not faster than memory.
        """
        if m <= 0 or n <= 0:
            return 0.0
        tiles = groups * m * n / (128 * 256)
        rate = self.rates[fp8] * tiles / (tiles + HALF_TILES) * k / (k + HALF_DEPTH)
        moved = groups * ((m * k + k * n) * self.element + m * n * (2 * sum_bytes or self.element))
        return max(2.0 * groups * m * n * k / rate, moved / self.bytes_per_s, LAUNCH_S)

    def attention(self, heads: float, pairs: float, width: float, *, backward: bool = False) -> float:
        """``pairs`` of query and key per head, each 2 ``width`` FLOPs, where ``width`` is that of keys plus values.

        The backward pass has 2.5 times as many (Dao 2023, arXiv 2307.08691, section 3.1).
        """
        flops = 2.0 * heads * pairs * width * (2.5 if backward else 1.0)
        share = (BACKWARD_ATTENTION if backward else FORWARD_ATTENTION) / (1 + WIDE_HEAD / width)
        return max(flops / (self.rates[False] / GEMM_SHARE * share), LAUNCH_S)

    def quantize(self, elements: float) -> float:
        """FP8 copies of activations or gradients."""
        return self.memory(QUANTIZE_BYTES * elements, 2) if self.precision == "fp8" else 0.0

    def memory(self, number_bytes: float, kernels: int = 1) -> float:
        """Kernels that read and write ``number_bytes`` in all."""
        return max(number_bytes / self.bytes_per_s, kernels * LAUNCH_S)


def fastest_gemm(part: Part, precision: str) -> float:
    """FLOP/s: as published for the part, or a share of its peak."""
    measured = part.measured_tflops.get("bf16" if precision == "fp16" else precision)
    return 1e12 * (UNMEASURED * part.peak_tflops[precision] if measured is None else measured)
