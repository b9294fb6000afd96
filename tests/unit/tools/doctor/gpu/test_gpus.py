"""GPUs, their drivers, device files, variables and use, on simulated machines."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from isthmus.tools.doctor.gpu import torch_build, visible_devices
from isthmus.tools.doctor.gpu.device_access import check_device_files
from isthmus.tools.doctor.gpu.gpu_use import check_gpu_use, check_kernel_log
from isthmus.tools.doctor.gpu.gpus import arch_name, count_by_vendor, find_gpus
from isthmus.tools.doctor.gpu.torch_build import TorchBuild, check_torch_build, installed_torch, match_build
from isthmus.tools.doctor.gpu.visible_devices import check_visible_gpus
from isthmus.tools.doctor.machine import ToolFailed, ToolTimedOut, run_tool
from unit.tools.doctor import simulated
from unit.tools.doctor.simulated import GIB, findings, h100, levels, mi300x, simulate

ROCM, CUDA = TorchBuild("2.13.0+rocm7.1", None, "7.1.25424"), TorchBuild("2.13.0+cu130", "13.0", None)
CPU = TorchBuild("2.13.0+cpu", None, None)
DISPLAY = {
    "/sys/bus/pci/devices/0000:03:00.0/vendor": "0x1002",
    "/sys/bus/pci/devices/0000:03:00.0/class": "0x030000",
}


def install(build: TorchBuild | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_build, "installed_torch", lambda: build)
    monkeypatch.setattr(visible_devices, "installed_torch", lambda: build)


def test_gpus_of_a_node(tmp_path: Path) -> None:
    amd = find_gpus(simulate(tmp_path / "amd", mi300x()))
    assert [gpu.numa_node for gpu in amd] == [0] * 4 + [1] * 4
    assert count_by_vendor(amd) == "8 AMD GPUs (gfx942)"
    nvidia = find_gpus(simulate(tmp_path / "nvidia", h100()))
    assert count_by_vendor(nvidia) == "8 NVIDIA GPUs" and not any(gpu.for_display for gpu in nvidia)
    assert count_by_vendor(find_gpus(simulate(tmp_path / "none", simulated.HOST))) == "no GPU"
    assert [arch_name(v) for v in (90010, 90402, 90500, 110000, 120001)] == [
        "gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\nhip: Optional[str] = None\n", CPU),
        ("__version__ = '2.13.0+rocm7.1'\ncuda: Optional[str] = None\nhip: Optional[str] = '7.1.25424'\n", ROCM),
        ("__version__ = '2.13.0+cu130'\ncuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n", CUDA),
        ("__version__ = '2.6.0+cu124'\ncuda = '12.4'\nhip = None\n", TorchBuild("2.6.0+cu124", "12.4", None)),
    ],
)
def test_build_is_read_without_import(text: str, expected: TorchBuild, tmp_path: Path) -> None:
    (tmp_path / "version.py").write_text(f"from typing import Optional\n\n{text}")
    assert installed_torch(tmp_path) == expected


def test_build_of_this_environment() -> None:
    import torch

    assert installed_torch() == TorchBuild(torch.__version__, torch.version.cuda, torch.version.hip)


@pytest.mark.parametrize(
    ("build", "files", "level", "words"),
    [
        (ROCM, mi300x(), "ok", "8 AMD GPUs (gfx942)"),
        (CUDA, mi300x(), "error", "built for CUDA 13.0; this machine has 8 AMD GPUs"),
        (ROCM, h100(), "error", "built for ROCm 7.1.25424; this machine has 8 NVIDIA GPUs"),
        (CUDA, h100(), "ok", "8 NVIDIA GPUs"),
        (CPU, h100(), "error", "it cannot use them"),
        (CPU, simulated.HOST, "ok", "no GPU"),
        (CUDA, simulated.HOST, "warning", "no GPU"),
        (ROCM, mi300x(1) | h100(), "ok", "1 AMD GPU (gfx942) and 8 NVIDIA GPUs"),
    ],
)
def test_build_against_gpus(build: TorchBuild, files: dict[str, str], level: str, words: str, tmp_path: Path) -> None:
    (item,) = match_build(build, find_gpus(simulate(tmp_path, files)))
    assert item.level == level and words in item.text


def test_cpu_build_on_a_machine_with_a_display_gpu_is_a_warning(tmp_path: Path) -> None:
    (item,) = match_build(CPU, find_gpus(simulate(tmp_path, DISPLAY)))
    assert item.level == "warning" and "Install a ROCm build" in item.hint


def test_gpu_in_a_processor_beside_one_of_the_vendor_of_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(CUDA, monkeypatch)
    both = h100(1, driver="580.82.07") | DISPLAY
    tools = {"nvidia-smi --query-gpu": "0, GPU-1, NVIDIA H100, 81559, 4, 0", "nvidia-smi --query-compute": ""}
    machine = simulate(tmp_path, both, tools=tools, user=0)
    assert levels(findings(check_torch_build, machine)) == ["ok", "ok"]
    assert levels(findings(check_device_files, machine)) == ["ok"]
    assert {finding.source for finding in findings(check_gpu_use, machine)} == {"nvidia-smi"}
    install(CPU, monkeypatch)  # runs do not use the GPU of a laptop
    assert levels(findings(check_device_files, simulate(tmp_path / "laptop", DISPLAY))) == []


@pytest.mark.slow
def test_drivers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(CUDA, monkeypatch)
    results = findings(check_torch_build, simulate(tmp_path / "old", h100(driver="550.54.15")))
    assert levels(results) == ["ok", "error"]
    assert "driver 550.54.15 is too old for CUDA 13.0, which needs 580.65" in results[1].text
    compatible = {"/usr/local/cuda/compat/lib/libcuda.so.1": ""}
    results = findings(check_torch_build, simulate(tmp_path / "old", compatible))
    assert levels(results) == ["ok", "warning"] and "550.54.15 is older than 580.65" in results[1].text
    assert levels(findings(check_torch_build, simulate(tmp_path / "new", h100(driver="580.82.07")))) == ["ok", "ok"]
    files = h100() | {"/sys/module/nouveau/refcnt": "1"}
    del files["/proc/driver/nvidia/version"]
    assert "nouveau" in findings(check_torch_build, simulate(tmp_path / "none", files))[1].text
    install(ROCM, monkeypatch)
    results = findings(check_torch_build, simulate(tmp_path / "amd", mi300x()))
    assert levels(results) == ["ok", "ok"] and results[1].text == "driver amdgpu 6.12.12, ROCm 6.4.1-83"
    files = {name: text for name, text in mi300x().items() if "/module/" not in name}
    assert levels(findings(check_torch_build, simulate(tmp_path / "amd_none", files))) == ["ok", "error"]
    install(None, monkeypatch)
    assert levels(findings(check_torch_build, simulate(tmp_path / "amd", {}))) == ["error"]


def test_device_files_of_a_group(tmp_path: Path) -> None:
    machine = simulate(tmp_path, mi300x(2), groups=frozenset({1000}))
    for file in (tmp_path / "dev/kfd", *(tmp_path / "dev/dri").iterdir()):
        file.chmod(0o660)
    group = os.stat(tmp_path / "dev/kfd").st_gid
    results = findings(check_device_files, simulate(tmp_path, {}, user=999, groups=frozenset({998})))
    assert levels(results) == ["error"] * 3
    assert "belongs to group" in results[0].text and f"--group-add {group}" in results[0].hint
    (item,) = findings(check_device_files, simulate(tmp_path, {}, user=999, groups=frozenset({group})))
    assert item.text == "/dev/kfd, /dev/dri/renderD128, /dev/dri/renderD129 can be opened"
    (tmp_path / "dev/kfd").chmod(0o666)
    assert levels(findings(check_device_files, simulate(tmp_path, {}, user=999))) == ["error"] * 2 + ["ok"]
    assert stat.S_IMODE((tmp_path / "dev/kfd").stat().st_mode) == 0o666 and machine.user == 1000


def test_device_files_that_are_not_passed_to_a_container(tmp_path: Path) -> None:
    def without_devices(files: dict[str, str]) -> dict[str, str]:
        return {name: text for name, text in files.items() if not name.startswith("/dev/")}

    results = findings(check_device_files, simulate(tmp_path / "amd", without_devices(mi300x())))
    assert [item.source for item in results] == ["/dev/kfd", "/dev/dri/renderD128"] and levels(results) == ["error"] * 2
    assert "--device /dev/kfd --device /dev/dri" in results[0].hint
    results = findings(check_device_files, simulate(tmp_path / "nvidia", without_devices(h100())))
    assert [item.source for item in results] == ["/dev/nvidiactl", "/dev/nvidia0"] and "--gpus all" in results[0].hint
    files = h100(1)
    del files["/dev/nvidia-uvm"]
    results = findings(check_device_files, simulate(tmp_path / "uvm", files, user=0))
    assert levels(results) == ["ok", "warning"]
    assert findings(check_device_files, simulate(tmp_path / "cpu", simulated.HOST)) == []


@pytest.mark.parametrize(
    ("build", "files", "environment", "expected"),
    [
        (ROCM, mi300x(), {}, [("ok", "8 of 8 (no variable hides one)")]),
        (ROCM, mi300x(), {"HIP_VISIBLE_DEVICES": "0,1"}, [("ok", "2 of 8 (HIP_VISIBLE_DEVICES=0,1)")]),
        (
            ROCM, mi300x(), {"ROCR_VISIBLE_DEVICES": "4,5,6,7", "HIP_VISIBLE_DEVICES": "4,5"},
            [("error", "there is no GPU 4, after ROCR_VISIBLE_DEVICES left 4"), ("error", "none of 8")],
        ),
        (ROCM, mi300x(), {"HIP_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": "9"}, [("ok", "1 of 8")]),
        (ROCM, mi300x(), {"HSA_OVERRIDE_GFX_VERSION": "10.3.0"}, [("ok", "8 of 8"), ("warning", "another arch")]),
        (CUDA, h100(), {"CUDA_VISIBLE_DEVICES": ""}, [("error", "none of 8")]),
        (CUDA, h100(), {"CUDA_VISIBLE_DEVICES": "0,1,8,2"}, [("error", "there is no GPU 8"), ("ok", "2 of 8")]),
        (CUDA, h100(), {"CUDA_VISIBLE_DEVICES": "-1"}, [("error", "there is no GPU -1"), ("error", "none of 8")]),
        (CUDA, h100(), {"CUDA_VISIBLE_DEVICES": "0,1,0"}, [("error", "names a GPU twice"), ("error", "none of 8")]),
        (CUDA, h100(), {"CUDA_VISIBLE_DEVICES": "GPU-11111111"}, [("ok", "1 of 8")]),
        (CUDA, h100(), {"HIP_VISIBLE_DEVICES": "0"}, [("ok", "8 of 8"), ("warning", "no effect with CUDA")]),
        (CPU, h100(), {"CUDA_VISIBLE_DEVICES": ""}, []),
    ],
)  # fmt: skip
def test_variables_that_hide_gpus(
    build: TorchBuild, files: dict[str, str], environment: dict[str, str], expected: list[tuple[str, str]],
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    install(build, monkeypatch)
    results = findings(check_visible_gpus, simulate(tmp_path, files, environment=environment))
    assert levels(results) == [level for level, _ in expected]
    assert all(words in item.text for item, (_, words) in zip(results, expected, strict=True))


def test_container_with_some_of_the_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(ROCM, monkeypatch)
    passed = ("/dev/dri/renderD129", "/sys/class/kfd/kfd/topology/nodes/2/properties", "/dev/kfd")
    files = {
        name: text for name, text in mi300x().items()
        if not name.startswith(("/dev/", "/sys/class/kfd")) or name in passed
    }  # fmt: skip
    files["/dev/dri/renderD160"] = ""  # of another vendor
    machine = simulate(tmp_path, files, environment={"HIP_VISIBLE_DEVICES": "0"}, user=0)
    results = findings(check_visible_gpus, machine)
    assert [item.text for item in results] == [
        "this container has access to 1 of the 8 GPUs of the machine", "1 of 1 (HIP_VISIBLE_DEVICES=0)"
    ]  # fmt: skip
    assert findings(check_device_files, machine)[0].text == "/dev/kfd, /dev/dri/renderD129 can be opened"


def test_gpus_of_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(CUDA, monkeypatch)
    (item,) = findings(check_torch_build, simulate(tmp_path, {"/dev/dxg": ""}))
    assert item.level == "ok" and "WSL" in item.text


def test_use_from_nvidia_smi(tmp_path: Path) -> None:
    tools = {"nvidia-smi --query-gpu": simulated.NVIDIA_GPUS, "nvidia-smi --query-compute": simulated.NVIDIA_PROCESSES}
    busy, free, broken = findings(check_gpu_use, simulate(tmp_path, h100(2), tools=tools))
    assert busy.level == "warning"
    assert busy.text == "GPU 0: 68.7 of 80 GiB are used by /usr/bin/python3 (4711, 68.7 GiB), [Not Found] (4712)"
    assert (free.level, free.text) == ("ok", "1 of 2 GPUs are free (NVIDIA H100 80GB HBM3), each with 80 GiB or more")
    assert broken.level == "error" and "GPU 1 has had 3 uncorrected memory errors" in broken.text


@pytest.mark.parametrize("form", ["list", "object", "banner"])
def test_use_from_amd_smi(form: str, tmp_path: Path) -> None:
    metric = simulated.AMD_METRIC
    if form == "object":
        metric = json.dumps({"gpu_data": json.loads(metric)})
    if form == "banner":
        metric = f"WARNING: User is missing the following required groups: render [1]\n{metric}"
    tools = {"amd-smi metric": metric, "amd-smi process": simulated.AMD_PROCESS}
    busy, free, broken = findings(check_gpu_use, simulate(tmp_path, mi300x(2), tools=tools))
    assert busy.text == "GPU 1: 96.0 of 192 GiB are used by python3.12 (4711, 96.0 GiB)" and busy.source == "amd-smi"
    assert free.level == "ok" and "1 of 2 GPUs are free" in free.text
    assert "GPU 1 has had 2 uncorrected" in broken.text


def test_use_from_rocm_smi_where_amd_smi_has_another_form(tmp_path: Path) -> None:
    tools = {"amd-smi": '[{"gpu": 0, "vram": "?"}]', "rocm-smi": f"\n{simulated.ROCM_SMI}\n"}
    results = findings(check_gpu_use, simulate(tmp_path, mi300x(2), tools=tools))
    assert [item.text for item in results] == [
        "GPU 1: 96.0 of 192 GiB are used",
        "processes on the GPUs: python3 (4711, 96.0 GiB)",
        "1 of 2 GPUs are free (AMD Instinct MI300X OAM), each with 192 GiB or more",
    ]


def test_a_slow_tool_is_asked_once(tmp_path: Path) -> None:
    """amd-smi takes seconds on some machines; --quick has no time for rocm-smi after it."""
    asked = []

    def run(command: Sequence[str]) -> str:
        asked.append(command[0])
        raise ToolTimedOut("amd-smi did not answer within 1 s")

    results = findings(check_gpu_use, simulate(tmp_path, mi300x(2), run_tool=run))
    assert asked == ["amd-smi"] and "2 of 2 GPUs are free" in results[0].text and "mem_info_vram" in results[0].source


def test_use_from_the_driver_without_tools(tmp_path: Path) -> None:
    address = "/sys/bus/pci/devices/0000:05:00.0"
    files = mi300x(2) | {
        f"{address}/mem_info_vram_used": str(100 * GIB), f"{address}/current_link_width": "8",
        f"{address}/current_compute_partition": "CPX",
        "/sys/class/kfd/kfd/proc/4711/vram_51110": str(90 * GIB), "/sys/class/kfd/kfd/proc/4711/pasid": "32769",
        "/proc/4711/comm": "python3",
    }  # fmt: skip
    results = findings(check_gpu_use, simulate(tmp_path, files))
    assert [item.text for item in results] == [
        "GPU 0000:05:00.0: 100.0 of 192 GiB are used",
        "processes on the GPUs: python3 (4711, 90.0 GiB)",
        "1 of 2 GPUs are free (gfx942), each with 192 GiB or more",
        "GPU 0000:05:00.0 is divided into several devices with a part of its memory each (CPX)",
        "GPU 0000:05:00.0 uses 8 of its 16 PCIe lanes, so copies from and to it are slower",
    ]


@pytest.mark.parametrize(
    ("line", "level"),
    [
        ("[  812.1] NVRM: Xid (PCI:0000:3b:00): 79, pid=4711, GPU has fallen off the bus.", "warning"),
        ("[ 4711.9] amdgpu 0000:05:00.0: amdgpu: ring sdma0 timeout, signaled seq=3, emitted seq=4", "warning"),
        ("[    4.2] [drm:amdgpu_device_ip_late_init [amdgpu]] *ERROR* late_init of IP block failed -62", "warning"),
        ("[    1.0] ACPI: PM: some warning of another device", "ok"),
        ("[    2.0] amdgpu 0000:05:00.0: amdgpu: using 48-bit DMA addresses", "ok"),
    ],
)
def test_kernel_log(line: str, level: str, tmp_path: Path) -> None:
    (item,) = findings(check_kernel_log, simulate(tmp_path, mi300x(1), tools={"dmesg": f"[ 0.1] x\n{line}\n"}))
    assert item.level == level and (line in item.text) is (level == "warning")


def test_kernel_log_that_cannot_be_read(tmp_path: Path) -> None:
    (item,) = findings(check_kernel_log, simulate(tmp_path, mi300x(1)))
    assert item.level == "ok" and "dmesg is not installed" in item.text
    assert findings(check_kernel_log, simulate(tmp_path / "cpu", simulated.HOST)) == []


def test_tools_that_fail_are_named(tmp_path: Path) -> None:
    files = {name: text for name, text in mi300x(1).items() if "mem_info" not in name}
    (item,) = findings(check_gpu_use, simulate(tmp_path, files, tools={"rocm-smi": "ERROR: no device"}))
    assert item.level == "warning" and "amd-smi is not installed; rocm_smi: the output has another form" in item.text


@pytest.mark.processes
@pytest.mark.parametrize(
    ("command", "words"),
    [
        (("isthmus-no-such-tool",), "is not installed"),
        (("sh", "-c", "echo a driver problem >&2; exit 9"), "exit code 9: a driver problem"),
        (("sleep", "60"), "did not answer within 0.2 s"),
    ],
)
def test_tools_are_bounded(command: tuple[str, ...], words: str) -> None:
    with pytest.raises(ToolFailed, match=words):
        run_tool(command, 0.2)


@pytest.mark.processes
def test_output_of_a_tool() -> None:
    seconds: Any = 20
    assert run_tool(("echo", "fine"), seconds) == "fine\n"
