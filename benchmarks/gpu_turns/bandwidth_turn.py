"""Memory bandwidth that compiled regions, the loss and AdamW reach, on the tensors of a training step."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gpu_turns.cases import model_config
from gpu_turns.rows import append

MODELS_OF_TURN = {"dense": ("llama-8b", "bf16"), "fp8": ("llama-8b", "fp8"), "experts": ("moe-16", "bf16")}
"""Turn -> model, of which one layer is trained, and precision."""
CALLS = 20
_CACHE_BYTES = 512 << 20
"""Written before each timed call: more than the caches of any GPU, so that the call reads from memory."""
_ADAMW_BYTES = 28
"""Of a float32 parameter: its gradient is read, the parameter and two moments are read and written."""


def run(spec: dict[str, Any]) -> None:
    """Append a row for each region of the turn's model, and for AdamW; or one for the loss."""
    from isthmus.platforms.detect import detect
    from isthmus.platforms.environment import apply_env

    platform = detect(spec["platform"])
    apply_env(platform)
    platform.prepare_process()
    part = getattr(platform, "part", lambda: None)()
    peak = None if part is None else part.memory_gb_s
    tokens = 64 if spec["dry"] else 8192

    def measure(name: str, call: Callable[[], Any], num_bytes: int, **more: Any) -> None:
        seconds = device_seconds(call, platform.device_type, 1 if spec["dry"] else CALLS)
        gb_per_s = num_bytes / seconds / 1e9
        share = None if peak is None else gb_per_s / peak
        append("bandwidth", name=name, mb=num_bytes / 1e6, us=1e6 * seconds, gb_per_s=gb_per_s, share=share, **more)

    if spec["contestant"] == "loss":
        call, num_bytes, flops = _loss(tokens, platform.device_type, dry=spec["dry"])
        measure("loss block, with its matmuls", call, num_bytes, gflop=flops / 1e9)
        return
    model, precision = MODELS_OF_TURN[spec["contestant"]]
    keys = model_config(model, tiny=spec["dry"]) | {"num_hidden_layers": 1}
    with observed_step() as (regions, optimizers):
        _train(keys, precision, tokens, spec)
    for region, arguments, num_bytes in regions.values():
        measure(region.name, lambda call=region, values=arguments: _without_autograd(call, values), num_bytes)
    for optimizer, grads in optimizers:
        for parameter, grad in grads:
            parameter.grad = grad
        measure("AdamW", optimizer.step, _ADAMW_BYTES * sum(parameter.numel() for parameter, _ in grads))


def _without_autograd(region: Callable[..., Any], arguments: Sequence[Any]) -> None:
    import torch

    with torch.no_grad():
        region(*arguments)


@contextmanager
def observed_step() -> Iterator[tuple[dict[str, tuple[Any, Sequence[Any], int]], list[Any]]]:
    """Regions that the block calls, each with the arguments and the bytes of its largest call; optimizers.

    An optimizer has its parameters and their gradients.
    """
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    from isthmus.engine import compiled

    module: Any = compiled
    call = module._Region.__call__
    regions: dict[str, tuple[Any, Sequence[Any], int]] = {}
    optimizers: dict[int, Any] = {}

    def call_region(region: Any, *arguments: Any) -> Any:
        results = call(region, *arguments)
        num_bytes = moved_bytes(arguments, results)
        if region.name not in regions or num_bytes > regions[region.name][2]:
            regions[region.name] = (region, arguments, num_bytes)
        return results

    def keep(optimizer: Any, _args: Any, _kwargs: Any) -> None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        grads = [(parameter, parameter.grad) for parameter in parameters if parameter.grad is not None]
        optimizers.setdefault(id(optimizer), (optimizer, grads))

    values: list[Any] = []
    hook = register_optimizer_step_pre_hook(keep)
    module._Region.__call__ = call_region
    try:
        yield regions, values
    finally:
        module._Region.__call__ = call
        hook.remove()
        values += optimizers.values()


