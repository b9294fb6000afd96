"""Assignment of layers to pipeline stages."""

from __future__ import annotations


def layers_per_stage(num_layers: int, pp: int, vpp: int = 1) -> list[int]:
    """Number of layers of each stage, in pipeline order.

    With ``vpp`` > 1 stage ``k`` is on rank ``k % pp``. Remaining layers go to the stages before the last one, which has
    the output layer: 9 layers on 4 stages are 2, 2, 3, 2. Late ranks keep fewer activations, so they have more memory.
    """
    stages = pp * vpp
    share, remaining = divmod(num_layers, stages)
    return [share + (stages - 1 - remaining <= stage < stages - 1) for stage in range(stages)]


def stage_layers(num_layers: int, pp: int, vpp: int, stage: int) -> range:
    """Model-wide numbers, from 0, of the layers of a stage."""
    sizes = layers_per_stage(num_layers, pp, vpp)
    first = sum(sizes[:stage])
    return range(first, first + sizes[stage])


def pipeline_layout(num_layers: int, pp: int, vpp: int = 1, *, mtp_layers: int = 0) -> list[list[str]] | None:
    """Megatron-Core's ``pipeline_model_parallel_layout``; None for one stage."""
    if pp == 1:
        return None
    stages = [["decoder"] * layers for layers in layers_per_stage(num_layers, pp, vpp)]
    stages[0].insert(0, "embedding")
    stages[-1] += ["mtp"] * mtp_layers + ["loss"]
    return stages
