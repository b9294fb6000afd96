"""What isthmus doctor --bench and isthmus tune call on a GPU exists there; times and values are meaningless."""

from __future__ import annotations

from typing import Any

import pytest

from fake_cuda.runner import FakeCuda
from isthmus.platforms.parts import find_part


def bench() -> list[list[Any]]:
    from isthmus.platforms.detect import detect
    from isthmus.tools.doctor import measurements

    measurements.SECONDS, measurements.COPY_BYTES = 0.0, 1 << 20
    result = measurements.measure_device(detect(), lambda _: None)
    return [[item.name, item.unit, item.reachable, item.value > 0] for item in result]


def tune() -> list[list[Any]]:
    """The libraries of NVIDIA GPUs, with the layout of logits."""
    import torch

    from isthmus.engine.linear.matmul_table import MatmulShape
    from isthmus.platforms.detect import detect
    from isthmus.recipes.plan.step_matmuls import StepMatmul
    from isthmus.tools.tune import choose, measure

    bf16, before = torch.bfloat16, torch.backends.cuda.preferred_blas_library()
    shapes = (
        ("output_layer", MatmulShape("matmul", 32, 64, 77, True, bf16)),
        ("output_layer", MatmulShape("matmul", 32, 77, 64, False, bf16)),
        ("output_layer", MatmulShape("add_matmul", 77, 32, 64, False, bf16)),
        ("mlp.linear_fc1", MatmulShape("add_matmul", 96, 32, 64, False, bf16)),
    )
    matmuls = [StepMatmul(name, "x", shape, 1) for name, shape in shapes]
    strides = [list(measure.Operands(matmul, torch.device("cuda")).a.stride()) for matmul in matmuls]
    choose.SECONDS = 0.0
    lines: list[str] = []
    choose.choose(matmuls, detect(), lines.append)
    assert torch.backends.cuda.preferred_blas_library() == before
    return [[line.count(" ms") for line in lines], strides]


@pytest.mark.parametrize(("gpu", "name"), [("sm_90", "NVIDIA H100 80GB HBM3"), ("gfx942", "AMD Instinct MI300X")])
def test_bench(fake_cuda: FakeCuda, gpu: str, name: str) -> None:
    result, part = fake_cuda.run(bench, gpu=gpu), find_part(name)
    assert part is not None
    assert all(positive for *_, positive in result)
    reachable = {name: value for name, _, value, _ in result}
    assert [reachable["GEMM bf16"], reachable["GEMM fp8"]] == [part.measured_tflops[of] for of in ("bf16", "fp8")]
    assert reachable["memory bandwidth"] == pytest.approx(0.8 * part.memory_gb_s)
    assert reachable["host to device"] == reachable["device to host"] == pytest.approx(0.8 * 64)
    assert [unit for _, unit, _, _ in result[:6]] == ["TFLOP/s"] * 3 + ["GB/s"] * 3


def test_libraries_of_nvidia(fake_cuda: FakeCuda) -> None:
    counts, strides = fake_cuda.run(tune)
    assert counts == [2] * 4  # this build of torch has no cuBLASLt: left out
    assert strides == [[64, 1], [128, 1], [1, 128], [1, 96]]  # rows of logits are padded
