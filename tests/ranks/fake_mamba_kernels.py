"""Plain PyTorch with the signatures and restrictions of mamba_ssm 2.3.2 and causal_conv1d 1.6.1."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor


def install(patch: pytest.MonkeyPatch, *, ignore_samples: bool = False) -> list[str]:
    """Make the packages importable; returns the names of their functions as they are called.

    ``ignore_samples``: kernels that carry their state from one sample to the next.
    """
    called: list[str] = []

    def mamba_chunk_scan_combined(
        x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int, D: Any = None, z: Any = None,
        dt_bias: Any = None, initial_states: Any = None, seq_idx: Any = None, cu_seqlens: Any = None,
        dt_softplus: bool = False, dt_limit: tuple[float, float] = (0.0, float("inf")),
        return_final_states: bool = False, return_varlen_states: bool = False, state_dtype: Any = None,
    ) -> Tensor:  # fmt: skip
        called.append("mamba_chunk_scan_combined")
        batch, length, heads, _ = x.shape
        assert dt.shape == (batch, length, heads) and A.shape == D.shape == (heads,) and seq_idx.shape == (1, length)
        assert B.shape == C.shape and B.shape[:2] == (batch, length) and heads % B.shape[2] == 0
        assert seq_idx.dtype == torch.int32 and chunk_size & (chunk_size - 1) == 0
        keys, queries = (item[0].float().repeat_interleave(heads // item.size(2), dim=1)[:, :, None] for item in (B, C))
        decay = (dt[0].float() * A).exp()[..., None, None]
        added = (dt[0].float()[..., None] * x[0].float())[..., None] * keys
        out = _recurrence(decay, added, queries, _firsts(seq_idx[0], ignore_samples)) + x[0].float() * D[:, None]
        return out.to(x.dtype)[None]

    def selective_scan_fn(
        u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Any = None, z: Any = None,
        delta_bias: Any = None, delta_softplus: bool = False, return_last_state: bool = False,
    ) -> Tensor:  # fmt: skip
        called.append("selective_scan_fn")
        assert u.dtype == delta.dtype == B.dtype == C.dtype and A.dtype == D.dtype == torch.float32
        batch, channels, length = u.shape
        assert delta.shape == u.shape and A.size(0) == channels and B.shape == C.shape == (batch, A.size(1), length)
        assert all(item.is_contiguous() for item in (u, delta, B, C)), "vectors of 16 bytes"
        x, dt = u[0].t(), delta[0].t()
        decay, added = (dt[..., None] * A).exp(), (dt * x)[..., None] * B[0].t()[:, None]
        firsts = torch.zeros(length, dtype=torch.bool)
        return (_recurrence(decay, added, C[0].t()[:, None], firsts) + x * D).t()[None]

    def causal_conv1d_fn(
        x: Tensor, weight: Tensor, bias: Any = None, seq_idx: Any = None, initial_states: Any = None,
        return_final_states: bool = False, final_states_out: Any = None, activation: Any = None,
    ) -> Tensor:  # fmt: skip
        called.append("causal_conv1d_fn")
        _, channels, length = x.shape
        width = weight.size(1)
        assert 2 <= width <= 4, "causal_conv1d only supports width between 2 and 4"
        assert x.stride(1) == 1 and channels % 8 == x.stride(2) % 8 == x.storage_offset() % 8 == 0
        assert seq_idx.shape == (1, length) and seq_idx.dtype == torch.int32 and seq_idx.is_contiguous()
        rows, samples = x[0].t().float(), seq_idx[0]
        out = torch.zeros_like(rows) + (0 if bias is None else bias.float())
        for shift in range(min(width, length)):
            same = torch.ones(length - shift, dtype=torch.bool) if ignore_samples else None
            same = samples[shift:] == samples[: length - shift] if same is None else same
            term = rows[: length - shift] * same[:, None] * weight[:, width - 1 - shift].float()
            out = out + torch.nn.functional.pad(term, (0, 0, shift, 0))
        out = torch.nn.functional.silu(out) if activation == "silu" else out
        return out.to(x.dtype).t()[None]

    for package in ("mamba_ssm", "mamba_ssm.ops", "mamba_ssm.ops.triton"):
        patch.setitem(sys.modules, package, ModuleType(package))
    for name, function in {
        "mamba_ssm.ops.triton.ssd_combined": mamba_chunk_scan_combined,
        "mamba_ssm.ops.selective_scan_interface": selective_scan_fn,
        "causal_conv1d": causal_conv1d_fn,
    }.items():
        module = ModuleType(name)
        setattr(module, function.__name__, function)
        patch.setitem(sys.modules, name, module)
    return called


def _firsts(samples: Tensor, ignore: bool) -> Tensor:
    changed = samples[1:] != samples[:-1]
    return torch.cat((torch.ones(1, dtype=torch.bool), changed & (not ignore)))


def _recurrence(decay: Tensor, added: Tensor, queries: Tensor, firsts: Tensor) -> Tensor:
    result, state = [], torch.zeros_like(added[0])
    for token in range(len(added)):
        state = added[token] if firsts[token] else decay[token] * state + added[token]
        result.append((state * queries[token]).sum(-1))
    return torch.stack(result)
