"""Compiles guard.cpp, once per version of torch and of the source."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name("guard.cpp")


class Unavailable(Exception):
    """Why this machine cannot trace; the text is the reason of the skipped tests."""


def build_guard() -> Path:
    """Path of the shared library, from the cache if it is there."""
    import torch

    if torch.version.cuda or torch.version.hip:
        raise Unavailable("traces need a CPU build of torch, which has no GPU code that the guard would replace")
    home = Path(torch.__file__).parent
    if not (home / "include" / "c10" / "core" / "impl" / "FakeGuardImpl.h").is_file():
        raise Unavailable(f"torch {torch.__version__} has no C++ headers")
    if (compiler := shutil.which("g++")) is None:
        raise Unavailable("no g++, which builds the guard for tensors on a GPU that is not there")
    key = hashlib.sha256(f"{torch.__version__} {home}".encode() + SOURCE.read_bytes()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"isthmus-fake-cuda-{os.getuid()}"
    library = folder / f"guard-{key}.so"
    if library.is_file():
        return library
    folder.mkdir(mode=0o700, exist_ok=True)
    unfinished = folder / f"{library.stem}-{os.getpid()}.so"
    abi = int(torch.compiled_with_cxx11_abi())
    command = [
        compiler, "-shared", "-fPIC", "-O1", "-std=c++20", f"-D_GLIBCXX_USE_CXX11_ABI={abi}",
        f"-I{home}/include", f"-I{home}/include/torch/csrc/api/include", str(SOURCE), "-o", str(unfinished),
        f"-L{home}/lib", f"-Wl,-rpath,{home}/lib", "-lc10", "-ltorch_cpu",
    ]  # fmt: skip
    built = subprocess.run(command, capture_output=True, text=True)
    if built.returncode:
        raise Unavailable(f"g++ cannot build {SOURCE.name} against torch {torch.__version__}: {built.stderr[-800:]}")
    unfinished.replace(library)  # another test process may build it too
    return library
