"""The choice of one attention backend for a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from isthmus.engine.attention_backends.backends import BACKENDS, AttentionNeeds, BackendName
from isthmus.engine.attention_backends.flash_versions import activate_flash, newer_flash
from isthmus.engine.attention_backends.self_check import CheckResult, self_check
from isthmus.errors import UsageError


@dataclass(frozen=True, slots=True)
class Selection:
    name: BackendName
    messages: tuple[str, ...] = ()
    """For the log."""


def select_backend(
    requested: BackendName | Literal["auto"], needs: AttentionNeeds, *, verified: bool = False
) -> Selection:
    """The requested backend, or with ``auto`` the first of the candidates that can compute this.

    ``verified`` compares it with float32 on a GPU, and takes the next one if its errors are large.

    Raises:
        UsageError: the requested backend cannot compute this, or is wrong on this device.
    """
    rejected: list[str] = []
    for name in _candidates(requested, needs):
        reason, remarks = BACKENDS[name].unsupported(needs), [f"attention: {name}, {BACKENDS[name].description}"]
        if reason is None and verified and needs.device == "cuda" and name != "blocks":
            result, flash = _verify(name, needs)
            reason = result.failure
            errors = f"errors against float32: {result.forward:.1g} forward, {result.backward:.1g} backward"
            remarks += [flash, errors]
        if reason is None:
            quiet = needs.device == "cpu" and requested == "auto"
            return Selection(name, () if quiet else ("; ".join(each for each in (*remarks, *rejected) if each),))
        if requested != "auto":
            raise UsageError(f"train.attention={name} cannot be used here: {reason}. Use train.attention=auto.")
        rejected.append(f"not {name}: {reason}")
    raise AssertionError("blocks can compute all attention")


def _verify(name: BackendName, needs: AttentionNeeds) -> tuple[CheckResult, str]:
    """Check the backend with the newest flash attention that is right; also returns what the log says about that."""
    version, remark = newer_flash() if name == "varlen" else (None, "")
    if version is not None:
        try:
            activate_flash(version)
        except (ImportError, RuntimeError) as error:
            remark = f"not {version.name}: {error}"
        else:
            result = self_check(name, needs, version.name)
            if result.failure is None:
                return result, version.name
            remark = f"not {version.name}: {result.failure}"
    activate_flash(None)
    return self_check(name, needs), remark


def _candidates(requested: BackendName | Literal["auto"], needs: AttentionNeeds) -> tuple[BackendName, ...]:
    """The backends to try, the fastest first."""
    if requested != "auto":
        return (requested,)
    if needs.device == "cpu":
        return ("blocks",)
    # With a window or context parallelism SDPA needs masks, which flash attention does not have.
    plain = not (needs.window or needs.cp)
    return ("varlen", "sdpa", "flex", "blocks") if plain else ("varlen", "flex", "sdpa", "blocks")
