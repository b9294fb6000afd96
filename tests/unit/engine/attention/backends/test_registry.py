"""Each attention backend against the formula of attention over packed samples: values and gradients."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from isthmus.engine.attention.backends import cudnn, flex
from isthmus.engine.attention.backends.blocks import packed_attention
from isthmus.engine.attention.backends.cudnn import cudnn_attention
from isthmus.engine.attention.backends.flex import flex_attention
from isthmus.engine.attention.backends.sdpa import sdpa_attention
from isthmus.engine.attention.backends.varlen import varlen_attention
from isthmus.engine.layers.row_ranges import row_ranges
from isthmus.engine.parallel.context_parallel import Spans, local_tokens
from sweep import swept
from unit.engine.attention.backends.plain_kernels import (  # noqa: F401
    plain_cudnn_attention,
    plain_flash_attention,
    plain_kernels,
)
from unit.engine.attention.test_self_attention import reference
from unit.engine.recorder import Recorder

pytestmark = pytest.mark.usefixtures("plain_kernels")
BACKENDS = pytest.mark.parametrize("attend", [varlen_attention, cudnn_attention, flex_attention, sdpa_attention])
LENGTHS = (9, 1, 4, 130, 6)
TOKENS = sum(LENGTHS)
SPANS: dict[str, Spans | None] = {
    "whole": None,
    "parts": ((0, 3), (7, 30), (100, 148)),
    "inside": ((20, 60),),
    "whole samples": ((9, 14), (144, 150)),
}


OPTIONS: list[dict[str, Any]] = [{"softcap": 0.5}, {"sinks": 0}, {"softcap": 2.0, "sinks": 0, "scale": 0.3}]


def inputs(groups: int, value_width: int = 16) -> list[Tensor]:
    random = torch.Generator().manual_seed(0)
    shapes = ((groups, 4 // groups, 16), (groups, 16), (groups, value_width))
    return [torch.randn(TOKENS, *s, dtype=torch.float64, generator=random).requires_grad_() for s in shapes]


def check(
    attend: Callable[..., Tensor], tensors: list[Tensor], window: int | None, spans: Spans | None, **options: Any
) -> None:
    """Against the formula, whose rows are those of the whole sequence."""
    sinks = [options["sinks"]] if "sinks" in options else []
    layout = {"spans": spans} if spans else {}
    out = attend(local_tokens(tensors[0], spans), tensors[1], tensors[2], LENGTHS, window, **options, **layout)
    expected = local_tokens(reference(*tensors, LENGTHS, window, **options), spans)
    assert out.shape == expected.shape and torch.allclose(out, expected, rtol=0, atol=1e-12)
    upstream = torch.randn(expected.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    leaves = [*tensors, *sinks]
    got = torch.autograd.grad(out, leaves, upstream)
    for mine, theirs in zip(got, torch.autograd.grad(expected, leaves, upstream), strict=True):
        assert torch.allclose(mine, theirs, rtol=0, atol=1e-12)


@BACKENDS
@pytest.mark.slow_cases("1-7-whole samples-flex_attention", "4-7-parts-flex_attention")
@pytest.mark.parametrize("spans", SPANS.values(), ids=SPANS)
@pytest.mark.parametrize("window", swept([None, 1, 7, 1000], always=(None, 7)))
@pytest.mark.parametrize("groups", [1, 4])
def test_values_and_gradients(
    attend: Callable[..., Tensor], groups: int, window: int | None, spans: Spans | None
) -> None:
    check(attend, inputs(groups), window, spans, scale=0.3)


@pytest.mark.parametrize(
    ("lengths", "window", "spans", "by_cudnn"),
    [
        ((512,), None, None, True),
        ((512,), 512, None, True),
        ((512,), 511, None, False),
        ((512,), None, ((0, 64), (400, 512)), False),
        ((500,), None, None, False),
        ((256, 256), None, None, False),
        ((512, 1), None, None, False),
    ],
)
def test_cudnn_computes_one_sample_of_a_length_that_recurs(
    lengths: tuple[int, ...], window: int | None, spans: Spans | None, by_cudnn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    monkeypatch.setattr(cudnn, "_KERNEL", lambda *a, **k: calls.append(1) or plain_cudnn_attention(*a, **k))
    random = torch.Generator().manual_seed(0)
    tokens, shapes = sum(lengths), ((2, 2, 16), (2, 16), (2, 8))
    tensors = [torch.randn(tokens, *s, dtype=torch.float64, generator=random).requires_grad_() for s in shapes]
    out = cudnn_attention(local_tokens(tensors[0], spans), *tensors[1:], lengths, window, scale=0.3, spans=spans)
    expected = local_tokens(reference(*tensors, lengths, window, scale=0.3), spans)
    assert bool(calls) is by_cudnn and torch.allclose(out, expected, rtol=0, atol=1e-12)
    upstream = torch.randn(expected.shape, dtype=torch.float64, generator=random)
    gradients = (torch.autograd.grad(x, tensors, upstream) for x in (out, expected))
    for mine, theirs in zip(*gradients, strict=True):
        assert torch.allclose(mine, theirs, rtol=0, atol=1e-12)


@pytest.mark.slow_cases("options2-7-whole", "options2-7-parts", "options2-7-inside")
@pytest.mark.parametrize("spans", SPANS.values(), ids=SPANS)
@pytest.mark.parametrize("window", swept([None, 7], always=(7,)))
@pytest.mark.parametrize("options", swept(OPTIONS, always=OPTIONS[-1:]))
def test_softcap_and_sinks(options: dict[str, Any], window: int | None, spans: Spans | None) -> None:
    arguments = dict(options)
    if "sinks" in arguments:
        arguments["sinks"] = torch.linspace(-1, 2, 4, dtype=torch.float64, requires_grad=True)
    check(flex_attention, inputs(2), window, spans, **arguments)


@pytest.mark.processes
def test_flex_is_compiled_for_the_first_two_lengths_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each packing has a new mask, lengths differ, and softcap and scale stay numbers that a kernel can contain."""
    graphs = []

    def count(graph: Any, _inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch._dynamo.optimize(count, nopython=True)
    monkeypatch.setattr(torch, "compile", lambda function, **_: compiled(function))
    options: dict[str, Any] = {"softcap": 2.0, "scale": 0.3, "sinks": torch.ones(4, dtype=torch.float64)}
    for lengths in ((300,), (9, 500), (140, 1, 2), (256, 256), (1000, 24)):
        random = torch.Generator().manual_seed(0)
        shapes = ((2, 2, 16), (2, 16), (2, 16))
        tensors = [
            torch.randn(sum(lengths), *s, dtype=torch.float64, generator=random).requires_grad_() for s in shapes
        ]
        out, expected = (attend(*tensors, lengths, 70, **options) for attend in (flex_attention, packed_attention))
        assert torch.allclose(out, expected, rtol=0, atol=1e-12)
    assert len(graphs) == 2


@BACKENDS
def test_values_narrower_than_keys(attend: Callable[..., Tensor]) -> None:
    """As in latent attention."""
    check(attend, inputs(4, value_width=8), None, SPANS["parts"])


@BACKENDS
def test_every_backend_equals_the_blocks_of_the_cpu(attend: Callable[..., Tensor]) -> None:
    tensors = inputs(2)
    assert torch.allclose(attend(*tensors, LENGTHS, 7), packed_attention(*tensors, LENGTHS, 7), rtol=0, atol=1e-12)


@BACKENDS
def test_wrong_lengths_are_refused(attend: Callable[..., Tensor]) -> None:
    with pytest.raises(ValueError, match="expected 150 queries and 150 keys"):
        attend(*(item[1:] for item in inputs(2)), LENGTHS)


@pytest.mark.parametrize("lengths", [(700,), (300, 1, 128, 128, 143), (64,) * 9, (1000, 24)])
@pytest.mark.parametrize("window", [None, 100, 300])
@pytest.mark.parametrize("spans", [None, ((100, 228), (300, 500))], ids=["whole", "parts"])
def test_blocks_of_the_mask_are_those_of_torch(
    lengths: tuple[int, ...], window: int | None, spans: Spans | None
) -> None:
    """Torch computes them from the mask of all pairs."""
    from torch.nn.attention.flex_attention import create_block_mask

    mask = flex._block_mask(lengths, window, spans, torch.device("cpu"))
    expected = create_block_mask(mask.mask_mod, None, None, *mask.seq_lengths, device="cpu")
    kinds = ("kv", "full_kv", "q", "full_q")
    for kind in kinds:
        number, indices = (getattr(mask, f"{kind}_{part}") for part in ("num_blocks", "indices"))
        theirs = getattr(expected, f"{kind}_num_blocks")
        extra = number - theirs
        if spans is None or kind.startswith("full"):
            assert torch.equal(number, theirs)
            used = torch.arange(indices.size(-1)) < number[..., None]
            assert torch.equal(indices[used], getattr(expected, f"{kind}_indices")[used])
        else:  # a block with queries of two spans has the blocks of keys between them too
            assert (extra >= 0).all()


def test_sdpa_makes_no_gradient_of_full_size_per_sample() -> None:
    """Slices would allocate one for each sample and tensor."""
    tensors = [torch.randn(480, *shape, requires_grad=True) for shape in ((2, 2, 16), (2, 16), (2, 16))]
    with Recorder() as seen:
        sdpa_attention(*tensors, (30,) * 16).sum().backward()
    names = [name for name, _ in seen.calls]
    assert "slice_backward" not in names and names.count("cat") == 4  # the output and three gradients


def test_row_ranges_add_up_gradients_of_rows_that_they_share() -> None:
    x = torch.randn(10, 3, dtype=torch.float64, requires_grad=True)
    ranges = ((0, 4), (2, 7), (7, 8))
    upstream = [torch.randn(end - start, 3, dtype=torch.float64) for start, end in ranges]
    views = row_ranges(x, ranges)
    assert all(view.data_ptr() == x[start:].data_ptr() for view, (start, _) in zip(views, ranges, strict=True))
    (grad,) = torch.autograd.grad(views, x, upstream)
    expected = torch.zeros_like(x)
    for (start, end), item in zip(ranges, upstream, strict=True):
        expected[start:end] += item
    assert torch.equal(grad, expected)


@pytest.mark.parametrize("ranges", [((0, 10),), ((0, 4), (4, 10))])
def test_adjacent_row_ranges_need_no_sum(ranges: Spans) -> None:
    x = torch.randn(10, 3, requires_grad=True)
    with Recorder() as seen:
        torch.cat(row_ranges(x, ranges)).sum().backward()
    assert not {name for name, _ in seen.calls} & {"add_", "add", "slice_backward", "new_zeros", "zeros"}


def operator_forward(q: Tensor, k: Tensor, v: Tensor, *arguments: Any, **options: Any) -> tuple[Tensor, ...]:
    """``aten._flash_attention_forward``; ``is_causal`` is a right window of 0."""
    *cumulative, dropout, is_causal, _mask = arguments
    window = options["window_size_left"], options["window_size_right"]
    assert dropout == 0.0 and is_causal == (window == (-1, 0))
    out = plain_flash_attention(q, k, v, *cumulative, scale=options["scale"], window_size=window)
    return out, *(out.new_zeros(1) for _ in range(4))


def operator_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *arguments: Any, **options: Any) -> Any:
    _out, _log_sum, *forward_arguments, _random, _unused = arguments

    def gradients() -> Any:
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out, *_ = operator_forward(*leaves, *forward_arguments, False, **options)
        return torch.autograd.grad(out, leaves, grad)

    with ThreadPoolExecutor(1) as thread:  # torch switches autograd off in the thread that calls a kernel
        return thread.submit(gradients).result()


@pytest.mark.parametrize("spans", [None, SPANS["parts"]], ids=["whole", "parts"])
@pytest.mark.parametrize("window", [None, 7])
def test_the_flash_operator_of_torch(window: int | None, spans: Spans | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through torch's dispatcher and its formula of the gradient, with a kernel for CPUs."""
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_flash_attention_forward", operator_forward, "CPU")
        library.impl("_flash_attention_backward", operator_backward, "CPU")
        check(varlen_attention, inputs(2), window, spans, scale=0.3)
