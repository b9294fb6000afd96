"""The kernels of mamba_ssm and causal_conv1d for Mamba and convolutions, on a GPU where they are installed and right.

They are called as in mamba_ssm 2.3.2 and causal_conv1d 1.6.1, and are untested on GPUs: each run compares them with the
functions that they replace before it uses them.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from isthmus.engine.host_copies import to_device
from isthmus.engine.kernel_check import TOLERANCE, relative_errors
from isthmus.engine.mixers.causal_convolution import causal_convolution
from isthmus.engine.mixers.mamba2_mixer import Mamba2Mixer
from isthmus.engine.mixers.mamba_mixer import MambaMixer
from isthmus.engine.mixers.selective_scan import selective_scan
from isthmus.engine.mixers.sharded_mixer import DepthwiseConvolution
from isthmus.engine.mixers.state_space_scan import state_space_scan

_LENGTHS = (200, 1, 77, 300, 62)
"""Not multiples of a chunk."""
_CHUNK = 128
_CONVOLUTIONS = "convolutions of mixers"
_PLAIN: dict[str, Callable[..., Tensor]] = {
    "Mamba-2": state_space_scan,
    "Mamba-1": selective_scan,
    _CONVOLUTIONS: causal_convolution,
}


@dataclass(frozen=True, slots=True)
class KernelCase:
    """A function of mixers, and what its kernel depends on."""

    name: str
    """``Mamba-2``, ``Mamba-1`` or ``convolutions of mixers``."""
    shape: tuple[int, ...]
    """Heads, width of a head, groups and size of the state; channels and size of the state; channels and taps."""
    dtype: torch.dtype
    device: torch.device
    has_bias: bool = True
    """Whether a convolution has a bias."""


def choose_mamba_kernels(model: nn.Module) -> tuple[str, ...]:
    """Set the scans and convolutions of all mixers of ``model`` to kernels that can be used.

    Returns messages for the user.
    """
    messages: dict[str, None] = {}
    for module in model.modules():
        if (case := _case(module)) is None or not _on_gpu(module):
            continue
        kernel, reason = usable_mamba_kernel(case)
        implementation = f"plain PyTorch, because {reason}"
        if kernel is not None:
            module.compute = kernel  # type: ignore[assignment]
            implementation = f"the kernel of {_PACKAGES[case.name][0]}"
        messages[f"{case.name}: {implementation}"] = None
    return tuple(messages)


def _on_gpu(module: nn.Module) -> bool:
    weight = next(module.parameters())
    return weight.is_cuda and not isinstance(weight.data, FakeTensor)


def _case(module: nn.Module) -> KernelCase | None:
    if isinstance(module, Mamba2Mixer):
        sizes = module.sizes
        shape = (module.heads, sizes.head_dim, module.groups.local_number, sizes.state_size)
        return KernelCase("Mamba-2", shape, module.config.params_dtype, module.A_log.device)
    if isinstance(module, MambaMixer):
        channels, states = module.A_log.shape
        return KernelCase("Mamba-1", (channels, states), module.config.params_dtype, module.A_log.device)
    if isinstance(module, DepthwiseConvolution):
        channels, _, taps = module.weight.shape
        has_bias, weight = module.bias is not None, module.weight
        return KernelCase(_CONVOLUTIONS, (channels, taps), weight.dtype, weight.device, has_bias)
    return None


@functools.cache
def usable_mamba_kernel(case: KernelCase) -> tuple[Callable[..., Tensor] | None, str]:
    """The kernel with the arguments of the function that it replaces, or None and the reason."""
    package, module, name, wrap = _PACKAGES[case.name]
    if case.dtype not in (torch.bfloat16, torch.float16):
        return None, f"{package} is used in bf16 and fp16, got {case.dtype}"
    if torch.are_deterministic_algorithms_enabled():
        return None, f"{package} is not deterministic"
    try:
        kernel = wrap(getattr(importlib.import_module(module), name))
        error = _largest_error(kernel, case)
    except Exception as failure:  # no module; or of CUDA or Triton
        reason = str(failure).strip().partition("\n")[0]
        return None, f"{package} failed with {type(failure).__name__}: {reason}"
    if error <= TOLERANCE[case.dtype]:
        return kernel, ""
    return None, f"{package} has errors of {error:.2g}, above {TOLERANCE[case.dtype]:g}"


def _mamba2(kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The kernel with the arguments of :func:`state_space_scan`."""

    def scan(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, lengths: tuple[int, ...]) -> Tensor:
        samples = _sample_numbers(lengths, x.device)
        return kernel(x[None], dt[None], a, b[None], c[None], _CHUNK, D=d, seq_idx=samples)[0].to(dt.dtype)

    return scan


