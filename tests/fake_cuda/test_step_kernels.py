"""Another layer adds kernels to a step, and nothing that the host waits for."""

from __future__ import annotations

from fake_cuda.runner import FakeCuda
from fake_cuda.step_kernels import kernels


def test_another_layer_adds_no_synchronization(fake_cuda: FakeCuda) -> None:
    few, more = (fake_cuda.run(kernels, model="preset:qwen3-0.6b", tokens=256, layers=layers) for layers in (1, 2))
    for micro_batches in ("1", "2"):
        layer = [b - a for a, b in zip(few[micro_batches], more[micro_batches], strict=True)]
        print(layer)
        assert layer[0] > 0 and layer[3] == 0
    # A micro batch may read what its loss needs, once.
    assert few["2"][3] - few["1"][3] <= 2
