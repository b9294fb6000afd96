from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from isthmus.engine.linear import batch_invariant
from isthmus.engine.linear.batch_invariant import replace_matmuls, restore_matmuls, use_batch_invariant_matmuls
from isthmus.errors import UsageError

INTERPRETED = """
import torch
from megatron.core.transformer.custom_layers.batch_invariant_kernels import mm_batch_invariant
from isthmus.engine.linear.batch_invariant import replace_matmuls, restore_matmuls

x, weight = torch.randn(200, 160).half(), torch.randn(70, 160).half()
expected = x.float() @ weight.float().t()
replace_matmuls(mm_batch_invariant, "CPU")
product = torch.nn.functional.linear(x, weight)
restore_matmuls()
torch.testing.assert_close(product.float(), expected, atol=2**-7, rtol=2**-7)
"""


@pytest.fixture
def calls() -> Iterator[list[tuple[int, ...]]]:
    """Shapes of the products of a kernel that replaces the matmuls of the CPU."""
    shapes: list[tuple[int, ...]] = []

    def kernel(a: Tensor, b: Tensor) -> Tensor:
        shapes.append((a.size(0), b.size(1)))
        return (a[:, :, None] * b[None]).sum(1)

    replace_matmuls(kernel, "CPU")
    yield shapes
    restore_matmuls()


def test_linear_layers_and_logits_use_the_kernel(calls: list[tuple[int, ...]]) -> None:
    x, weight, out = (item.bfloat16() for item in (torch.randn(3, 1, 8), torch.randn(5, 8), torch.empty(3, 5)))
    linear = torch.nn.functional.linear(x, weight)
    torch.matmul(x[:, 0], weight.t(), out=out)
    assert calls == [(3, 5)] * 2
    assert torch.equal(linear[:, 0], out)
    expected = torch.einsum("th,vh->tv", x[:, 0].double(), weight.double())
    torch.testing.assert_close(out.double(), expected, rtol=2**-6, atol=2**-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_other_dtypes_keep_their_kernels(dtype: torch.dtype, calls: list[tuple[int, ...]]) -> None:
    a, b = torch.randn(3, 8, dtype=dtype), torch.randn(8, 5, dtype=dtype)
    torch.testing.assert_close(a @ b, torch.einsum("ab,bc->ac", a, b))
    assert not calls


def test_matmuls_are_restored(calls: list[tuple[int, ...]]) -> None:
    restore_matmuls()
    torch.ones(3, 8, dtype=torch.bfloat16) @ torch.ones(8, 5, dtype=torch.bfloat16)
    assert not calls


def test_missing_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "megatron.core.transformer.custom_layers.batch_invariant_kernels"
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UsageError, match=r"train\.batch_invariant=true needs the Triton kernels .* or leave it out"):
        use_batch_invariant_matmuls(torch.device("cuda"))
    assert not batch_invariant.uses_batch_invariant_matmuls()


def test_trial_finds_kernels_that_depend_on_other_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    def kernel(a: Tensor, b: Tensor) -> Tensor:
        return torch.einsum("ab,bc->ac", a, b) + len(a)

    monkeypatch.setattr(batch_invariant, "_kernel", lambda: kernel)
    monkeypatch.setattr(batch_invariant, "_DISPATCH_KEY", "CPU")
    with pytest.raises(UsageError, match="rows have other results alone than in a batch"):
        use_batch_invariant_matmuls(torch.device("cpu"))
    assert not batch_invariant.uses_batch_invariant_matmuls()


@pytest.mark.processes
def test_kernels_of_megatron_core_in_the_interpreter_of_triton() -> None:
    """It multiplies blocks with NumPy, which has no bfloat16. Whether other rows matter is left to the trial."""
    pytest.importorskip("triton", reason="Triton is not installed")
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", INTERPRETED], env=environment, check=True, timeout=600)
