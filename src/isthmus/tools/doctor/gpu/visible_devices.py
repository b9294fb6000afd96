"""Environment variables that select GPUs: how many they leave, and whether they contradict each other."""

from __future__ import annotations

from collections.abc import Iterator

from isthmus.platforms.environment import MASKS
from isthmus.tools.doctor.findings import Finding, error, ok, warning
from isthmus.tools.doctor.gpu.gpus import Vendor, find_gpus, gpu_files
from isthmus.tools.doctor.gpu.torch_build import installed_torch
from isthmus.tools.doctor.machine import Machine

_SUBJECT = "visible GPUs"
_ORDER = {"AMD": ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"), "NVIDIA": MASKS[:1]}
"""HIP reads CUDA_VISIBLE_DEVICES only if HIP_VISIBLE_DEVICES is not set; ROCR is below both."""
_OVERRIDE = "HSA_OVERRIDE_GFX_VERSION"


def check_visible_gpus(machine: Machine) -> Iterator[Finding]:
    build, gpus = installed_torch(), find_gpus(machine)
    vendor: Vendor = "AMD" if build is not None and build.kind == "ROCm" else "NVIDIA"
    present = [gpu for gpu in gpus if gpu.vendor == vendor]
    if build is None or build.kind == "CPU" or not present:
        return
    count = len(gpu_files(machine, vendor)) or len(present)
    if count < len(present):
        yield ok(_SUBJECT, f"this container has access to {count} of the {len(present)} GPUs of the machine", "/dev")
    yield from masked(vendor, count, machine)
    for name in sorted((set(MASKS) - set(_ORDER[vendor])) & machine.environment.keys()):
        yield warning(_SUBJECT, f"{name}={machine.environment[name]} has no effect with CUDA", f"Unset {name}.", name)
    if vendor == "AMD" and (version := machine.environment.get(_OVERRIDE)):
        yield warning(
            _SUBJECT,
            f"{_OVERRIDE}={version} makes the runtime treat each GPU as another architecture; kernels may be wrong",
            "Unset it, unless torch has no kernels for this GPU.",
            _OVERRIDE,
        )


def masked(vendor: Vendor, count: int, machine: Machine) -> Iterator[Finding]:
    """Apply each variable to ``count`` GPUs, as the runtimes do: a wrong number hides itself and all after it."""
    visible, names = count, []
    for name in _ORDER[vendor]:
        value = machine.environment.get(name)
        if value is None or (name == "CUDA_VISIBLE_DEVICES" and "HIP_VISIBLE_DEVICES" in names):
            continue
        names.append(name)
        words = [word.strip() for word in value.split(",")] if value.strip() else []
        wrong = next((word for word in words if not _names_one_of(word, visible)), None)
        if wrong is not None:
            words = words[: words.index(wrong)]
            after = f", after {names[-2]} left {visible}" if len(names) > 1 else ""
            yield error(
                _SUBJECT,
                f"{name}={value}: there is no GPU {wrong}{after}; it hides itself and all after it",
                f"Name GPUs from 0 to {visible - 1}, or unset {name}. Each variable counts the GPUs that those before "
                "it leave: keep one of them.",
                name,
            )
        elif len(set(words)) < len(words):
            words = []
            yield error(_SUBJECT, f"{name}={value} names a GPU twice, which hides all", f"Correct {name}.", name)
        visible = len(words)
    used = ", ".join(f"{name}={machine.environment[name]}" for name in names) or "no variable hides one"
    if visible:
        yield ok(_SUBJECT, f"{visible} of {count} ({used})", ", ".join(_ORDER[vendor]))
    else:
        yield error(
            _SUBJECT, f"none of {count} ({used})", f"Unset {names[-1]}, or name GPUs from 0 on.", ", ".join(names)
        )


def _names_one_of(word: str, count: int) -> bool:
    """A number below ``count``, or a UUID, which is not checked."""
    return int(word) < count if word.isdigit() else word.startswith(("GPU-", "MIG-"))
