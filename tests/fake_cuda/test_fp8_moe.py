"""Experts and FP8 on a GPU: what the host waits for, kernels per layer, and how often weights are quantized."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from fake_cuda import trace as traces
from fake_cuda.runner import FakeCuda
from fake_cuda.trace import measure, record
from fake_cuda.world import build

DENSE = {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 256, "hidden_size": 64,
    "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
}  # fmt: skip
EXPERTS = DENSE | {
    "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True,
}  # fmt: skip
FILES = (
    "host_copies.py", "load_balancing.py", "router.py", "routed_tokens.py", "token_dispatcher.py", "grouped_gemm.py",
    "moe_layer.py",
)  # fmt: skip


@contextmanager
def regions_as_kernels() -> Iterator[None]:
    """Compiled regions run eagerly on fake tensors: count each call as one kernel."""
    from isthmus.engine.compiled import _Region

    run = _Region.__call__

    def once(region: Any, *args: Any) -> Any:
        observers = traces._OBSERVERS[:]
        traces._OBSERVERS.clear()
        try:
            return run(region, *args)
        finally:
            traces._OBSERVERS[:] = observers
            traces.tell("kernel", f"region {region.name.rpartition('.')[2]}")

    _Region.__call__ = once  # type: ignore[method-assign]
    try:
        yield
    finally:
        _Region.__call__ = run  # type: ignore[method-assign]


def experts_step(size: int = 1, moe: dict[str, Any] | None = None, **parallel: Any) -> dict[str, int]:
    """What the host waits for in the files of the experts, in a step of two micro batches of two layers."""
    losses = {"aux_loss": 0.1, "seq_aux_loss": 0.1, "z_loss": 0.01}
    rank = build(EXPERTS, size=size, sections={"moe": losses | (moe or {})}, **parallel)
    with record() as trace:
        rank.stepper.train_step([rank.batch(20, 44), rank.batch(64)])
    return dict(Counter(sync.partition(":")[0].replace(" at ", " in ") for sync in trace.syncs_in(*FILES)))


@pytest.mark.thorough_cases("capacity")
@pytest.mark.parametrize(
    ("gpu", "moe"), [("sm_90", {}), ("gfx942", {"capacity_factor": 1.0})], ids=["dropless", "capacity"]
)
def test_the_host_waits_for_no_layer_with_all_experts_on_a_rank(
    fake_cuda: FakeCuda, gpu: str, moe: dict[str, Any]
) -> None:
    assert fake_cuda.run(experts_step, gpu=gpu, moe=moe) == {}


@pytest.mark.thorough_cases("allgather", "alltoall-capacity")
@pytest.mark.parametrize(
    ("moe", "waits"), [({}, 1), ({"capacity_factor": 1.0}, 1), ({"dispatcher": "allgather"}, 2)],
    ids=["alltoall", "alltoall-capacity", "allgather"],
)  # fmt: skip
def test_expert_parallel_waits_for_row_counts_without_blocking_copies(
    fake_cuda: FakeCuda, moe: dict[str, Any], waits: int
) -> None:
    results = fake_cuda.run(experts_step, size=2, moe=moe, ep=2)
    assert results == {"wait (synchronize) in host_copies.py": waits * 2 * 2}


def gemms_of_experts() -> list[dict[str, int]]:
    """Of one layer, by what uses grouped_mm."""
    from isthmus.engine.moe.grouped_gemm import GemmKernels
    from isthmus.engine.moe.moe_layer import GroupedExperts

    rank = build(EXPERTS | {"num_hidden_layers": 1})
    (experts,) = (module for module in rank.model.stages[0].modules() if isinstance(module, GroupedExperts))
    results = []
    for kernels in (GemmKernels(), GemmKernels(weight_gradient=False), GemmKernels(False, False)):
        experts.kernels = kernels
        with record() as trace:
            rank.stepper.train_step([rank.batch(20, 44)])
        waits = [sync for sync in trace.syncs_in("host_copies.py") if sync.startswith("wait")]
        results.append({"grouped_mm": trace.kernels["_grouped_mm"], "waits": len(waits)})
    return results


def test_loops_over_experts_read_the_row_counts_once_per_layer(fake_cuda: FakeCuda) -> None:
    assert fake_cuda.run(gemms_of_experts) == [
        {"grouped_mm": 6, "waits": 0},
        # Waits in the backward pass for a copy that started in the forward pass.
        {"grouped_mm": 4, "waits": 1},
        {"grouped_mm": 0, "waits": 1},
    ]


def kernels_of_gradients(experts: int) -> dict[str, int]:
    """Forward and backward pass of one layer with this many experts."""
    rank = build(EXPERTS | {"num_hidden_layers": 1, "num_experts": experts})
    with record() as trace:
        rank.stepper.compute_gradients([rank.batch(20, 44)])
    return dict(trace.kernels)


def test_more_experts_add_no_kernels(fake_cuda: FakeCuda) -> None:
    """An operator on a list of gradients would count once here and start a kernel for each."""
    few, more = (fake_cuda.run(kernels_of_gradients, experts=number) for number in (4, 16))
    assert few == more and not any(name.startswith("_foreach") for name in few)


def fp8_gemms_of_experts(**train: Any) -> dict[str, Any]:
    """Of one layer in a step of two micro batches."""
    rank = build(EXPERTS | {"num_hidden_layers": 1}, precision="fp8", sections={"train": train})
    with regions_as_kernels(), record() as trace:
        rank.stepper.train_step([rank.batch(20, 44)] * 2)
    waits = trace.syncs_in("host_copies.py", "fp8_experts.py", "grouped_gemm.py")
    grouped = {name: trace.kernels[name] for name in ("_scaled_grouped_mm", "_grouped_mm")}
    quantized = sum(number for name, number in trace.kernels.items() if name == "region quantize")
    return grouped | {
        "waits": len(waits),
        "quantized": quantized,
        "lines": [m for m in rank.model.messages if "fp8" in m],
    }


@pytest.mark.thorough_cases("gfx950")
@pytest.mark.parametrize("gpu", ["sm_90", "gfx942", "gfx950"])
def test_experts_in_fp8_use_torch_s_grouped_kernel(fake_cuda: FakeCuda, gpu: str) -> None:
    """Forward and for the gradient of the input; weight gradients stay bfloat16, and nothing waits for the GPU."""
    results, without = (fake_cuda.run(fp8_gemms_of_experts, gpu=gpu, fp8_experts=on) for on in (True, False))
    assert results["_scaled_grouped_mm"] == 2 * 4 and results["_grouped_mm"] == 2 * 2 and results["waits"] == 0
    assert without["_scaled_grouped_mm"] == 0 and without["_grouped_mm"] == 2 * 6
    # Rows of two GEMMs forward and backward in each micro batch, two layouts of two weights in a step.
    assert results["quantized"] - without["quantized"] == 2 * 4 + 2 * 2
    assert (
        "fp8: 8 experts of 64 x 64 and 64 x 32 with rowwise scales; their weight gradients stay bf16"
        in results["lines"]
    )


def router_kernels() -> dict[str, int]:
    """Copies to float32, matmuls into float32 and bytes that autograd saves, of a router with 256 channels."""
    from isthmus.engine.moe.router_logits import router_logits

    options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16, "requires_grad": True}
    hidden, weight = torch.ones(64, 256, **options), torch.ones(8, 256, **options)
    router_logits(hidden, weight)  # with the trial of the kernel
    with regions_as_kernels(), record() as trace, measure() as memory:
        logits = router_logits(hidden, weight)
        saved = memory.live_bytes - logits.nbytes - weight.nbytes  # of which there is a view
        logits.sum().backward()
    return {"copies": trace.kernels["_to_copy"], "into float32": trace.kernels["addmm"], "saved": saved}


def test_routers_copy_no_hidden_states_to_float32(fake_cuda: FakeCuda) -> None:
    """The one copy is that of the weight's gradient to bfloat16."""
    assert fake_cuda.run(router_kernels) == {"copies": 1, "into float32": 2, "saved": 0}


