"""Each layer with regions, compiled by inductor's C++ backend on this CPU: results of the eager code, for two lengths
without compiling again.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from isthmus.config.schema.train import TrainConfig
from isthmus.data.batching.packed_batch import PackedBatch
from isthmus.engine.attention.projected_heads import HeadSettings, project_heads
from isthmus.engine.attention.rope import rotate, rotation_table
from isthmus.engine.compiled import compiled_versions, compiles, set_compile
from isthmus.engine.decoder.single_process_model import single_process_groups
from isthmus.engine.layers.activation import Activation, _xielu, activation_function, clamped_swiglu
from isthmus.engine.layers.dropout import MLP_OUTPUT, dropout_keys, hidden_dropout
from isthmus.engine.layers.fused_function import fused
from isthmus.engine.layers.norm import LayerNorm, RMSNorm
from isthmus.engine.mixers.gated_norm import GatedNorm, gate
from isthmus.engine.mixers.mamba2_groups import RankGroups
from isthmus.engine.mixers.sharded_mixer import DepthwiseConvolution
from isthmus.engine.moe.router import route
from isthmus.families.architecture import from_settings
from isthmus.families.blocks.feed_forward import Experts

pytestmark = pytest.mark.processes  # the C++ compiler
WIDTH = 24


@pytest.fixture(autouse=True)
def eager_again() -> Iterator[None]:
    compiled_versions.clear()
    yield
    set_compile(False)


def randomized(module: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_()
    return module


def norm(kind: Any, *, width: int = WIDTH, zero_centered: bool = False, **kwargs: Any) -> nn.Module:
    config: Any = SimpleNamespace(
        params_dtype=torch.float32, sequence_parallel=False, layernorm_zero_centered_gamma=zero_centered
    )
    return randomized(kind(config, width, 1e-5, **kwargs))


def rope(x: Tensor, *, interleaved: bool, pairs: int) -> Tensor:
    """Of 3 heads of 8 channels, of which 2 x ``pairs`` are rotated."""
    frequencies, positions = torch.linspace(1, 0.1, pairs, device=x.device), torch.arange(len(x), device=x.device)
    return rotate(x.view(len(x), 3, 8), rotation_table(frequencies, positions, x.dtype), interleaved=interleaved)


def dropout(x: Tensor) -> Tensor:
    """In two layers, which must not compile twice."""
    batch = replace(PackedBatch.for_inference([torch.zeros(len(x), dtype=torch.int64)]), sample_ids=(3,))
    keys = dropout_keys(batch, seed=1, step=2)
    batch = replace(batch, dropout=replace(keys, tokens=keys.tokens.to(x.device)))
    return torch.cat([hidden_dropout(x, batch, 0.3, layer=layer, place=MLP_OUTPUT) for layer in (1, 2)])


def gated(function: Callable[[Tensor], Tensor]) -> nn.Module:
    return Activation(cast(Any, None), function=function)


class GegluOfLayers(nn.Module):
    """In two layers, which must not compile twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(gated(activation_function("gelu_tanh", gated=True)) for _ in range(2))

    def forward(self, x: Tensor) -> list[Tensor]:
        return [layer(x) for layer in self.layers]


class OfRows(nn.Module):
    """A layer of a mixer, given [T, C]."""

    def __init__(self, layer: nn.Module, **arguments: Any) -> None:
        super().__init__()
        self.layer, self.arguments = randomized(layer), arguments

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        arguments = [item[:, 0] for item in (x, *others)]
        if isinstance(self.layer, DepthwiseConvolution):
            arguments.append((2, len(x) - 2))
        return self.layer(*arguments, **self.arguments)


class XieluOfParameters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.sizes = nn.ParameterList(nn.Parameter(torch.tensor([size])) for size in (0.8, 0.3))
        self.register_buffer("constants", torch.tensor([[0.5], [-1e-6]]))

    def forward(self, x: Tensor) -> Tensor:
        return fused(_xielu)(x, *self.sizes, *self.constants)


