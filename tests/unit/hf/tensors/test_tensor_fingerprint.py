from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

from isthmus.files.checked_files import ChecksumVerifier
from isthmus.hf.tensors.safetensors_format import read_header
from isthmus.hf.tensors.tensor_fingerprint import fingerprint_of

TENSORS = {"a": torch.zeros(5000), "b": torch.ones(3, 7, dtype=torch.bfloat16), "empty": torch.zeros(0)}


def saved(folder: Path, *files: dict[str, torch.Tensor]) -> str:
    folder.mkdir()
    infos = {}
    for number, tensors in enumerate(files):
        save_file(tensors, folder / f"{number}.safetensors")
        infos |= read_header(folder / f"{number}.safetensors", ChecksumVerifier())
    return fingerprint_of(infos)


def test_other_tensors_have_another_fingerprint(tmp_path: Path) -> None:
    first = saved(tmp_path / "first", TENSORS)
    others = []
    for element in (0, 2500, 4999):
        changed = TENSORS["a"].clone()
        changed[element] = 1e-30
        others.append(TENSORS | {"a": changed})
    others += [{"c": TENSORS["a"], "b": TENSORS["b"], "empty": TENSORS["empty"]}, {"a": TENSORS["a"]}]
    others += [TENSORS | {"a": TENSORS["a"].view(50, 100)}, TENSORS | {"a": TENSORS["a"].to(torch.float16)}]
    fingerprints = [saved(tmp_path / str(number), tensors) for number, tensors in enumerate(others)]
    assert len({first, *fingerprints}) == 1 + len(others)


def test_the_division_into_files_does_not_matter(tmp_path: Path) -> None:
    halves = {"b": TENSORS["b"]}, {name: TENSORS[name] for name in ("empty", "a")}
    assert saved(tmp_path / "one", TENSORS) == saved(tmp_path / "two", *halves)
