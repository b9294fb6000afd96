"""Processor, memory, NUMA, limits, clock, disks, network, jobs, variables, versions and the Hub."""

from __future__ import annotations

import json
import resource
import socket
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from isthmus.hf import hub
from isthmus.platforms import network_interfaces
from isthmus.platforms.network_interfaces import Interface
from isthmus.tools.doctor import network as network_module
from isthmus.tools.doctor.host import check_clock, check_memory, check_numa, check_processor
from isthmus.tools.doctor.hub_access import check_hub, check_hub_settings
from isthmus.tools.doctor.jobs import check_job
from isthmus.tools.doctor.limits import check_limits
from isthmus.tools.doctor.machine import Machine, clock_state
from isthmus.tools.doctor.network import check_network, check_rdma
from isthmus.tools.doctor.storage import check_disk_space, check_disk_speed, hub_cache
from isthmus.tools.doctor.variables import check_variables
from isthmus.tools.doctor.versions import check_versions, compare_versions
from unit.tools.doctor.simulated import GIB, HOST, RDMA, Usage, findings, h100, levels, mi300x, simulate

GOVERNOR = "/sys/devices/system/cpu/cpu0/cpufreq"


def test_cores_of_this_process(tmp_path: Path) -> None:
    (item,) = findings(check_processor, simulate(tmp_path, HOST))
    assert item.text == "AMD EPYC 9654; 64 of 64 logical cores for this process"
    limited = h100() | {"/proc/self/cgroup": "0::/", "/sys/fs/cgroup/cpu.max": "800000 100000"}
    (item,) = findings(check_processor, simulate(tmp_path, limited))
    assert item.level == "warning" and "8 of 64 logical cores for this process, for 8 GPUs" in item.text
    for tasks, level in (("8(x2)", "ok"), ("1(x2)", "warning")):
        task = simulate(tmp_path, limited, environment={"SLURM_STEP_TASKS_PER_NODE": tasks})
        assert levels(findings(check_processor, task)) == [level]


def test_cores_that_others_use_or_that_stay_unused(tmp_path: Path) -> None:
    files = HOST | {"/proc/loadavg": "40.50 9.00 9.00 3/79 20521"}
    results = findings(check_processor, simulate(tmp_path, files, environment={"OMP_NUM_THREADS": "1"}))
    assert levels(results) == ["ok", "warning", "warning"]
    assert "40.50 threads on 64 cores" in results[1].text and "computes on 1 of 64" in results[2].text
    rank = {"OMP_NUM_THREADS": "1", "WORLD_SIZE": "8"}
    assert levels(findings(check_processor, simulate(tmp_path, {}, environment=rank))) == ["ok", "warning"]


@pytest.mark.parametrize(
    ("files", "level", "words"),
    [
        ({"scaling_governor": "performance", "scaling_driver": "acpi-cpufreq"}, "ok", "governor performance"),
        ({"scaling_governor": "powersave", "scaling_driver": "acpi-cpufreq"}, "warning", "governor powersave"),
        ({"scaling_governor": "powersave", "scaling_driver": "intel_pstate"}, "ok", "governor powersave"),
        (
            {"scaling_governor": "powersave", "scaling_driver": "amd-pstate-epp",
             "energy_performance_preference": "power"}, "warning", "energy preference power",
        ),
    ],
)  # fmt: skip
def test_governor(files: dict[str, str], level: str, words: str, tmp_path: Path) -> None:
    machine = simulate(tmp_path, HOST | {f"{GOVERNOR}/{name}": text for name, text in files.items()})
    _, item = findings(check_processor, machine)
    assert item.level == level and words in item.text


@pytest.mark.parametrize(
    "group",
    [
        {"/proc/self/cgroup": "0::/", "/sys/fs/cgroup/memory.max": str(4 * GIB),
         "/sys/fs/cgroup/memory.events": "low 0\noom 2\noom_kill 2\n"},
        {"/proc/self/cgroup": "4:memory:/job_7", "/sys/fs/cgroup/memory/job_7/memory.limit_in_bytes": str(4 * GIB),
         "/sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
         "/sys/fs/cgroup/memory/job_7/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n"},
    ],
)  # fmt: skip
def test_memory_limit_of_a_container(group: dict[str, str], tmp_path: Path) -> None:
    (item,) = findings(check_memory, simulate(tmp_path / "host", HOST))
    assert (item.level, item.text) == ("ok", "1812 of 2015 GiB are free")
    limit, kills = findings(check_memory, simulate(tmp_path / "container", HOST | group))
    assert limit.level == "warning" and limit.text.endswith("the limit of this container or job is 4.0 GiB")
    assert kills.level == "warning" and kills.text.startswith("2 processes")