def choices(precision: str, full: bool = False) -> dict[str, Any]:
    """With the times of a GPU, or without the memory for them."""
    from isthmus.engine.moe import gemm_choice
    from isthmus.engine.moe.moe_layer import GroupedExperts

    rows = []

    def timings(_number: int, _shapes: Any, number_of_rows: int, _device: Any) -> Any:
        rows.append(number_of_rows)
        if full:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return gemm_choice.Timing("matmuls", 0.5, 1.0, 0.0), gemm_choice.Timing("weight gradients", 2.0, 1.0, 0.0)

    module: Any = gemm_choice
    module.FakeTensor, module.time_gemms = type(None), timings
    rank = build(EXPERTS, precision=precision, size=2, ep=2)
    experts = [item for item in rank.model.stages[0].modules() if isinstance(item, GroupedExperts)]
    kernels = [[item.kernels.matmul, item.kernels.weight_gradient] for item in experts]
    return {"lines": [line for line in rank.model.messages if "experts" in line], "kernels": kernels, "rows": rows}


def test_the_choice_of_gemms_is_applied_and_logged(fake_cuda: FakeCuda) -> None:
    timed = "matmuls by grouped_mm (0.50 ms, a loop of GEMMs 1.00 ms)"
    timed += "; weight gradients by a loop of GEMMs (1.00 ms, grouped_mm 2.00 ms)"
    assert fake_cuda.run(choices, precision="bf16") == {
        "lines": [f"experts: 4 of 64 x 64 and 64 x 32: {timed}"], "kernels": [[True, False]] * 2, "rows": [128] * 2,
    }  # fmt: skip
    results = fake_cuda.run(choices, precision="bf16", full=True)
    assert "by a loop" not in results["lines"][0] and "a loop of GEMMs, which needs less memory" in results["lines"][0]
    assert results["kernels"] == [[False, False]] * 2
    reason = "a loop of GEMMs, because grouped_mm has kernels for bfloat16, not for float32"
    results = fake_cuda.run(choices, precision="fp32")
    assert results["lines"] == [f"experts: 4 of 64 x 64 and 64 x 32: {reason}"] and not results["rows"]


