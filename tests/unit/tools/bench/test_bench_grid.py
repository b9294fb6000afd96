"""The grid of a benchmark, and the config of each cell."""

from __future__ import annotations

from pathlib import Path

import pytest

from isthmus.cli.options import configs_and_overrides
from isthmus.config.load import load_config
from isthmus.config.presets import config_path
from isthmus.errors import MissingInput, UsageError
from isthmus.tools.bench.bench_config import cell_config, check_settings, fingerprint, pasteable_yaml
from isthmus.tools.bench.bench_grid import BenchCell, make_cells, split_values, table_rows

SFT = """\
recipe: sft
out: runs/mine
model: some/model
data: {files: [chats.json], columns: {text: body}, loss_on: last, valid_fraction: 0.1, seq_length: 64}
chat: {system: "Be brief."}
train: {epochs: 3, eval_every: 10, early_stopping: 2, micro_batch_size: 2}
optim: {lr: 1e-4, schedule: wsd, decay_steps: 50, warmup_steps: 100}
eval: {generate: true, prompts: [Hello]}
checkpoint: {every: 100, keep_best: true}
logging: {to: [wandb], style: megatron}
"""


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("1", ["1"]),
        ("1,2, 4", ["1", "2", "4"]),
        ("", [""]),
        ("[a,b]", ["[a,b]"]),
        ("[a,b],[c],[]", ["[a,b]", "[c]", "[]"]),
        ("{a: 1, b: [2,3]},{}", ["{a: 1, b: [2,3]}", "{}"]),
        ("'a,b',\"c,[\",d", ["'a,b'", '"c,["', "d"]),
        ("it's,so", ["it's", "so"]),
        ("runs/x,runs/[y,z]", ["runs/x", "runs/[y,z]"]),
    ],
)
def test_values_are_split_at_commas_outside_of_brackets_and_quotes(text: str, values: list[str]) -> None:
    assert split_values("a.b", text) == values


def cells(*words: str, nproc: tuple[int, ...] = (1,)) -> list[BenchCell]:
    return make_cells(*configs_and_overrides(words), nproc, configs_and_overrides)


