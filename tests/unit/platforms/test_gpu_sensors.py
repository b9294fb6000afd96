"""Readings of a GPU from stand-ins for the vendors' libraries, with the names of their documentation."""

from __future__ import annotations

import math
import sys
from types import ModuleType
from typing import Any

import pytest

from isthmus.platforms import gpu_sensors
from isthmus.platforms.gpu_sensors import Throttle, amd_sensors, nvidia_sensors

PCI = "0000:23:00.0"


class FakeNvml(ModuleType):
    """Functions and constants of NVML's reference and of nvidia-ml-py."""

    NVML_TEMPERATURE_GPU, NVML_CLOCK_SM = 0, 1
    nvmlClocksThrottleReasonSwPowerCap = 0x4
    nvmlClocksThrottleReasonHwSlowdown = 0x8
    nvmlClocksEventReasonSwThermalSlowdown = 0x20
    nvmlClocksThrottleReasonHwThermalSlowdown = 0x40
    nvmlClocksThrottleReasonHwPowerBrakeSlowdown = 0x80

    def __init__(self, reasons: int) -> None:
        super().__init__("pynvml")
        self.reasons, self.opened = reasons, ""

    def nvmlInit(self) -> None: ...

    def nvmlDeviceGetHandleByPciBusId(self, pci: str) -> str:
        self.opened = pci
        return "handle"

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        self.opened = uuid
        return "handle"

    def nvmlDeviceGetTemperature(self, handle: str, sensor: int) -> int:
        assert (handle, sensor) == ("handle", 0)
        return 81

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        return 689_500  # milliwatts

    def nvmlDeviceGetClockInfo(self, handle: str, clock: int) -> int:
        if clock != 1:
            raise RuntimeError("not supported")
        return 1410

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: str) -> int:
        return self.reasons


@pytest.mark.parametrize(
    ("reasons", "throttle"),
    [
        (0x0, Throttle.NONE),
        (0x1, Throttle.NONE),  # idle
        (0x4, Throttle.POWER),
        (0x20 | 0x4, Throttle.HEAT | Throttle.POWER),
        (0x40, Throttle.HEAT),
        (0x8 | 0x80, Throttle.HARDWARE),
    ],
)
def test_nvidia(reasons: int, throttle: Throttle, monkeypatch: pytest.MonkeyPatch) -> None:
    library = FakeNvml(reasons)
    monkeypatch.setitem(sys.modules, "pynvml", library)
    sensors = nvidia_sensors(PCI, "")
    assert sensors is not None and library.opened == PCI
    reading = sensors.read()
    assert (reading.temperature_c, reading.power_w, reading.clock_mhz) == (81.0, 689.5, 1410.0)
    assert reading.throttle == throttle
    assert nvidia_sensors("", "1f-2e") is not None and library.opened == "GPU-1f-2e"


class FakeAmdSmi(ModuleType):
    """``amdsmi_get_gpu_metrics_info`` with the keys of AMD SMI's Python reference."""

    def __init__(self, *readings: dict[str, Any]) -> None:
        super().__init__("amdsmi")
        self.readings = list(readings)

    def amdsmi_init(self) -> None: ...

    def amdsmi_get_processor_handle_from_bdf(self, bdf: str) -> str:
        assert bdf == PCI
        return "handle"

    def amdsmi_get_gpu_metrics_info(self, handle: str) -> dict[str, Any]:
        return self.readings.pop(0)


def mi300(counter: int, **residencies: int) -> dict[str, Any]:
    """Keys that this GPU does not have are "N/A"."""
    names = ("prochot", "ppt", "socket_thm", "vr_thm", "hbm_thm")
    return {
        "temperature_hotspot": 71, "temperature_edge": "N/A", "average_socket_power": "N/A",
        "current_socket_power": 640, "current_gfxclk": 1300, "current_gfxclks": [1310, 1300], "throttle_status": "N/A",
        "indep_throttle_status": "N/A", "accumulation_counter": counter,
        **{f"{name}_residency_acc": residencies.get(name, 500) for name in names},
    }  # fmt: skip


def test_amd_counts_the_time_since_the_reading_before(monkeypatch: pytest.MonkeyPatch) -> None:
    library = FakeAmdSmi(mi300(10_000), mi300(11_000, ppt=900), mi300(12_000, ppt=900, socket_thm=700), {})
    monkeypatch.setitem(sys.modules, "amdsmi", library)
    sensors = amd_sensors(PCI)
    assert sensors is not None
    first = sensors.read()
    assert (first.temperature_c, first.power_w, first.clock_mhz) == (71.0, 640.0, 1310.0)
    assert first.throttle == Throttle.NONE, "nothing is known about the time before"
    assert sensors.read().throttle == Throttle.POWER
    assert sensors.read().throttle == Throttle.HEAT
    unknown = sensors.read()
    assert math.isnan(unknown.temperature_c) and unknown.throttle == Throttle.NONE


def test_amd_of_before_mi300(monkeypatch: pytest.MonkeyPatch) -> None:
    older = {"temperature_hotspot": 88, "average_socket_power": 300, "current_socket_power": "N/A",
             "current_gfxclk": 1500, "current_gfxclks": "N/A", "indep_throttle_status": 1 << 36}  # fmt: skip
    monkeypatch.setitem(sys.modules, "amdsmi", FakeAmdSmi(older))
    sensors = amd_sensors(PCI)
    assert sensors is not None
    reading = sensors.read()
    assert (reading.power_w, reading.clock_mhz, reading.throttle) == (300.0, 1500.0, Throttle.HEAT)


def test_without_the_library_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("pynvml", "amdsmi"):
        monkeypatch.setitem(sys.modules, name, None)
    messages: list[str] = []
    monkeypatch.setattr(gpu_sensors._logger, "debug", lambda message, *values: messages.append(message % values))
    assert nvidia_sensors(PCI, "") is None and amd_sensors(PCI) is None
    assert "pip install 'isthmus[nvidia]'" in messages[0] and "isthmus[amd]" in messages[1]
