"""Quantised weights are dequantized slice by slice; missing or misshapen scales are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from isthmus.convert.hf import dequantize
from isthmus.convert.hf.dequantize import DequantizedWeights
from isthmus.errors import DataError
from isthmus.hf.model_folder import ModelFolder
from isthmus.hf.tensors.quantization import Fp8Blocks, Mxfp4, Quantization
from isthmus.platforms.torch_features import FLOAT8_E8M0

Slices = tuple[slice, ...]


class Watched:
    """Tensors in memory that record which elements are read."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors
        self.num_read: dict[str, int] = dict.fromkeys(tensors, 0)

    def __str__(self) -> str:
        return "the model"

    def read(self, name: str, index: Slices | None = None, *, into: Tensor | None = None) -> Tensor:
        part = self.tensors[name][index or ...].clone()
        self.num_read[name] += part.numel()
        return part if into is None else into.copy_(part)


def fp8(*shape: int, block: tuple[int, int] = (4, 6), scales: torch.dtype = torch.float32) -> tuple[Watched, Tensor]:
    """An FP8 tensor beside plain ones, and its values, computed one by one."""
    torch.manual_seed(0)
    codes = torch.randn(shape).to(torch.float8_e4m3fn)
    *lead, rows, cols = shape
    factors = torch.rand(*lead, -(-rows // block[0]), -(-cols // block[1])).add(0.5).to(scales)
    values = torch.empty(shape)
    for at in torch.cartesian_prod(*map(torch.arange, shape)).tolist():
        *first, row, col = at
        factor = factors[(*first, row // block[0], col // block[1])]
        values[tuple(at)] = codes[tuple(at)].float() * factor.float()
    remaining = {"a.norm": torch.ones(3), "w": codes, "w_scale_inv": factors, "z.bias": torch.zeros(2).bfloat16()}
    return Watched(remaining), values.bfloat16()


def mxfp4(experts: int, blocks: int, out: int) -> tuple[Watched, Tensor]:
    """A stack of experts, and its values, computed one by one."""
    torch.manual_seed(0)
    codes = torch.randint(0, 256, (experts, out, blocks, 16), dtype=torch.uint8)
    scales = torch.randint(110, 140, (experts, out, blocks), dtype=torch.uint8)
    e2m1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    values = torch.empty(experts, blocks * 32, out)
    for e, i, o in torch.cartesian_prod(torch.arange(experts), torch.arange(blocks * 32), torch.arange(out)).tolist():
        byte = int(codes[e, o, i // 32, i % 32 // 2])
        code = byte >> 4 if i % 2 else byte & 15
        values[e, i, o] = (-1) ** (code >> 3) * e2m1[code & 7] * 2.0 ** (int(scales[e, o, i // 32]) - 127)
    remaining = {"up_bias": torch.zeros(experts, out), "up_blocks": codes, "up_scales": scales, "norm": torch.ones(2)}
    return Watched(remaining), values.bfloat16()


@pytest.fixture(autouse=True, params=[7, 1 << 20], ids=["small-tiles", "one-tile"])
def tile(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dequantize, "_TILE_VALUES", request.param)


@pytest.mark.parametrize("codes", [torch.float8_e4m3fn, torch.uint8])
def test_scales_beyond_the_range_are_refused(codes: torch.dtype) -> None:
    fp8_codes = codes == torch.float8_e4m3fn
    source, _ = fp8(8, 12) if fp8_codes else mxfp4(2, 1, 4)
    scales = source.tensors["w_scale_inv" if fp8_codes else "up_scales"]
    scales.fill_(3e38 if fp8_codes else 254)
    quantization: Quantization = Fp8Blocks(4, 6) if fp8_codes else Mxfp4()
    weights = DequantizedWeights(source, quantization, torch.bfloat16)
    with pytest.raises(DataError, match="beyond the range of bfloat16"):
        weights.read("w" if fp8_codes else "up")


def check_slices(weights: DequantizedWeights, name: str, values: Tensor, slices: list[Slices | None]) -> None:
    for index in slices:
        expected = values[index or ...]
        got = weights.read(name, index)
        assert got.dtype == expected.dtype and torch.equal(got, expected)
        cast = torch.full(expected.shape, torch.nan)
        assert weights.read(name, index, into=cast).data_ptr() == cast.data_ptr()
        assert torch.equal(cast, expected.float())
        turned = torch.full(expected.shape[::-1], torch.nan, dtype=expected.dtype)
        weights.read(name, index, into=turned.permute(*reversed(range(turned.dim()))))
        assert torch.equal(turned.permute(*reversed(range(turned.dim()))), expected)


@pytest.mark.parametrize("scales", [torch.float32, torch.bfloat16, *([FLOAT8_E8M0] if FLOAT8_E8M0 else [])])
def test_any_slice_of_fp8(scales: torch.dtype) -> None:
    source, values = fp8(10, 15, scales=scales)
    weights = DequantizedWeights(source, Fp8Blocks(4, 6), torch.bfloat16)
    slices: list[Slices | None] = [None, (slice(3, 5),), (slice(4, 8), slice(6, 12)), (slice(9, 10), slice(14, 15))]
    slices += [(slice(0, 10), slice(5, 7)), (slice(2, 2), slice(0, 15)), (slice(1, 9, 3), slice(0, 15, 2))]
    check_slices(weights, "w", values, slices)


def test_any_slice_of_a_stack_in_fp8() -> None:
    source, values = fp8(3, 5, 8)
    weights = DequantizedWeights(source, Fp8Blocks(4, 6), torch.bfloat16)
    check_slices(weights, "w", values, [None, (slice(1, 2),), (slice(1, 3), slice(3, 5), slice(2, 7))])


def test_any_slice_of_mxfp4() -> None:
    source, values = mxfp4(2, 2, 5)
    weights = DequantizedWeights(source, Mxfp4(), torch.bfloat16)
    slices: list[Slices | None] = [None, (slice(1, 2),), (slice(0, 1), slice(31, 33), slice(1, 4))]
    slices += [(slice(1, 2), slice(32, 64), slice(0, 5, 2)), (slice(0, 2), slice(5, 5)), (slice(0, 2), slice(63, 64))]
    check_slices(weights, "up", values, slices)


def test_target_of_another_dtype() -> None:
    source, values = fp8(5, 7)
    weights = DequantizedWeights(source, Fp8Blocks(4, 6), torch.float32)
    assert weights.tensors["w"].dtype == torch.float32
    assert torch.equal(weights.read("w").bfloat16(), values) and not torch.equal(weights.read("w"), values.float())


def test_names_keep_their_order_and_other_tensors_are_unchanged() -> None:
    source, _ = fp8(5, 7)
    weights = DequantizedWeights(source, Fp8Blocks(4, 6), torch.bfloat16)
    assert [(name, meta.dtype, tuple(meta.shape)) for name, meta in weights.tensors.items()] == [
        ("a.norm", torch.float32, (3,)),
        ("w", torch.bfloat16, (5, 7)),
        ("z.bias", torch.bfloat16, (2,)),
    ]
    assert torch.equal(weights.read("z.bias", (slice(1, 2),)), torch.zeros(1).bfloat16())
    experts, _ = mxfp4(2, 1, 3)
    assert list(DequantizedWeights(experts, Mxfp4(), torch.bfloat16).tensors) == ["up_bias", "up", "norm"]
    with pytest.raises(ValueError, match="does not fit"):
        weights.read("w", into=torch.zeros(5, 6))


@pytest.mark.slow
def test_only_codes_and_scales_of_a_slice_are_read() -> None:
    source, _ = fp8(40, 60)
    DequantizedWeights(source, Fp8Blocks(4, 6), torch.bfloat16).read("w", (slice(6, 7), slice(12, 24)))
    assert (source.num_read["w"], source.num_read["w_scale_inv"]) == (12, 2)
    experts, _ = mxfp4(4, 3, 5)
    DequantizedWeights(experts, Mxfp4(), torch.bfloat16).read("up", (slice(2, 3), slice(32, 40), slice(1, 3)))
    assert (experts.num_read["up_blocks"], experts.num_read["up_scales"]) == (2 * 16, 2)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("w_scale_inv", None, "FP8 in blocks of 4x6 as in config.json: 1 missing: w_scale_inv"),
        ("w_scale_inv", torch.ones(2, 1), r"1 of another shape: w_scale_inv is \[2, 1\] for \[5, 7\]"),
        ("w_scale_inv", torch.ones(2, 2, dtype=torch.int32), r"w_scale_inv is \[2, 2\]"),
    ],
)
def test_fp8_that_does_not_match_is_refused(name: str, tensor: Tensor | None, message: str) -> None:
    source, _ = fp8(5, 7)
    refuses(source, name, tensor, Fp8Blocks(4, 6), message)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("up_scales", None, "the model is not MXFP4 as in config.json: 1 missing: up_scales"),
        ("up_scales", torch.ones(2, 3, 2, dtype=torch.uint8), r"up_scales is \[2, 3, 2\] for \[2, 3, 1, 16\]"),
        ("up_blocks", torch.ones(3, 1, 16, dtype=torch.uint8), r"up_scales is \[2, 3, 1\] for \[3, 1, 16\]"),
    ],
)
def test_mxfp4_that_does_not_match_is_refused(name: str, tensor: Tensor | None, message: str) -> None:
    source, _ = mxfp4(2, 1, 3)
    refuses(source, name, tensor, Mxfp4(), message)


def refuses(source: Watched, name: str, tensor: Tensor | None, quantization: Quantization, message: str) -> None:
    source.tensors.pop(name)
    if tensor is not None:
        source.tensors[name] = tensor
    with pytest.raises(DataError, match=message):
        DequantizedWeights(source, quantization, torch.bfloat16)


@pytest.mark.slow
def test_from_files(tmp_path: Path) -> None:
    source, values = fp8(140, 130, block=(128, 128), scales=FLOAT8_E8M0 or torch.float32)
    (tmp_path / "config.json").write_text("{}")
    save_file(source.tensors, tmp_path / "model.safetensors")
    weights = DequantizedWeights(ModelFolder.open(tmp_path), Fp8Blocks(128, 128), torch.bfloat16)
    for index in (None, (slice(120, 140), slice(127, 129))):
        assert torch.equal(weights.read("w", index), values[index or ...])