def test_memory_that_cannot_be_read(tmp_path: Path) -> None:
    assert levels(findings(check_memory, simulate(tmp_path, {}))) == ["warning"]


def test_numa(tmp_path: Path) -> None:
    (item,) = findings(check_numa, simulate(tmp_path / "good", mi300x()))
    assert item.text == "2 nodes, pages stay where they are"
    bad = mi300x() | {"/proc/sys/kernel/numa_balancing": "1"}
    bad |= {"/sys/bus/pci/devices/0000:05:00.0/iommu_group/type": "DMA-FQ"}
    results = findings(check_numa, simulate(tmp_path / "bad", bad, cores=frozenset(range(32))))
    assert levels(results) == ["warning"] * 3
    assert "numa_balancing is on" in results[0].text and "iommu=pt" in results[2].hint
    assert "no core of node 1, where 4 GPUs are" in results[1].text
    task = simulate(tmp_path / "good", {}, cores=frozenset(range(8)), environment={"SLURM_STEP_TASKS_PER_NODE": "8"})
    assert levels(findings(check_numa, task)) == ["ok"]
    unknown = h100(2) | {"/sys/bus/pci/devices/0000:18:00.0/numa_node": "-1"}
    assert "the node of 1 GPUs is unknown" in findings(check_numa, simulate(tmp_path / "vm", unknown))[1].text


def test_limits(tmp_path: Path) -> None:
    rdma = HOST | {"/sys/class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE"}
    results = findings(check_limits, simulate(tmp_path, rdma))
    assert levels(results) == ["ok"] * 3 and results[2].text == "unlimited locked memory, for RDMA"
    few = {resource.RLIMIT_NOFILE: (1024, 4096), resource.RLIMIT_MEMLOCK: (64 << 10, 64 << 10)}
    few[resource.RLIMIT_NPROC] = (1000, 1000)
    machine = simulate(tmp_path, rdma, limit=few.__getitem__, disk_usage=lambda path: Usage(64 << 20, 0, 64 << 20))
    results = findings(check_limits, machine)
    assert levels(results) == ["warning"] * 4
    assert results[0].text == "0.06 of 0.06 GiB of shared memory are free" and "--shm-size" in results[0].hint
    assert "1024 open files" in results[1].text and "0 MiB of locked memory" in results[2].text

    def no_shm(path: Path) -> Usage:
        raise FileNotFoundError(2, "No such file or directory")

    assert "cannot be used" in findings(check_limits, simulate(tmp_path, HOST, disk_usage=no_shm))[0].text


@pytest.mark.parametrize(("state", "level"), [(0, "ok"), (5, "warning"), (None, "ok")])
def test_clock(state: int | None, level: str, tmp_path: Path) -> None:
    assert levels(findings(check_clock, simulate(tmp_path, {}, clock_state=lambda: state))) == [level]
    assert clock_state() in (None, *range(6))


