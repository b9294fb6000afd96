"""Kernels are used where they are installed and right; else a reason is given."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from isthmus.engine.mixers import mamba_kernels
from isthmus.engine.mixers.mamba_kernels import KernelCase, choose_mamba_kernels, usable_mamba_kernel
from isthmus.engine.mixers.sharded_mixer import DepthwiseConvolution
from ranks.fake_mamba_kernels import install

CPU = torch.device("cpu")
CASES = {
    "Mamba-2": KernelCase("Mamba-2", (4, 8, 2, 5), torch.bfloat16, CPU),
    "Mamba-1": KernelCase("Mamba-1", (8, 4), torch.bfloat16, CPU),
    "convolution": KernelCase("convolutions of mixers", (16, 4), torch.bfloat16, CPU),
    "convolution without bias": KernelCase("convolutions of mixers", (16, 3), torch.float16, CPU, has_bias=False),
}


@pytest.fixture(autouse=True)
def short_samples(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(mamba_kernels, "_LENGTHS", (20, 1, 7, 31))
    usable_mamba_kernel.cache_clear()
    yield
    usable_mamba_kernel.cache_clear()


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_right_kernel_is_used(case: KernelCase, monkeypatch: pytest.MonkeyPatch) -> None:
    called = install(monkeypatch)
    kernel, reason = usable_mamba_kernel(case)
    assert kernel is not None, reason
    assert called and not reason


@pytest.mark.parametrize("name", ["Mamba-2", "convolution"])
def test_a_kernel_that_ignores_samples_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, ignore_samples=True)
    kernel, reason = usable_mamba_kernel(CASES[name])
    assert kernel is None and " has errors of " in reason, reason


def test_other_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES["Mamba-2"]
    assert "mamba_ssm is used in bf16 and fp16, got torch.float32" in usable_mamba_kernel(
        replace(case, dtype=torch.float32)
    )
    if not torch.cuda.is_available():
        assert "failed with ModuleNotFoundError: No module named 'mamba_ssm'" in usable_mamba_kernel(case)[1]
    install(monkeypatch)
    narrow = replace(CASES["convolution"], shape=(12, 4))
    assert usable_mamba_kernel(narrow)[1].startswith("causal_conv1d failed with AssertionError")
    usable_mamba_kernel.cache_clear()
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert usable_mamba_kernel(case)[1] == "mamba_ssm is not deterministic"


def test_the_convolution_of_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of rows that are a part of wider ones, which the kernel does not read."""
    layer = DepthwiseConvolution(16, 4, bias=True, dtype=torch.bfloat16)
    assert choose_mamba_kernels(layer) == ()  # on a CPU
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    wide = torch.randn(9, 21).bfloat16().requires_grad_()
    expected = layer(wide[:, 3:19], (4, 5), activated=True)
    (wanted_grad,) = torch.autograd.grad(expected.float().square().sum(), wide)
    called = install(monkeypatch)
    monkeypatch.setattr(mamba_kernels, "_on_gpu", lambda _: True)
    assert choose_mamba_kernels(layer) == ("convolutions of mixers: the kernel of causal_conv1d",)
    called.clear()
    result = layer(wide[:, 3:19], (4, 5), activated=True)
    (grad,) = torch.autograd.grad(result.float().square().sum(), wide)
    assert called == ["causal_conv1d_fn"]
    torch.testing.assert_close(result, expected, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(grad, wanted_grad, rtol=5e-2, atol=5e-2)
