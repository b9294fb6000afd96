"""Which layers stand on which stage of the pipeline: one deal, which Megatron-Core is told of."""

from __future__ import annotations


def layers_of_stages(num_layers: int, pp: int, vpp: int = 1) -> list[int]:
    """How many layers each stage has, in the order that a line goes through them.

    With ``vpp`` above 1 every rank holds that many stages, dealt out in turns: stage ``k`` is on rank ``k % pp``.
    Layers that are left over go to the stages before the last one, which has the output layer on top of its own: 9
    layers on 4 stages are 2, 2, 3, 2. A rank early in the pipeline keeps more micro batches' activations than a late
    one, so that the ones before the last are also those with memory to spare.
    """
    stages = pp * vpp
    share, left = divmod(num_layers, stages)
    return [share + (stages - 1 - left <= stage < stages - 1) for stage in range(stages)]


def pipeline_layout(num_layers: int, pp: int, vpp: int = 1, *, ahead: int = 0) -> list[list[str]] | None:
    """The deal as Megatron-Core's ``pipeline_model_parallel_layout`` has it; None where there is one stage.

    Args:
        num_layers: of the decoder.
        pp: ranks of the pipeline.
        vpp: stages of each rank.
        ahead: layers behind the last, which predict ahead; they stand before the loss.
    """
    if pp == 1:
        return None
    stages = [["decoder"] * layers for layers in layers_of_stages(num_layers, pp, vpp)]
    stages[0].insert(0, "embedding")
    stages[-1] += ["mtp"] * ahead + ["loss"]
    return stages
