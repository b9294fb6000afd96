"""Sample answers, model cards, publication, and evaluation with lm-evaluation-harness, in real commands."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from transformers import AutoModelForCausalLM, AutoTokenizer

from faults.command import CompletedCommand, rows
from faults.fork_server import ForkServer
from faults.hosts import rank_variables
from isthmus.errors import UsageError

PROMPTS = ["Say the number 5.", "Say the number 61."]


def greedy_answer(folder: Path, prompt: str, new_tokens: int) -> str:
    """The answer of transformers."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    messages = [{"role": "user", "content": prompt}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
    with torch.no_grad():
        answer = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False)
    return str(tokenizer.decode(answer[0, ids.size(1) :], skip_special_tokens=True))


def test_answers_at_each_evaluation(isthmus: ForkServer, sft_args: list[str], tmp_path: Path) -> None:
    """Also of a resumed run, which answers again at the step from which it resumes; at the end as transformers do."""
    prompts = tmp_path / "prompts.jsonl"
    chat = {"messages": [{"role": "user", "content": PROMPTS[1]}]}
    prompts.write_text(json.dumps(PROMPTS[0]) + "\n\n" + json.dumps(chat) + "\n")
    more = ["train.eval_every=2", "eval.generate=true", f"eval.prompts={prompts}", "eval.max_new_tokens=8"]
    more += ["train.precision=fp32"]
    first = isthmus(*sft_args, *more, "train.steps=3", "optim.schedule=constant")
    assert first.returncode == 0, first.stderr
    out = tmp_path / "out"
    assert [row["step"] for row in rows(out, "samples.jsonl")] == [0, 0, 2, 2, 3, 3]
    done = isthmus(*sft_args, *more, "train.steps=8", "train.eval_every=4", "optim.schedule=constant")
    assert done.returncode == 0, done.stderr
    results = rows(out, "samples.jsonl")
    assert [row["step"] for row in results] == [0, 0, 2, 2, 3, 3, 4, 4, 8, 8]
    assert [row["prompt"] for row in results[-2:]] == PROMPTS
    for row in results[-2:]:
        assert row["answer"] == greedy_answer(out / "hf", row["prompt"], 8) and row["answer"]
    assert "(samples.jsonl)" in done.stderr and f"{PROMPTS[0]} -> " in done.stderr


