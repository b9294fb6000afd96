"""The notebook of examples/ runs as Jupyter runs it, on a small model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from faults.command import environment

_SHELL = """
import shlex, subprocess, sys
def shell(line):
    words = shlex.split(line)
    if words[0] == "isthmus":
        words[:1] = [sys.executable, "-m", "isthmus"]
    done = subprocess.run(words, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    print(done.stdout, flush=True)
    assert done.returncode == 0, (line, done.returncode)
"""


def program(notebook: Path) -> str:
    """Its code cells; Jupyter runs lines that begin with ! in a shell, with the values of variables in braces."""
    cells = [cell for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == "code"]
    lines = "\n".join("".join(cell["source"]) for cell in cells).splitlines()
    return "\n".join([_SHELL, *(f"shell(f{line[1:]!r})" if line.startswith("!") else line for line in lines)])


@pytest.mark.thorough
def test_the_notebook_trains_and_answers(model: Path, repository: Path, tmp_path: Path) -> None:
    text = program(repository / "examples/first_run.ipynb")
    done = subprocess.run(
        [sys.executable, "-c", text], cwd=tmp_path, env=environment() | {"MODEL": str(model)}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]
    assert "run.yaml is written" in done.stdout and "after step 0: validation loss" in done.stdout
    assert (tmp_path / "run/report.html").is_file() and (tmp_path / "run/hf/model.safetensors").is_file()
