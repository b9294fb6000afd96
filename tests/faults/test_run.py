"""Complete runs: the files of a run folder, and runs that use the same folder again."""

from __future__ import annotations

import json
import math
import os
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from faults.command import finished, listing, rows, start
from faults.fork_server import ForkServer
from isthmus.config.load import load_config
from isthmus.convert.open_model import open_model
from isthmus.convert.transfer import convert
from isthmus.convert.verify.compare import compare_models
from isthmus.hf.model_folder import ModelFolder

STEP_KEYS = {
    *("step", "loss", "lr", "grad_norm", "tokens_per_s", "tflops_per_device", "mfu", "memory_gib"),
    *("num_tokens", "loss_tokens", "padding", "step_time_s", "consumed_sequences", "epoch", "time_s"),
}


def test_few_records_make_the_default_batch_smaller_also_after_a_resume(
    isthmus: ForkServer, sft_args: list[str], tmp_path: Path
) -> None:
    args = [word for word in sft_args if not word.startswith("train.")] + ["data.packing=false", "train.epochs=0.5"]
    first = isthmus(*args, "checkpoint.every=8")
    assert "train.global_batch_size=1 instead of the default 16, since the data has only 63 sequences" in first.stderr
    assert first.result["steps"] == 32
    out = tmp_path / "out"
    assert load_config("sft", out / "config.yaml").train.global_batch_size == 1
    assert [row["consumed_sequences"] for row in rows(out) if "loss" in row][:2] == [1, 2]
    saved = out / "checkpoints" / "iter_0000024"
    assert json.loads((saved / "run_record.json").read_text())["settings"]["train.global_batch_size"] == 1
    resumed = isthmus(*args, "--out", tmp_path / "resumed", f"checkpoint.resume={saved}")
    assert resumed.result["steps"] == 32 and resumed.result["loss"] == first.result["loss"]
    other = isthmus(*args, "--out", tmp_path / "x", f"checkpoint.resume={saved}", "train.global_batch_size=4")
    assert "train.global_batch_size 1 -> 4" in other.error(2)


def test_files_and_metrics_of_a_run(isthmus: ForkServer, sft_args: list[str], model: Path, tmp_path: Path) -> None:
    more = ["train.eval_every=2", "checkpoint.every=2", "data.test_fraction=0.1"]
    result = isthmus(*sft_args, *more).result
    out = tmp_path / "out"
    assert result["model"] == str(out / "hf") and result["steps"] == 4
    assert result["valid_loss"] < result["valid_loss_before"]

    steps = [row for row in rows(out) if "loss" in row]
    assert [row["step"] for row in steps] == [1, 2, 3, 4] and all(row.keys() == STEP_KEYS for row in steps)
    assert [row["consumed_sequences"] for row in steps] == [4, 8, 12, 16]
    assert steps[3]["epoch"] == 2 * steps[1]["epoch"] > 0
    assert steps[0]["time_s"] < steps[3]["time_s"]
    assert all(0 < row["loss_tokens"] < row["num_tokens"] for row in steps)
    valid = {row["step"]: row["valid_loss"] for row in rows(out) if "valid_loss" in row}
    assert list(valid) == [0, 2, 4] and valid[4] == result["valid_loss"]
    test = {row["step"]: row["test_loss"] for row in rows(out) if "test_loss" in row}
    assert test == {4: result["test_loss"]} and 0 < test[4] != valid[4]
    for row in rows(out):
        for part in (part for part in ("valid", "test") if f"{part}_loss" in row):
            assert row[f"{part}_perplexity"] == pytest.approx(math.exp(row[f"{part}_loss"]), rel=1e-6)
            assert 0 <= row[f"{part}_mean_token_accuracy"] < 1

    config = load_config("sft", out / "config.yaml", [], {})
    args = [arg for arg in sft_args[7:] if "=" in arg]
    flags = {"model": sft_args[2], "data": [sft_args[4]], "out": sft_args[6]}
    again = load_config("sft", None, [*args, *more], flags)
    assert config == again

    exported = {path.name for path in (out / "hf").iterdir()}
    assert exported == {path.name for path in model.iterdir()} | {"README.md", "checksums.json"}
    assert {path.name for path in (out / "checkpoints").iterdir()} >= {"iter_0000002", "iter_0000004"}
    assert not list(out.rglob(".tmp*"))

    # A checkpoint has the config and the tokenizer; without them its arguments describe the model.
    convert(out / "checkpoints" / "iter_0000004", tmp_path / "converted")
    compare_models(tmp_path / "converted", out / "hf")
    small_files = exported - {"model.safetensors", "README.md", "checksums.json"}
    assert all((tmp_path / "converted" / name).read_bytes() == (out / "hf" / name).read_bytes() for name in small_files)
    shutil.rmtree(out / "checkpoints" / "iter_0000004" / "hf")
    opened = open_model(out / "checkpoints")
    assert opened.hf_folder is None and opened.family.name == open_model(out / "hf").family.name