def moved_bytes(arguments: Sequence[Any], results: Any) -> int:
    """Each argument read once and each result written once, without results that are views of an argument.

    Elements of an expanded dimension count once, and so do two arguments that are the same tensor.
    """
    from torch import Tensor
    from torch.utils._pytree import tree_leaves

    def tensors(values: Any) -> dict[tuple[Any, ...], Tensor]:
        leaves = (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor))
        return {(_storage(x), x.storage_offset(), x.shape, x.stride(), x.dtype): x for x in leaves}

    read, written = tensors(arguments), tensors(results)
    storages = {_storage(x) for x in read.values()}
    new = [x for x in written.values() if _storage(x) not in storages]
    return sum(map(_distinct_bytes, [*read.values(), *new]))


def _storage(tensor: Any) -> int:
    """Identity of its memory, which a tensor without values has, too."""
    return int(tensor.untyped_storage()._cdata)


def _distinct_bytes(tensor: Any) -> int:
    number = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        number *= size if stride else 1
    return int(number * tensor.element_size())


def device_seconds(call: Callable[[], Any], device_type: str, calls: int) -> float:
    """Median time of a call after a warm-up; on a GPU between two events, while the host is ahead."""
    import torch

    call()
    if device_type == "cpu":
        times = []
        for _ in range(calls):
            started_s = time.perf_counter()
            call()
            times.append(time.perf_counter() - started_s)
        return statistics.median(times)
    cache = torch.empty(_CACHE_BYTES, dtype=torch.uint8, device="cuda")
    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(calls)]
    for start, end in marks:
        cache.zero_()  # takes the GPU longer than the host needs to start the call
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in marks) / 1e3


def _train(keys: dict[str, Any], precision: str, tokens: int, spec: dict[str, Any]) -> None:
    """Train the model for one step of one micro batch."""
    from isthmus.config.load import load_config
    from isthmus.recipes.run import run_recipe

    with tempfile.TemporaryDirectory(prefix="isthmus-bench-", dir=spec["folder"]) as folder:
        settings = {
            "model.config": keys, "model.init": "random", "out": str(Path(folder) / "run"), "data.mock": True,
            "data.seq_length": tokens, "data.valid_fraction": 0.0, "platform": spec["platform"], "train.steps": 1,
            "train.global_batch_size": 1, "train.precision": precision, "optim.lr": 1e-4,
            "checkpoint.save_final": False, "checkpoint.export_final": False, "logging.to": [],
            "tokenizer.type": "NullTokenizer", "tokenizer.vocab_size": keys["vocab_size"] - 1,
        }  # fmt: skip
        if spec["dry"] and precision == "fp8":
            settings["train.emulate_fp8"] = True
        run_recipe(load_config("pretrain", None, flags=settings))


def _loss(tokens: int, device_type: str, *, dry: bool) -> tuple[Callable[[], Any], int, float]:
    """The loss block of Llama 3.1 8B with its gradients, its bytes and its FLOPs.

    Logits are written by their matmul, read for the statistics, replaced by their gradient, and read by both other
    matmuls. A chunk reads the weight twice, and reads and writes its float32 gradient.
    """
    import torch

    from isthmus.engine.compiled import choose_compile, compile_failure
    from isthmus.engine.loss.linear_cross_entropy import chunk_bounds, device_code, linear_cross_entropy

    choose_compile("auto", device_type, compile_failure("auto", device_type))
    keys = model_config("llama-8b", tiny=dry)
    width, rows, device = keys["hidden_size"], keys["vocab_size"], torch.device(device_type)
    hidden = torch.randn(tokens, width, device=device).to(torch.bfloat16).requires_grad_()
    weight: Any = torch.nn.Parameter(0.02 * torch.randn(rows, width, device=device).to(torch.bfloat16))
    weight.main_grad = torch.zeros(rows, width, device=device)
    labels = torch.randint(rows, (tokens,), device=device)
    chunks = len([*chunk_bounds(tokens, rows, device_code(hidden).chunk_elements(device))])
    num_bytes = 6 * 2 * tokens * rows + 3 * 2 * tokens * width + chunks * (2 * 2 + 2 * 4) * rows * width
    return lambda: linear_cross_entropy(hidden, weight, labels), num_bytes, 6.0 * tokens * rows * width
