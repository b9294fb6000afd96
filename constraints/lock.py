"""Write a lock with SHA-256 hashes beside each set of versions: ``constraints/NAME.txt`` -> ``constraints/NAME.lock``.

A lock has one line for each package, with the hashes of all its files in the package index. Needs uv and the index.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
PYTHON = {"cpu-py310": "3.10", "cpu-py311": "3.11.5", "tools": "3.11", "types": "3.11", "workflows": "3.11"}
CPU_BUILDS = {"torch==2.13.0": "6746dbcbeb526eb61330b76b41ff1b4eb848951103a892eeb080dfa2b264667b"}
"""PyTorch's own CPU builds (here of Python 3.11 on Linux x86_64), which are not in the package index."""


def lock(name: str) -> str:
    """The lines of the lock; raises CalledProcessError if a version does not exist."""
    command = [
        "uv", "pip", "compile", str(FOLDER / f"{name}.txt"), "--no-deps", "--generate-hashes", "--no-header",
        "--no-annotate", "--no-python-downloads", "--python-version", PYTHON[name],
        "--python-platform", "x86_64-manylinux_2_28",
    ]  # fmt: skip
    text = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    lines = re.sub(r" *\\\n *", " ", text).splitlines()
    extra = {package: f" --hash=sha256:{digest}" for package, digest in CPU_BUILDS.items()}
    return "".join(f"{line}{extra.get(line.split(' ')[0], '')}\n" for line in lines)


if __name__ == "__main__":
    for each in sys.argv[1:] or PYTHON:
        (FOLDER / f"{each}.lock").write_text(lock(each), encoding="utf-8")
        print(f"constraints/{each}.lock")
