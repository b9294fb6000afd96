"""The async saver of Megatron-LM is fixed in all its known forms, for every signature of torch's ``_write_item``."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import filesystem, planner_helpers

from isthmus.cli.main import main
from isthmus.engine.upstream import startup_hook
from isthmus.engine.upstream.checkpoint_saver import MODULE, patch_module
from isthmus.engine.upstream.saver_patch import plan_patch

BIND_TRANSFORMS = """
try:
    from functools import partial
    from torch.distributed.checkpoint.filesystem import _StorageWriterTransforms
    _write_item = partial(_write_item, _StorageWriterTransforms())
except ImportError:
    pass
"""
ARGUMENTS = "stream, data, write_item, storage_key"
FORMAT = """
        extra_kwargs = {}
        if "serialization_format" in inspect.signature(_write_item).parameters:
            from torch.distributed.checkpoint.filesystem import SerializationFormat
            extra_kwargs["serialization_format"] = SerializationFormat.TORCH_SAVE
"""


def saver(arguments: str, after_imports: str = "", before_call: str = "") -> str:
    return f'''"""A saver."""
import inspect
from torch.distributed.checkpoint.filesystem import _write_item
{after_imports}
WriteBucket = tuple


class FileSystemWriterAsync:
    @staticmethod
    def write_preloaded_data(transform_list, stream, items, storage_key):{before_call}
        return [_write_item({arguments}) for write_item, data in items]
'''


FAULTY = {
    "core 0.6 to 0.11": saver(ARGUMENTS),
    "core 0.12": saver(f"*transform_list, {ARGUMENTS}"),
    "ROCm, April 2025": saver(ARGUMENTS, BIND_TRANSFORMS),
    "ROCm, August 2025": saver(f"*transform_list, {ARGUMENTS}, **extra_kwargs", BIND_TRANSFORMS, FORMAT),
}
FIXED = saver(f"*transform_list, {ARGUMENTS}, **extra_kwargs", before_call=FORMAT)


class Transforms:
    pass


def torch_2_6(stream: Any, data: Any, write_item: Any, storage_key: Any) -> Any:
    return [stream, data, write_item, storage_key]


def torch_2_7(transforms: Any, stream: Any, data: Any, write_item: Any, storage_key: Any) -> Any:
    assert isinstance(transforms, Transforms)
    return torch_2_6(stream, data, write_item, storage_key)


def torch_2_8(
    transforms: Any, stream: Any, data: Any, write_item: Any, storage_key: Any, serialization_format: Any
) -> Any:
    assert serialization_format == "torch_save"
    return torch_2_7(transforms, stream, data, write_item, storage_key)


def checkout(folder: Path, source: str) -> Path:
    """A folder with the saver where Megatron-LM has it; returns the file."""
    file = folder.joinpath(*MODULE.split(".")).with_suffix(".py")
    file.parent.mkdir(parents=True)
    file.write_text(source)
    return file


def load(file: Path) -> Any:
    spec = spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def command(folder: Path, *options: str) -> list[str]:
    return ["patch", "checkpoint-saver", "--megatron", str(folder), *options]


@pytest.mark.parametrize("torch_function", [torch_2_6, torch_2_7, torch_2_8])
@pytest.mark.parametrize("version", FAULTY)
def test_works_with_the_signature_of_each_torch(
    version: str, torch_function: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(filesystem, "_write_item", torch_function)
    formats = SimpleNamespace(TORCH_SAVE="torch_save")
    monkeypatch.setattr(filesystem, "_StorageWriterTransforms", Transforms, raising=False)
    monkeypatch.setattr(filesystem, "SerializationFormat", formats, raising=False)
    if torch_function is torch_2_6:
        monkeypatch.delattr(filesystem, "_StorageWriterTransforms")
    of_torch = [] if torch_function is torch_2_6 else [Transforms()]
    arguments = (of_torch, "stream", [("item", "data")], "key")
    file = checkout(tmp_path, FAULTY[version])
    loaded = load(file)
    if torch_function is torch_2_8:
        with pytest.raises(TypeError, match="serialization_format"):
            loaded.FileSystemWriterAsync.write_preloaded_data(*arguments)
    patch_module(loaded)
    plan_patch(tmp_path).write()
    for module in (loaded, load(file)):
        written = module.FileSystemWriterAsync.write_preloaded_data(*arguments)
        assert written == [["stream", "data", "item", "key"]]


@pytest.mark.parametrize("version", FAULTY)
def test_writes_with_this_torch(version: str, tmp_path: Path) -> None:
    module, said = load(checkout(tmp_path, FAULTY[version])), []
    patch_module(module, said.append)
    assert said == [f"async saver: {plan_patch(tmp_path).fault}; fixed"]
    tensor, stream = torch.arange(6.0), io.BytesIO()
    item = planner_helpers._create_write_items("weight", tensor)[0]
    transforms = [filesystem._StorageWriterTransforms()] if hasattr(filesystem, "_StorageWriterTransforms") else []
    items = [(item, tensor)]
    (written,) = module.FileSystemWriterAsync.write_preloaded_data(transforms, stream, items, "__0_0.distcp")
    assert torch.equal(torch.load(io.BytesIO(stream.getvalue())), tensor)
    assert written.storage_data.relative_path == "__0_0.distcp"


@pytest.mark.slow
@pytest.mark.parametrize("version", ["core 0.12", "ROCm, August 2025"])
def test_patch_and_revert(version: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = checkout(tmp_path, FAULTY[version])
    file.chmod(0o640)
    assert main(command(tmp_path, "--check")) == 1
    assert "isthmus patch checkpoint-saver --megatron" in capsys.readouterr().err
    assert main(command(tmp_path, "--dry-run")) == 0
    shown = capsys.readouterr().out
    assert "+def _write_item(" in shown and "would be patched" in shown and file.read_text() == FAULTY[version]
    assert main(command(tmp_path)) == 0
    patched = file.read_text()
    assert capsys.readouterr().out.partition("file ")[0] == shown.partition("file ")[0]
    assert file.stat().st_mode & 0o777 == 0o640
    assert main(command(tmp_path, "--check")) == 0
    assert main(command(tmp_path, "--json")) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["state"] == "patched already"
    assert file.read_text() == patched
    assert main(command(tmp_path, "--revert")) == 0
    assert file.read_text() == FAULTY[version] and "reverted" in capsys.readouterr().out
    assert main(command(tmp_path, "--revert")) == 0
    assert list(file.parent.iterdir()) == [file]


@pytest.mark.processes
def test_diff_is_one_for_git(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = checkout(tmp_path, FAULTY["core 0.12"])
    main(command(tmp_path, "--dry-run"))
    diff = capsys.readouterr().out.partition("file ")[0]
    subprocess.run(["git", "apply", "-"], input=diff, text=True, cwd=tmp_path, check=True)
    assert file.read_text() == plan_patch(tmp_path).before and plan_patch(tmp_path).unchanged == "patched already"


def test_saver_without_the_fault_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = checkout(tmp_path, FIXED)
    assert main(command(tmp_path)) == 0 and main(command(tmp_path, "--check")) == 0
    assert "not patched, it does not have the fault" in capsys.readouterr().out
    module = load(file)
    function = module._write_item
    patch_module(module)
    assert module._write_item is function and file.read_text() == FIXED


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (saver("stream, data, write_item"), "passes other arguments"),
        (saver(f"*transforms(), {ARGUMENTS}"), "passes other arguments"),
        (saver(ARGUMENTS).replace("import _write_item", "import _write_item as write"), "does not import _write_item"),
        (saver(ARGUMENTS, "def _write_item(*args): ..."), "a _write_item of its own"),
        (saver(ARGUMENTS).replace("[_write_item(", "[write("), "does not call _write_item"),
        (saver("stream, data,, write_item"), "is not valid Python"),
        (saver(ARGUMENTS) + "\0", "is not valid Python"),
    ],
)
def test_unknown_saver_is_refused(source: str, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = checkout(tmp_path, source)
    assert main(command(tmp_path)) == 65
    assert reason in capsys.readouterr().err and file.read_text() == source
    if "valid Python" not in reason:
        patch_module(load(file))
        assert reason in capsys.readouterr().err


def test_edited_patch_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = checkout(tmp_path, FAULTY["core 0.12"])
    plan_patch(tmp_path).write()
    edited = file.read_text().replace("TORCH_SAVE", "SAFETENSORS")
    file.write_text(edited)
    for options in ((), ("--revert",)):
        assert main(command(tmp_path, *options)) == 65
        assert "were edited" in capsys.readouterr().err and file.read_text() == edited


@pytest.mark.slow
def test_wrong_folder_and_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command(tmp_path)) == 66
    assert "Name the root of a checkout" in capsys.readouterr().err
    assert main(command(tmp_path, "--check", "--revert")) == 2
    assert main(["patch", "runtime"]) == main(["patch", "runtime", "--install", "--remove"]) == 2


IMPORT_SAVER = f"""
import encodings.utf_8_sig, json, site, sys  # Python 3.13 reads .pth files with this encoding
before = set(sys.modules)
site.addsitedir(sys.argv[1])
started = sorted(set(sys.modules) - before)
import {MODULE} as saver
isthmus = [name for name in sys.modules if name.startswith("isthmus.")]
print(json.dumps([started, saver.FileSystemWriterAsync.write_preloaded_data([], 1, [(3, 2)], 4), isthmus]))
"""


@pytest.mark.processes
def test_startup_hook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    site_packages = tmp_path / "site-packages"
    site_packages.mkdir()
    monkeypatch.setattr(startup_hook.sysconfig, "get_path", lambda name: str(site_packages))
    assert main(["patch", "runtime", "--list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["state"] == "not installed"
    for _ in range(2):
        assert main(["patch", "runtime", "--install"]) == 0
    assert capsys.readouterr().out.endswith("  installed\n")
    # A program with a small torch of the signature of 2.8, in a Python without other packages.
    checkout(tmp_path, FAULTY["core 0.12"])
    small_torch = tmp_path / "torch/distributed/checkpoint/filesystem.py"
    small_torch.parent.mkdir(parents=True)
    small_torch.write_text(
        "from types import SimpleNamespace\nSerializationFormat = SimpleNamespace(TORCH_SAVE=6)\n"
        "class _StorageWriterTransforms: ...\n"
        "def _write_item(transforms, stream, data, write_item, storage_key, serialization_format):\n"
        "    return [stream, data, write_item, storage_key, serialization_format]\n"
    )

    def run(*folders: Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-S", "-c", IMPORT_SAVER, str(site_packages)],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, folders))},
            capture_output=True, text=True,
        )  # fmt: skip

    done = run(tmp_path, Path(startup_hook.__file__).parents[3])
    assert (json.loads(done.stdout), done.stderr) == ([[startup_hook.NAME], [[1, 2, 3, 4, 6]], []], "")
    without_isthmus = run(tmp_path)
    assert f"{startup_hook.NAME}: Isthmus is not installed" in without_isthmus.stderr
    assert "_write_item() missing 2 required positional arguments" in without_isthmus.stderr
    assert main(["patch", "runtime", "--remove"]) == 0
    assert capsys.readouterr().out.endswith("  not installed\n") and not list(site_packages.glob("*.p*"))
