"""What fully sharded data parallelism is refused with, by name and with what to do."""

from __future__ import annotations

from typing import Any

import pytest

from isthmus.config.schema.parallel import ParallelConfig
from isthmus.errors import UsageError
from isthmus.recipes.setup.layout_checks import check_fsdp, check_fsdp_precision


@pytest.mark.parametrize(
    ("sizes", "named"),
    [({"pp": 2}, "parallel.pp=2"), ({"ep": 2}, "parallel.ep=2"), ({"tp": 2, "etp": 1}, "parallel.etp=1")],
)
def test_other_ways_to_cut_are_refused(sizes: dict[str, Any], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        check_fsdp(ParallelConfig(fsdp=True, **sizes))


def test_tensor_parallelism_is_not() -> None:
    check_fsdp(ParallelConfig(fsdp=True, tp=2, sp=True))


@pytest.mark.parametrize("precision", ["fp16", "fp8"])
def test_precisions_that_scale_are_refused(precision: str) -> None:
    check_fsdp_precision(ParallelConfig(), precision)
    with pytest.raises(UsageError, match=f"train.precision={precision}"):
        check_fsdp_precision(ParallelConfig(fsdp=True), precision)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_plain_precisions_are_not(precision: str) -> None:
    check_fsdp_precision(ParallelConfig(fsdp=True), precision)
