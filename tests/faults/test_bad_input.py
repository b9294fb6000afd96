"""Invalid inputs give a one-line error message and an exit code, and leave no partial output."""

from __future__ import annotations

import gzip
import json
import os
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from safetensors.torch import load_file, save_file

from faults.command import CompletedCommand, listing
from faults.fork_server import ForkServer

Run = Callable[..., CompletedCommand]


@pytest.fixture
def refused(isthmus: ForkServer, model: Path, chats: Path, tmp_path: Path) -> Run:
    """Run a command that must fail without changing any file, and return its error message."""

    def run(*args: str, code: int, model: Path = model, data: Path = chats, out: Path = tmp_path / "out") -> str:
        before = listing(tmp_path)
        flags = ["--model", str(model), "--data", str(data), "--out", str(out)]
        completed = isthmus("sft", *flags, "train.steps=2", "data.seq_length=64", "train.global_batch_size=2", *args)
        assert listing(tmp_path) == before
        return completed.error(code)

    return run


@pytest.fixture
def copied(model: Path, tmp_path: Path) -> Path:
    """A copy of the model that a test can damage."""
    return Path(shutil.copytree(model, tmp_path / "model"))


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_missing_model_folder(refused: Run, tmp_path: Path) -> None:
    line = refused(code=66, model=tmp_path / "nowhere")
    assert f"{tmp_path / 'nowhere'} does not exist. Give a folder" in line


def test_folder_without_a_config(refused: Run, copied: Path) -> None:
    (copied / "config.json").unlink()
    assert "config.json" in refused(code=66, model=copied)


@pytest.mark.parametrize("name", ["org/none", "./org/none", "/nowhere/none"])
def test_wrong_model_path(refused: Run, name: str) -> None:
    """Also one that could be an id on the Hub, which does not answer here."""
    assert "no such" in (line := refused(code=66, model=Path(name))) or "does not exist" in line or "no local" in line


def test_lora_folder_as_model(refused: Run, copied: Path) -> None:
    (copied / "config.json").rename(copied / "adapter_config.json")
    edited = json.dumps({"peft_type": "LORA", "base_model_name_or_path": "org/base"})
    (copied / "adapter_config.json").write_text(edited)
    line = refused(code=66, model=copied)
    assert f"{copied} is a LoRA adapter" in line and "for org/base" in line and "isthmus merge org/base " in line


def test_megatron_checkpoint_as_model(
    refused: Run, isthmus: ForkServer, model: Path, chats: Path, tmp_path: Path
) -> None:
    """The named command converts it, and the run starts from the result."""
    for number, to in enumerate(("torch_dist", "torch")):
        assert isthmus("convert", model, tmp_path / to, "--to", to).returncode == 0
        line = refused(code=66, model=tmp_path / to)
        assert f"{tmp_path / to} is a Megatron checkpoint" in line
        words = shlex.split(line.partition("isthmus convert ")[2])
        assert isthmus("convert", *words).returncode == 0
        flags = ["--model", str(tmp_path / f"{to}-hf"), "--data", str(chats), "--out", str(tmp_path / f"run-{number}")]
        assert isthmus("sft", *flags, "train.steps=1", "data.seq_length=64").returncode == 0
    line = refused(code=66, model=tmp_path / "run-0")
    assert f"is a run folder. Use the model that the run exported: {tmp_path / 'run-0' / 'hf'}" in line


def test_folder_without_weights(refused: Run, copied: Path) -> None:
    (copied / "model.safetensors").unlink()
    assert "model.init=random" in refused(code=66, model=copied)


def test_folder_without_a_tokenizer(refused: Run, copied: Path) -> None:
    for path in copied.glob("tokenizer*"):
        path.unlink()
    assert "tokenizer" in refused(code=66, model=copied)


@pytest.mark.parametrize("fraction", [0.0, 0.01, 0.5, 0.999])
def test_truncated_safetensors(refused: Run, copied: Path, fraction: float) -> None:
    weights = copied / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: int(weights.stat().st_size * fraction)])
    line = refused(code=65, model=copied)
    assert str(weights) in line and str(weights.stat().st_size) in line


def test_weights_of_wrong_shape(refused: Run, copied: Path) -> None:
    edit_config(copied, intermediate_size=96)
    assert "mlp" in refused(code=65, model=copied)


def test_unknown_family(refused: Run, copied: Path) -> None:
    edit_config(copied, model_type="rwkv")
    line = refused(code=2, model=copied)
    assert "no family has the model_type 'rwkv'" in line
    assert "The nearest are" in line and "docs/reference/families.md" in line