class Heads(nn.Module):
    """Of 2 groups with 2 queries, a key and a value of 2 channels; eagerly a norm, a rotation, or both for each."""

    def __init__(self, *, normed: bool, gated: bool = False, interleaved: bool = False) -> None:
        super().__init__()
        self.interleaved = interleaved
        self.norms = nn.ModuleList(norm(RMSNorm, width=2, zero_centered=True) for _ in range(2 * normed))
        widths = (4, 4, 2, 2) if gated else (4, 4, 4)
        self.settings = HeadSettings(2, widths, interleaved, 1e-5, zero_centered=True)

    def forward(self, x: Tensor) -> list[Tensor]:
        table = rotation_table(torch.ones(1, device=x.device), torch.arange(len(x), device=x.device), x.dtype)
        if compiles(x):
            weights = [cast(RMSNorm, layer).weight for layer in self.norms] or [None, None]
            return list(project_heads(x, table, *weights, self.settings))
        parts = x.view(len(x), 2, -1).split(self.settings.widths, dim=-1)
        q, *gates, k, v = parts
        heads = [q.unflatten(-1, (-1, k.size(-1))), k]
        if len(self.norms):
            heads = [layer(x) for layer, x in zip(self.norms, heads, strict=True)]
        return [*(rotate(x, table, interleaved=self.interleaved) for x in heads), *gates, v]


class PartOfAGroup(RankGroups):
    """The other rank of the group has zeros."""

    def summed(self, values: Tensor) -> Tensor:
        return values


ONE_RANK = RankGroups(3, SimpleNamespace(size=lambda: 1))
PART_OF_A_GROUP = PartOfAGroup(1, SimpleNamespace(size=lambda: 2, rank=lambda: 0))
CASES: dict[str, Callable[..., Any]] = {
    "RMSNorm of a sum": norm(RMSNorm, zero_centered=True),
    "LayerNorm": norm(LayerNorm, bias=True),
    "partial interleaved rope": partial(rope, interleaved=True, pairs=3),
    "geglu": GegluOfLayers(),
    "xielu": XieluOfParameters(),
    "convolution": OfRows(DepthwiseConvolution(WIDTH, 3, bias=True, dtype=torch.float32), activated=True),
    "norm of a gated sum": OfRows(GatedNorm(WIDTH, ONE_RANK, 1e-5, gate_first=True, dtype=torch.float32)),
    "norm of a gated sum over ranks": OfRows(
        GatedNorm(WIDTH, PART_OF_A_GROUP, 1e-5, gate_first=True, dtype=torch.float32)
    ),
    "gate of a sum": gate,
    "clamped swiglu": gated(clamped_swiglu),
    "dropout": dropout,
    "normed heads": Heads(normed=True, gated=True, interleaved=True),
    "heads": Heads(normed=False),
}


