"""``megatron.core.datasets.helpers_cpp`` for a checkout of Megatron-LM, which has the C++ source only.

It is built with the system's compiler outside of the checkout, once for each source and Python, or computed with NumPy.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from importlib.abc import Loader
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import spec_from_file_location
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np

from isthmus.errors import UsageError
from isthmus.files.atomic_write import cache_folder

NAME = "megatron.core.datasets.helpers_cpp"
_SUFFIX = str(sysconfig.get_config_var("EXT_SUFFIX"))


def find_helpers(folders: Sequence[str], say: Callable[[str], None]) -> ModuleSpec | None:
    """The module for the package ``megatron.core.datasets`` in ``folders``; None if it is compiled there."""
    sources = [Path(folder, "helpers.cpp") for folder in folders]
    source = next((path for path in sources if path.is_file()), None)
    if source is None or any(source.with_name(f"helpers_cpp{suffix}").exists() for suffix in EXTENSION_SUFFIXES):
        return None
    try:
        library, done = _installed(source) or _built(source)
    except _NotBuilt as error:
        say(f"dataset helpers: NumPy instead of C++, slower for many samples ({error})")
        return ModuleSpec(NAME, NumpyHelpers())
    say(f"dataset helpers: {done}")
    return spec_from_file_location(NAME, library)


class _NotBuilt(Exception):
    pass


def _installed(source: Path) -> tuple[Path, str] | None:
    """The compiled helpers of the installed megatron-core, if they have the same source."""
    try:
        folder = Path(str(distribution("megatron-core").locate_file("megatron/core/datasets")))
    except PackageNotFoundError:
        return None
    library = folder / f"helpers_cpp{_SUFFIX}"
    same = library.is_file() and (folder / "helpers.cpp").read_bytes() == source.read_bytes()
    return (library, f"those of the installed megatron-core, from the same source ({library})") if same else None


def _built(source: Path) -> tuple[Path, str]:
    """The library in the cache, built by the first rank of a machine while the others wait."""
    cache = cache_folder()
    library = cache / f"helpers_cpp-{hashlib.sha256(source.read_bytes()).hexdigest()[:16]}{_SUFFIX}"
    if library.exists():
        return library, f"built before, {library}"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with (cache / "helpers_cpp.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not library.exists():
                _compile(source, library)
    except OSError as error:
        raise _NotBuilt(f"{error.filename or cache}: {error.strerror}") from error
    return library, f"compiled {source} to {library}"


def _compile(source: Path, library: Path) -> None:
    import torch

    compiler = shutil.which(os.environ.get("CXX") or "c++") or shutil.which("g++")
    if compiler is None:
        raise _NotBuilt("there is no C++ compiler; CXX names one")
    # torch includes the headers of pybind11.
    headers = [str(Path(torch.__file__).parent / "include"), sysconfig.get_paths()["include"]]
    if not Path(headers[1], "Python.h").is_file():
        raise _NotBuilt(f"{headers[1]} has no Python.h; python3-dev has it")
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        built = Path(folder, library.name)
        flags = ["-O3", "-shared", "-std=c++17", "-fPIC", *(f"-I{path}" for path in headers)]
        done = subprocess.run([compiler, *flags, str(source), "-o", str(built)], capture_output=True, text=True)
        if done.returncode:
            error = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip()[:200])
            raise _NotBuilt(f"{compiler} failed: {error}")
        built.rename(library)


class NumpyHelpers(Loader):
    """Loads a module with the functions for GPT datasets; the results are equal to those in C++."""

    def exec_module(self, module: Any) -> None:
        module.build_sample_idx_int32 = partial(_sample_index, np.int32)
        module.build_sample_idx_int64 = partial(_sample_index, np.int64)
        module.build_blending_indices = _blending_indices
        module.build_exhaustive_blending_indices = _exhaustive_blending_indices
        module.build_mapping = module.build_blocks_mapping = _needs_compiler


def _needs_compiler(*_args: object) -> None:
    raise UsageError("datasets of sentences (BERT, T5) need the compiled dataset helpers: install a C++ compiler.")


def _sample_index(
    dtype: Any,
    sizes: Any,
    documents: Any,
    seq_length: int,
    epochs: int,
    tokens_per_epoch: int,
    drop_last: bool = True,
    extra_token: int = 1,
) -> Any:
    """[samples + 1, 2]: the index into ``documents`` and the offset in that document where each sample starts."""
    tokens = epochs * tokens_per_epoch - extra_token
    # C++ divides in float32 if the last sample is kept.
    samples = tokens // seq_length if drop_last else ceil(np.float32(tokens) / np.float32(seq_length))
    lengths = sizes[documents]
    ends = np.cumsum(lengths, dtype=np.int64)
    # A sample starts in the document of the last token of the one before; with an extra token, both contain it.
    starts = np.arange(1, samples + 1, dtype=np.int64) * seq_length
    index = np.searchsorted(ends, starts - 1 + extra_token, side="right")
    index, past_end = np.minimum(index, len(ends) - 1), index == len(ends)
    offset = np.where(past_end, lengths[-1] - extra_token, starts - (ends - lengths)[index])
    return np.concatenate([np.zeros((1, 2), np.int64), np.stack([index, offset], axis=1)]).astype(dtype)


def _blending_indices(
    dataset_index: Any, sample_index: Any, weights: Any, datasets: int, size: int, verbose: bool
) -> None:
    """Take each sample of the dataset that is furthest below its weight."""
    counts = np.zeros(datasets, np.int64)
    for sample in range(size):
        chosen = int(np.argmax(weights[:datasets] * max(float(sample), 1.0) - counts))
        dataset_index[sample], sample_index[sample] = chosen, counts[chosen]
        counts[chosen] += 1


def _exhaustive_blending_indices(dataset_index: Any, sample_index: Any, sizes: Any, datasets: int) -> None:
    """The same until each dataset has given ``sizes`` samples."""
    sizes = np.asarray(sizes[:datasets], np.int64)
    weights, counts = sizes / float(sizes.sum()), np.zeros(datasets, np.int64)
    # C++ includes datasets of size 0, and would then take their samples without an end.
    for sample in range(int(sizes.sum())):
        error = np.where(counts < sizes, weights * max(float(sample), 1.0) - counts, -np.inf)
        chosen = int(np.argmax(error))
        dataset_index[sample], sample_index[sample] = chosen, counts[chosen]
        counts[chosen] += 1