def test_unsupported_config_value(refused: Run, copied: Path) -> None:
    edit_config(copied, hidden_act="relu")
    line = refused(code=2, model=copied)
    assert "hidden_act" in line and "relu" in line


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "empty"),
        ("[]", "empty"),
        ("once upon a time", "not JSON"),
        ('{"instruction": "a", "output": "b"}\n{"instruction": "a", "output": \n', ":2"),
        ('[{"instruction": "a", "output": "b"},\n{"instruction": "a"', ":2"),
        ('{"instruction": "a", "output": "b"}\n17\n', ":2"),
        ('{"messages": [{"role": "user", "content": "Hello?"}]}\n', ":1"),
        ('{"nothing": "known"}\n', ":1"),
    ],
    ids=["empty", "empty-array", "not-json", "bad-line", "cut-array", "not-an-object", "no-assistant", "unknown-kind"],
)
def test_bad_data(refused: Run, tmp_path: Path, text: str, message: str) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text(text)
    line = refused(code=65, data=data)
    assert str(data) in line and message in line


def test_chat_without_assistant_message(refused: Run, tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('{"messages": [{"role": "user", "content": "Hello?"}]}\n')
    assert "assistant" in refused(code=65, data=data)


def test_invalid_utf8(refused: Run, tmp_path: Path) -> None:
    data = tmp_path / "data.json"
    data.write_bytes(b'[{"instruction": "\xff\xfe", "output": "x"}]')
    assert str(data) in refused(code=65, data=data)


def test_truncated_gzip_and_parquet(refused: Run, tmp_path: Path) -> None:
    chat = json.dumps({"instruction": "Say it.", "output": "It is said."}) + "\n"
    data = tmp_path / "data.jsonl.gz"
    data.write_bytes(gzip.compress(chat.encode() * 50)[:-9])
    assert f"{data}: truncated" in refused(code=65, data=data)
    data = tmp_path / "data.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([json.loads(chat)] * 50), data)
    data.write_bytes(data.read_bytes()[:-9])
    assert f"{data}: damaged or truncated" in refused(code=65, data=data)


def test_unknown_columns_and_folder_without_data(refused: Run, tmp_path: Path) -> None:
    data = tmp_path / "data.csv"
    data.write_text("ask,say\nWhat?,That.\n")
    assert "data.columns maps other names" in refused(code=65, data=data)
    columns = ["data.columns.prompt=aks", "data.columns.completion=say"]
    assert f"{data}:2: no field aks" in refused(*columns, code=65, data=data)
    assert "Did you mean prompt?" in refused("data.columns.prompts=ask", code=2, data=data)
    data.rename(tmp_path / "data.xls")
    assert "no data file in it" in refused(code=2, data=tmp_path)


def test_missing_data_file(refused: Run, tmp_path: Path) -> None:
    assert "nothing.json" in refused(code=66, data=tmp_path / "nothing.json")
    assert "valid.json" in refused(f"data.valid_files={tmp_path / 'valid.json'}", code=66)


def test_missing_data_file_is_reported_before_weights_are_read(refused: Run, copied: Path, tmp_path: Path) -> None:
    weights = load_file(copied / "model.safetensors")
    weights.pop("model.norm.weight")  # the header is valid: only loading finds the missing tensor
    save_file(weights, copied / "model.safetensors")
    assert "nothing.json" in refused(code=66, model=copied, data=tmp_path / "nothing.json")


def test_skipping_all_records_is_an_error(refused: Run, tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('{"nothing": "known"}\n' * 3)
    assert "3 bad records skipped" in refused("data.on_error=skip", code=65, data=data)


def test_impossible_layouts(refused: Run) -> None:
    line = refused("parallel.tp=3", code=2)
    assert "tp=3" in line and "num_attention_heads=4" in line and "1, 2 or 4" in line
    line = refused("parallel.pp=4", code=2)
    assert "pp=4" in line and "2 layers" in line and "Use 2 or less" in line
    assert "--nproc 2" in refused("parallel.pp=2", code=2)


def test_pipeline_of_a_model_with_one_layer(refused: Run, copied: Path) -> None:
    edit_config(copied, num_hidden_layers=1, layer_types=["full_attention"])
    line = refused("parallel.pp=2", code=2, model=copied)
    assert line.endswith("Use 1.")


def test_indivisible_global_batch(refused: Run) -> None:
    assert "micro_batch_size" in refused("train.micro_batch_size=4", code=2)


def test_too_many_warmup_steps(refused: Run) -> None:
    assert "warmup_steps" in refused("optim.warmup_steps=5", code=2)


def test_run_folder_with_other_files(refused: Run, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.txt").write_text("years of work")
    line = refused(code=73, out=other)
    assert str(other) in line and "--out" in line


def test_run_folder_is_a_file_or_inside_one(refused: Run, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    assert str(file) in refused(code=73, out=file)
    assert str(file / "out") in refused(code=74, out=file / "out")


def test_run_folder_is_the_model_folder(refused: Run, copied: Path) -> None:
    assert str(copied) in refused(code=73, model=copied, out=copied)


def test_failed_run_leaves_empty_folder_empty(refused: Run, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "empty.json").touch()
    refused(code=65, data=tmp_path / "empty.json")


def test_failed_run_removes_created_parent_folders(refused: Run, tmp_path: Path) -> None:
    (tmp_path / "empty.json").touch()
    refused(code=65, data=tmp_path / "empty.json", out=tmp_path / "a" / "b" / "c")


def test_tokenizer_larger_than_the_embedding(refused: Run, copied: Path) -> None:
    from isthmus.hf.tiny_model import train_tokenizer
    from isthmus.hf.tokenizer.tokenizer import save_tokenizer

    texts = [f"word{number} number{number} Say The is ." for number in range(400)]
    tokenizer = train_tokenizer(texts, vocab_size=1500)
    save_tokenizer(tokenizer, copied)
    line = refused(code=2, model=copied)
    assert "rows" in line and "tokenizer" in line


def test_no_space_for_the_checkpoint(isthmus: ForkServer, sft_args: list[str], small_disk: Path) -> None:
    out = small_disk / "out"
    line = isthmus(*sft_args, "--out", out).error(73)
    assert "no room for the checkpoint" in line and str(out) in line
    assert {path.name for path in (out / "checkpoints").iterdir()} == set()
    assert not (out / "hf").exists() and not list(out.glob(".tmp*"))


def test_no_space_for_the_export(isthmus: ForkServer, sft_args: list[str], small_disk: Path, model: Path) -> None:
    out = small_disk / "out"
    export_bytes = (model / "model.safetensors").stat().st_size
    (small_disk / "ballast").write_bytes(bytes(600 * 1024 - export_bytes - 4096))
    line = isthmus(*sft_args, "checkpoint.save_final=false", "logging.to=[]", "--out", out).error(73)
    assert str(out) in line
    assert not (out / "hf").exists() and not list(out.glob(".tmp*"))


def test_no_space_for_the_run_folder(isthmus: ForkServer, sft_args: list[str], small_disk: Path) -> None:
    (small_disk / "ballast").write_bytes(bytes(600 * 1024 - 4096))
    before = listing(small_disk)
    line = isthmus(*sft_args, "--out", small_disk / "out").error(73)
    assert str(small_disk / "out") in line
    assert listing(small_disk) == before


def test_failed_export_keeps_the_previous_one(
    isthmus: ForkServer, sft_args: list[str], small_disk: Path, model: Path
) -> None:
    out = small_disk / "out"
    args = [*sft_args, "train.steps=3", "checkpoint.hf_every=2", "checkpoint.save_final=false"]
    assert isthmus(*args, "logging.to=[]", "--out", out).returncode == 0
    (out / "hf").rename(out / "other")
    remaining = listing(out / "hf-step-0000002")
    left_bytes = (model / "model.safetensors").stat().st_size // 2
    free = shutil.disk_usage(small_disk).free
    assert free > left_bytes
    (small_disk / "ballast").write_bytes(bytes(free - left_bytes))
    isthmus(*args, "logging.to=[]", "--out", out).error(73)
    assert listing(out / "hf-step-0000002") == remaining and not list(out.glob(".tmp*"))


def test_file_size_limit_is_reported_as_no_space(isthmus: ForkServer, sft_args: list[str], tmp_path: Path) -> None:
    assert "checkpoint" in isthmus(*sft_args, largest_file_bytes=40_000).error(73)
    assert not (tmp_path / "out" / "hf").exists() and not list((tmp_path / "out").rglob(".tmp*"))


@pytest.mark.parametrize(
    ("override", "code", "part"),
    [
        ("train.threads=1000000", 2, "train.threads  must be less than or equal to 1024"),
        ("train.threads=1024", 2, "train.threads=1024 is more than the"),
        ("train.seed=18446744073709551616", 2, "train.seed  must be less than or equal to 9223372036854775807"),
        ("train.global_batch_size=1000000000", 2, "train.global_batch_size  must be less than or equal to 1048576"),
        ("train.steps=" + "[" * 3000, 2, "more than 64 levels are nested"),
    ],
)
def test_hostile_settings(refused: Run, override: str, code: int, part: str) -> None:
    if override == "train.threads=1024" and 4 * (os.cpu_count() or 1) >= 1024:
        pytest.skip("this machine has so many cores that 1024 threads are sensible")
    assert part in refused(override, code=code)


def test_hostile_files(refused: Run, isthmus: ForkServer, copied: Path, chats: Path, tmp_path: Path) -> None:
    os.mkfifo(pipe := tmp_path / "pipe.jsonl")
    assert f"{pipe} is a pipe, expected a file" in refused(code=65, data=pipe)
    for words in (["config", "from-megatron", pipe], ["prepare", "/dev/zero", tmp_path / "x", "--tokenizer", copied]):
        assert "expected a file" in isthmus(*words).error(65)
    (copied / "config.json").write_text("[" * 100_000)
    assert "more than 64 levels are nested" in refused(code=65, model=copied)