def results(case: str, length: int, device: str = "cpu", dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Outputs and gradients for inputs that depend only on the length."""
    generator = torch.Generator().manual_seed(length)
    compute = CASES[case]
    if isinstance(compute, nn.Module):
        # Layers of a model share the function, whose regions belong to it.
        functions = {id(layer.function): layer.function for layer in compute.modules() if isinstance(layer, Activation)}
        compute = copy.deepcopy(compute, functions).to(device, dtype)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    inputs = [random(length, 1, WIDTH).requires_grad_() for _ in range(2 if "sum" in case else 1)]
    outputs = compute(*inputs)
    outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    weighted = sum((out * random(*out.shape)).sum() for out in outputs)
    weights = list(compute.parameters()) if isinstance(compute, nn.Module) else []
    return [*outputs, *torch.autograd.grad(weighted, [*inputs, *weights])]


@pytest.mark.thorough_cases(
    "convolution",
    "gate of a sum",
    "norm of a gated sum over ranks",
    "norm of a gated sum",
    "xielu",
    "LayerNorm",
    "partial interleaved rope",
    "clamped swiglu",
    "heads",
)
@pytest.mark.parametrize("case", CASES)
def test_compiled_equals_eager_for_any_length(case: str) -> None:
    lengths = (5, 7, WIDTH)
    expected = [results(case, length) for length in lengths]
    set_compile(True, device="cpu")
    for length, eager in zip(lengths, expected, strict=True):
        for mine, reference in zip(results(case, length), eager, strict=True):
            torch.testing.assert_close(mine, reference, rtol=2e-6, atol=5e-6)
    # A forward and a backward region; dropout has one for both, and ranks exchange sums within the norm.
    assert compiled_versions.total() == {"dropout": 1, "norm of a gated sum over ranks": 4}.get(case, 2)


@pytest.mark.thorough_cases("LayerNorm-True", "RMSNorm of a sum-True")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("case", ["RMSNorm of a sum", "LayerNorm", "normed heads"])
def test_gradients_of_weights_are_added_to_main_grad(case: str, compiled: bool) -> None:
    """Eagerly the bits that a hook of autograd adds; also where the hidden size is the length."""
    set_compile(compiled, device="cpu")
    for length in (7, WIDTH):
        inputs = torch.randn(length, 1, WIDTH, generator=torch.Generator().manual_seed(length))
        layers = [copy.deepcopy(CASES[case]) for _ in range(2)]
        sums = [[torch.ones_like(parameter) for parameter in layer.parameters()] for layer in layers]
        for parameter, buffer in zip(layers[1].parameters(), sums[1], strict=True):
            parameter.main_grad = buffer
        for _ in range(2):  # micro batches
            for layer, buffers in zip(layers, sums, strict=True):
                outputs = layer(inputs, inputs) if "sum" in case else layer(inputs)
                outputs = [outputs] if isinstance(outputs, Tensor) else outputs
                sum((out * out).sum() for out in outputs).backward()
                for parameter, buffer in zip(layer.parameters(), buffers, strict=True):
                    if layer is layers[0]:
                        buffer.add_(parameter.grad)
                        parameter.grad = None
                    assert parameter.grad is None and getattr(parameter, "grad_added_to_main_grad", layer is layers[0])
        for mine, expected in zip(sums[1], sums[0], strict=True):
            assert torch.equal(mine, expected) or compiled
            torch.testing.assert_close(mine, expected, rtol=2e-6, atol=5e-6)


def model_gradients(**train: Any) -> dict[str, Tensor]:
    """Of a model with GQA, partial rotation, and experts in one of two layers, for two packings."""
    from isthmus.engine.decoder.decoder import build_model
    from isthmus.engine.decoder.model_config import transformer_config

    moe = Experts(num_experts=4, top_k=2, ffn_hidden_size=24, dense_layers=(0,), normalize=True)
    architecture = from_settings({
        "family": "qwen3_moe", "num_layers": 2, "hidden_size": WIDTH, "ffn_hidden_size": 32, "num_attention_heads": 4,
        "num_query_groups": 2, "kv_channels": 12, "vocab_size": 40, "max_position_embeddings": 64,
        "norm_epsilon": 1e-6, "rotary_percent": 0.5, "moe": moe,
    })  # fmt: skip
    config = transformer_config(architecture, dtype=torch.float32, train=TrainConfig.model_validate(train))
    model = build_model(architecture, config).train()
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        parameter.data.normal_(generator=generator).mul_(0.2).add_(1 if "norm" in name else 0)
    for lengths in ((7, 4), (12, 5, 3)):
        batch = PackedBatch.for_training([torch.arange(length + 1) * 7 % 40 for length in lengths])
        model(batch).square().mean().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("recomputed", [None, "layernorm mlp_act moe_act rope", "full"])
def test_a_compiled_model_has_the_gradients_of_the_eager_one(recomputed: str | None) -> None:
    train: dict[str, Any] = {"recompute": "full"} if recomputed == "full" else {}
    if recomputed not in (None, "full"):
        train = {"recompute": "selective", "recompute_modules": recomputed.split()}
    with single_process_groups():
        eager = model_gradients()
        set_compile(True, device="cpu")
        compiled = model_gradients(**train)
    assert compiled_versions.total() > 0 or recomputed  # later cases find the versions of the first
    assert compiled.keys() == eager.keys() and len(eager) > 20
    for name, gradient in eager.items():
        assert torch.allclose(compiled[name], gradient, rtol=2e-4, atol=2e-6), name


@pytest.mark.parametrize(
    "moe",
    [
        Experts(num_experts=6, top_k=3, ffn_hidden_size=8, score="softmax_of_chosen"),
        Experts(
            num_experts=6, top_k=2, ffn_hidden_size=8, score="sigmoid", expert_bias=True, normalize=True, num_groups=3,
            group_top_k=2, scaling_factor=2.5,
        ),
    ],
    ids=["softmax_of_chosen", "sigmoid with groups"],
)  # fmt: skip
def test_a_compiled_router(moe: Experts) -> None:
    bias = torch.randn(6) if moe.expert_bias else None

    def routed(length: int) -> list[Tensor]:
        logits = torch.randn(length, 6, generator=torch.Generator().manual_seed(length)).requires_grad_()
        weights, chosen = route(logits, bias, moe)
        return [weights, chosen, *torch.autograd.grad((weights * (1 + chosen)).sum(), logits)]

    lengths = (5, 7, 9)
    expected = [routed(length) for length in lengths]
    set_compile(True, device="cpu")
    for length, eager in zip(lengths, expected, strict=True):
        for mine, reference in zip(routed(length), eager, strict=True):
            torch.testing.assert_close(mine, reference)
    assert compiled_versions.total() == 3  # choice, weights, and their gradient
