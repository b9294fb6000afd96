"""The choice of one attention backend for a run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from isthmus.engine.attention.backends.flash_versions import activate_flash, newer_flash
from isthmus.engine.attention.backends.registry import BACKENDS, AttentionNeeds
from isthmus.engine.attention.backends.self_check import SHORT_TOKENS, CheckResult, self_check
from isthmus.engine.decoder_config import BackendName
from isthmus.errors import UsageError


@dataclass(frozen=True, slots=True)
class Selection:
    name: BackendName
    messages: tuple[str, ...] = ()
    """For the log."""


def select_backend(
    requested: BackendName | Literal["auto"], *needs: AttentionNeeds, verified: bool = False, tokens: int = 0
) -> Selection:
    """The requested backend, or with ``auto`` the first of the candidates that can compute all of ``needs``.

    ``needs`` are those of each kind of layer, on one device. ``verified`` compares it with float32 on a GPU, and takes
    the next one if its errors are large, also in packed sequences of ``tokens``, the length of the run's.

    Raises:
        UsageError: the requested backend cannot compute this, or is wrong on this device.
    """
    rejected: list[str] = []
    on_cpu = needs[0].device == "cpu"
    for name in _candidates(requested, needs):
        reason = next(filter(None, map(BACKENDS[name].unsupported, needs)), None)
        remarks = [f"attention: {name}, {BACKENDS[name].description}"]
        if reason is None and verified and not on_cpu and name != "blocks":
            result, flash = _verify(name, needs, tokens)
            reason = result.failure
            errors = f"errors against float32: {result.forward:.1g} forward, {result.backward:.1g} backward"
            remarks += [flash, errors]
        if reason is None:
            quiet = on_cpu and requested == "auto"
            return Selection(name, () if quiet else ("; ".join(remark for remark in (*remarks, *rejected) if remark),))
        if requested != "auto":
            raise UsageError(f"train.attention={name} cannot be used here: {reason}. Use train.attention=auto.")
        rejected.append(f"not {name}: {reason}")
    raise AssertionError("blocks can compute all attention")


def _verify(name: BackendName, needs: Sequence[AttentionNeeds], tokens: int) -> tuple[CheckResult, str]:
    """Check the backend with the newest flash attention that is right; also returns what the log says about that."""
    version, remark = newer_flash() if name in ("varlen", "cudnn") else (None, "")
    if version is not None:
        try:
            activate_flash(version)
        except (ImportError, RuntimeError) as error:
            remark = f"not {version.name}: {error}"
        else:
            result = _check(name, needs, version.name, tokens)
            if result.failure is None:
                return result, version.name
            remark = f"not {version.name}: {result.failure}"
    activate_flash(None)
    return _check(name, needs, "", tokens), remark


def _check(name: BackendName, needs: Sequence[AttentionNeeds], flash: str, tokens: int) -> CheckResult:
    """On few tokens, then on ``tokens`` with one key head: heads do not depend on each other."""
    short = _worst(self_check(name, need, flash) for need in needs)
    if short.failure is not None or tokens <= SHORT_TOKENS:
        return short
    return _worst([short, *(self_check(name, replace(need, groups=1), flash, tokens) for need in needs)])


def _worst(results: Iterable[CheckResult]) -> CheckResult:
    """A failure if there is one, else the largest errors."""
    checked = list(results)
    failed = next((result for result in checked if result.failure is not None), None)
    return failed or CheckResult(max(r.forward for r in checked), max(r.backward for r in checked), None)


def _candidates(requested: BackendName | Literal["auto"], needs: Sequence[AttentionNeeds]) -> tuple[BackendName, ...]:
    """The backends to try, the fastest first."""
    if requested != "auto":
        return (requested,)
    if needs[0].device == "cpu":
        return ("blocks",)
    # With a window or context parallelism SDPA needs masks, which flash attention does not have.
    plain = not any(need.window or need.cp for need in needs)
    return ("varlen", "sdpa", "flex", "blocks") if plain else ("varlen", "flex", "sdpa", "blocks")