def test_tensorboard_has_the_loss(isthmus: ForkServer, sft_args: list[str], tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    assert isthmus(*sft_args).returncode == 0
    events = accumulator.EventAccumulator(str(tmp_path / "out" / "tensorboard")).Reload()
    (name,) = [tag for tag in events.Tags()["scalars"] if tag == "train/loss"]
    losses = [row["loss"] for row in rows(tmp_path / "out") if "loss" in row]
    assert [scalar.value for scalar in events.Scalars(name)] == pytest.approx(losses, rel=1e-6)


def test_stderr_has_only_isthmus_messages(sft_args: list[str], tmp_path: Path) -> None:
    """In a new interpreter: forked commands do not show what imports print."""
    completed = finished(start(*sft_args, "logging.every=2", cwd=tmp_path))
    assert json.loads(completed.stdout) == completed.result
    settings = (
        "platform ",
        "layout: ",
        "precision ",
        "learning rate ",
        "memory, estimated: ",
    )
    prefixes = (*settings, "isthmus ", "data: ", "training: ", "step ", "saved ", "exported ", "TensorBoard")
    others = [line for line in completed.stderr.splitlines() if not line.startswith(prefixes)]
    assert all("threads a rank" in line for line in others), others


def test_beginning_of_a_run(isthmus: ForkServer, sft_args: list[str], model: Path, tmp_path: Path) -> None:
    """The run, then its sizes; allocator and libraries are for --debug."""
    epoch = [*sft_args, "data.packing=false", "train.global_batch_size=3", "train.steps=null", "train.epochs=1"]
    shown = isthmus(*epoch).stderr
    first, *others = shown.splitlines()
    assert first.startswith("isthmus ") and f"  model {model}  data {sft_args[4]}  1 epoch  1 rank" in first
    (line,) = [line for line in others if line.startswith("training: ")]
    tokens = [row["num_tokens"] for row in rows(tmp_path / "out") if "loss" in row]
    parameters = sum(math.prod(info.shape) for info in ModelFolder.open(model).tensors.values())
    assert line == (
        f"training: {len(tokens)} steps, 1 epoch, {sum(tokens) / len(tokens):,.0f} tokens per step; "
        f"{parameters:,} parameters, {parameters:,} trainable"
    )
    assert max(len(line) for line in others if line.startswith("step ")) <= 80
    assert "allocator" not in shown and "oneDNN" not in shown
    assert "memory allocator: " in isthmus(*epoch, "--debug").stderr


def test_early_stopping_and_the_best_checkpoint(isthmus: ForkServer, sft_args: list[str], tmp_path: Path) -> None:
    best = ["checkpoint.keep_best=true", "train.early_stopping=2", "checkpoint.keep=1"]
    assert "checkpoint.keep_best needs validations during training. Set train.eval_every" in isthmus(
        *sft_args, *best
    ).error(2)
    command = [*sft_args, *best, "train.eval_every=1", "train.steps=12", "optim.lr=0.1", "optim.schedule=constant"]
    run, out = isthmus(*command), tmp_path / "out"
    valid = {row["step"]: row["valid_loss"] for row in rows(out) if "valid_loss" in row and row["step"]}
    lowest = min(valid, key=valid.__getitem__)
    assert list(valid) == list(range(1, lowest + 3)) and len(valid) < 12
    assert f"stopped early: 2 validations in a row were not below {valid[lowest]:.4f}, the loss of step {lowest}" in (
        run.stderr
    )
    assert run.result["valid_loss"] == valid[lowest] and run.result["steps"] == lowest + 2
    remaining = {path.name for path in (out / "checkpoints").glob("iter_*")}
    assert remaining == {f"iter_{lowest:07d}", f"iter_{lowest + 2:07d}"}
    compare_models(out / "checkpoints" / f"iter_{lowest:07d}", out / "hf")
    shutil.rmtree(out / "hf")
    again = isthmus(*command)
    assert again.result["steps"] == lowest + 2 and again.result["valid_loss"] == valid[lowest]
    assert [row["step"] for row in rows(out) if "loss" in row] == list(range(1, lowest + 3))
    compare_models(out / "checkpoints" / f"iter_{lowest:07d}", out / "hf")


def test_exports_during_a_run(isthmus: ForkServer, sft_args: list[str], tmp_path: Path) -> None:
    assert isthmus(*sft_args, "--hf-every", "2", "train.steps=5").returncode == 0
    out = tmp_path / "out"
    assert {path.name for path in out.glob("hf*")} == {"hf", "hf-step-0000002", "hf-step-0000004"}
    weights = {path.name: (path / "model.safetensors").read_bytes() for path in out.glob("hf*")}
    assert len(set(weights.values())) == 3
    assert {path.name for path in (out / "hf-step-0000002").iterdir()} == {path.name for path in (out / "hf").iterdir()}


def test_finished_run_started_again_changes_nothing(isthmus: ForkServer, sft_args: list[str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    first = isthmus(*sft_args).result
    weights, metrics = (out / "hf" / "model.safetensors").read_bytes(), rows(out)
    names = set(listing(out))
    for _ in range(2):
        again = isthmus(*sft_args).result
        assert again["valid_loss"] == first["valid_loss"] and again["loss"] is None
        assert (out / "hf" / "model.safetensors").read_bytes() == weights
        assert rows(out) == metrics
    new = {name for name in set(listing(out)) - names if "tfevents" not in name}
    assert not new


@pytest.mark.thorough
def test_more_steps_resume(isthmus: ForkServer, sft_args: list[str], tmp_path: Path) -> None:
    isthmus(*sft_args)
    first = next(row["valid_loss"] for row in rows(tmp_path / "out") if "valid_loss" in row)
    result = isthmus(*sft_args, "train.steps=6").result
    assert result["steps"] == 6 and result["valid_loss_before"] == first > result["valid_loss"]
    assert [row["step"] for row in rows(tmp_path / "out") if "loss" in row] == [1, 2, 3, 4, 5, 6]


def test_dry_run_prints_a_loadable_config_and_writes_nothing(
    isthmus: ForkServer, sft_args: list[str], tmp_path: Path
) -> None:
    args = [arg for arg in sft_args if arg != "--json"]
    printed = isthmus(*args, "--dry-run", "--json", "parallel.tp=2", "--nproc", "2")
    assert printed.returncode == 0 and not list(tmp_path.iterdir()), printed
    for line in (
        "layout: tp=2 +sp pp=1 dp=1", "data: 1 file, the first records: 64 records -> 64 samples",
        "training: 4 steps, about ", "estimated from the first records", "no run was started",
    ):  # fmt: skip
        assert line in printed.stderr
    (tmp_path / "run.yaml").write_text(printed.stdout)
    again = isthmus("sft", tmp_path / "run.yaml", "--dry-run", "--json", "--nproc", "2")
    assert again.stdout == printed.stdout
    refusals = {
        (2, "tp=3"): ["parallel.tp=3", "--nproc", "3"],
        (2, "not a multiple of micro_batch_size"): ["--nproc", "3"],
        (66, "no such data file"): ["--data", tmp_path / "absent.json"],
    }
    for (code, message), more in refusals.items():
        refused = isthmus(*args, "--dry-run", *more)
        assert refused.returncode == code and message in refused.errors[-1], refused


def test_resume_never(isthmus: ForkServer, sft_args: list[str], tmp_path: Path) -> None:
    isthmus(*sft_args)
    before = listing(tmp_path)
    line = isthmus(*sft_args, "checkpoint.resume=never").error(73)
    assert "never" in line and "--out" in line and listing(tmp_path) == before


def test_finished_export_without_checkpoints_is_not_replaced(
    isthmus: ForkServer, sft_args: list[str], tmp_path: Path
) -> None:
    assert isthmus(*sft_args, "checkpoint.save_final=false").returncode == 0
    before = listing(tmp_path)
    for resume in ("auto", "never"):
        line = isthmus(*sft_args, f"checkpoint.resume={resume}").error(73)
        assert "export" in line and listing(tmp_path) == before


def test_resume_from_a_given_checkpoint(isthmus: ForkServer, sft_args: list[str], tmp_path: Path) -> None:
    isthmus(*sft_args, "checkpoint.every=2")
    other = tmp_path / "other"
    from_it = f"checkpoint.resume={tmp_path / 'out' / 'checkpoints' / 'iter_0000002'}"
    completed = isthmus(*sft_args, "--out", other, from_it)
    assert "at step 2" in completed.stderr and completed.result["steps"] == 4
    weights = [(folder / "hf" / "model.safetensors").read_bytes() for folder in (other, tmp_path / "out")]
    assert weights[0] == weights[1]
    by_muon = isthmus(*sft_args, "--out", tmp_path / "muon", from_it, "optim.optimizer=muon")
    assert "optim.optimizer adamw -> muon" in by_muon.error(2)
    assert "no such folder" in isthmus(*sft_args, "--out", tmp_path / "c", "checkpoint.resume=iter_9").error(66)
    assert not (tmp_path / "c").exists()


def test_what_changed_since_the_checkpoint_is_refused_or_accepted(
    isthmus: ForkServer, sft_args: list[str], model: Path, chats: Path, tmp_path: Path
) -> None:
    """With another model, other data or other settings that shape the result; the run folder stays as it is."""
    data, other, out = tmp_path / "chats.json", tmp_path / "other", tmp_path / "out"
    data.write_bytes(chats.read_bytes())
    args = [*sft_args, "--data", str(data)]
    isthmus(*args)
    shutil.copytree(model, other)
    tensors = load_file(other / "model.safetensors")
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, other / "model.safetensors", {"format": "pt"})
    before = listing(out)

    weights = isthmus(*args, "train.steps=6", "--model", other).error(2)
    assert f"model weights of {model} -> other weights in {other}. Restore it, or start a new run with" in weights
    several = ["data.seq_length=32", "train.global_batch_size=8", "data.valid_fraction=0.25", "optim.lr=1e-4"]
    refused = isthmus(*args, "train.steps=6", *several)
    assert "iter_0000004 was trained with other settings:" in refused.error(2)
    for line in (
        "data.seq_length 64 -> 32", "train.global_batch_size 4 -> 8", "data.valid_fraction 0.02 -> 0.25",
        "optim.lr 0.001 -> 0.0001", "To resume with another optim.lr: --accept-changes optim.lr",
    ):  # fmt: skip
        assert line in refused.stderr
    data.write_bytes(chats.read_bytes().replace(b"number 7", b"number 8"))
    changed = isthmus(*args, "train.steps=6").error(65)
    assert "--out" in changed and f"the data files (changed: {data}) differ from those of" in changed
    assert isthmus(*args, "train.steps=6", "--dry-run").errors == [changed]
    assert listing(out) == before

    data.write_bytes(chats.read_bytes())
    accepted = isthmus(*args, "train.steps=6", "optim.lr=1e-4", "--accept-changes", "lr")
    assert accepted.result["steps"] == 6
    text = "optim.lr 0.001 -> 0.0001, train.steps 4 -> 6"
    assert f"changed since {out / 'checkpoints' / 'iter_0000004'}: {text}" in accepted.stderr
    record = json.loads((out / "checkpoints" / "iter_0000006" / "run_record.json").read_text())
    assert record == json.loads((out / "run_record.json").read_text()) and not record["trust_remote_code"]
    assert [", ".join(entry["changes"]) for entry in record["changes"]] == [text]

    newest = out / "checkpoints" / "iter_0000006"
    content = (newest / "run_record.json").read_text()
    (newest / "run_record.json").write_text(content.replace('"optim.lr": 0.0001', '"optim.lr": 0.0003'))
    flipped = isthmus(*args, "train.steps=7", "optim.lr=1e-3").error(65)
    assert f"{newest / 'run_record.json'}" in flipped and "optim.lr" not in flipped
    for name in ("run_record.json", "checksums.json"):
        (newest / name).unlink()
    older = isthmus(*args, "train.steps=7", "optim.lr=1e-3")
    assert older.result["steps"] == 7
    assert "iter_0000006 was written by an older version and has no run record" in older.stderr


def test_moved_data_with_new_mtime_resumes(
    isthmus: ForkServer, sft_args: list[str], chats: Path, tmp_path: Path
) -> None:
    data = tmp_path / "chats.json"
    data.write_bytes(chats.read_bytes())
    isthmus(*sft_args, "--data", data)
    data.rename(tmp_path / "moved.json")
    os.utime(tmp_path / "moved.json")
    assert isthmus(*sft_args, "--data", tmp_path / "moved.json", "train.steps=5").result["steps"] == 5


def test_truncated_checkpoint(isthmus: ForkServer, sft_args: list[str], tmp_path: Path) -> None:
    isthmus(*sft_args, "checkpoint.every=2")
    (file,) = (tmp_path / "out" / "checkpoints" / "iter_0000004").glob("*.distcp")
    file.write_bytes(file.read_bytes()[:-1000])
    before = listing(tmp_path / "out")
    line = isthmus(*sft_args, "train.steps=6").error(65)
    assert str(file) in line and "another checkpoint" in line and listing(tmp_path / "out") == before
    resume = f"checkpoint.resume={tmp_path / 'out' / 'checkpoints' / 'iter_0000002'}"
    assert isthmus(*sft_args, "train.steps=6", resume).result["steps"] == 6


@pytest.mark.thorough_cases(".metadata")
@pytest.mark.parametrize("file", ["common.pt", ".metadata", "metadata.json"])
def test_checkpoint_with_a_damaged_part(isthmus: ForkServer, sft_args: list[str], tmp_path: Path, file: str) -> None:
    isthmus(*sft_args)
    damaged = tmp_path / "out" / "checkpoints" / "iter_0000004" / file
    damaged.write_bytes(damaged.read_bytes()[:40])
    assert str(damaged.parent) in isthmus(*sft_args, "train.steps=6").error(65)


def test_checkpoint_of_another_model(isthmus: ForkServer, sft_args: list[str], model: Path, tmp_path: Path) -> None:
    isthmus(*sft_args)
    other = Path(shutil.copytree(model, tmp_path / "other"))
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"intermediate_size": 96}))
    before = listing(tmp_path / "out")
    refused = isthmus(*sft_args, "--model", other, "model.init=random", "train.steps=6")
    assert "iter_0000004" in refused.error(2) and "model ffn_hidden_size 64 -> 96" in refused.error(2)
    assert listing(tmp_path / "out") == before


