"""Files of isthmus tune: what is written is read, and used for the matmuls that it was measured for."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from isthmus.engine.linear import matmul as matmul_module
from isthmus.engine.linear import tuned_matmuls
from isthmus.engine.linear.matmul import add_matmul, matmul, use_table
from isthmus.engine.linear.matmul_table import MatmulShape, MatmulTable
from isthmus.engine.linear.tuned_matmuls import TunedMatmuls, read_tuned, use_tuned
from isthmus.errors import DataError, MissingInput, UsageError
from isthmus.platforms.cpu import CpuPlatform

CPU = CpuPlatform(reason="")
FORWARD = MatmulShape("matmul", 64, 8, 16, True, torch.float32)
INPUT_GRADIENT = MatmulShape("matmul", 64, 16, 8, False, torch.float32)
WEIGHT_GRADIENT = MatmulShape("add_matmul", 16, 64, 8, False, torch.float32)
# As in the documentation of torch.cuda.tunable, and as newer releases write it.
CSV = """Validator,PT_VERSION,2.9.0
Validator,ROCM_VERSION,7.0.0.0-38-abc
Validator,HIPBLASLT_VERSION,100000-a9c5cc7
GemmTunableOp_float_NT,nt_25088_4096_64,Gemm_Hipblaslt_1219,1.262
GemmTunableOp_BFloat16_TN,tn_4096_512_8192_ld_8192_8192_4096,Gemm_Rocblas_1216,0.033
GemmStridedBatchedTunableOp_BFloat16_NN,nn_64_32_16_B_4_ld_64_16_64,Default,0.01
ScaledGemmTunableOp_Float8_e4m3fnuz_Float8_e4m3fnuz_BFloat16_TN,tn_1_2_3_ld_3_3_1_rw_0_bias_None,Gemm_Hipblaslt_3,0.1
"""


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The libraries of the matmuls, in order."""
    results: list[str] = []

    def noting(name: str) -> Any:
        @contextmanager
        def context() -> Iterator[None]:
            results.append(name)
            yield

        return context

    for name in matmul_module.LIBRARIES:
        monkeypatch.setitem(matmul_module.LIBRARIES, name, noting(name))  # type: ignore[arg-type]
    yield results
    use_table(None)


def test_the_table_decides_by_weight_and_length(used: list[str]) -> None:
    longer = MatmulShape("matmul", 256, 8, 16, True, torch.float32)
    use_table(MatmulTable([(longer, "cublas"), (FORWARD, "onednn"), (WEIGHT_GRADIENT, "cublaslt")]))
    weight, main_grad = torch.ones(16, 8), torch.zeros(16, 8)
    for length in (1, 64, 65, 256, 999):
        matmul(torch.ones(length, 1, 8), weight.t())
    assert used == ["onednn", "onednn", "cublas", "cublas", "cublas"]
    used.clear()
    add_matmul(main_grad, torch.ones(30, 16).t(), torch.ones(30, 8))
    matmul(torch.ones(64, 16), weight)  # not in the table
    matmul(torch.ones(64, 8, dtype=torch.bfloat16), weight.t().bfloat16())
    assert used == ["cublaslt", "default", "default"] and float(main_grad.sum()) == 30 * 16 * 8
    used.clear()
    use_table(None)
    matmul(torch.ones(64, 8), weight.t())
    assert used == ["default"]


def test_a_file_is_used_in_a_run(used: list[str], tmp_path: Path) -> None:
    tuned = TunedMatmuls(
        made_for=tuned_matmuls.made_for(CPU), choices=[(FORWARD, "onednn"), (WEIGHT_GRADIENT, "default")], threads=3
    )
    path = tmp_path / "tune.json"
    path.write_text(tuned.to_json())
    assert read_tuned(path) == tuned
    assert tuned.covers(FORWARD) and not tuned.covers(INPUT_GRADIENT)
    assert use_tuned(str(path), CPU) == f"tune.file: libraries for 2 measured matmuls of {path}"
    matmul(torch.ones(64, 8), torch.ones(16, 8).t())
    assert used == ["onednn"] and tuned_matmuls.tuned_threads(str(path), CPU) == 3


