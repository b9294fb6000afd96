"""A pipeline that layers or micro batches do not fit is refused with what would do."""

from __future__ import annotations

import pytest

from isthmus.config.schema.optim import OptimConfig
from isthmus.config.schema.parallel import ParallelConfig
from isthmus.config.schema.train import TrainConfig
from isthmus.errors import UsageError
from isthmus.families.architecture import Architecture
from isthmus.recipes.setup.layout_checks import check_layout, check_micro_batches, check_offload

SIZES = {"hidden_size": 32, "ffn_hidden_size": 48, "num_attention_heads": 4, "num_query_groups": 2, "kv_channels": 8}
ENDS = {"vocab_size": 77, "max_position_embeddings": 128, "norm_epsilon": 1e-6}


def check(num_layers: int, **sizes: int) -> None:
    architecture = Architecture(family="llama", num_layers=num_layers, **SIZES, **ENDS)  # type: ignore[arg-type]
    check_layout(architecture, ParallelConfig(**sizes))


@pytest.mark.parametrize(
    ("num_layers", "sizes"), [(5, {"pp": 2}), (7, {"pp": 7}), (8, {"pp": 2, "vpp": 4}), (12, {"pp": 3, "vpp": 2})]
)
def test_stages_that_fit(num_layers: int, sizes: dict[str, int]) -> None:
    check(num_layers, **sizes)


@pytest.mark.parametrize(
    ("num_layers", "sizes", "told"),
    [
        (3, {"pp": 4}, r"pp=4 is more than the 3 layers \(llama\)\. Use 3 or less\."),
        (1, {"pp": 2}, r"pp=2 is more than the 1 layers \(llama\)\. Use 1\."),
        (12, {"pp": 2, "vpp": 4}, r"= 8 stages do not divide num_layers=12 .* Use vpp=2 or 3 or 6, or leave it out\."),
        (5, {"pp": 2, "vpp": 2}, r"pp=2 x vpp=2 = 4 stages do not divide num_layers=5 .* Leave vpp out\."),
    ],
)
def test_stages_that_do_not(num_layers: int, sizes: dict[str, int], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        check(num_layers, **sizes)


def test_micro_batches_take_turns() -> None:
    sizes = ParallelConfig(pp=4, vpp=2)
    check_micro_batches(TrainConfig(steps=1, global_batch_size=16, micro_batch_size=2), sizes, 8)
    check_micro_batches(TrainConfig(steps=1, global_batch_size=6), ParallelConfig(pp=4), 4)
    train = TrainConfig(steps=1, global_batch_size=20, micro_batch_size=2)
    with pytest.raises(UsageError, match=r"batch_size=20 is not a multiple of .* Use 16 or 32, or leave parallel.vpp"):
        check_micro_batches(train, sizes, 8)


def test_optimizer_state_leaves_the_memory_of_a_gpu_or_none() -> None:
    offload = OptimConfig(offload=True)
    check_offload(offload, ParallelConfig(), "cuda")
    check_offload(OptimConfig(), ParallelConfig(fsdp=True), "cpu")
    with pytest.raises(UsageError, match=r"this run is on a CPU. Leave it out"):
        check_offload(offload, ParallelConfig(), "cpu")
    with pytest.raises(UsageError, match=r"parallel.fsdp=true does not use"):
        check_offload(offload, ParallelConfig(fsdp=True), "cuda")