def fp8_linear_kernels(scaling: str, micro_batches: int) -> dict[str, int]:
    """Forward and backward of one layer."""
    from isthmus.engine.linear.fp8_linear import Fp8Recipe, fp8_linear, fp8_step
    from isthmus.engine.linear.fp8_quantization import named_scaling
    from isthmus.platforms.detect import detect

    platform = detect()
    kind = named_scaling(scaling, swizzled=platform.swizzled_mx_scales)  # type: ignore[arg-type]
    recipe = Fp8Recipe(kind, *platform.fp8_types())
    options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    x, weight = (torch.ones(*sizes, 640, **options, requires_grad=True) for sizes in ((300, 1), (256,)))
    weight.main_grad = torch.zeros(256, 640, device="cuda")  # type: ignore[attr-defined]
    grad = torch.ones(300, 1, 256, **options)
    with regions_as_kernels(), record() as trace, fp8_step(keeps_weights=micro_batches > 1, gradients_are_zero=True):
        for _ in range(micro_batches):
            torch.autograd.grad(fp8_linear(x, weight, recipe), x, grad)
    assert not trace.syncs
    return dict(trace.kernels)


@pytest.mark.thorough_cases(
    "1-tensorwise-gfx942",
    "1-tensorwise-gfx950",
    "1-rowwise-sm_90",
    "1-rowwise-gfx950",
    "3-tensorwise-sm_90",
    "3-rowwise-gfx942",
)
@pytest.mark.parametrize("gpu", ["sm_90", "gfx942", "gfx950"])
@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("number", [1, 3])
def test_kernels_of_an_fp8_linear_layer(fake_cuda: FakeCuda, gpu: str, scaling: str, number: int) -> None:
    """Seven a micro batch and one a step: input in two layouts, weight and output's gradient in both at once.

    The first weight gradient is written to the buffer, tensorwise by the matmul itself. One micro batch keeps no
    quantized weight.
    """
    results = fake_cuda.run(fp8_linear_kernels, gpu=gpu, scaling=scaling, micro_batches=number)
    once, direct = number > 1, scaling == "tensorwise"
    assert Counter(results) == Counter({
        "region quantize": number if once else 2, "region quantize_columns": number if once else 2,
        "region quantize_both": number + once, "_scaled_mm_v2": 3 * number - direct, "_scaled_mm": int(direct),
        "copy_": int(not direct), "add_": number - 1,
    })  # fmt: skip


@pytest.mark.parametrize("number", [1, 3])
def test_kernels_of_a_blockwise_fp8_linear_layer(fake_cuda: FakeCuda, number: int) -> None:
    """As many as tensorwise; torch checks shapes and strides of the scales of all three matmuls."""
    results = fake_cuda.run(fp8_linear_kernels, gpu="sm_90", scaling="blockwise", micro_batches=number)
    assert results == fake_cuda.run(fp8_linear_kernels, gpu="sm_90", scaling="tensorwise", micro_batches=number)


def test_kernels_of_an_mxfp8_linear_layer(fake_cuda: FakeCuda) -> None:
    """As many as rowwise, and copies of the scales of six operands in the order that the kernel reads."""
    results, rowwise = (
        Counter(fake_cuda.run(fp8_linear_kernels, gpu="sm_100", scaling=scaling, micro_batches=3))
        for scaling in ("mxfp8", "rowwise")
    )
    assert not rowwise - results and {"_scaled_mm_v2", "region quantize"} <= rowwise.keys()
    copies = results - rowwise
    assert copies.total() <= 3 * 6 * 2 and not any("quantize" in name or "mm" in name for name in copies), copies


def fp8_regions_of_a_step() -> dict[str, float]:
    """Calls per FP8 layer in a step of three micro batches."""
    from isthmus.engine.linear.linear import ColumnParallelLinear, RowParallelLinear

    rank = build(DENSE | {"num_hidden_layers": 1}, precision="fp8")
    layers = [m for m in rank.model.stages[0].modules() if isinstance(m, ColumnParallelLinear | RowParallelLinear)]
    number = sum(layer.fp8 is not None for layer in layers)
    with regions_as_kernels(), record() as trace:
        rank.stepper.train_step([rank.batch(20, 43)] * 3)
    return {name: count / number for name, count in trace.kernels.items() if "quantize" in name}


def test_weights_are_quantized_once_per_step(fake_cuda: FakeCuda) -> None:
    assert fake_cuda.run(fp8_regions_of_a_step) == {
        "region quantize": 3, "region quantize_columns": 3, "region quantize_both": 4,
    }  # fmt: skip
