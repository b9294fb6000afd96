"""The timed choice between grouped_mm and a loop: faster, correct, and named with the reason."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from isthmus.engine.moe import gemm_choice, grouped_gemm
from isthmus.engine.moe.gemm_choice import Timing, time_gemms
from isthmus.engine.moe.grouped_gemm import unsupported_reason
from isthmus.platforms.torch_features import GROUPED_MM

CPU = torch.device("cpu")
SHAPES = ((16, 8), (8, 8))
needs_kernel = pytest.mark.skipif(GROUPED_MM is None, reason=f"torch {torch.__version__} has no grouped_mm")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[bool, float]]:
    """Milliseconds of grouped_mm (True) and of the loop."""
    times = {True: 2.0, False: 1.0}

    def milliseconds(run: object) -> float:
        kernels: list[bool] = []
        for name in ("grouped_matmul", "add_gradients"):
            real = getattr(grouped_gemm, name)

            def counted(*args: object, kernel: bool, real: object = real, **kwargs: object) -> object:
                kernels.append(kernel)
                return real(*args, kernel=kernel, **kwargs)  # type: ignore[operator]

            monkeypatch.setattr(gemm_choice, name, counted)
        run()  # type: ignore[operator]
        (kernel,) = set(kernels)
        return times[kernel]

    monkeypatch.setattr(gemm_choice, "_milliseconds", milliseconds)
    time_gemms.cache_clear()
    yield times
    time_gemms.cache_clear()


@needs_kernel
@pytest.mark.parametrize(("kernel_ms", "chosen"), [(0.5, True), (2.0, False)])
@pytest.mark.parametrize("number", [1, 2, 5])
def test_the_faster_is_chosen(clock: dict[bool, float], kernel_ms: float, chosen: bool, number: int) -> None:
    clock[True] = kernel_ms
    matmuls, gradients = time_gemms(number, SHAPES, 33, CPU)
    assert matmuls.kernel is gradients.kernel is chosen
    assert (matmuls.kernel_ms, matmuls.loop_ms) == (kernel_ms, 1.0)
    assert matmuls.difference < 0.01 and gradients.difference < 0.01
    fast = (
        "grouped_mm (0.50 ms, a loop of GEMMs 1.00 ms)" if chosen else "a loop of GEMMs (1.00 ms, grouped_mm 2.00 ms)"
    )
    assert str(matmuls) == f"matmuls by {fast}"


@needs_kernel
@pytest.mark.parametrize("fault", ["wrong", "nan", "raises"])
def test_a_faulty_kernel_is_not_chosen(clock: dict[bool, float], fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    clock[True] = 0.1

    def faulty(*args: Tensor, **kwargs: Tensor) -> Tensor:
        if fault == "raises":
            raise RuntimeError("no kernel image is available for execution on the device")
        result: Tensor = GROUPED_MM(*args, **kwargs)
        result[-1] = torch.nan if fault == "nan" else 1.0
        return result

    monkeypatch.setattr(grouped_gemm, "GROUPED_MM", faulty)
    for timing in time_gemms(3, SHAPES, 33, CPU):
        assert not timing.kernel
        assert ("fails on this GPU" if fault == "raises" else "results of grouped_mm differ by") in str(timing)


def test_a_timing_without_a_difference_compares_the_times() -> None:
    assert Timing("matmuls", 1.0, 1.0, 0.0).kernel and not Timing("matmuls", 1.1, 1.0, 0.0).kernel


@needs_kernel
def test_reasons_without_a_kernel() -> None:
    assert unsupported_reason((16, 8), torch.bfloat16) is None
    assert "bfloat16, not for float32" in str(unsupported_reason((16, 8), torch.float32))
    assert "multiple of 16 bytes, not 16 x 12" in str(unsupported_reason((16, 12), torch.bfloat16))


def test_a_trial_cannot_run_out_of_memory(clock: dict[bool, float], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 128 experts 8 are timed, with as many rows each, and their memory is returned, also after a failure."""
    freed: list[bool] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: freed.append(True))
    sizes: list[list[int]] = []
    operands = gemm_choice._Operands

    def recorded(number: int, shape: tuple[int, int], counts: Tensor, rows: int) -> gemm_choice._Operands:
        sizes.append([number, rows, len(counts)])
        return operands(number, shape, counts, rows)

    monkeypatch.setattr(gemm_choice, "_Operands", recorded)
    assert gemm_choice._timings(128, SHAPES, 128 * 5, CPU) is not None
    assert sizes == [[8, 40, 8]] * 2 and freed == [True]

    def full(*_arguments: object, **_options: object) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    for module, name in ((gemm_choice, "_Operands"), (grouped_gemm, "GROUPED_MM")):
        time_gemms.cache_clear()
        with monkeypatch.context() as changed:
            changed.setattr(module, name, full)
            assert gemm_choice._timings(128, SHAPES, 128 * 5, CPU) is None
    assert freed == [True] * 3
