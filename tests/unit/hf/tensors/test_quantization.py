"""What quantised weights mean: every code and every scale, and which configs are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from isthmus.errors import DataError, UsageError
from isthmus.hf.tensors.quantization import Fp8Blocks, Mxfp4, parse_quantization


def whole(shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    return tuple((0, size) for size in shape)


def test_every_fp8_code() -> None:
    """E4M3 by its definition: sign, four bits of exponent biased by 7, three of mantissa."""
    codes = torch.arange(256, dtype=torch.uint8).view(16, 16)
    values = Fp8Blocks(16, 16).dequantize(codes.view(torch.float8_e4m3fn), torch.tensor([[2.0]]), whole((16, 16)))
    for code, value in zip(range(256), values.flatten().tolist(), strict=True):
        sign, exponent, mantissa = -1 if code >> 7 else 1, code >> 3 & 15, code & 7
        if code & 127 == 127:
            assert value != value
        elif exponent:
            assert value == sign * 2 ** (exponent - 7) * (1 + mantissa / 8) * 2
        else:
            assert value == sign * 2**-6 * mantissa / 8 * 2


def test_all_fp4_codes_and_all_scales_except_nan() -> None:
    """E2M1: sign, two bits of exponent biased by 1, one of mantissa; the low half of a byte first."""
    codes = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16)
    for low in range(0, 255, 16):
        scales = torch.arange(low, low + 16, dtype=torch.int32).clamp(max=254).to(torch.uint8).view(1, 1, 16)
        values = Mxfp4().dequantize(codes, scales, whole((1, 512, 1))).flatten().tolist()
        for at, value in enumerate(values):
            code = at // 2 >> 4 if at % 2 else at // 2 & 15
            exponent, mantissa = code >> 1 & 3, code & 1
            magnitude = 2.0 ** (exponent - 1) * (1 + mantissa / 2) if exponent else mantissa / 2
            expected = (-magnitude if code >> 3 else magnitude) * 2.0 ** (int(scales[0, 0, at // 32]) - 127)
            assert value == expected or (abs(expected) >= 2.0**128 and abs(value) == float("inf"))


def test_mxfp4_equals_transformers() -> None:
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    torch.manual_seed(0)
    codes = torch.randint(0, 256, (3, 10, 4, 16), dtype=torch.uint8)
    scales = torch.randint(90, 160, (3, 10, 4), dtype=torch.uint8)
    theirs = mxfp4.convert_moe_packed_tensors(codes, scales)
    assert Mxfp4().shape(tuple(codes.shape)) == tuple(theirs.shape) == (3, 128, 10)
    ours = Mxfp4().dequantize(codes, scales, whole((3, 128, 10)))
    assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)
    assert not torch.equal(Mxfp4().dequantize(codes >> 4 | codes << 4, scales, whole((3, 128, 10))), theirs)


@pytest.mark.parametrize(
    ("scales", "dtype", "matches"),
    [
        ((2, 3), torch.float32, True),
        ((2, 3), torch.bfloat16, True),
        ((2, 2), torch.float32, False),
        ((3, 2), torch.float32, False),
        ((), torch.float32, False),
        ((2, 3), torch.uint8, False),
    ],
)
def test_matching_scales_of_fp8(scales: tuple[int, ...], dtype: torch.dtype, matches: bool) -> None:
    assert Fp8Blocks(128, 64).matches((130, 129), scales, dtype) == matches
    assert Fp8Blocks(128, 64).matches((5, 130, 129), (5, *scales), dtype) == matches


@pytest.mark.parametrize(
    ("codes", "scales", "dtype", "matches"),
    [
        ((2, 6, 3, 16), (2, 6, 3), torch.uint8, True),
        ((2, 6, 3, 16), (2, 6, 4), torch.uint8, False),
        ((2, 6, 3, 8), (2, 6, 3), torch.uint8, False),
        ((6, 3, 16), (6, 3), torch.uint8, False),
        ((2, 6, 3, 16), (2, 6, 3), torch.float32, False),
    ],
)
def test_matching_scales_of_mxfp4(
    codes: tuple[int, ...], scales: tuple[int, ...], dtype: torch.dtype, matches: bool
) -> None:
    assert Mxfp4().matches(codes, scales, dtype) == matches


def test_supported_quantization_configs() -> None:
    deepseek = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 64]}
    assert parse_quantization(deepseek) == Fp8Blocks(128, 64)
    assert str(parse_quantization(deepseek)) == "FP8 in blocks of 128x64"
    assert parse_quantization({"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}) == Mxfp4()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "awq", "bits": 4}, "quant_method='awq' is not supported"),
        ({"quant_method": "compressed-tensors"}, "quant_method='compressed-tensors' is not supported"),
        ({"load_in_4bit": True}, "quant_method=None is not supported"),
        ({"quant_method": "fp8"}, "weight_block_size=None"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, r"weight_block_size=\[128\]"),
        ({"quant_method": "fp8", "weight_block_size": [128, 0]}, r"weight_block_size=\[128, 0\]"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128], "expert_dtype": "fp4"}, "expert_dtype='fp4'"),
    ],
)
def test_unsupported_quantization_configs(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=f"{message}.*Use the unquantized model, or dequantize it"):
        parse_quantization(config)


def test_quantization_config_must_be_an_object() -> None:
    with pytest.raises(DataError, match="quantization_config must be an object, got 'fp8'"):
        parse_quantization("fp8")  # type: ignore[arg-type]