def test_partial_outputs_are_removed(isthmus: ForkServer, sft_args: list[str], tmp_path: Path) -> None:
    isthmus(*sft_args)
    for folder in (tmp_path / "out" / ".tmp-hf", tmp_path / "out" / "checkpoints" / ".tmp-iter_0000003"):
        folder.mkdir()
        (folder / "part").write_bytes(bytes(1000))
    assert isthmus(*sft_args, "train.steps=5").returncode == 0
    assert not list((tmp_path / "out").rglob(".tmp*"))


@pytest.mark.parametrize("recipe", ["sft", "pretrain"])
def test_mock_data(isthmus: ForkServer, model: Path, tmp_path: Path, recipe: str) -> None:
    """Mock data needs no data file; a run that resumes in another layout takes the same samples."""
    out, rest = tmp_path / "out", tmp_path / "rest"
    args = [recipe, "--model", model, "--json", "data.mock=true", "data.seq_length=24", "train.steps=4"]
    args += ["train.global_batch_size=4", "optim.lr=1e-3", "data.valid_fraction=0.3", "data.test_fraction=0.1"]
    result = isthmus(*args, "--out", out, "checkpoint.every=2").result
    steps = [row for row in rows(out) if "loss" in row]
    assert [(row["num_tokens"], row["loss_tokens"], row["padding"]) for row in steps] == [(96, 96, 0)] * 4
    (test,) = [row for row in rows(out) if "test_loss" in row]
    assert test.keys() == {"step", "test_loss", "test_perplexity", "test_mean_token_accuracy"}
    assert test["step"] == 4 and test["test_loss"] == result["test_loss"] != result["valid_loss"]
    assert not (out / "data").exists()

    from_it = f"checkpoint.resume={out / 'checkpoints' / 'iter_0000002'}"
    if recipe == "sft":
        layout = ["train.micro_batch_size=2", "data.length_buckets=[32, 64]"]
        again = isthmus(*args, "--out", rest, from_it, *layout).result
        late = [row for row in rows(rest) if "loss" in row]
        assert [row["loss"] for row in late] == pytest.approx([row["loss"] for row in steps[2:]], rel=1e-5)
        assert again["test_loss"] == pytest.approx(result["test_loss"], rel=1e-5)
        assert [row["padding"] for row in late] == [0.25, 0.25]
    else:
        line = isthmus(*args, "--out", rest, from_it, "data.seed=1").error(2)
        assert "data.seed 0 -> 1" in line and "checkpoint.resume=never" in line and not rest.exists()


