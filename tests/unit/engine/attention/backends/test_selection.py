"""Which attention backend a run gets, and what happens if it is wrong on a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from isthmus.config.schema import ParallelConfig
from isthmus.engine import kernel_check
from isthmus.engine.attention.backends import flash_versions, selection, self_check
from isthmus.engine.attention.backends import registry as backends
from isthmus.engine.attention.backends.blocks import packed_attention
from isthmus.engine.attention.backends.registry import BACKENDS, AttentionNeeds
from isthmus.engine.attention.backends.selection import select_backend
from isthmus.engine.attention.backends.self_check import CheckResult
from isthmus.engine.decoder.model_config import attention_needs, transformer_config
from isthmus.errors import UsageError
from isthmus.families.architecture import Dropout
from isthmus.families.registry import family_for

BF16 = AttentionNeeds("cuda", torch.bfloat16, groups=8, repeat=4, key_width=128, value_width=128)


@pytest.fixture(autouse=True)
def with_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a compiler."""
    monkeypatch.setattr(backends, "find_compiler", lambda _device: ("Triton", ""))
    monkeypatch.setattr(selection, "newer_flash", lambda: (None, ""))
    self_check.self_check.cache_clear()


@pytest.mark.parametrize(
    ("changes", "name", "reason"),
    [
        ({}, "varlen", ""),
        ({"window": True, "cp": True}, "varlen", ""),
        ({"key_width": 192, "value_width": 128}, "varlen", ""),
        ({"softcap": 50.0}, "flex", "not varlen: it has no logit softcapping"),
        ({"sinks": True, "window": True}, "flex", "not varlen: it has no attention sinks"),
        ({"dtype": torch.float32}, "sdpa", "needs bf16 or fp16"),
        ({"dtype": torch.float32, "softcap": 50.0}, "flex", "needs bf16 or fp16"),
        ({"dtype": torch.float32, "window": True}, "flex", "needs bf16 or fp16"),
        ({"dropout": True}, "sdpa", "has no dropout"),
        ({"dropout": True, "sinks": True}, "blocks", "not flex: it has no dropout"),
        ({"key_width": 100}, "sdpa", "keys of 100"),
        ({"key_width": 512, "value_width": 512}, "sdpa", "up to 256 channels"),
        ({"key_width": 64, "value_width": 128}, "sdpa", "values that are not wider"),
    ],
)
def test_the_choice_follows_what_the_model_needs(changes: dict[str, Any], name: str, reason: str) -> None:
    selected = select_backend("auto", replace(BF16, **changes))
    assert selected.name == name
    (line,) = selected.messages
    assert line.startswith(f"attention: {name}, ") and reason in line


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "find_compiler", lambda _device: ("", "Triton cannot be imported (x)"))
    selected = select_backend("auto", replace(BF16, sinks=True))
    assert selected.name == "blocks" and "not flex: Triton cannot be imported (x)" in selected.messages[0]


def test_a_deterministic_run_has_no_compiled_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # of the compiler that the other tests find
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    selected = select_backend("auto", replace(BF16, softcap=50.0))
    assert selected.name == "blocks" and "not flex: train.deterministic=true excludes" in selected.messages[0]