@pytest.mark.parametrize(
    "change",
    [
        {"format": "isthmus tune 2"}, {"threads": 0}, {"threads": True}, {"threads": "2"}, {"matmuls": [{"m": 1}]},
        {"matmuls": 3}, {"made_for": []},
        {"matmuls": [{"operation": "matmul", "library": "open", "m": 1, "k": 1, "n": 1}]},
        {"matmuls": [{"operation": "matmul", "library": "onednn", "m": -1, "k": 1, "n": 1, "transposed": True,
                      "dtype": "float32"}]},
        {"matmuls": [{"operation": "matmul", "library": "onednn", "m": 1, "k": 1, "n": 1, "transposed": True,
                      "dtype": "text"}]},
    ],
)  # fmt: skip
def test_damaged_json(change: dict[str, Any], tmp_path: Path) -> None:
    values = json.loads(TunedMatmuls(made_for={"device": "x"}, choices=[(FORWARD, "onednn")]).to_json())
    path = tmp_path / "tune.json"
    path.write_text(json.dumps(values | change))
    with pytest.raises(DataError, match="is no file of isthmus tune"):
        read_tuned(path)


@pytest.mark.parametrize("text", ["", "\0\0", "Validator,PT_VERSION,2.9.0\nGemm", CSV.partition("\n")[2], "{", "[]"])
def test_other_files_are_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "tune.csv"
    with pytest.raises(MissingInput, match="isthmus tune writes it"):
        read_tuned(path)
    path.write_text(text)
    with pytest.raises(DataError, match="is no file of isthmus tune"):
        read_tuned(path)


REAL = torch.cuda.tunable


class TunableOp:
    """``torch.cuda.tunable`` of a torch for ROCm, which has read what a test wrote."""

    def __init__(self, validators: dict[str, str]) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.validators, self.enabled, self.accepts = validators, False, True

    def __getattr__(self, name: str) -> Any:
        signature = inspect.signature(getattr(REAL, name))

        def call(*args: Any, **kwargs: Any) -> Any:
            signature.bind(*args, **kwargs)
            self.calls.append((name, *args))
            if name == "enable":
                self.enabled = args[0]
            answers = {"is_enabled": self.enabled, "get_validators": tuple(self.validators.items())}
            return answers.get(name, self.accepts)

        return call


@pytest.fixture
def rocm(monkeypatch: pytest.MonkeyPatch) -> TunableOp:
    fake = TunableOp({"PT_VERSION": "2.9.0", "ROCM_VERSION": "7.0.0.0-38-abc", "HIPBLASLT_VERSION": "100000-a9c5cc7"})
    inner = torch.ones
    monkeypatch.setattr(tuned_matmuls.torch.cuda, "tunable", fake)
    monkeypatch.setattr(tuned_matmuls.torch, "ones", lambda *size, device, dtype: inner(*size, dtype=dtype))
    return fake


def test_a_file_of_tunable_op_is_read_by_torch(rocm: TunableOp, tmp_path: Path) -> None:
    (tmp_path / "tune3.csv").write_text(CSV)
    platform: Any = SimpleNamespace(device_index=lambda: 3)
    path = str(tmp_path / "tune3.csv")
    try:
        line = use_tuned(str(tmp_path / "tune%d.csv"), platform)
        assert matmul_module._tunable_op
    finally:
        use_table(None)
    assert line == f"tune.file: TunableOp uses 3 measured GEMM kernels of {path}"
    assert rocm.calls == [
        ("enable", True), ("is_enabled",), ("tuning_enable", False), ("set_filename", path, False),
        ("get_validators",), ("read_file", path), ("enable", False),
    ]  # fmt: skip
    tuned = read_tuned(Path(path))
    assert tuned.covers(MatmulShape("matmul", 512, 8192, 4096, True, torch.bfloat16))
    assert tuned.covers(MatmulShape("matmul", 4096, 64, 25088, False, torch.float32))
    assert not tuned.covers(MatmulShape("matmul", 511, 8192, 4096, True, torch.bfloat16))


def test_a_file_that_tunable_op_would_ignore_is_refused(rocm: TunableOp, tmp_path: Path) -> None:
    path = tmp_path / "tune.csv"
    path.write_text(CSV)
    platform: Any = SimpleNamespace(device_index=lambda: 0)
    rocm.validators |= {"HIPBLASLT_VERSION": "100100-ffff", "GCN_ARCH_NAME": "gfx950"}
    with pytest.raises(UsageError) as error:
        use_tuned(str(path), platform)
    assert "GCN_ARCH_NAME is gfx950 here and None in the file" in str(error.value)
    assert "HIPBLASLT_VERSION is 100100-ffff here and 100000-a9c5cc7 in the file" in str(error.value)
    rocm.validators = {"PT_VERSION": "2.9.0", "ROCM_VERSION": "7.0.0.0-38-abc", "HIPBLASLT_VERSION": "100000-a9c5cc7"}
    rocm.accepts = False
    with pytest.raises(UsageError, match="rejects the file"):
        use_tuned(str(path), platform)


def test_tunable_op_is_off_while_weight_gradients_are_added_to_float32(rocm: TunableOp) -> None:
    with matmul_module.without_tunable_op():
        assert not rocm.enabled
    assert rocm.enabled
