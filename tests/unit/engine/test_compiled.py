"""Regions compiled by inductor's C++ backend on this CPU, which takes about a second each."""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from isthmus.engine import compiled
from isthmus.engine.compiled import choose_compile, compile_failure, compiled_on_gpu, compiled_versions, set_compile
from isthmus.errors import UsageError

pytestmark = pytest.mark.processes  # the C++ compiler


@pytest.fixture(autouse=True)
def on_cpu() -> Iterator[None]:
    set_compile(True, device="cpu")
    compiled_versions.clear()
    yield
    set_compile(False)


def num_compiled() -> int:
    return compiled_versions.total()


@compiled_on_gpu
def scaled(x: Tensor, weight: Tensor, shift: float) -> Tensor:
    return (x * weight).add_(shift)


def test_lengths_share_a_compiled_version_and_widths_do_not() -> None:
    results = []
    for shape in ((7, 3), (9, 3), (3, 3), (4, 5)):
        x, weight = torch.randn(shape), torch.nn.Parameter(torch.randn(shape[1]))
        with torch.no_grad():
            assert torch.allclose(scaled(x, weight, 0.5), x * weight + 0.5)
        assert weight.__dict__.keys().isdisjoint({"_dynamo_weak_dynamic_indices"})
        results.append(num_compiled())
    # Also where the length is the width, as that of the weight.
    assert results == [1, 1, 1, 2]


def test_layouts_have_versions_and_their_lengths_do_not() -> None:
    region = compiled_on_gpu(lambda x: x * 2)
    layouts: list[Callable[[int], Tensor]] = [
        lambda length: torch.randn(length, 2, 4),
        lambda length: torch.randn(2, length, 4).transpose(0, 1),  # the length is not outermost
        lambda length: torch.randn(length, 2, 12)[..., 4:8],
        lambda length: torch.randn(1, 2, 4).expand(length, 2, 4),
    ]
    for number, layout in enumerate(layouts, start=1):
        for length in (5, 2, 4, 100):
            x = layout(length)
            assert torch.equal(region(x), x * 2)
        assert compiled_versions.total() == number


def test_a_tensor_that_has_as_many_rows_by_chance() -> None:
    region = compiled_on_gpu(lambda x, row: x + row)
    row = torch.arange(6.0)
    for length in (6, 4, 6, 5):
        x = torch.randn(length, 6)
        assert torch.equal(region(x, row), x + row)
    assert compiled_versions.total() == 2


def test_a_version_is_for_the_lengths_that_the_compiler_assumed() -> None:
    region = compiled_on_gpu(lambda x: x + 1 if x.size(0) > 4 else x - 1)
    for length, expected, versions in ((5, 1, 1), (9, 1, 1), (3, -1, 2), (2, -1, 2), (6, 1, 2)):
        assert region(torch.zeros(length, 2)).tolist() == [[expected] * 2] * length
        assert compiled_versions.total() == versions


def test_a_region_may_change_an_argument_and_return_none() -> None:
    @compiled_on_gpu
    def added(x: Tensor, total: Tensor) -> tuple[Tensor | None, Tensor]:
        total.add_(x.sum(0))
        return None, x * 2

    total = torch.ones(3)
    for length in (4, 7):
        nothing, doubled = added(torch.ones(length, 3), total)
        assert nothing is None and torch.equal(doubled, torch.full((length, 3), 2.0))
    assert total.tolist() == [12.0] * 3 and compiled_versions.total() == 1


def test_a_region_in_another_thread_shares_it_too() -> None:
    """The backward pass of a GPU runs in a thread of its own; settings of the compiler are per thread."""
    inputs = torch.randn(4, 6), torch.randn(6), 0.5
    scaled(*inputs)
    before = num_compiled()
    thread = threading.Thread(target=scaled, args=(torch.randn(5, 6), *inputs[1:]))
    thread.start()
    thread.join()
    assert num_compiled() == before


def test_short_and_disabled_regions_run_eagerly() -> None:
    for rows in (0, 1):
        assert scaled(torch.ones(rows, 3), torch.ones(3), 0.5).tolist() == [[1.5] * 3] * rows
    set_compile(True, device="cuda")
    assert scaled(torch.ones(4, 3), torch.ones(3), 0.5).shape == (4, 3)
    assert num_compiled() == 0


