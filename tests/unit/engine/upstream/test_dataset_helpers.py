"""The dataset helpers of a checkout: compiled, built, or computed with NumPy."""

from __future__ import annotations

from importlib.machinery import EXTENSION_SUFFIXES
from importlib.metadata import distribution
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.testing  # starts a process when imported, which unit tests must not
import pytest

from isthmus.engine.upstream import dataset_helpers
from isthmus.engine.upstream.dataset_helpers import NAME, NumpyHelpers, find_helpers
from isthmus.errors import UsageError

INSTALLED = Path(str(distribution("megatron-core").locate_file("megatron/core/datasets")))
LIBRARY = next(path for path in INSTALLED.glob("helpers_cpp*") if path.name.endswith(tuple(EXTENSION_SUFFIXES)))


@pytest.fixture(scope="module")
def compiled() -> Any:
    spec = spec_from_file_location(NAME, LIBRARY)
    assert spec and spec.loader
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def computed() -> Any:
    module = ModuleType(NAME)
    NumpyHelpers().exec_module(module)
    return module


@pytest.mark.slow
def test_sample_index_with_numpy(compiled: Any, computed: Any) -> None:
    random, compared = np.random.default_rng(0), 0
    for _ in range(300):
        sizes = random.integers(1, 12, random.integers(1, 9)).astype(np.int32)
        epochs, seq_length, extra = (int(random.integers(low, high)) for low, high in ((1, 4), (2, 9), (0, 2)))
        documents = np.concatenate([random.permutation(len(sizes)) for _ in range(epochs)]).astype(np.int32)
        tokens = int(sizes.sum())
        if epochs * tokens - extra < seq_length or tokens < 2:
            continue
        args = (sizes, documents, seq_length, epochs, tokens, bool(random.integers(0, 2)), extra)
        for name in ("build_sample_idx_int32", "build_sample_idx_int64"):
            expected, result = getattr(compiled, name)(*args), getattr(computed, name)(*args)
            assert result.dtype == expected.dtype
            np.testing.assert_array_equal(result, expected, err_msg=str(args))
        compared += 1
    assert compared > 200


def test_blends_with_numpy(compiled: Any, computed: Any) -> None:
    random = np.random.default_rng(0)
    for _ in range(30):
        count, size = int(random.integers(1, 6)), int(random.integers(1, 100))
        sizes = random.integers(1, 20, count)
        weights = random.random(count) / count
        results = []
        for module in (compiled, computed):
            blend = np.zeros(size, np.int16), np.zeros(size, np.int64)
            module.build_blending_indices(*blend, weights, count, size, False)
            full = np.zeros(sizes.sum(), np.int16), np.zeros(sizes.sum(), np.int64)
            module.build_exhaustive_blending_indices(*full, sizes, count)
            results.append([*blend, *full])
        for expected, result in zip(*results, strict=True):
            np.testing.assert_array_equal(result, expected)


def test_sentences_need_a_compiler(computed: Any) -> None:
    with pytest.raises(UsageError, match="install a C\\+\\+ compiler"):
        computed.build_mapping()


def checkout(folder: Path, source: str | None = None) -> list[str]:
    (folder / "helpers.cpp").write_text(source or (INSTALLED / "helpers.cpp").read_text())
    return [str(folder)]


def test_installed_library_of_the_same_source(tmp_path: Path) -> None:
    said: list[str] = []
    spec = find_helpers(checkout(tmp_path), said.append)
    assert spec is not None
    assert spec.origin == str(LIBRARY)
    assert said == [f"dataset helpers: those of the installed megatron-core, from the same source ({LIBRARY})"]


def test_a_compiled_checkout_needs_nothing() -> None:
    assert find_helpers([str(INSTALLED)], lambda line: pytest.fail(line)) is None


def test_helpers_of_another_python_are_not_used(tmp_path: Path) -> None:
    folders, said = checkout(tmp_path), list[str]()
    Path(folders[0], "helpers_cpp.cpython-27-x86_64-linux-gnu.so").touch()
    assert find_helpers(folders, said.append) is not None
    assert len(said) == 1


@pytest.mark.processes
def test_build_outside_of_the_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler here records its command and copies a library to the output."""
    compiler, log = tmp_path / "compiler", tmp_path / "log"
    compiler.write_text(f'#!/bin/sh\necho "$@" >> {log}\nfor last; do :; done\ncp {LIBRARY} "$last"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "checkout").mkdir()
    folders, said = checkout(tmp_path / "checkout", "// another source"), []
    for _ in range(2):
        spec = find_helpers(folders, said.append)
        assert spec is not None and spec.origin is not None
        assert Path(spec.origin).read_bytes() == LIBRARY.read_bytes()
    assert [line.split()[2] for line in said] == ["compiled", "built"]
    (command,) = log.read_text().splitlines()
    assert "-std=c++17" in command and str(tmp_path / "checkout" / "helpers.cpp") in command
    assert sorted(path.name for path in (tmp_path / "checkout").iterdir()) == ["helpers.cpp"]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("script", "reason"),
    [(None, "there is no C++ compiler"), ("#!/bin/sh\necho 'x.cpp:1: error: no' >&2\nexit 1\n", "x.cpp:1: error: no")],
)
def test_numpy_without_a_working_compiler(
    script: str | None, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text(script or "")
    compiler.chmod(0o755)
    monkeypatch.setattr(dataset_helpers.shutil, "which", lambda name: str(compiler) if script else None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    said: list[str] = []
    spec = find_helpers(checkout(tmp_path, "// another source"), said.append)
    assert spec is not None and isinstance(spec.loader, NumpyHelpers)
    assert reason in said[0]