def test_grid_is_the_product_of_configs_ranks_and_values(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.yaml").write_text("train: {steps: 1}\n")
    a, b = str(tmp_path / "a.yaml"), str(tmp_path / "b.yaml")
    results = cells(a, "parallel.tp=1,2", b, "data.seq_length=8", nproc=(2, 4))
    assert [(cell.name, cell.nproc, *cell.varied) for cell in results] == [
        (name, nproc, f"parallel.tp={tp}") for name in (a, b) for nproc in (2, 4) for tp in (1, 2)
    ]
    assert results[0].settings == ("parallel.tp=1", "data.seq_length=8") and results[0].file == Path(a)
    assert str(results[0]) == f"{a} --nproc 2 parallel.tp=1"
    (alone,) = cells("parallel.tp=2")
    assert (alone.name, alone.file, alone.varied) == ("", None, ())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["parallel.tp=1", "parallel.tp=2"], r"parallel\.tp is given twice\. Give all its values at once"),
        (["parallel.tp=1,,2"], r"parallel\.tp=1,,2 has an empty value"),
        ([f"train.seed={','.join('1' * 101)}", f"data.seed={','.join('1' * 101)}"], r"has 10201 cells"),
        (["preset:llama3-8b"], r"is a model, expected a run config\. Use it with --model"),
    ],
)
def test_bad_grids_are_refused(words: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        cells(*words)


def test_rows_of_a_table_have_settings_that_the_command_line_overrides(tmp_path: Path) -> None:
    table = tmp_path / "table.yaml"
    row = "preset:llama2-7b-bf16-benchmark parallel.tp=8"
    table.write_text(f"# Mine.\nrows:\n  - {row}\n  - preset:qwen2.5-7b-benchmark\n")
    first, second, *_ = cells(str(table), "train.micro_batch_size=1,2")
    assert (first.name, first.settings) == (row, ("parallel.tp=8", "train.micro_batch_size=1"))
    assert second.varied == ("train.micro_batch_size=2",)
    for text, message in (
        ("rows: []", "a list of texts"),
        ("rows: [a.yaml]\ntrain: {steps: 1}", "got keys rows, train"),
        ("rows: [parallel.tp=1]", "has 0 configs, expected one"),
    ):
        table.write_text(text)
        with pytest.raises(UsageError, match=message):
            cells(str(table))
    with pytest.raises(MissingInput, match="cannot be read"):
        table_rows(tmp_path / "absent.yaml")


def test_each_row_of_the_rocm_table_is_a_config_of_8_ranks(tmp_path: Path) -> None:
    results = cells("preset:rocm-table", nproc=(8,))
    for cell in results:
        config = cell_config(cell, recipe=None, model=None, steps=15, out=tmp_path)
        config.parallel.check_world_size(8)
        assert config.train.global_batch_size % (config.train.micro_batch_size * config.parallel.dp(8)) == 0
    models = {str(cell_config(cell, recipe=None, model=None, steps=15, out=tmp_path).model.path) for cell in results}
    assert {model.removeprefix("preset:") for model in models} == {
        "llama3.1-8b", "llama3.1-70b", "llama3-8b", "llama3-70b", "llama2-7b", "llama2-70b", "deepseek-v2-lite",
    }  # fmt: skip
    with pytest.raises(UsageError, match="is a table of run configs, expected a run config"):
        config_path("preset:rocm-table")


def test_config_of_a_cell_has_the_step_of_the_run_and_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "sft.yaml"
    file.write_text(SFT)
    (cell,) = cells(str(file), "train.precision=fp32")
    config = cell_config(cell, recipe=None, model=None, steps=7, out=tmp_path / "out")
    assert (config.recipe, config.train.steps, config.train.micro_batch_size) == ("sft", 7, 2)
    assert config.data.mock and config.data.seq_length == 64 and config.optim.lr == 1e-4
    assert not config.checkpoint.save_final and not config.eval.generate and config.logging.to == ()
    key = fingerprint(config, nproc=1, warmup=2)
    assert key == fingerprint(config.model_copy(update={"out": "elsewhere"}), nproc=1, warmup=2)
    assert len({key, fingerprint(config, nproc=2, warmup=2), fingerprint(config, nproc=1, warmup=3)}) == 3

    again = tmp_path / "best.yaml"
    again.write_text(pasteable_yaml(cell, recipe=None, model=None))
    pasted = load_config("sft", again)
    assert pasted == load_config("sft", file, ["train.precision=fp32"])
    assert pasted.logging.to == ("wandb",)


def test_errors_of_the_users_config_have_their_place(tmp_path: Path) -> None:
    file = tmp_path / "sft.yaml"
    file.write_text(SFT.replace("seq_length", "seqlength"))
    (cell,) = cells(str(file))
    with pytest.raises(UsageError, match=r"sft\.yaml:4:\d+  data\.seqlength"):
        cell_config(cell, recipe=None, model=None, steps=7, out=tmp_path)
    file.write_text("recipe: dpo\nmodel: m\ndata: {files: [pairs.jsonl]}\n")
    with pytest.raises(UsageError, match=r"mock data.* the recipe is dpo\. Measure"):
        cell_config(cell, recipe=None, model=None, steps=7, out=tmp_path)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("train.steps=3", "--warmup and --steps"),
        ("out=x", "Use --out"),
        ("optim.warmup_steps=1,2", "has no effect"),
        ("logging.every=5", "has no effect"),
    ],
)
def test_settings_without_effect_are_refused(setting: str, message: str) -> None:
    check_settings(["train.micro_batch_size=1"])
    with pytest.raises(UsageError, match=message):
        check_settings([setting])