@pytest.mark.parametrize(
    ("free", "mounts", "level", "words"),
    [
        (4000 * GIB, "/dev/sda1 / ext4 rw\n", "ok", "4,000.0 GiB free (ext4)"),
        (20 * GIB, "", "warning", "20.0 GiB free"),
        (GIB // 2, "", "error", "0.5 GiB free"),
        (4000 * GIB, "overlay / overlay rw\n", "warning", "this is the layer of a container and not kept"),
        (4000 * GIB, "tmpfs / tmpfs rw\nnas:/x /tmp nfs4 rw\n", "ok", "(nfs4)"),
    ],
)
def test_disk_space(free: int, mounts: str, level: str, words: str, tmp_path: Path) -> None:
    machine = simulate(
        tmp_path, {"/proc/mounts": mounts}, environment={"HF_HOME": str(tmp_path / "hf")}, folder=Path("/tmp"),
        disk_usage=lambda path: Usage(8000 * GIB, 0, free),
    )  # fmt: skip
    working, cache = findings(check_disk_space, machine)
    assert working.level == level and words in working.text
    assert f"the cache of the Hub {tmp_path}/hf/hub" in cache.text


def test_cache_is_that_of_huggingface_hub() -> None:
    from huggingface_hub import constants

    assert hub_cache(Machine()) == Path(constants.HF_HUB_CACHE)


def test_disk_speed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("isthmus.tools.doctor.storage._CHUNKS", 1)
    (item,) = findings(check_disk_speed, simulate(tmp_path, {}))
    assert "MB/s for one process that writes 8 MiB" in item.text and not list(tmp_path.iterdir())
    (item,) = findings(check_disk_speed, simulate(tmp_path, {}, folder=tmp_path / "absent"))
    assert item.level == "error"


@pytest.fixture
def two_interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    present = [Interface("lo", "127.0.0.1"), Interface("ens50f0np0", "10.1.0.4")]
    for module in (network_interfaces, network_module):
        monkeypatch.setattr(module, "interfaces", lambda: present)


@pytest.mark.usefixtures("two_interfaces")
@pytest.mark.parametrize(
    ("environment", "state", "level", "words"),
    [
        ({"GLOO_SOCKET_IFNAME": "ens50f0np0"}, "up", "ok", "names ens50f0np0 10.1.0.4"),
        ({"NCCL_SOCKET_IFNAME": "ens"}, "down", "error", "which is down"),
        ({"NCCL_SOCKET_IFNAME": "eth0"}, "up", "error", "NCCL_SOCKET_IFNAME=eth0 names no network interface"),
        ({"GLOO_SOCKET_IFNAME": "lo"}, "unknown", "warning", "no other machine can be reached"),
    ],
)
def test_interfaces(environment: dict[str, str], state: str, level: str, words: str, tmp_path: Path) -> None:
    files = {"/sys/class/net/ens50f0np0/speed": "100000", "/sys/class/net/ens50f0np0/operstate": state}
    result, requested = findings(check_network, simulate(tmp_path, files, environment=environment))
    assert result.text == "ens50f0np0 10.1.0.4 (100 Gbit/s)"
    assert requested.level == level and words in requested.text


@pytest.mark.parametrize(
    ("changes", "environment", "expected"),
    [
        ({}, {}, []),
        ({}, {"NCCL_IB_HCA": "rdma0,rdma1", "NCCL_IB_GID_INDEX": "3"}, [("ok", "names devices of this machine")]),
        ({}, {"NCCL_IB_HCA": "=rdma"}, [("warning", "names rdma, and this machine has rdma0, rdma1")]),
        ({}, {"NCCL_IB_HCA": "rdma0:1,mlx5_0:1"}, [("warning", "names mlx5_0, and this machine has rdma0, rdma1")]),
        ({}, {"NCCL_IB_HCA": "^mlx5_0"}, [("ok", "names devices")]),
        ({"/sys/class/infiniband/rdma1/ports/1/gids/3": "0000:0000:0000:0000:0000:0000:0000:0000"},
         {"NCCL_IB_GID_INDEX": "3"}, [("error", "rdma1 port 1 has no address with this number")]),
    ],
)  # fmt: skip
def test_rdma(
    changes: dict[str, str], environment: dict[str, str], expected: list[tuple[str, str]], tmp_path: Path
) -> None:
    first, second, *result = findings(check_rdma, simulate(tmp_path, RDMA | changes, environment=environment))
    assert first.text == "rdma0 port 1: ACTIVE, 400 Gb/sec (4X NDR), Ethernet" and second.level == "ok"
    assert [item.level for item in result] == [level for level, _ in expected]
    assert all(words in item.text for item, (_, words) in zip(result, expected, strict=True))


def test_rdma_devices_that_cannot_be_used(tmp_path: Path) -> None:
    files = RDMA | {"/sys/class/infiniband/rdma0/ports/1/state": "1: DOWN"}
    del files["/dev/infiniband/uverbs0"]
    results = findings(check_rdma, simulate(tmp_path / "down", files))
    assert levels(results) == ["warning", "ok", "warning"] and "--device /dev/infiniband" in results[2].hint
    assert findings(check_rdma, simulate(tmp_path / "none", HOST)) == []
    (item,) = findings(check_rdma, simulate(tmp_path / "none", HOST, environment={"NCCL_IB_HCA": "mlx5"}))
    assert item.level == "warning" and "no RDMA device" in item.text


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, [("ok", "--nproc starts them")]),
        ({"RANK": "0"}, [("error", "RANK is set, but WORLD_SIZE is not")]),
        ({"RANK": "0", "WORLD_SIZE": "2"}, [("error", "MASTER_ADDR=''")]),
        (
            {"RANK": "9", "WORLD_SIZE": "16", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "8", "MASTER_ADDR": "localhost",
             "MASTER_PORT": "29500"}, [("error", "which is this machine, and the ranks are on several")],
        ),
        (
            {"RANK": "2", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
             "MASTER_PORT": "29500"}, [("ok", "rendezvous at 127.0.0.1:29500"), ("error", "RANK=2 of WORLD_SIZE=2")],
        ),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "no-such-host",
             "MASTER_PORT": "29500"}, [("error", "the name cannot be resolved")],
        ),
        (
            {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_NTASKS": "16", "SLURM_GPUS_ON_NODE": "8"},
            [("ok", "job 7 of Slurm: 2 nodes, 16 tasks; srun starts"), ("ok", "--nproc starts them")],
        ),
        (
            {"SLURM_JOB_ID": "7", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": "1",
             "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_STEP_NODELIST": "127.0.0.1", "KUBERNETES_SERVICE_HOST": "x"},
            [("ok", "job 7 of Slurm"), ("warning", "each task has one core"), ("warning", "asked for no GPU"),
             ("ok", "a pod of Kubernetes"), ("ok", "rank 1 of 2")],
        ),
    ],
)  # fmt: skip
def test_jobs(
    environment: dict[str, str], expected: list[tuple[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def resolve(host: str, port: int, **_: Any) -> Any:
        if host == "no-such-host":
            raise socket.gaierror(-2, "Name or service not known")
        return [(2, 1, 6, "", ("127.0.0.1", port))]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    results = findings(check_job, simulate(tmp_path, h100(1), environment=environment, cores=frozenset({0, 32})))
    assert [item.level for item in results] == [level for level, _ in expected]
    assert all(words in item.text for item, (_, words) in zip(results, expected, strict=True))


def test_variables(tmp_path: Path) -> None:
    assert levels(findings(check_variables, simulate(tmp_path, HOST))) == ["ok"]
    recommended = {"GPU_MAX_HEAP_SIZE": "100", "HSA_ENABLE_SDMA": "0", "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "0"}
    results = findings(check_variables, simulate(tmp_path, mi300x(1), environment=recommended))
    assert [(item.level, item.source) for item in results] == [
        ("warning", "GPU_MAX_HEAP_SIZE"), ("warning", "HSA_ENABLE_SDMA"), ("warning", "NCCL_P2P_DISABLE")
    ]  # fmt: skip


def test_versions() -> None:
    oldest, newest = {"torch": "2.6.0", "numpy": "1.26.0"}, {"torch": "2.13.0", "numpy": "2.4.6"}
    results = list(compare_versions({"torch": "2.5.1+rocm6.2", "numpy": ""}, oldest, newest))
    assert levels(results) == ["error"] * 2 and "numpy is not installed; 1.26.0 is the oldest" in results[1].text
    results = list(compare_versions({"torch": "2.14.0a0+git1", "numpy": "2.4.9"}, oldest, newest))
    assert [(item.level, item.text) for item in results] == [
        ("warning", "torch 2.14.0a0+git1 is newer than 2.13.0, the newest that was tested"),
        ("ok", "within the tested range: numpy 2.4.9"),
    ]


def test_versions_of_this_environment_are_a_tested_set() -> None:
    (item,) = findings(check_versions, Machine())
    assert item.level == "ok" and "torch 2." in item.text and "megatron-core" in item.text


@pytest.mark.parametrize(
    ("environment", "texts"),
    [
        ({"HF_TOKEN": "hf_x"}, ["a token is set"]),
        ({"HF_TOKEN": "hf_x\n"}, ["HF_TOKEN has spaces or line ends around it", "a token is set"]),
        ({"HF_HUB_OFFLINE": "1"}, ["no token:", "downloads are disabled"]),
    ],
)
def test_hub_settings(environment: dict[str, str], texts: list[str], tmp_path: Path) -> None:
    machine = simulate(tmp_path, {}, environment={"HF_HOME": str(tmp_path)} | environment)
    results = findings(check_hub_settings, machine)
    assert all(item.text.startswith(text) for item, text in zip(results, texts, strict=True))
    (tmp_path / "token").write_text("hf_x")
    assert "a token is" in findings(check_hub_settings, machine)[-1 - ("HF_HUB_OFFLINE" in environment)].text


@pytest.fixture
def hub_address(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A Hub that knows one token."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            known = self.path == "/api/whoami-v2" and self.headers["Authorization"] == "Bearer hf_known"
            self.send_response(200 if known else 401)
            self.end_headers()
            self.wfile.write(json.dumps({"name": "somebody"} if known else {}).encode())

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(hub, "ENDPOINT", address)
    monkeypatch.setattr(hub, "get_session", httpx.Client)  # that of the library is offline in tests
    yield address
    server.shutdown()
    server.server_close()


@pytest.mark.slow
def test_hub_is_asked_for_the_account(hub_address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = simulate(tmp_path, {})
    for token, level, text in (
        ("hf_known", "ok", f"{hub_address} answers, the token is of somebody"),
        (None, "ok", f"{hub_address} answers"),
        ("hf_old", "error", f"{hub_address} refuses the token"),
    ):
        monkeypatch.setattr(hub, "get_token", lambda token=token: token)
        (item,) = findings(check_hub, machine)
        assert (item.level, item.text) == (level, text)
    monkeypatch.setattr(hub, "get_session", lambda: SimpleNamespace(get=None))
    (item,) = findings(check_hub, machine)
    assert item.level == "warning" and "does not answer" in item.text
    assert findings(check_hub, simulate(tmp_path, {}, environment={"HF_HUB_OFFLINE": "1"})) == []
