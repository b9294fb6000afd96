"""Whole runs: what lies in the folder afterwards, and what happens when the same folder is used again."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from faults.command import finished, listing, rows, start
from faults.fork_server import ForkServer
from isthmus.config.load import load_config
from isthmus.convert.open_model import open_model
from isthmus.convert.transfer import convert
from isthmus.convert.verify.compare import compare_models

STEP_KEYS = {
    *("step", "loss", "lr", "grad_norm", "tokens_per_s", "tflops_per_device", "mfu", "memory_gib"),
    *("num_tokens", "learned_tokens", "padding", "step_time_s", "consumed_sequences"),
}


def test_what_a_run_leaves(isthmus: ForkServer, small: list[str], model: Path, tmp_path: Path) -> None:
    more = ["train.eval_every=2", "checkpoint.every=2", "data.test_fraction=0.1"]
    result = isthmus(*small, *more).result
    out = tmp_path / "out"
    assert result["model"] == str(out / "hf") and result["steps"] == 4
    assert result["valid_loss"] < result["valid_loss_before"]

    steps = [row for row in rows(out) if "loss" in row]
    assert [row["step"] for row in steps] == [1, 2, 3, 4] and all(row.keys() == STEP_KEYS for row in steps)
    assert [row["consumed_sequences"] for row in steps] == [4, 8, 12, 16]
    assert all(0 < row["learned_tokens"] < row["num_tokens"] for row in steps)
    held_out = {row["step"]: row["valid_loss"] for row in rows(out) if "valid_loss" in row}
    assert list(held_out) == [0, 2, 4] and held_out[4] == result["valid_loss"]
    test = {row["step"]: row["test_loss"] for row in rows(out) if "test_loss" in row}
    assert test == {4: result["test_loss"]} and 0 < test[4] != held_out[4]

    config = load_config("sft", out / "config.yaml", [], {})
    words = [word for word in small[7:] if "=" in word]
    flags = {"model": small[2], "data": [small[4]], "out": small[6]}
    again = load_config("sft", None, [*words, *more], flags)
    assert config == again

    exported = {path.name for path in (out / "hf").iterdir()}
    assert exported == {path.name for path in model.iterdir()}
    assert {path.name for path in (out / "checkpoints").iterdir()} >= {"iter_0000002", "iter_0000004"}
    assert not list(out.rglob(".tmp*"))

    # A checkpoint brings its config and its tokenizer along, or is described by its arguments at least.
    convert(out / "checkpoints" / "iter_0000004", tmp_path / "converted")
    compare_models(tmp_path / "converted", out / "hf")
    small_files = exported - {"model.safetensors"}
    assert all((tmp_path / "converted" / name).read_bytes() == (out / "hf" / name).read_bytes() for name in small_files)
    shutil.rmtree(out / "checkpoints" / "iter_0000004" / "hf")
    stored = open_model(out / "checkpoints")
    assert stored.hf_folder is None and stored.family.name == open_model(out / "hf").family.name


def test_tensorboard_has_the_curves(isthmus: ForkServer, small: list[str], tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    assert isthmus(*small).returncode == 0
    events = accumulator.EventAccumulator(str(tmp_path / "out" / "tensorboard")).Reload()
    (name,) = [tag for tag in events.Tags()["scalars"] if tag.rpartition("/")[2] == "loss"]
    told = [row["loss"] for row in rows(tmp_path / "out") if "loss" in row]
    assert [scalar.value for scalar in events.Scalars(name)] == pytest.approx(told, rel=1e-6)


def test_real_process_says_nothing_but_its_own_lines(small: list[str], tmp_path: Path) -> None:
    """The other tests fork; what an import prints, they do not see."""
    ended = finished(start(*small, "logging.every=2", cwd=tmp_path))
    assert json.loads(ended.stdout) == ended.result
    decided = (
        "platform ",
        "layout: ",
        "precision ",
        "memory, estimated: ",
    )
    begins = (*decided, "data: ", "step ", "saved ", "exported ", "TensorBoard")
    others = [line for line in ended.stderr.splitlines() if not line.startswith(begins)]
    assert all("threads a rank" in line for line in others), others


def test_exports_on_the_way(isthmus: ForkServer, small: list[str], tmp_path: Path) -> None:
    assert isthmus(*small, "--hf-every", "2", "train.steps=5").returncode == 0
    out = tmp_path / "out"
    assert {path.name for path in out.glob("hf*")} == {"hf", "hf-step-0000002", "hf-step-0000004"}
    weights = {path.name: (path / "model.safetensors").read_bytes() for path in out.glob("hf*")}
    assert len(set(weights.values())) == 3
    assert {path.name for path in (out / "hf-step-0000002").iterdir()} == {path.name for path in (out / "hf").iterdir()}


def test_finished_run_again_changes_nothing(isthmus: ForkServer, small: list[str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    first = isthmus(*small).result
    weights, told = (out / "hf" / "model.safetensors").read_bytes(), rows(out)
    names = set(listing(out))
    for _ in range(2):
        again = isthmus(*small).result
        assert again["valid_loss"] == first["valid_loss"] and again["loss"] is None
        assert (out / "hf" / "model.safetensors").read_bytes() == weights
        assert rows(out) == told
    new = {name for name in set(listing(out)) - names if "tfevents" not in name}
    assert not new


def test_more_steps_go_on(isthmus: ForkServer, small: list[str], tmp_path: Path) -> None:
    isthmus(*small)
    assert isthmus(*small, "train.steps=6").result["steps"] == 6
    assert [row["step"] for row in rows(tmp_path / "out") if "loss" in row] == [1, 2, 3, 4, 5, 6]


def test_dry_run_prints_a_config_that_reads_back_and_writes_nothing(
    isthmus: ForkServer, small: list[str], tmp_path: Path
) -> None:
    words = [word for word in small if word != "--json"]
    printed = isthmus(*words, "--dry-run", "parallel.tp=2")
    assert printed.returncode == 0 and not printed.stderr and not list(tmp_path.iterdir())
    (tmp_path / "run.yaml").write_text(printed.stdout)
    again = isthmus("sft", tmp_path / "run.yaml", "--dry-run")
    assert again.stdout == printed.stdout


def test_resume_never(isthmus: ForkServer, small: list[str], tmp_path: Path) -> None:
    isthmus(*small)
    before = listing(tmp_path)
    line = isthmus(*small, "checkpoint.resume=never").error(73)
    assert "never" in line and "--out" in line and listing(tmp_path) == before


def test_finished_export_without_checkpoints_is_not_replaced(
    isthmus: ForkServer, small: list[str], tmp_path: Path
) -> None:
    assert isthmus(*small, "checkpoint.save_final=false").returncode == 0
    before = listing(tmp_path)
    for resume in ("auto", "never"):
        line = isthmus(*small, f"checkpoint.resume={resume}").error(73)
        assert "export" in line and listing(tmp_path) == before


def test_named_checkpoint(isthmus: ForkServer, small: list[str], tmp_path: Path) -> None:
    isthmus(*small, "checkpoint.every=2")
    other = tmp_path / "other"
    from_it = f"checkpoint.resume={tmp_path / 'out' / 'checkpoints' / 'iter_0000002'}"
    ended = isthmus(*small, "--out", other, from_it)
    assert "at step 2" in ended.stderr and ended.result["steps"] == 4
    weights = [(folder / "hf" / "model.safetensors").read_bytes() for folder in (other, tmp_path / "out")]
    assert weights[0] == weights[1]
    assert "no such folder" in isthmus(*small, "--out", tmp_path / "c", "checkpoint.resume=iter_9").error(66)
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("change", ["file", "seq_length", "batch", "held_out"])
def test_changed_data_on_resume(
    isthmus: ForkServer, small: list[str], chats: Path, tmp_path: Path, change: str
) -> None:
    data = tmp_path / "chats.json"
    data.write_bytes(chats.read_bytes())
    words = [*small, "--data", str(data)]
    isthmus(*words)
    if change == "file":
        data.write_bytes(chats.read_bytes().replace(b"number 7", b"number 8"))
    more = {
        "file": "train.steps=6",
        "seq_length": "data.seq_length=32",
        "batch": "train.global_batch_size=8",
        "held_out": "data.valid_fraction=0.25",
    }[change]
    before = listing(tmp_path / "out")
    line = isthmus(*words, "train.steps=6", more).error(65)
    assert "--out" in line and "differ" in line
    assert listing(tmp_path / "out") == before


def test_moved_and_touched_data_is_the_same_data(
    isthmus: ForkServer, small: list[str], chats: Path, tmp_path: Path
) -> None:
    data = tmp_path / "chats.json"
    data.write_bytes(chats.read_bytes())
    isthmus(*small, "--data", data)
    data.rename(tmp_path / "moved.json")
    os.utime(tmp_path / "moved.json")
    assert isthmus(*small, "--data", tmp_path / "moved.json", "train.steps=5").result["steps"] == 5


def test_checkpoint_that_was_cut_short(isthmus: ForkServer, small: list[str], tmp_path: Path) -> None:
    isthmus(*small, "checkpoint.every=2")
    (file,) = (tmp_path / "out" / "checkpoints" / "iter_0000004").glob("*.distcp")
    file.write_bytes(file.read_bytes()[:-1000])
    before = listing(tmp_path / "out")
    line = isthmus(*small, "train.steps=6").error(65)
    assert str(file) in line and "another checkpoint" in line and listing(tmp_path / "out") == before
    named = f"checkpoint.resume={tmp_path / 'out' / 'checkpoints' / 'iter_0000002'}"
    assert isthmus(*small, "train.steps=6", named).result["steps"] == 6


@pytest.mark.parametrize("file", ["common.pt", ".metadata", "metadata.json"])
def test_checkpoint_with_a_damaged_part(isthmus: ForkServer, small: list[str], tmp_path: Path, file: str) -> None:
    isthmus(*small)
    damaged = tmp_path / "out" / "checkpoints" / "iter_0000004" / file
    damaged.write_bytes(damaged.read_bytes()[:40])
    assert str(damaged.parent) in isthmus(*small, "train.steps=6").error(65)


def test_checkpoint_of_another_model(isthmus: ForkServer, small: list[str], model: Path, tmp_path: Path) -> None:
    isthmus(*small)
    other = Path(shutil.copytree(model, tmp_path / "other"))
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"intermediate_size": 96}))
    before = listing(tmp_path / "out")
    line = isthmus(*small, "--model", other, "model.init=random", "train.steps=6").error(65)
    assert "iter_0000004" in line and listing(tmp_path / "out") == before


def test_what_an_interrupted_save_left_goes(isthmus: ForkServer, small: list[str], tmp_path: Path) -> None:
    isthmus(*small)
    for left in (tmp_path / "out" / ".tmp-hf", tmp_path / "out" / "checkpoints" / ".tmp-iter_0000003"):
        left.mkdir()
        (left / "part").write_bytes(bytes(1000))
    assert isthmus(*small, "train.steps=5").returncode == 0
    assert not list((tmp_path / "out").rglob(".tmp*"))


@pytest.mark.parametrize("recipe", ["sft", "pretrain"])
def test_made_up_data(isthmus: ForkServer, model: Path, tmp_path: Path, recipe: str) -> None:
    """No file but the model; a run that goes on in another layout takes what it would have taken."""
    out, rest = tmp_path / "out", tmp_path / "rest"
    words = [recipe, "--model", model, "--json", "data.mock=true", "data.seq_length=24", "train.steps=4"]
    words += ["train.global_batch_size=4", "optim.lr=1e-3", "data.valid_fraction=0.3", "data.test_fraction=0.1"]
    result = isthmus(*words, "--out", out, "checkpoint.every=2").result
    steps = [row for row in rows(out) if "loss" in row]
    assert [(row["num_tokens"], row["learned_tokens"], row["padding"]) for row in steps] == [(96, 96, 0)] * 4
    (test,) = [row for row in rows(out) if "test_loss" in row]
    assert test == {"step": 4, "test_loss": result["test_loss"]} and result["test_loss"] != result["valid_loss"]
    assert not (out / "data").exists()

    from_it = f"checkpoint.resume={out / 'checkpoints' / 'iter_0000002'}"
    if recipe == "sft":
        lines = ["train.micro_batch_size=2", "data.length_buckets=[32, 64]"]
        again = isthmus(*words, "--out", rest, from_it, *lines).result
        late = [row for row in rows(rest) if "loss" in row]
        assert [row["loss"] for row in late] == pytest.approx([row["loss"] for row in steps[2:]], rel=1e-5)
        assert again["test_loss"] == pytest.approx(result["test_loss"], rel=1e-5)
        assert [row["padding"] for row in late] == [0.25, 0.25]
    else:
        line = isthmus(*words, "--out", rest, from_it, "data.seed=1").error(65)
        assert "differ" in line and not rest.exists()


def test_pretraining(isthmus: ForkServer, small: list[str], tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("The number is 4. Say the number 5. " * 200)
    chats, small[4] = small[4], str(text)
    result = isthmus("pretrain", *small[1:]).result
    assert result["valid_loss"] < result["valid_loss_before"]
    assert all(row["learned_tokens"] == row["num_tokens"] for row in rows(tmp_path / "out") if "loss" in row)
    assert "plain text among data of kind chat" in isthmus(*small, "--out", tmp_path / "b").error(65)
    small[4] = chats
    assert "a chat record among data of kind text" in isthmus("pretrain", *small[1:], "--out", tmp_path / "c").error(65)


def test_ranks_that_share_a_line_count_its_tokens_once(isthmus: ForkServer, small: list[str], tmp_path: Path) -> None:
    """And padding, of lines that come in two lengths, for none."""
    small.append("data.packing=false")
    assert isthmus(*small).returncode == 0
    shared = tmp_path / "shared"
    more = ["--nproc", "2", "parallel.cp=2", "data.length_buckets=[32, 64]", "--out", str(shared)]
    assert isthmus(*small, *more).returncode == 0
    alone, together = ([row for row in rows(out) if "loss" in row] for out in (tmp_path / "out", shared))
    for key in ("num_tokens", "learned_tokens", "consumed_sequences"):
        assert [row[key] for row in together] == [row[key] for row in alone]
    for row in together:
        lines = row["num_tokens"] / (1 - row["padding"])
        assert lines == pytest.approx(round(lines / 32) * 32) and lines > row["num_tokens"]
    assert not any(row["padding"] for row in alone)
    for key in ("loss", "grad_norm"):
        assert [row[key] for row in together] == pytest.approx([row[key] for row in alone], rel=1e-5)
