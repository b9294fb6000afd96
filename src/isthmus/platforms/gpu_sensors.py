"""Temperature, power, clock and throttling of this rank's GPU, from the vendor's library if it is installed."""

from __future__ import annotations

import importlib
import io
import logging
import math
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass, field
from enum import IntFlag
from typing import Any, Protocol

from isthmus.extras import install_command

_logger = logging.getLogger(__name__)
_SIGNIFICANT = 0.01
"""Share of the time since the reading before; less is no throttling."""


class Throttle(IntFlag):
    """Reasons why a GPU runs below its clock."""

    NONE = 0
    POWER = 1
    """Its power limit: usual in training."""
    HEAT = 2
    HARDWARE = 4
    """An external power brake, or another slowdown by the hardware."""


@dataclass(frozen=True, slots=True)
class GpuReading:
    """Values that the GPU does not report are NaN."""

    temperature_c: float
    power_w: float
    clock_mhz: float
    throttle: Throttle


class GpuSensors(Protocol):
    def read(self) -> GpuReading: ...


def nvidia_sensors(pci: str, uuid: str) -> GpuSensors | None:
    """Through nvidia-ml-py; None if it or the GPU is not available. ``pci`` is such as ``0000:23:00.0``."""
    return _opened("pynvml", lambda library: _Nvidia(library, _nvml_handle(library, pci, uuid)))


def amd_sensors(pci: str) -> GpuSensors | None:
    """Through amdsmi, which is also a part of ROCm; as :func:`nvidia_sensors`."""

    def opened(library: Any) -> GpuSensors:
        library.amdsmi_init()
        return _Amd(library, library.amdsmi_get_processor_handle_from_bdf(pci))

    return _opened("amdsmi", opened)


def _opened(module: str, make: Callable[[Any], GpuSensors]) -> GpuSensors | None:
    try:
        with redirect_stdout(io.StringIO()):  # amdsmi prints what it does not find; stdout is for results
            return make(importlib.import_module(module))
    except Exception as error:  # the library raises errors of its own, and none is a reason to end a run
        command = install_command(module)
        _logger.debug("GPU temperature, power and clock are not recorded: %s: %s (%s)", module, error, command)
        return None


def _nvml_handle(library: Any, pci: str, uuid: str) -> Any:
    library.nvmlInit()
    if pci:
        return library.nvmlDeviceGetHandleByPciBusId(pci)
    return library.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}")


_NVIDIA_REASONS = {
    "SwPowerCap": Throttle.POWER,
    "SwThermalSlowdown": Throttle.HEAT,
    "HwThermalSlowdown": Throttle.HEAT,
    "HwSlowdown": Throttle.HARDWARE,
    "HwPowerBrakeSlowdown": Throttle.HARDWARE,
}
"""NVML's ``nvmlClocksThrottleReason...``; newer versions name some of them ``nvmlClocksEventReason...`` too."""


@dataclass(slots=True)
class _Nvidia:
    library: Any
    handle: Any

    def read(self) -> GpuReading:
        nvml, gpu = self.library, self.handle
        return GpuReading(
            _number(lambda: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU)),
            _number(lambda: nvml.nvmlDeviceGetPowerUsage(gpu) / 1000),
            _number(lambda: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM)),
            self._throttle(),
        )

    def _throttle(self) -> Throttle:
        nvml, throttles = self.library, Throttle.NONE
        with suppress(Exception):
            read = getattr(nvml, "nvmlDeviceGetCurrentClocksThrottleReasons", None)
            reasons = (read or nvml.nvmlDeviceGetCurrentClocksEventReasons)(self.handle)
            for name, throttle in _NVIDIA_REASONS.items():
                bit = getattr(nvml, f"nvmlClocksThrottleReason{name}", None)
                bit = getattr(nvml, f"nvmlClocksEventReason{name}", 0) if bit is None else bit
                throttles |= throttle if reasons & bit else Throttle.NONE
        return throttles


_AMD_RESIDENCIES = {
    "ppt_residency_acc": Throttle.POWER,
    "prochot_residency_acc": Throttle.HEAT,
    "socket_thm_residency_acc": Throttle.HEAT,
    "vr_thm_residency_acc": Throttle.HEAT,
    "hbm_thm_residency_acc": Throttle.HEAT,
}
"""Counters of the time that each limit was active, in units of ``accumulation_counter`` (MI300 and newer).

``amdsmi_get_violation_status`` computes the same from two readings, and sleeps between them.
"""
_AMD_BITS = ((0, 32, Throttle.POWER), (32, 48, Throttle.HEAT))
"""Ranges of bits of ``indep_throttle_status`` (older GPUs): power and current, temperature."""


@dataclass(slots=True)
class _Amd:
    library: Any
    handle: Any
    _before: Mapping[str, Any] = field(default_factory=dict)

    def read(self) -> GpuReading:
        metrics: Mapping[str, Any] = {}
        with suppress(Exception):
            metrics = self.library.amdsmi_get_gpu_metrics_info(self.handle)
        clocks = metrics.get("current_gfxclks")
        reading = GpuReading(
            _first(metrics, "temperature_hotspot"),
            _first(metrics, "current_socket_power", "average_socket_power"),
            _first({"first": clocks[0]} if isinstance(clocks, list) and clocks else metrics, "first", "current_gfxclk"),
            self._throttle(metrics),
        )
        self._before = metrics
        return reading

    def _throttle(self, metrics: Mapping[str, Any]) -> Throttle:
        throttles = Throttle.NONE
        time = self._since_before(metrics, "accumulation_counter")
        for name, throttle in _AMD_RESIDENCIES.items():
            if time > 0 and self._since_before(metrics, name) / time > _SIGNIFICANT:
                throttles |= throttle
        status = metrics.get("indep_throttle_status")
        for first, end, throttle in _AMD_BITS:
            if isinstance(status, int) and status >> first & (1 << end - first) - 1:
                throttles |= throttle
        return throttles

    def _since_before(self, metrics: Mapping[str, Any], name: str) -> float:
        """NaN, of which no comparison is true, if the GPU has no such counter."""
        return _first(metrics, name) - _first(self._before, name)


def _first(metrics: Mapping[str, Any], *names: str) -> float:
    """The first value that is known: others are "N/A"."""
    values = (metrics.get(name) for name in names)
    return next((float(value) for value in values if isinstance(value, int | float)), math.nan)


def _number(read: Callable[[], Any]) -> float:
    with suppress(Exception):  # such as a value that this GPU does not report
        return float(read())
    return math.nan