def test_push(isthmus: ForkServer, sft_args: list[str], tmp_path: Path) -> None:
    """The access is checked before training; a failed upload leaves the finished run."""
    out = tmp_path / "out"

    def run(fault: str, *more: str) -> CompletedCommand:
        return isthmus.start(*sft_args, *more, cwd=tmp_path, FAULT=fault).result()

    assert "the token of me can only read" in run("hub read-only", "--push", "me/model").error(2)
    line = run("hub", "--push", "others/model").error(2)
    assert "--push others/model: me can write to me, team" in line
    assert not out.exists() and not (tmp_path / "hub.jsonl").exists()
    broken = run("hub broken", "--push", "team/model", "lora.rank=2")
    line = broken.error(74)
    assert f"{out / 'hf'} and {out / 'adapter'} is complete, but was not pushed to team/model" in line
    assert line.endswith(f"hf upload team/model {out / 'hf'} && hf upload team/model {out / 'adapter'} adapter")
    assert [row["step"] for row in rows(out) if "loss" in row] == [1, 2, 3, 4]
    assert ModelCard.load(out / "adapter" / "README.md").data["library_name"] == "peft"
    (tmp_path / "hub.jsonl").unlink()

    pushed = run("hub", "--push", "team/model", "lora.rank=2").result
    assert pushed["pushed"] == "https://hub/team/model"
    created, model, adapter = (json.loads(line) for line in (tmp_path / "hub.jsonl").read_text().splitlines())
    assert created == {"create": "team/model", "private": True, "exist_ok": True}
    assert (model["upload"], model["path_in_repo"]) == (str(out / "hf"), None)
    assert {"README.md", "config.json", "model.safetensors", "tokenizer.json"} <= {*model["files"]}
    assert (adapter["upload"], adapter["path_in_repo"]) == (str(out / "adapter"), "adapter")
    card = ModelCard.load(out / "hf" / "README.md")
    assert card.data["tags"] == ["isthmus", "megatron-core", "sft", "lora"] and "| training | 4 |" in card.text


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a task of each kind of request, and its data."""
    folder = tmp_path_factory.mktemp("tasks")
    data = folder / "questions.json"
    records = [
        {"question": f"Say the number {number}.", "choices": [str(number), "seven eight", "The"], "answer": number % 3}
        for number in range(8)
    ]
    data.write_text(json.dumps(records))
    common = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data), "train": str(data)}},
        "test_split": "test",
        "fewshot_split": "train",
        "fewshot_config": {"sampler": "first_n"},
        "doc_to_text": "{{question}}",
    }
    kinds = {
        "numbers_choice": {
            "output_type": "multiple_choice", "doc_to_choice": "choices", "doc_to_target": "answer",
            "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
        },
        "numbers_text": {
            "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{question}} {{choices[1]}}",
            "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
        },
        "numbers_answer": {
            "output_type": "generate_until", "doc_to_target": "{{choices[0]}}",
            "generation_kwargs": {"until": ["er"], "max_gen_toks": 12},
            "metric_list": [{"metric": "exact_match"}],
        },
    }  # fmt: skip
    for name, kind in kinds.items():
        (folder / f"{name}.yaml").write_text(json.dumps({"task": name, **common, **kind}))
    return folder


def results_of_transformers(folder: Path, tasks: Path, **options: Any) -> dict[str, dict[str, Any]]:
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    result = simple_evaluate(
        "hf", {"pretrained": str(folder), "dtype": "float32"}, NAMES, device="cpu", batch_size=4,
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False), log_samples=False, **options,
    )  # fmt: skip
    return dict(result["results"])


NAMES = ["numbers_choice", "numbers_text", "numbers_answer"]


def numbers(results: dict[str, dict[str, Any]]) -> dict[str, float]:
    return {
        f"{task} {metric}": value
        for task, metrics in results.items()
        for metric, value in metrics.items()
        if isinstance(value, float)
    }


@pytest.mark.thorough
def test_tasks_of_lm_eval(isthmus: ForkServer, sft_args: list[str], tasks: Path, tmp_path: Path) -> None:
    """A folder in one process, and the checkpoint of the same run on two ranks, as in lm_eval's own hf model."""
    pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed (extra: eval)")
    out = tmp_path / "out"
    assert isthmus(*sft_args, "train.precision=fp32", "train.steps=20").returncode == 0
    args = ["--tasks", ",".join(NAMES), "--include-path", tasks, "train.precision=fp32", "--num-fewshot", "1"]
    expected = numbers(results_of_transformers(out / "hf", tasks, num_fewshot=1))
    assert len(expected) >= 6
    written = tmp_path / "results.json"
    alone = isthmus("eval", out, *args, "--out", written)
    assert alone.returncode == 0, alone.stderr
    assert "fatal: not a git repository" not in alone.stderr
    assert "|numbers_choice|" in alone.stdout and "acc_norm" in alone.stdout
    assert numbers(json.loads(written.read_text())["results"]) == pytest.approx(expected, rel=1e-5, abs=1e-6)
    command = ["eval", out / "checkpoints", *args, "--json", "parallel.tp=2", "--batch-tokens", "64"]
    ranks = isthmus.start_ranks([[([str(word) for word in command], variables) for variables in rank_variables(2)]])
    split, other = ranks.wait()
    assert (split.returncode, other.returncode, other.stdout) == (0, 0, ""), split.stderr + other.stderr
    results = json.loads(split.stdout)
    assert numbers(results["results"]) == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert results["n-shot"]["numbers_choice"] == 1 and results["config"]["model"] == str(out / "checkpoints")


def test_evaluations_that_cannot_run(isthmus: ForkServer, model: Path, tasks: Path) -> None:
    pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed (extra: eval)")
    args = ["eval", model, "--include-path", tasks]
    assert "--tasks is missing" in isthmus(*args).error(2)
    assert "optim.lr has no effect on an evaluation" in isthmus(*args, "--tasks", "numbers_text", "optim.lr=1").error(2)
    assert "is not a setting (key=value)" in isthmus(*args, "--tasks", "numbers_text", "more").error(2)
    args += ["--tasks", "numbers_choice"]
    assert "--limit 0 leaves no questions" in isthmus(*args, "--limit", "0").error(2)
    assert "its folder does not exist" in isthmus(*args, "--out", "nowhere/results.json").error(2)
    assert "does not exist" in isthmus("eval", "nowhere", "--tasks", "numbers_text").error(66)


def test_answer_longer_than_all_texts() -> None:
    """It would be scored without its beginning."""
    pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed (extra: eval)")
    from isthmus.tools.evaluate.harness_model import HarnessModel

    unused: Any = SimpleNamespace(inner=None)
    with pytest.raises(UsageError, match="answer of a task has 3 tokens, and the longest text has 2"):
        HarnessModel(unused, unused, set(), 2)._loglikelihood_tokens([(("", ""), [1], [1, 2, 3])])
