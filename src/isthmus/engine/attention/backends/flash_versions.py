"""FlashAttention 3 and 4 in place of the version 2 of torch, if their packages are installed on a GPU that has them."""

from __future__ import annotations

from importlib.util import find_spec
from typing import NamedTuple

import torch
import torch.nn.attention as torch_attention


class FlashVersion(NamedTuple):
    name: str
    """In torch."""
    module: str
    major: int
    """Major compute capability of its GPUs."""


_VERSIONS = (
    FlashVersion("FA3", "flash_attn_interface", 9),
    FlashVersion("FA4", "flash_attn.cute.interface", 10),
)


def newer_flash() -> tuple[FlashVersion | None, str]:
    """The version for this GPU that torch can activate, and if there is none or it is not installed, a remark."""
    if torch.version.hip is not None or not hasattr(torch_attention, "activate_flash_attention_impl"):
        return None, ""
    major, _ = torch.cuda.get_device_capability()
    newest = next((version for version in _VERSIONS if version.major == major), None)
    if newest is None or _is_installed(newest.module):
        return newest, ""
    return None, f"{newest.name} is not installed ({newest.module})"


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # its package
        return False


def activate_flash(version: FlashVersion | None) -> None:
    """Use ``version``, or that of torch, in flash attention of this process.

    Raises:
        ImportError, RuntimeError: the package does not fit to torch.
    """
    if version is not None:
        torch_attention.activate_flash_attention_impl(version.name)
    elif hasattr(torch_attention, "current_flash_attention_impl") and torch_attention.current_flash_attention_impl():
        torch_attention.restore_flash_attention_impl()
