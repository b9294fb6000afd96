"""The table of GPUs."""

from __future__ import annotations

import pytest

from isthmus.errors import UsageError
from isthmus.platforms.parts import PARTS, Part, find_part, part_named


def test_every_part_is_found_by_its_own_name() -> None:
    assert {part.name: find_part(part.name) for part in PARTS} == {part.name: part for part in PARTS}
    assert len({part.name for part in PARTS}) == len(PARTS)


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("AMD Instinct MI300X OAM", "MI300X"),
        ("AMD Instinct MI250X / MI250", "MI250X"),
        ("AMD Instinct MI355X", "MI355X"),
        ("NVIDIA A100-SXM4-80GB", "A100 80 GB"),
        ("NVIDIA A100-SXM4-40GB", "A100 40 GB"),
        ("NVIDIA A100-PCIE-40GB", "A100 PCIe 40 GB"),
        ("NVIDIA A100 80GB PCIe", "A100 PCIe 80 GB"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("NVIDIA GH200 144G HBM3e", "GH200 144 GB"),
        ("NVIDIA A10G", "A10G"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX PRO 6000"),
        ("AMD Radeon RX 7900 XTX", "RX 7900 XTX"),
        ("mi300x", "MI300X"),
        ("h100-pcie", "H100 PCIe"),
        ("h100_sxm", "H100"),
        ("H100 SXM", "H100"),
        ("A100-40GB", "A100 40 GB"),
        ("a100", "A100 80 GB"),
        ("rtx4090", "RTX 4090"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("AMD Radeon Graphics", None),
        ("Tesla V100-SXM2-16GB", "V100 16 GB"),
        ("Tesla V100-SXM2-32GB", "V100"),
        # Others than those whose names theirs begin with.
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("NVIDIA H800 PCIe", None),
        ("Tesla V100-PCIE-32GB", None),
    ],
)
def test_names_of_torch_and_of_users(name: str, part: str | None) -> None:
    matched = find_part(name)
    assert (None if matched is None else matched.name) == part


def test_an_unknown_gpu_is_refused_with_the_nearest_names() -> None:
    assert part_named("MI300X").memory_gib > 190
    with pytest.raises(UsageError, match=r"no data of the GPU 'MI330X'\. Did you mean .*MI300X.*state its memory"):
        part_named("MI330X")
    with pytest.raises(UsageError, match=r"Use one of MI355X.*RTX 3090"):
        part_named("zzz")


@pytest.mark.parametrize("part", PARTS, ids=[part.name for part in PARTS])
def test_the_figures_of_a_part_are_consistent(part: Part) -> None:
    peaks = part.peak_tflops
    assert peaks["fp32"] < peaks["fp16"] and peaks.get("bf16", 0) <= peaks["fp16"]
    assert 1.9 < peaks.get("fp8", 2 * peaks["fp16"]) / peaks["fp16"] < 2.1
    for precision, tflops in part.measured_tflops.items():
        assert 0.45 < tflops / peaks[precision] < 0.9
    assert part.network_gb_s < part.link_gb_s < part.memory_gb_s


def test_a_mesh_gives_few_devices_few_links() -> None:
    mi300x, h100 = part_named("MI300X"), part_named("H100")
    assert [mi300x.link_between(n) for n in (2, 4, 8)] == [64, 192, 448]
    assert [h100.link_between(n) for n in (2, 4, 8)] == [450, 450, 450]