def test_a_cpu_has_blocks_and_no_message() -> None:
    assert select_backend("auto", replace(BF16, device="cpu", softcap=1.0)) == selection.Selection("blocks")
    assert select_backend("sdpa", replace(BF16, device="cpu")).messages == (
        "attention: sdpa, scaled_dot_product_attention, one call for each sample",
    )


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("varlen", {"device": "cpu"}, "it has no CPU kernel"),
        ("varlen", {"dtype": torch.float32}, "it needs bf16 or fp16, got torch.float32"),
        ("cudnn", {"dtype": torch.float32}, "it needs bf16 or fp16, got torch.float32"),
        ("flex", {"device": "cpu"}, "it has no backward pass on a CPU"),
        ("flex", {"dropout": True}, "it has no dropout"),
        ("sdpa", {"sinks": True}, "it has no attention sinks"),
        ("sdpa", {"device": "cpu", "dropout": True}, "would depend on the parallel layout"),
    ],
)
def test_a_requested_backend_that_cannot_is_refused(name: Any, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(UsageError, match=rf"train\.attention={name} .*{reason}.*Use train\.attention=auto"):
        select_backend(name, replace(BF16, **changes))


def test_a_backend_with_large_errors_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    def check(name: str, _needs: AttentionNeeds, _flash: str = "") -> CheckResult:
        return CheckResult(0.004, 0.9, "its errors are 0.9") if name == "varlen" else CheckResult(0.001, 0.002, None)

    monkeypatch.setattr(selection, "self_check", check)
    selected = select_backend("auto", BF16, verified=True)
    assert selected.name == "sdpa"
    assert "errors against float32: 0.001 forward, 0.002 backward" in selected.messages[0]
    assert "not varlen: its errors are 0.9" in selected.messages[0]
    with pytest.raises(UsageError, match=r"train\.attention=varlen cannot be used here: its errors are 0\.9"):
        select_backend("varlen", BF16, verified=True)


@pytest.mark.parametrize(
    ("installed", "works", "right", "remark", "active"),
    [
        (False, True, True, "FA3 is not installed (flash_attn_interface)", []),
        (True, True, True, "; FA3; errors", ["FA3"]),
        (True, True, False, "not FA3: its errors are 0.9", ["FA3", "torch"]),
        (True, False, True, "not FA3: no kernels", ["torch"]),
    ],
)
def test_an_installed_flash_attention_is_used_if_it_is_right(
    monkeypatch: pytest.MonkeyPatch, installed: bool, works: bool, right: bool, remark: str, active: list[str]
) -> None:
    activated: list[str] = []

    def activate(name: str) -> None:
        if not works:
            raise RuntimeError("no kernels")
        activated.append(name)

    def check(_name: str, _needs: AttentionNeeds, flash: str = "") -> CheckResult:
        wrong = bool(flash) and not right
        return CheckResult(0.001, 0.9 if wrong else 0.002, "its errors are 0.9" if wrong else None)

    monkeypatch.setattr(selection, "newer_flash", flash_versions.newer_flash)
    monkeypatch.setattr(selection, "self_check", check)
    monkeypatch.setattr(flash_versions, "find_spec", lambda _name: object() if installed else None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    attention = torch.nn.attention
    monkeypatch.setattr(attention, "activate_flash_attention_impl", activate, raising=False)
    monkeypatch.setattr(attention, "current_flash_attention_impl", lambda: "FA3" if installed else None, raising=False)
    monkeypatch.setattr(attention, "restore_flash_attention_impl", lambda: activated.append("torch"), raising=False)
    (line,) = select_backend("auto", BF16, verified=True).messages
    assert line.startswith("attention: varlen") and remark in line
    assert activated == active


def of_kernel(monkeypatch: pytest.MonkeyPatch, attend: Any, tokens: int = 0, **changes: Any) -> CheckResult:
    """The check of a kernel, on the CPU."""
    monkeypatch.setitem(BACKENDS, "varlen", replace(BACKENDS["varlen"], attend=attend))
    self_check.self_check.cache_clear()
    needs = replace(BF16, device="cpu", groups=2, repeat=2, key_width=16, value_width=16, **changes)
    return self_check.self_check("varlen", needs, "", tokens)


CASES = pytest.mark.parametrize(
    "changes",
    [{}, {"window": True}, {"cp": True}, {"softcap": 2.0, "sinks": True, "window": True, "cp": True}],
    ids=["causal", "window", "cp", "all"],
)


@CASES
@pytest.mark.slow_cases("dtype0-causal", "dtype0-window", "dtype0-all", "dtype1-window", "dtype1-all")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_right_kernel_passes(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, changes: dict[str, Any]) -> None:
    """Also one that accumulates in the dtype of the inputs, as the blocks do."""
    result = of_kernel(monkeypatch, packed_attention, dtype=dtype, **changes)
    assert result.failure is None
    assert 0 < max(result[:2]) < kernel_check.TOLERANCE[dtype] or dtype == torch.float32


def without_window(*args: Any, **kwargs: Any) -> Tensor:
    """As in ROCm builds that accepted a window and ignored it."""
    return packed_attention(*args[:4], None, **kwargs)


def aligned_with_the_first_key(q: Tensor, k: Tensor, v: Tensor, *args: Any, spans: Any, **kwargs: Any) -> Tensor:
    """Queries of a part of a sample, as if they were its first tokens."""
    early = tuple((start - 30, end - 30) for start, end in spans)
    return packed_attention(q, k, v, *args, spans=early, **kwargs)


class WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * 1.1


@pytest.mark.slow_cases("window")
@pytest.mark.parametrize(
    ("attend", "changes", "reason"),
    [
        (without_window, {"window": True}, "errors against float32 are"),
        (aligned_with_the_first_key, {"cp": True}, "errors against float32 are"),
        (lambda q, *a, **k: packed_attention(q * torch.nan, *a, **k), {}, "errors against float32 are nan forward"),
        (lambda q, k, v, *a, **o: packed_attention(q, k, WrongGradient.apply(v), *a, **o), {}, "and 0.098 backward"),
        (lambda *_, **__: 1 / 0, {}, "failed with ZeroDivisionError: division by zero"),
    ],
    ids=["window", "alignment", "nan", "gradient", "error"],
)
def test_a_wrong_kernel_is_found(
    monkeypatch: pytest.MonkeyPatch, attend: Any, changes: dict[str, Any], reason: str
) -> None:
    assert reason in (of_kernel(monkeypatch, attend, **changes).failure or "")


def without_early_keys(
    q: Tensor, k: Tensor, v: Tensor, lengths: Any, window: int | None = None, **kwargs: Any
) -> Tensor:
    """Right for up to 700 keys."""
    return packed_attention(q, k, v, lengths, min(window or 700, 700), **kwargs)


@pytest.mark.slow
@CASES
def test_a_kernel_is_checked_at_the_length_of_the_run(monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        assert of_kernel(monkeypatch, packed_attention, 1100, dtype=dtype, **changes).failure is None
    assert of_kernel(monkeypatch, without_early_keys).failure is None
    result = of_kernel(monkeypatch, without_early_keys, 1100)
    assert "its errors at 1100 tokens against float32 are" in (result.failure or "")


@pytest.mark.slow
def test_the_check_of_cudnn_has_one_sample_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Right for several samples, by flash attention, and wrong for one."""

    def attend(q: Tensor, k: Tensor, v: Tensor, lengths: Any, *args: Any, **kwargs: Any) -> Tensor:
        return packed_attention(q if len(lengths) > 1 else q * 2, k, v, lengths, *args, **kwargs)

    needs = replace(BF16, device="cpu", groups=2, repeat=2, key_width=16, value_width=16)
    for tokens in (0, 1100):
        for kernel, is_right in ((packed_attention, True), (attend, False)):
            monkeypatch.setitem(BACKENDS, "cudnn", replace(BACKENDS["cudnn"], attend=kernel))
            self_check.self_check.cache_clear()
            assert (self_check.self_check("cudnn", needs, "", tokens).failure is None) is is_right


def test_cudnn_is_refused_on_amd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.0")
    with pytest.raises(UsageError, match="cudnn cannot be used here: cuDNN is for NVIDIA GPUs"):
        select_backend("cudnn", BF16)


def test_cudnn_is_refused_in_deterministic_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    with pytest.raises(UsageError, match="deterministic=true excludes its backward pass"):
        select_backend("cudnn", BF16)


def test_the_choice_follows_the_check_at_the_length_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def check(name: str, needs: AttentionNeeds, _flash: str = "", tokens: int = 0) -> CheckResult:
        fails = name == "varlen" and tokens > 0
        assert needs.groups == (1 if tokens else 8) and tokens in (0, 8192)
        return CheckResult(0.001, 0.9 if fails else 0.002, "its errors are 0.9" if fails else None)

    monkeypatch.setattr(selection, "self_check", check)
    assert select_backend("auto", BF16, verified=True, tokens=600).name == "varlen"
    assert select_backend("auto", BF16, verified=True, tokens=8192).name == "sdpa"


def test_a_check_runs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    attend = lambda *args, **kwargs: calls.append(1) or packed_attention(*args, **kwargs)  # noqa: E731
    first = of_kernel(monkeypatch, attend)
    needs = replace(BF16, device="cpu", groups=2, repeat=2, key_width=16, value_width=16)
    assert self_check.self_check("varlen", needs, "", 0) is first and len(calls) == 1


SIZES = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64, "rms_norm_eps": 1e-6}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16, "max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("tp", "groups", "repeat"),
    [(1, 4, 2), (2, 2, 2), (8, 1, 1)],
)
def test_needs_are_those_of_one_rank(tp: int, groups: int, repeat: int) -> None:
    config = {"model_type": "qwen3", **SIZES, **HEADS, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    arch = family_for(config).to_architecture(config)
    device = torch.device("cuda")
    (needs,) = attention_needs(arch, ParallelConfig(tp=tp), dtype=torch.bfloat16, device=device, dropout=Dropout())
    assert (needs.groups, needs.repeat, needs.key_width, needs.cp) == (groups, repeat, 16, False)
    assert transformer_config(arch, dtype=torch.bfloat16, device=device).attention == "varlen"
    assert transformer_config(arch, dtype=torch.bfloat16).attention == "blocks"