def _mamba1(kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The kernel with the arguments of :func:`selective_scan`, for one sample after another.

    It has no boundaries of samples, and needs time steps in the dtype of its inputs, so all are float32.
    """

    def scan(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, lengths: tuple[int, ...]) -> Tensor:
        parts = [tensor.to(dt.dtype).split(lengths) for tensor in (x, dt, b, c)]
        outputs = []
        for sample in zip(*parts, strict=True):
            sample_x, sample_dt, sample_b, sample_c = (part.t().contiguous()[None] for part in sample)
            outputs.append(kernel(sample_x, sample_dt, a, sample_b, sample_c, D=d)[0].t())
        return torch.cat(outputs)

    return scan


def _convolution(kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The kernel with the arguments of :func:`causal_convolution`."""

    def convolve(
        x: Tensor, weight: Tensor, bias: Tensor | None, lengths: tuple[int, ...], *, activated: bool = False
    ) -> Tensor:
        if x.stride(1) != 1 or x.stride(0) % 8 or x.storage_offset() % 8:  # it reads 8 channels at once
            x = x.clone(memory_format=torch.contiguous_format)
        out = kernel(
            x.t()[None],
            weight[:, 0],
            bias,
            seq_idx=_sample_numbers(lengths, x.device),
            activation="silu" if activated else None,
        )[0].t()
        if out.requires_grad:
            out.register_hook(lambda grad: grad.contiguous())
        return out

    return convolve


_PACKAGES: dict[str, tuple[str, str, str, Callable[..., Callable[..., Tensor]]]] = {
    "Mamba-2": ("mamba_ssm", "mamba_ssm.ops.triton.ssd_combined", "mamba_chunk_scan_combined", _mamba2),
    "Mamba-1": ("mamba_ssm", "mamba_ssm.ops.selective_scan_interface", "selective_scan_fn", _mamba1),
    _CONVOLUTIONS: ("causal_conv1d", "causal_conv1d", "causal_conv1d_fn", _convolution),
}
"""Kernels by case: package, module, name, and the function that converts the arguments."""


@functools.lru_cache(maxsize=4)  # shared by the layers of a step
def _sample_numbers(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """int32 [1, T], the sample of each token, without a read of the device."""
    sizes = torch.tensor(lengths)
    return to_device(torch.arange(len(lengths), dtype=torch.int32).repeat_interleave(sizes)[None], device)


def _largest_error(kernel: Callable[..., Tensor], case: KernelCase) -> float:
    """Largest error of output and gradients, relative to their largest value; NaN if one is not finite."""
    leaves = _convolution_inputs(case) if case.name == _CONVOLUTIONS else _scan_inputs(case)
    upstream = torch.randn(leaves[0].shape, generator=torch.Generator().manual_seed(1))
    without_bias = [None] if case.name == _CONVOLUTIONS and not case.has_bias else []

    def run(function: Callable[..., Tensor], device: torch.device, **options: bool) -> list[Tensor]:
        arguments = [tensor.to(device, copy=True).requires_grad_() for tensor in leaves]
        with torch.enable_grad():
            out = function(*arguments, *without_bias, _LENGTHS, **options)
            return [out.detach(), *torch.autograd.grad(out, arguments, upstream.to(device, out.dtype))]

    errors = []
    for options in [{"activated": True}, {"activated": False}] if case.name == _CONVOLUTIONS else [{}]:
        reference = run(_PLAIN[case.name], torch.device("cpu"), **options)
        errors.append(relative_errors(run(kernel, case.device, **options), reference))
    return float(torch.cat(errors).max())


def _convolution_inputs(case: KernelCase) -> list[Tensor]:
    channels, taps = case.shape
    shapes = [(sum(_LENGTHS), channels), (channels, 1, taps), (channels,)][: 2 + case.has_bias]
    random = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=random).to(case.dtype) for shape in shapes]


def _scan_inputs(case: KernelCase) -> list[Tensor]:
    """Arguments of the scan but the lengths."""
    random, tokens = torch.Generator().manual_seed(0), sum(_LENGTHS)

    def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, generator=random).to(dtype)

    x: tuple[int, ...]
    per_step: tuple[int, ...]
    a: tuple[int, ...]
    keys: tuple[int, ...]
    if case.name == "Mamba-2":
        heads, width, groups, states = case.shape
        x, per_step, a, keys = (heads, width), (heads,), (heads,), (groups, states)
    else:
        channels, states = case.shape
        x, per_step, a, keys = (channels,), (channels,), (channels, states), (states,)
    dt = torch.nn.functional.softplus(draw(tokens, *per_step) - 2)
    b, c = (draw(tokens, *keys, dtype=case.dtype) for _ in range(2))
    return [draw(tokens, *x, dtype=case.dtype), dt, -draw(*a).exp(), b, c, draw(*per_step)]
