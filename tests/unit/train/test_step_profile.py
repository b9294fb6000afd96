"""The table of a profile from synthetic events: self times on a CPU, kernels on a device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from isthmus.train.step_profile import COMMUNICATION, HOST, IDLE, costs_of, overlap, union, weight_uses

USES = weight_uses(
    {
        "decoder.layers.0.mlp.linear_fc1.weight": (96, 32),
        "decoder.layers.0.self_attention.linear_qkv.weight": (64, 32),
        "decoder.layers.0.self_attention.linear_proj.weight": (32, 48),
        "decoder.layers.0.mlp.linear_fc2.weight": (32, 48),
        "decoder.layers.0.mlp.linear_fc1.layer_norm_weight": (32,),
    }
)


def event(name: str, start: float, end: float, *children: Any, **more: Any) -> Any:
    """A FunctionEvent, times in microseconds."""
    result = SimpleNamespace(
        name=name, time_range=SimpleNamespace(start=start, end=end), cpu_children=list(children), cpu_parent=None,
        self_cpu_time_total=end - start - sum(item.time_range.end - item.time_range.start for item in children),
        device_type="DeviceType.CPU", input_shapes=[], kernels=[], is_user_annotation=False,
        self_cpu_memory_usage=0, self_device_memory_usage=0,
    )  # fmt: skip
    result.__dict__.update(more)
    for child in children:
        child.cpu_parent = result
    return result


def flat(*roots: Any) -> list[Any]:
    return [item for root in roots for item in (root, *flat(*root.cpu_children))]


def phase(name: str, start: float, end: float, *children: Any, **more: Any) -> Any:
    return event(name, start, end, *children, is_user_annotation=True, **more)


def test_rows_of_a_cpu_step_add_up() -> None:
    step = phase(
        "step 3", 0, 1000,
        phase("data", 0, 50, event("aten::cat", 10, 30)),
        phase("forward and backward", 50, 800,
            event("aten::mm", 100, 300, input_shapes=[[7, 32], [32, 96]], self_cpu_memory_usage=64),
            event("_RMSNormFunction", 300, 350, event("aten::mul", 310, 340)),
            event("aten::copy_", 360, 370),
            event("_LinearIntoMainGradBackward", 400, 500,
                event("aten::mm", 400, 440, input_shapes=[[96, 64], [64, 32]]),
                event("aten::mm", 440, 480, input_shapes=[[5, 7], [7, 32]]))),
        phase("optimizer", 800, 950, event("aten::_fused_adamw_", 810, 900), event("c10d::allgather_", 900, 910)),
    )  # fmt: skip
    others = [event("gloo:all_reduce", 600, 700), event("aten::mm", 1200, 1300)]
    costs = costs_of([*flat(step), *others], USES)
    us = {row: round(1e6 * cost.seconds, 6) for row, cost in costs.rows.items()}
    assert us == {
        "matmuls of the feed-forward block": 200,
        "matmuls of the attention projections": 80,  # a weight's gradient is counted with its weight
        "optimizer": 140, "data": 50, "norms": 50, COMMUNICATION: 110, "other tensor operations": 10, HOST: 360,
    }  # fmt: skip
    assert sum(us.values()) == pytest.approx(1e6 * costs.wall_s) and not costs.on_device
    assert costs.largest(2) == f"{HOST} 36%, matmuls of the feed-forward block 20%"
    assert costs.rows["matmuls of the feed-forward block"].allocated_bytes == 64
    assert (costs.rows["norms"].calls, costs.rows["matmuls of the attention projections"].calls) == (1, 2)


def test_weight_of_aten_linear_has_shape_out_in() -> None:
    step = phase(
        "step 1", 0, 100,
        event("aten::linear", 0, 30, input_shapes=[[7, 1, 32], [96, 32], []]),
        event("_LinearIntoMainGradBackward", 40, 90,
            event("aten::linear", 40, 60, input_shapes=[[7, 1, 64], [32, 64], []]),
            event("aten::addmm_", 60, 90, input_shapes=[[64, 32], [64, 7], [7, 32], [], []])),
    )  # fmt: skip
    us = {row: round(1e6 * cost.seconds, 6) for row, cost in costs_of(flat(step), USES).rows.items()}
    assert us["matmuls of the feed-forward block"] == 30
    assert us["matmuls of the attention projections"] == 50


def test_device_rows_are_kernels_and_idle_time() -> None:
    def kernel(name: str, us: float) -> Any:
        return SimpleNamespace(name=name, duration=us)

    step = phase(
        "step 1", 0, 100, event("aten::mm", 5, 10, input_shapes=[[7, 32], [32, 96]], kernels=[kernel("g", 40)])
    )
    backward = event(
        "autograd::engine::evaluate_function: SiluBackward0", 20, 30,
        event("aten::silu_backward", 22, 28, kernels=[kernel("e", 10)]),
        event("nccl:all_reduce", 28, 29, kernels=[kernel("ncclDevKernel_AllReduce", 20)]),
    )  # fmt: skip
    on_device = [event("g", 10, 50, device_type="DeviceType.CUDA"), event("e", 55, 65, device_type="DeviceType.CUDA"),
                 event("ncclDevKernel_AllReduce", 60, 80, device_type="DeviceType.CUDA")]  # fmt: skip
    costs = costs_of([*flat(step, backward), *on_device], USES)
    us = {row: round(1e6 * cost.seconds, 6) for row, cost in costs.rows.items()}
    assert us == {
        "matmuls of the feed-forward block": 40, "activations": 10, COMMUNICATION: 20, IDLE: 35,
    }  # fmt: skip


def test_functions_of_the_engine_have_their_rows() -> None:
    from isthmus.engine.attention import projected_heads, rope
    from isthmus.engine.attention.backends import blocks
    from isthmus.engine.decoder import embedding
    from isthmus.engine.layers import activation, fused_function, norm
    from isthmus.engine.loss import linear_cross_entropy

    functions = {
        blocks._PackedAttention: "attention", norm._NormFunction: "norms",
        rope._Rotate: "rotary positions", projected_heads._ProjectedHeads: "rotary positions",
        activation._SwiGLU: "activations", fused_function._FusedFunction: "activations",
        embedding._Lookup: "embedding",
        linear_cross_entropy._LinearCrossEntropy: "loss", linear_cross_entropy._TokenCrossEntropy: "loss",
    }  # fmt: skip
    for function, row in functions.items():
        for name in (function.__name__, f"{function.__name__}Backward"):
            assert set(costs_of(flat(phase("step 1", 0, 9, event(name, 1, 5))), USES).rows) == {row, HOST}


def test_uses_of_weights_with_one_shape_are_joined() -> None:
    assert USES[(32, 48)] == "the attention projections or the feed-forward block"
    assert USES[(96, 32)] == "the feed-forward block" and len(USES) == 3


def test_spans() -> None:
    assert union([(5, 6), (0, 2), (1, 3)]) == [(0, 3), (5, 6)]
    assert overlap([(0, 3), (5, 6)], [(2, 5.5)]) == 1.5