def test_pretraining(isthmus: ForkServer, sft_args: list[str], tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("The number is 4. Say the number 5. " * 200)
    chats, sft_args[4] = sft_args[4], str(text)
    result = isthmus("pretrain", *sft_args[1:]).result
    assert result["valid_loss"] < result["valid_loss_before"]
    assert all(row["loss_tokens"] == row["num_tokens"] for row in rows(tmp_path / "out") if "loss" in row)
    assert "plain text among data of kind chat" in isthmus(*sft_args, "--out", tmp_path / "b").error(65)
    sft_args[4] = chats
    assert "a chat record among data of kind text" in isthmus("pretrain", *sft_args[1:], "--out", tmp_path / "c").error(
        65
    )


@pytest.mark.thorough
def test_context_parallel_ranks_count_tokens_once(isthmus: ForkServer, sft_args: list[str], tmp_path: Path) -> None:
    """Padding of length buckets is not counted as tokens."""
    sft_args.append("data.packing=false")
    assert isthmus(*sft_args).returncode == 0
    shared = tmp_path / "shared"
    more = ["--nproc", "2", "parallel.cp=2", "data.length_buckets=[32, 64]", "--out", str(shared)]
    assert isthmus(*sft_args, *more).returncode == 0
    alone, together = ([row for row in rows(out) if "loss" in row] for out in (tmp_path / "out", shared))
    for key in ("num_tokens", "loss_tokens", "consumed_sequences"):
        assert [row[key] for row in together] == [row[key] for row in alone]
    for row in together:
        padded = row["num_tokens"] / (1 - row["padding"])
        assert padded == pytest.approx(round(padded / 32) * 32) and padded > row["num_tokens"]
    assert not any(row["padding"] for row in alone)
    for key in ("loss", "grad_norm"):
        assert [row[key] for row in together] == pytest.approx([row[key] for row in alone], rel=1e-5)


def test_config_over_weights_and_dropout(isthmus: ForkServer, sft_args: list[str], tmp_path: Path) -> None:
    """The export has the config that the model was trained with."""
    over = ["model.config.attention_dropout=0.1", "model.config.max_position_embeddings=4096"]
    over += ["model.config.rope_scaling={rope_type: linear, factor: 2.0}", "train.hidden_dropout=0.2"]
    run = [*sft_args, *over, "train.steps=2"]
    done = isthmus(*run)
    assert done.result["steps"] == 2
    assert "dropout: attention 0.1, hidden 0.2, embedding 0.2 (config.json of qwen3 has no key for" in done.stderr
    config = json.loads((tmp_path / "out" / "hf" / "config.json").read_text())
    assert (config["attention_dropout"], config["max_position_embeddings"]) == (0.1, 4096)
    assert config["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}
    line = isthmus(*run, "model.config.num_attention_heads=8").error(2)
    assert "model.config changes the tensors of" in line and "num_attention_heads is 4" in line


def test_chat_settings_of_prepared_and_raw_data(
    isthmus: ForkServer, sft_args: list[str], chats: Path, model: Path, tmp_path: Path
) -> None:
    """Both give the same run; the export has the template. Data that was prepared otherwise is refused."""
    settings = ["chat.template=zephyr", "chat.system=Be brief.", "train.steps=1"]
    raw = isthmus(*sft_args, *settings).result
    prepare = ["prepare", chats, tmp_path / "data", "--tokenizer", model, "--seq-length", "64"]
    assert isthmus(*prepare, "--chat-template", "zephyr", "--system", "Be brief.").returncode == 0
    sft_args[sft_args.index(str(chats))] = str(tmp_path / "data")
    prepared = isthmus(*sft_args, *settings, "--out", tmp_path / "b").result
    assert prepared["valid_loss"] == raw["valid_loss"] and prepared["loss"] == raw["loss"]
    template = (tmp_path / "b" / "hf" / "chat_template.jinja").read_text()
    assert "<|' + message.role + '|>" in template and "im_start" not in template
    line = isthmus(*sft_args, settings[0], "chat.reasoning=drop", "--out", tmp_path / "c").error(65)
    assert "prepared with system='Be brief.', the run has chat.system=None" in line
    assert "prepared with another chat template" in isthmus(*sft_args, settings[1], "--out", tmp_path / "c").error(65)
    line = isthmus(*sft_args, "chat.override_system=true", "--out", tmp_path / "c").error(2)
    assert "chat.override_system" in line and "set that too" in line


@pytest.mark.thorough
def test_fp16_run_without_an_update(isthmus: ForkServer, sft_args: list[str], tmp_path: Path) -> None:
    run = [*sft_args, "train.precision=fp16", "train.initial_loss_scale=4294967296"]
    failed = isthmus(*run, "train.steps=8", "checkpoint.every=5")
    line = failed.error(79)
    assert "none of the steps 1 to 8 changed the weights" in line and "now 1.67772e+07" in line
    assert "warning: 4 steps in a row did not change the weights" in failed.stderr
    assert "warning: 8 steps in a row" in failed.stderr
    assert not (tmp_path / "out" / "hf").exists()
    done = isthmus(*run, "train.steps=30", "--out", str(tmp_path / "longer"))
    assert 8 < done.result["steps"] and rows(tmp_path / "longer")[-2]["skipped"] < 30


def test_a_run_without_out_has_a_new_folder_and_never_resumes(
    isthmus: ForkServer, sft_args: list[str], tmp_path: Path
) -> None:
    """The ranks of ``--nproc`` share a folder: test_launch.py."""
    at = sft_args.index("--out")
    args = [*sft_args[:at], *sft_args[at + 2 :], "train.steps=2"]
    first, second = (isthmus(*args, cwd=tmp_path) for _ in range(2))
    assert (first.result["out"], second.result["out"]) == ("runs/sft-tiny-1", "runs/sft-tiny-2")
    assert "out runs/sft-tiny-1, as --out is not given; add --out runs/sft-tiny-1 to resume this run" in first.stderr
    assert "resumed" not in second.stderr
    resumed = isthmus(*args, "--out", "runs/sft-tiny-1", "train.steps=3", cwd=tmp_path)
    assert "resumed from runs/sft-tiny-1/checkpoints/iter_0000002" in resumed.stderr
    assert len(list((tmp_path / "runs").iterdir())) == 2
    environment = json.loads((tmp_path / "runs" / "sft-tiny-2" / "environment.json").read_text())
    assert "--out" not in environment["command"]
    assert "need one run folder" in isthmus.start(*args, cwd=tmp_path, RANK="0", WORLD_SIZE="2").result().error(2)
