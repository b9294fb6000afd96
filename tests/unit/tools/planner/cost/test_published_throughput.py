"""The cost model against the published figures of benchmarks/planner_throughput.py."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from isthmus.platforms.parts import part_named
from isthmus.tools.planner.cost import kernels
from isthmus.tools.planner.cost.cluster import Cluster, Ring


@pytest.fixture
def planner_throughput(repository: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(repository / "benchmarks"))
    return importlib.import_module("planner_throughput")


@pytest.mark.slow
def test_the_median_error_is_below_15_percent_also_for_rows_that_were_not_fitted(
    planner_throughput: Any, repository: Path
) -> None:
    rows = planner_throughput.compare()
    result = planner_throughput.summary(rows)
    assert result["held out"]["rows"] >= 45 and result["fitted"]["rows"] >= 20
    assert result["held out"]["median_error"] < 0.12 and result["fitted"]["median_error"] < 0.12
    assert result["all"]["within_15_percent"] > 0.6 * len(rows)
    assert all(row["url"].startswith("https://") for row in rows)
    assert {row["gpu"] for row in rows} >= {"A100", "H100", "H200", "B200", "GB200", "MI300X", "MI325X", "MI355X"}
    page = (repository / "docs" / "concepts" / "cost-model.md").read_text()
    assert all(line in page for line in planner_throughput.table(rows)), "run benchmarks/planner_throughput.py"
    json.dumps(rows)


def test_the_error_follows_the_constants(planner_throughput: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the loss of speed of real kernels, published figures are missed."""
    for name, value in (("GEMM_SHARE", 1.0), ("HALF_TILES", 0), ("HALF_DEPTH", 0), ("WIDE_HEAD", 0)):
        monkeypatch.setattr(kernels, name, value)
    assert planner_throughput.summary(planner_throughput.compare())["all"]["median_error"] > 0.2


@pytest.mark.parametrize(("precision", "published"), [("bf16", 616), ("fp8", 1143)])
def test_gemms_reach_the_typical_attained_flops_that_amd_published(
    precision: str, published: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MI325X, ten shapes of DeepSeek-V3, weighted by FLOPs ("Understanding TAF Alongside Peak FLOPs and MAF", 2026)."""
    monkeypatch.setattr(kernels, "GEMM_SHARE", 1.0)  # they run alone
    part = kernels.Kernels(part_named("MI325X"), precision)
    weights = ((2112, 7168), (3072, 1536), (7168, 2048), (4608, 7168), (7168, 256))
    shapes = [(m, n, k) for m in (32, 32768) for n, k in weights]
    flops, seconds = sum(2 * m * n * k for m, n, k in shapes), sum(part.gemm(*shape) for shape in shapes)
    assert flops / seconds / 1e12 == pytest.approx(published, rel=0.1)


@pytest.mark.parametrize(
    ("gpu", "ranks", "mib", "published"),
    [
        ("MI300X", 2, 4096, 47.7), ("MI300X", 8, 4096, 312.9), ("A100", 8, 16384, 234.9), ("H200", 8, 16384, 367.6),
        ("H200", 32, 4096, 364.7), ("B200", 32, 4096, 377.3), ("B200", 32, 128, 197.9), ("B200", 32, 16, 64.4),
        ("B200", 32, 4, 18.9), ("B200", 8, 4096, 740.6), ("B200", 8, 64, 400.6), ("B200", 8, 16, 255.0),
    ],
)  # fmt: skip
def test_rings_reach_the_bus_bandwidth_that_was_measured(gpu: str, ranks: int, mib: int, published: float) -> None:
    """All-reduces, in "Machine Learning Engineering" (S. Bekman, 2026), chapter on networks; GB/s."""
    size = mib << 20
    seconds = 2 * Ring(Cluster(part_named(gpu), nodes=-(-ranks // 8)), ranks).gather(size)
    assert 2 * size * (ranks - 1) / ranks / seconds / 1e9 == pytest.approx(published, rel=0.2)
