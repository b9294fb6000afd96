"""The config loader and its error messages."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from ruamel.yaml import YAML

from isthmus.config.load import dump, load_config
from isthmus.config.schema import RunConfig
from isthmus.errors import IOFailure, MissingInput, UsageError

GOOD = """\
out: runs/a
model:
  path: models/tiny
data:
  files: [chats.json, more.jsonl]
train:
  steps: 100
optim:
  lr: 1e-5
"""
FLAGS = {"model": Path("m"), "data": [Path("a.json"), Path("b.json")], "out": Path("o")}


def write(folder: Path, text: str) -> Path:
    path = folder / "sft.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def refused(folder: Path, text: str, *overrides: str) -> list[str]:
    with pytest.raises(UsageError) as caught:
        load_config("sft", write(folder, text), overrides)
    return str(caught.value).replace(f"{folder}/", "").splitlines()


def test_overrides_win_over_flags_and_flags_over_the_file(tmp_path: Path) -> None:
    config = load_config(
        "sft",
        write(tmp_path, GOOD),
        ["optim.lr=3e-4", "parallel.tp=2", "parallel.tp=4", "train.precision=null", "out=third"],
        {"out": "second", "hf_every": 5, "data": None, "logging.every": 7},
    )
    assert config.recipe == "sft" and config.out == "third"
    assert config.optim.lr == 3e-4 and config.train.precision is None and config.train.steps == 100
    assert config.parallel.tp == 4 and config.parallel.sp is None and config.parallel.sequence_parallel
    assert config.data.files == ("chats.json", "more.jsonl")
    assert config.checkpoint.hf_every == 5 and config.logging.every == 7


def test_flags_alone_are_enough() -> None:
    config = load_config("pretrain", None, [], FLAGS)
    assert (config.model.path, config.out) == ("m", "o")
    assert config.data.files == ("a.json", "b.json")
    assert config.train.epochs == 1.0 and config.train.steps is None


def test_a_section_can_be_overridden_as_a_whole_or_be_empty(tmp_path: Path) -> None:
    config = load_config("sft", write(tmp_path, GOOD + "parallel:\n"), ["train={seed: 3, eval_every: 5}"])
    assert (config.train.steps, config.train.seed, config.train.eval_every) == (100, 3, 5)
    assert config.parallel.tp == 1


def test_numbers_are_those_of_yaml_1_2(tmp_path: Path) -> None:
    assert load_config("sft", write(tmp_path, GOOD)).optim.lr == 1e-5
    assert load_config("sft", write(tmp_path, GOOD + "parallel: {tp: 0o10}")).parallel.tp == 8


def test_an_override_of_a_path_is_always_text(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD)
    for text in ("2026-11-21", "007", "[odd", "null", "a: b"):
        assert load_config("sft", path, [f"out={text}"]).out == text
    assert load_config("sft", path, ["data.files=x.json"]).data.files == ("x.json",)
    assert load_config("sft", path, ["out=~/runs"]).out == str(Path.home() / "runs")


def test_zero_means_never(tmp_path: Path) -> None:
    overrides = ["train.eval_every=0", "checkpoint.every=0", "checkpoint.hf_every=0"]
    config = load_config("sft", write(tmp_path, GOOD), overrides)
    assert (config.train.eval_every, config.checkpoint.every, config.checkpoint.hf_every) == (None, None, None)


@pytest.mark.parametrize(
    "extra", ["", "parallel: {tp: 2, sp: false}\n", "platform: cpu\ncheckpoint: {resume: never, every: 3}\n"]
)
def test_dump_reads_back_equal(tmp_path: Path, extra: str) -> None:
    config = load_config("sft", write(tmp_path, GOOD + extra))
    assert load_config("sft", write(tmp_path, dump(config))) == config


def test_yaml_1_1_reads_a_dump_as_the_same_values() -> None:
    reader = YAML(typ="safe", pure=True)
    reader.version = (1, 1)
    read: dict[str, Any] = reader.load(dump(load_config("sft", None, ["optim.lr=1e-05", "out='1e5'"], FLAGS)))
    assert read["optim"]["lr"] == 1e-5 and read["optim"]["eps"] == 1e-8 and read["out"] == "1e5"


def test_an_unknown_key_is_reported_with_its_line_and_a_suggestion(tmp_path: Path) -> None:
    line = "sft.yaml:11:3  parallel.tpp  is not a setting (did you mean parallel.tp?)"
    assert refused(tmp_path, GOOD + "parallel:\n  tpp: 2\n") == [line]


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("lr=1", "optim.lr"),
        ("seq_length=8", "data.seq_length"),
        ("train.seq_length=8", "data.seq_length"),
        ("optim.learning_rate=1e-5", "optim.lr"),
        ("trian={steps: 3}", "train"),
        ("paralel.tp=2", "parallel"),
        ("parallel.sequence-parallel=true", "parallel.sp"),
        ("every=1", "checkpoint.every or logging.every"),
        ("seed=1", "train.seed, and data.seed for the order of the samples"),
        ("cluster.gpus_per_node=8", "--nproc"),
        ("dpo.sft_loss_weight=0.1", "dpo.sft_weight"),
        ("dpo.preference_average_log_probs=true", "dpo.length_normalized"),
        ("dpo.preference_loss_weight=1", "dpo.sft_weight, relative to a preference loss of weight 1"),
        ("dpo.reference_policy_kl_penalty=0.05", "dpo.beta"),
    ],
)
def test_a_setting_of_another_name_or_section_is_suggested(tmp_path: Path, written: str, meant: str) -> None:
    (line,) = refused(tmp_path, GOOD, written)
    assert line.startswith("command line  ") and line.endswith(f"is not a setting (did you mean {meant}?)")


def test_no_suggestion_for_a_name_that_resembles_nothing(tmp_path: Path) -> None:
    assert refused(tmp_path, GOOD, "zzz.qqq=1") == ["command line  zzz  is not a setting"]


def test_all_errors_are_raised_together(tmp_path: Path) -> None:
    text = GOOD.replace("steps: 100", 'steps: "100"\n  threads: true\n  recompute: ful').replace("1e-5", "-1")
    lines = [line.strip() for line in refused(tmp_path, text, "data.packing=yes", "nonsense")]
    assert lines[0] == "the config has 6 errors:"
    assert set(lines[1:]) == {
        "sft.yaml:7:3  train.steps  must be a valid integer, got '100'; leave out the quotes",
        "sft.yaml:8:3  train.threads  must be a valid integer, got True",
        "sft.yaml:9:3  train.recompute  must be 'none', 'selective' or 'full', got 'ful'",
        "sft.yaml:11:3  optim.lr  must be greater than 0, got -1",
        "command line  data.packing  must be a valid boolean, got 'yes'; write true or false",
        "command line  nonsense  is not an override; use section.setting=value",
    }


def test_missing_settings_are_described_and_name_their_option(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        load_config("sft", None, ["model.init=random"])
    message = str(caught.value)
    assert "out  is missing" in message and "Give it with --out or out=..." in message
    assert "model.path  is missing: Hugging Face model folder" in message and "--model or model.path=..." in message
    assert "data.files  is missing" in message and "--data or data.files=..." in message


LAUGHS = "a0: &a0 {x: [1, 2]}\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 40))
"""A billion laughs: 40 lines that mean 9 ** 40 values."""


@pytest.mark.slow_cases("text10-sft.yaml-more than 64 levels")
@pytest.mark.parametrize(
    ("text", "place", "part"),
    [
        ("a: [1, 2\nb: 3\n", "sft.yaml:2:", "while parsing"),
        ("- a\n- b\n", "sft.yaml:1:1", "must be a mapping of settings"),
        ("out: a\nout: b\n", "sft.yaml:2:1", "duplicate key"),
        ("optim:\n  lr: 1\n  lr: 2\n", "sft.yaml:3:3", "duplicate key"),
        ("1: a\n", "sft.yaml:1:1", "key '1' must be text"),
        ("\tout: a\n", "sft.yaml:1:1", "cannot start any token"),
        ("out: !!python/object/apply:os.system [ls]\n", "sft.yaml:1:6", "tag"),
        ("out: &a {b: *a}\n", "sft.yaml:1:6", "an alias stands for a value that contains it"),
        ("data: {}\n" + LAUGHS, "sft.yaml:7:", "more than 100,000 values"),
        ("data: {}\n" + LAUGHS.replace("[", "{<<: [").replace("]", "]}"), "sft.yaml:7:", "more than 100,000 values"),
        ("out: " + "[" * 2000, "sft.yaml", "more than 64 levels"),
        ("out: " + "{a: " * 2000, "sft.yaml", "more than 64 levels"),
        ("".join(f"{' ' * level}a:\n" for level in range(40)), "sft.yaml:17:17", "nested mappings"),
        ("out: !!bool x\n", "sft.yaml", "x"),
        ("train: {seed: 0x" + "9" * 5000 + "}\n", "sft.yaml", "more than 100 digits"),
    ],
)
def test_files_that_are_not_configs(tmp_path: Path, text: str, place: str, part: str) -> None:
    (line,) = refused(tmp_path, text)
    assert line.startswith(place) and part in line


@pytest.mark.parametrize(
    ("override", "place", "part"),
    [
        ("train={steps: 9, epochs: 2}", "command line  train.epochs", "got steps=9 and epochs=2; keep one"),
        ("parallel.sp=true", "command line  parallel.sp", "needs tp > 1, got tp=1"),
        (
            "parallel={fsdp: true, overlap_grad_reduce: true}",
            "command line  parallel.overlap_grad_reduce",
            "fsdp always overlaps",
        ),
        ("parallel.fsdp_reduce=step", "command line  parallel.fsdp_reduce", "needs fsdp, got fsdp=false"),
        (
            "parallel={overlap_grad_reduce: false, overlap_param_gather: true}",
            "command line  parallel.overlap_param_gather",
            "needs overlap_grad_reduce, got false",
        ),
        ("optim.schedule=wsd", "sft.yaml:8:1  optim.decay_steps", "wsd needs decay_steps"),
        ("optim.decay_steps=5", "command line  optim.decay_steps", "is for schedule wsd, got cosine"),
        ("optim={schedule: wsd, decay_steps: 5, schedule_steps: 9}", "command line", "is for schedules cosine, linear"),
        ("optim={schedule_steps: 5, warmup_steps: 5}", "command line", "must be larger than warmup_steps=5; raise it"),
        ("optim.muon_lr=0.1", "command line  optim.muon_lr", "is for optimizer=muon, got adamw"),
        ("optim={optimizer: muon, offload: true}", "command line", "offload=true is for optimizer=adamw, got muon"),
        ("optim.min_lr=1", "command line  optim.min_lr", "above lr=1e-05"),
        ("data={valid_fraction: 0.5, test_fraction: 0.6, files: [a]}", "command line", "leave no training samples"),
        ("optim.warmup_steps=100", "command line  optim.warmup_steps", "does not fit in train.steps=100"),
        ("optim={schedule: wsd, warmup_steps: 60, decay_steps: 60}", "command line", "do not fit in train.steps=100"),
        ("train.micro_batch_size=3", "sft.yaml:6:1  train.global_batch_size", "use 15 or 18 sequences"),
        ("train.micro_batch_size=32", "sft.yaml:6:1  train.global_batch_size", "use 32 sequences"),
        ("train.global_batch_size=0", "command line", "must be greater than or equal to 1, got 0"),
        ("train.steps=1.5", "command line", "must be a valid integer, got 1.5"),
        ("train.precision=fp64", "command line", "must be 'fp32', 'bf16', 'fp16' or 'fp8', got 'fp64'"),
        ("train.fp8_scaling=rowwise", "command line  train.fp8_scaling", "is for precision=fp8, got None"),
        ("train.loss_scale_window=9", "command line  train.loss_scale_window", "is for precision=fp16, got None"),
        ("train.recompute_layers=2", "command line  train.recompute_layers", "is for recompute=full, got none"),
        ("train.recompute_modules=[mlp]", "command line  train.recompute_modules", "is for recompute=selective"),
        ("train={steps: 9, precision: fp16, fp8_format: e4m3}", "command line", "fp8_format is for precision=fp8"),
        (
            "train.recompute_modules=[]",
            "command line  train.recompute_modules",
            "must not be empty; use core_attn, mlp, moe, layernorm",
        ),
        ("train.recompute_modules=[norm]", "command line", "'layernorm', 'mlp_act', 'moe_act' or 'rope', got 'norm'"),
        ("data.files=[]", "command line  data.files", "is missing: Training files"),
        ("data.files={a: 1}", "command line", "data.files is a setting and not a section"),
        ("data.files=''", "command line  data.files.0", "must have at least 1 character"),
        ("data.files=3", "command line", "must be a list, got 3"),
        ("data.files=", "command line", "must be a list"),
        ("out=", "command line  out", "must have at least 1 character"),
        ("optim.lr=.inf", "command line", "must be a finite number"),
        ("optim.lr=[", "command line  optim.lr=[", "the value is not YAML"),
        ("parallel=4", "command line  parallel", "is a section, with settings such as parallel.tp; got 4"),
        ("out.deep=3", "command line  out.deep", "out is a setting and not a section"),
        ("recipe=pretrain", "command line  recipe", "the command is sft"),
        ("=3", "command line  =3", "not an override"),
    ],
)
def test_invalid_settings(tmp_path: Path, override: str, place: str, part: str) -> None:
    (line,) = refused(tmp_path, GOOD, override)
    assert line.startswith(place) and part in line


def test_hints_for_text_in_place_of_numbers_and_booleans(tmp_path: Path) -> None:
    (line,) = refused(tmp_path, GOOD.replace("runs/a", "007"))
    assert line.startswith("sft.yaml:1:1  out  must be text, got 7")
    config = load_config("sft", write(tmp_path, GOOD.replace("runs/a", "2026-11-21")))  # YAML 1.2 has no dates
    assert config.out == "2026-11-21" and 'out: "2026-11-21"' in dump(config).replace("'", '"')


def test_chat_settings_are_refused_for_plain_text(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"data.loss_on .*is for the chats of sft"):
        load_config("pretrain", None, ["data.loss_on=all"], FLAGS)
    with pytest.raises(UsageError, match=r"chat.system is for chats, got recipe pretrain; leave it out"):
        load_config("pretrain", None, ["chat.system=Hi"], FLAGS)
    for recipe in ("sft", "dpo"):
        with pytest.raises(UsageError, match=r"eod_mask_loss is for the documents of pretraining. Leave it out"):
            load_config(recipe, None, ["data.eod_mask_loss=false"], FLAGS)
    config = load_config("pretrain", None, [], FLAGS)
    assert load_config("pretrain", write(tmp_path, dump(config))) == config


def test_mock_data_needs_steps_and_has_no_files(tmp_path: Path) -> None:
    flags = FLAGS | {"data": None}
    config = load_config("sft", None, ["data.mock=true", "train.steps=3", "data.length_buckets=[512, 2048]"], flags)
    assert load_config("sft", write(tmp_path, dump(config))) == config
    with pytest.raises(UsageError) as caught:
        load_config("sft", None, ["data.mock=true", "data.valid_files=v.json", "train.epochs=2"], flags)
    assert "give train.steps" in str(caught.value) and "valid_files is for data files" in str(caught.value)


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["data.length_buckets=[64, 32, 64]"], "use [32, 64]"),
        (["data.length_buckets=[33, 64]", "parallel.tp=2", "data.seq_length=64"], "got 33; use 34"),
        (["data.length_buckets=[32, 64]", "parallel.cp=2", "data.seq_length=65", "parallel.tp=2"], "add 72"),
        (["data.length_buckets=[64]", "train.micro_batch_size=2", "data.seq_length=64"], "add 128"),
        (["data.length_buckets=[0, 2048]"], "greater than or equal to 1"),
    ],
)
def test_buckets_that_do_not_fit_packed_sequences(words: list[str], hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        load_config("sft", None, words, FLAGS)
    assert "data.length_buckets" in str(caught.value) and hint in str(caught.value)


def test_settings_of_another_recipe_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"dpo.beta .*beta=0.2 is for recipe dpo, got sft"):
        load_config("sft", None, ["dpo.beta=0.2"], FLAGS)
    with pytest.raises(UsageError, match=r"data.loss_on .*is for the chats of sft"):
        load_config("dpo", None, ["data.loss_on=all"], FLAGS)
    with pytest.raises(UsageError, match=r"length_buckets is for packed single samples"):
        load_config("dpo", None, ["data.length_buckets=[4096]"], FLAGS)
    with pytest.raises(UsageError, match=r"label_smoothing=0.1 is for loss=sigmoid, .* got ipo"):
        load_config("dpo", None, ["dpo.label_smoothing=0.1", "dpo.loss=ipo"], FLAGS)
    with pytest.raises(UsageError, match=r"export_merged=false exports adapters alone, and this run has none"):
        load_config("sft", None, ["checkpoint.export_merged=false"], FLAGS)
    config = load_config("dpo", None, ["dpo.beta=0.2", "data.overlong=drop"], FLAGS)
    assert load_config("dpo", write(tmp_path, dump(config))) == config


def test_files_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MissingInput, match="no such config file"):
        load_config("sft", tmp_path / "absent.yaml")
    with pytest.raises(MissingInput, match="no such config file"):
        load_config("sft", tmp_path)
    bad = tmp_path / "bad.yaml"
    bad.write_bytes(b"out: \xff\xfe\n")
    with pytest.raises(UsageError, match=r"not UTF-8 text \(byte 5\)"):
        load_config("sft", bad)

    def denied(*_args: object, **_kwargs: object) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", denied)
    with pytest.raises(IOFailure, match="Permission denied"):
        load_config("sft", bad)


def test_the_config_is_frozen() -> None:
    config = load_config("sft", None, [], FLAGS)
    with pytest.raises(ValueError, match="frozen"):
        config.train.steps = 3  # type: ignore[misc]
    assert isinstance(config, RunConfig)


def test_consequences_of_an_error_are_not_reported(tmp_path: Path) -> None:
    text = """
        out: run
        model: {init: hfs}
        data: {files: [a], mock: true, seq_length: "12"}
        parallel: {sp: true, vpp: 2, tq: 4}
        train: {steps: 5, epochs: 2, precision: fp9, fp8_scaling: rowwise, recompute_layers: 3}
        optim: {warmup_steps: 10, min_lr: 1}
    """
    lines = refused(tmp_path, dedent(text))[1:]
    assert {line.split()[1] for line in lines} == {
        *("model.init", "model.path", "data.seq_length", "data.mock", "parallel.tq", "parallel.sp", "parallel.vpp"),
        *("train.precision", "train.recompute_layers", "train.epochs", "optim.min_lr", "optim.warmup_steps"),
    }
    assert all(line.split()[0].startswith("sft.yaml:") or "is missing" in line for line in lines)


@pytest.mark.parametrize(
    ("recipe", "full", "adapters"),
    [
        ("sft", (2e-5, 0.03), (2e-4, 0.03)),
        ("distill", (2e-5, 0.03), (2e-4, 0.03)),
        ("dpo", (5e-7, 0.1), (5e-6, 0.1)),
        ("kto", (1e-6, 0.1), (5e-6, 0.1)),
        ("reward", (1e-5, 0.03), (1e-4, 0.03)),
        ("pretrain", (2e-5, 0.01), (2e-4, 0.01)),
    ],
)
def test_learning_rate_and_warmup_are_those_of_the_recipe(
    recipe: str, full: tuple[float, float], adapters: tuple[float, float]
) -> None:
    base = ["distill.teacher=t"] if recipe == "distill" else []

    def optim(*overrides: str) -> tuple[float, float]:
        config = load_config(recipe, None, [*base, *overrides], FLAGS)
        assert load_config(recipe, None, [], replaced=config.model_dump(mode="json")) == config
        return config.optim.lr, config.optim.warmup_fraction

    assert optim() == full and optim("lora.rank=8") == optim("lora.path=a") == adapters
    scratch = optim("model.init=random")
    assert scratch == ((3e-4, 0.01) if recipe == "pretrain" else full)
    assert optim("optim.lr=1", "lora.rank=8") == (1, adapters[1])  # each is independent of the other
    assert optim("optim.warmup_steps=0") == (full[0], 0) and optim("optim.warmup_fraction=0.5") == (full[0], 0.5)
    assert optim("optim.schedule=inverse_sqrt", "optim.warmup_steps=3")[1] == 0
    assert optim("optim.schedule=wsd", "optim.decay_steps=3")[1] == 0
    assert optim("optim.schedule=constant") == (full[0], 0) and optim("optim.lr=null") == full