def test_a_region_that_autograd_would_record_is_refused() -> None:
    with pytest.raises(ValueError, match=r"test_compiled\.scaled is compiled, and autograd would not record it"):
        scaled(torch.ones(4, 3, requires_grad=True), torch.ones(3), 0.5)


def test_too_many_versions_warn_once_and_run_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "_VERSIONS", 1)
    region = compiled_on_gpu(lambda x: x + 1)
    assert region(torch.ones(2, 3)).tolist() == [[2] * 3] * 2
    with pytest.warns(UserWarning, match=r"<lambda> was compiled too often and runs eagerly"):
        assert region(torch.ones(2, 4)).tolist() == [[2] * 4] * 2
    assert region(torch.ones(2, 5)).tolist() == [[2] * 5] * 2
    assert num_compiled() == 1


def test_a_failing_compiler_names_the_region_and_the_setting() -> None:
    region = compiled_on_gpu(lambda x: x + float(x.sum().item() > 0))
    with pytest.raises(UsageError, match=r"torch.compile failed for .*<lambda> .*Set train.compile=false"):
        region(torch.ones(3))


def test_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    triton = types.ModuleType("triton")
    triton.__version__ = "3.4.0"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "triton", triton)
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("CXX", "c++")
    assert choose_compile("auto", "cuda") == choose_compile(True, "cuda") == "compile: on (Triton 3.4.0)"
    assert compiled._devices == {"cuda"}
    assert str(choose_compile(False, "cuda")).startswith("compile: off, train.compile=false; norms")
    assert choose_compile("auto", "cpu") is None
    assert not compiled._devices
    assert choose_compile(True, "cpu") == "compile: on (c++)"


def test_choice_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.setattr("shutil.which", lambda name: "/usr/bin/gcc" if name == "gcc" else None)
    monkeypatch.delenv("CXX", raising=False)
    assert "compile: off, Triton cannot be imported (" in str(choose_compile("auto", "cuda"))
    with pytest.raises(UsageError, match=r"train.compile=true cannot be used here: Triton cannot be imported"):
        choose_compile(True, "cuda")
    with pytest.raises(UsageError, match=r"no C\+\+ compiler was found \(g\+\+, clang\+\+ or \$CXX\)"):
        choose_compile(True, "cpu")
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert "compile: off, no C compiler was found (gcc, clang or $CC); norms" in str(choose_compile("auto", "cuda"))


def test_auto_is_eager_if_a_trial_fails_on_any_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """As without the headers of Python, which Triton needs to build its launcher."""
    monkeypatch.setattr(compiled, "find_compiler", lambda _device: ("Triton 3.6.0", ""))
    monkeypatch.setattr(compiled, "_trial", lambda _device: "a trial failed (x)")
    failure = compile_failure("auto", "cuda")
    assert compile_failure("auto", "cpu") == compile_failure(True, "cuda") == compile_failure(False, "cuda") == ""
    assert str(choose_compile("auto", "cuda", failure)).startswith("compile: off, a trial failed (x); norms")
    assert not compiled._devices


def test_a_trial_finds_a_compiler_that_fails() -> None:
    assert compiled._trial("cpu") == ""
    torch._dynamo.reset()
    with torch._inductor.config.patch({"cpp.cxx": ("false",), "force_disable_caches": True}):
        assert "a trial failed (" in compiled._trial("cpu")


def test_a_launch_that_fails_names_the_region(monkeypatch: pytest.MonkeyPatch) -> None:
    class OutOfResources(Exception):
        __module__ = "triton.runtime.errors"

    def launch(*_args: object) -> None:
        raise OutOfResources("out of resource: shared memory")

    version = compiled._Version(launch, list, lambda _length: True)
    monkeypatch.setattr(compiled, "_compile", lambda *_args, **_options: version)
    region = compiled_on_gpu(lambda x: x + 1)
    with pytest.raises(UsageError, match=r"<lambda> \(OutOfResources: out of resource.*Set train.compile=false"):
        region(torch.ones(3))


def test_deterministic_training_is_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert "compile: off, train.deterministic=true" in str(choose_compile("auto", "cuda"))
    with pytest.raises(UsageError, match=r"train.compile=true cannot be used here: train.deterministic=true"):
        choose_compile(True, "cuda")
