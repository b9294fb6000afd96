"""``isthmus convert`` and ``isthmus verify`` as a user types them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from isthmus.cli.main import main
from isthmus.engine.checkpoint import checkpoint_store
from isthmus.engine.checkpoint.checkpoint_store import CheckpointStore
from isthmus.files.object_store import ObjectStore
from ranks.tiny import build_model_folder

QUERY = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture
def model(tmp_path: Path) -> str:
    return str(build_model_folder(tmp_path / "model", "qwen2", tie_word_embeddings=True))


@pytest.mark.slow
def test_convert_both_ways_and_verify(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    there, back = str(tmp_path / "there"), str(tmp_path / "back")
    assert main(["convert", model, there, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["source_format"], result["destination_format"], result["family"]) == ("hf", "torch_dist", "qwen2")
    assert main(["convert", there, back]) == 0
    assert "destination format  hf" in capsys.readouterr().out
    assert main(["verify", model, back, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["formats"] == ["hf", "hf"]
    assert main(["verify", model, there]) == 0
    assert capsys.readouterr().out.split()[-2:] == ["result", "identical"]


@pytest.mark.slow
def test_a_difference_is_exit_code_1(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", model, str(tmp_path / "there")]) == 0
    file = Path(model) / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"][0] += 1
    save_file(tensors, file, {"format": "pt"})
    assert main(["verify", model, str(tmp_path / "there")]) == 1
    out, line = capsys.readouterr()
    assert "identical" not in out + line
    assert "model.norm.weight in 1 of 32 elements, by 1 at most" in line and line.count("\n") == 1


def test_dtype(model: str, tmp_path: Path) -> None:
    assert main(["convert", model, str(tmp_path / "half"), "--to", "hf", "--dtype", "fp16"]) == 0
    assert {tensor.dtype for tensor in load_file(tmp_path / "half" / "model.safetensors").values()} == {torch.float16}


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--to", "onnx"], 2, "Use hf, torch_dist, torch"),
        (["--tp", "2"], 2, "torch_dist has no layout and no spelling"),
        (["--to", "torch", "--tp", "3"], 2, "tp=3 does not divide"),
        (["--to", "torch", "--pp", "8"], 2, "pp=8 is more than num_layers=4"),
        (["--to", "torch", "--vpp", "2"], 2, "needs more than one pipeline stage"),
        (["--dtype", "int8"], 2, "Use fp32, bf16, fp16"),
        (["--hf-like", "MODEL"], 2, "Omit --hf-like"),
        (["--learn"], 2, "model_type 'qwen2' has a family. Omit --learn"),
        (["--keep", "families"], 2, "Add --learn"),
        (["--public"], 2, "Add --push REPO_ID"),
    ],
)
def test_invalid_options_are_refused(
    words: list[str], code: int, message: str, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [model if word == "MODEL" else word for word in words]
    assert main(["convert", model, str(tmp_path / "out"), *words]) == code
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("words", [["--tolerance", "1"], ["--tokens", "8"], ["--layer-by-layer"]])
def test_options_of_logits_need_logits(words: list[str], model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", model, model, *words]) == 2
    assert "need --logits" in capsys.readouterr().err


@pytest.mark.slow
def test_differing_config_field_is_named(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rope = {"rope_type": "linear", "rope_theta": 10000.0}
    for folder, factor in (("two", 2.0), ("four", 4.0)):
        build_model_folder(tmp_path / folder, "qwen2", rope_parameters=rope | {"factor": factor})
    assert main(["verify", str(tmp_path / "two"), str(tmp_path / "four")]) == 1
    assert "not the same model: rope_scaling.factor=2.0 and 4.0." in capsys.readouterr().err
    assert main(["verify", model, str(tmp_path / "two")]) == 1
    assert "rope_scaling.factor=None and 2.0" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_folder_is_its_export(model: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    Path(model).rename(run / "hf")
    (run / "config.yaml").touch()
    assert main(["convert", str(run), str(tmp_path / "dist"), "--to", "torch_dist"]) == 0
    assert main(["verify", str(run / "hf"), str(tmp_path / "dist")]) == 0
    # A converted checkpoint has a folder hf with its config, and is the checkpoint.
    assert main(["convert", str(tmp_path / "dist"), str(tmp_path / "back"), "--to", "hf"]) == 0
    assert main(["verify", str(run / "hf"), str(tmp_path / "back")]) == 0


def test_merge_takes_run_folders(model: str, tmp_path: Path) -> None:
    base, tuned, out = tmp_path / "base", tmp_path / "tuned", tmp_path / "out"
    base.mkdir()
    Path(model).rename(base / "hf")
    sizes = json.loads((base / "hf/config.json").read_text())
    hidden, rows = sizes["hidden_size"], load_file(base / "hf/model.safetensors")[QUERY].size(0)
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], "bias": "none"}
    (tuned / "adapter").mkdir(parents=True)
    (tuned / "adapter/adapter_config.json").write_text(json.dumps(settings | {"task_type": "CAUSAL_LM"}))
    prefix = f"base_model.model.{QUERY.removesuffix('.weight')}"
    factors = {f"{prefix}.lora_A.weight": torch.ones(2, hidden), f"{prefix}.lora_B.weight": torch.ones(rows, 2)}
    save_file(factors, tuned / "adapter/adapter_model.safetensors", {"format": "pt"})
    assert main(["merge", str(base), str(tuned), str(out)]) == 0
    before, after = (load_file(folder / "model.safetensors")[QUERY] for folder in (base / "hf", out))
    torch.testing.assert_close(after - before, torch.full_like(before, 4.0))


def test_missing_folder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", str(tmp_path / "none"), str(tmp_path / "out")]) == 66
    assert "does not exist" in capsys.readouterr().err


@pytest.fixture
def stored(model: str, tmp_path: Path) -> Iterator[CheckpointStore]:
    """A store with the checkpoint of step 5 of a run."""
    assert main(["convert", model, str(tmp_path / "converted")]) == 0
    staging = tmp_path / "staging"
    shutil.copytree(tmp_path / "converted/release", staging)
    store = CheckpointStore(f"memory://{tmp_path.name}/run")
    store.begin(5)
    sizes = {}
    for path in staging.glob("*.distcp"):
        with store.create(5, path.name) as stream:
            sizes[path.name] = stream.write(path.read_bytes())
        path.unlink()
    store.publish(staging, 5, sizes, 1, None)
    yield store
    store.objects.remove(store.objects.sizes())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["", "/iter_0000005"])
def test_a_checkpoint_in_a_store(name: str, stored: CheckpointStore, model: str, tmp_path: Path) -> None:
    assert main(["convert", f"{stored.url}{name}", str(tmp_path / "hf"), "--json"]) == 0
    assert main(["verify", model, str(tmp_path / "hf")]) == 0
    assert not list(tmp_path.glob(".tmp-*"))


@pytest.mark.slow
def test_a_killed_download_is_continued(
    stored: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names: list[str] = []
    download = ObjectStore.download

    def killed(self: ObjectStore, name: str, path: Path) -> None:
        if len(names) == 2:
            raise KeyboardInterrupt
        names.append(name)
        download(self, name, path)

    words = ["convert", stored.url, str(tmp_path / "hf")]
    with monkeypatch.context() as patched:
        patched.setattr(checkpoint_store, "_THREADS", 1)
        patched.setattr(ObjectStore, "download", killed)
        assert main(words) == 130
    again: list[str] = []
    monkeypatch.setattr(ObjectStore, "download", lambda *call: (again.append(call[1]), download(*call))[1])
    assert main(words) == 0 and not set(again) & set(names)
    content = bytearray(stored.objects.read("iter_0000005/__0_0.distcp"))
    content[len(content) // 2] ^= 1
    stored.objects.write("iter_0000005/__0_0.distcp", bytes(content))
    capsys.readouterr()
    assert main(["convert", stored.url, str(tmp_path / "other")]) == 65
    assert "__0_0.distcp is damaged: bytes" in capsys.readouterr().err
    assert not list(tmp_path.glob(".tmp-*")) and not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    "words",
    [
        ["verify", "memory://a/run", "memory://a/run"],
        ["merge", "memory://a/run", "adapter", "out"],
        ["chat", "memory://a/run"],
        ["eval", "memory://a/run", "--tasks", "arc_easy"],
        ["convert", "memory://a/run", "out", "--learn"],
    ],
    ids=lambda words: words[0],
)
def test_other_commands_name_the_command_that_downloads(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    error = capsys.readouterr().err
    assert "memory://a/run is in a store, and this command reads folders" in error
    assert "isthmus convert memory://a/run DST --to hf" in error
