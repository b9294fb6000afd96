"""More layers and micro batches add kernels to a step, and nothing that the host waits for."""

from __future__ import annotations

from fake_cuda.runner import FakeCuda
from fake_cuda.step_kernels import kernels


def test_layers_and_micro_batches_add_no_synchronization(fake_cuda: FakeCuda) -> None:
    few, more = (fake_cuda.run(kernels, model="preset:qwen3-0.6b", tokens=256, layers=layers) for layers in (1, 2))
    for micro_batches in ("1", "2"):
        layer = [b - a for a, b in zip(few[micro_batches], more[micro_batches], strict=True)]
        assert layer[0] > 0 and layer[1] > 0 and layer[2] == 0
    assert few["2"][2] == few["1"][2]  # nor does another micro batch
