"""Demo: create a tiny model and data, pretrain, fine-tune with a stop and resume, export, compare, generate.

The demo runs isthmus commands, then evaluates the exported model with transformers on questions about names that no
training sample mentions.
"""

from __future__ import annotations

import json
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from isthmus.errors import CheckFailed, IsthmusError, OutputExists
from isthmus.tools.demo.python_docs import python_documentation
from isthmus.tools.demo.questions import Question, chance_level, exact_match, make_questions, split_entries

PRETRAIN_STEPS, SFT_STEPS = 200, 500
TOLERANCE = 1e-4
EVALUATED_PER_TOPIC = 100
Log = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class DemoResult:
    pretrain_loss: tuple[float, float]
    """Validation loss before the first and after the last step."""
    sft_loss: tuple[float, float]
    """Loss on the validation questions, before and after."""
    exact_match: dict[str, dict[str, float]]
    """Scores by topic and for all validation questions: exact match before and after fine-tuning, and chance level."""
    examples: list[tuple[str, str, str]]
    """(validation question, model's answer, correct answer)"""
    tokens_per_s: float
    resumed_at_step: int
    logits_difference: float
    """Largest absolute difference of the export's float32 logits between transformers and Megatron-Core."""
    model: str
    run: str
    time_s: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def run(out: Path, *, nproc: int = 2, debug: bool = False, log: Log = print, show: Log = lambda _: None) -> DemoResult:
    """Run the demo in ``out``, a new folder, on ``nproc`` tensor-parallel ranks.

    ``debug`` shows the output of the commands, which otherwise goes to files in ``out``. ``show`` gets what is being
    done, several times a second.

    Raises:
        OutputExists: ``out`` exists.
        CheckFailed: the logits of the export differ from those of the trained model.
        IsthmusError: a command failed; it has the command's exit code.
    """
    started_s = time.monotonic()
    out = Path(out).absolute()
    log("1. Data: the documentation of this Python's standard library")
    show("reading documentation, training a tokenizer")
    training, validation = _make_data(out, log)
    common = ["--nproc", str(nproc), f"parallel.tp={nproc}", "data.seq_length=256", "train.precision=fp32"]
    common += ["optim.warmup_steps=10", "optim.lr=4e-3"]

    log(f"2. Pretrain: {PRETRAIN_STEPS} steps on Megatron-Core with {nproc} tensor-parallel ranks")
    pretrained, tuned = out / "pretrain", out / "sft"
    arguments = ["pretrain", "--model", str(out / "model"), "--data", str(out / "documents.jsonl"), *common]
    arguments += [f"train.steps={PRETRAIN_STEPS}", "train.global_batch_size=4", "train.micro_batch_size=4"]
    _command([*arguments, "checkpoint.save_final=false"], pretrained, log, show, debug=debug)

    half = SFT_STEPS // 2
    log(f"3. Fine-tune: {SFT_STEPS} steps on the questions; after step {half} the run gets SIGTERM")
    arguments = ["sft", "--model", str(pretrained / "hf"), "--data", str(out / "chats.jsonl"), *common]
    arguments += [f"data.valid_files={out / 'valid-chats.jsonl'}", f"train.steps={SFT_STEPS}"]
    arguments += ["train.global_batch_size=3", "train.micro_batch_size=3"]
    _command(arguments, tuned, log, show, debug=debug, stop_after=half)
    resumed_at = max(int(path.name.removeprefix("iter_")) for path in (tuned / "checkpoints").glob("iter_*"))
    log("4. The same command again: it resumes from the checkpoint and exports a Hugging Face model")
    _command(arguments, tuned, log, show, debug=debug)

    log("5. The exported model in transformers: logits, and answers to validation questions")
    show("logits of transformers and Megatron-Core")
    difference = logits_difference(tuned / "hf", out / "valid-chats.jsonl")
    if difference > TOLERANCE:
        raise CheckFailed(f"logits of {tuned / 'hf'} in transformers and Megatron-Core differ by {difference:.2e}.")
    show(f"{len(validation)} questions, after fine-tuning")
    answers = _answers(tuned / "hf", validation)
    show(f"{len(validation)} questions, before fine-tuning")
    before = _answers(pretrained / "hf", validation)
    shown = [questions[7 * i] for i, questions in enumerate(_by_topic(validation).values())]
    losses, pretrain_losses = _metrics(tuned, "valid_loss"), _metrics(pretrained, "valid_loss")
    return DemoResult(
        pretrain_loss=(pretrain_losses[0], pretrain_losses[-1]),
        sft_loss=(losses[0], losses[-1]),
        exact_match=_scores(training, validation, before, answers),
        examples=[(question.text, answers[question], question.answer) for question in shown],
        tokens_per_s=statistics.median_high(_metrics(tuned, "tokens_per_s")),
        resumed_at_step=resumed_at,
        logits_difference=difference,
        model=str(tuned / "hf"),
        run=str(tuned),
        time_s=time.monotonic() - started_s,
    )


def _make_data(out: Path, log: Log) -> tuple[list[Question], list[Question]]:
    """Write documents, questions and the model; returns training and validation questions."""
    from isthmus.hf.tiny_model import QWEN_PATTERN, build_tiny_qwen3

    if out.exists():
        raise OutputExists(f"{out} exists already. Remove it or choose another folder with --out.")
    out.mkdir(parents=True)
    training, validation = split_entries(python_documentation())
    questions, unseen = make_questions(training), make_questions(validation)
    evaluated = [question for some in _by_topic(unseen).values() for question in some[:EVALUATED_PER_TOPIC]]
    _write(out / "documents.jsonl", ({"text": entry.document} for entry in training))
    _write(out / "chats.jsonl", map(_chat, questions))
    _write(out / "valid-chats.jsonl", map(_chat, evaluated))
    log(f"   {len(training)} documents, {len(questions)} questions; none has one of {len(validation)} validation names")
    texts = [entry.document for entry in training] + [question.text for question in questions]
    sizes: dict[str, Any] = {"vocab_size": 2048, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 3}
    sizes |= {"num_attention_heads": 4, "head_dim": 64}
    model = build_tiny_qwen3(out / "model", texts, **sizes, pattern=QWEN_PATTERN, scaled_init=True)
    log(f"   {model}: a Qwen3 model with random weights, and a tokenizer trained on the documents")
    return questions, evaluated


def _by_topic(questions: list[Question]) -> dict[str, list[Question]]:
    return {topic: [q for q in questions if q.topic == topic] for topic in sorted({q.topic for q in questions})}


def _chat(question: Question) -> dict[str, object]:
    return {"messages": [*question.prompt, {"role": "assistant", "content": question.answer}]}


def _write(path: Path, records: Iterable[dict[str, object]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def _answers(model_folder: Path, questions: list[Question]) -> dict[Question, str]:
    from isthmus.hf.tiny_model import generate

    answers = generate(model_folder, [question.prompt for question in questions], max_new_tokens=24)
    return dict(zip(questions, map(str.strip, answers), strict=True))


def _scores(
    training: list[Question], validation: list[Question], before: dict[Question, str], after: dict[Question, str]
) -> dict[str, dict[str, float]]:
    return {
        topic: {
            "before": exact_match(questions, [before[question] for question in questions]),
            "after": exact_match(questions, [after[question] for question in questions]),
            "chance": chance_level(questions, training),
        }
        for topic, questions in (_by_topic(validation) | {"all": validation}).items()
    }


def _command(
    arguments: list[str], run_dir: Path, log: Log, show: Log, *, debug: bool, stop_after: int | None = None
) -> None:
    """Run one isthmus command. With ``stop_after``, send SIGTERM at that step and expect exit code 75."""
    command = [sys.executable, "-m", "isthmus", *arguments, "--out", str(run_dir)]
    log_file = run_dir.with_suffix(".log")
    with ExitStack() as stack:
        output = None if debug else stack.enter_context(log_file.open("a", encoding="utf-8"))
        process = subprocess.Popen(command, stdout=output, stderr=output and subprocess.STDOUT)
        started = len(_metrics(run_dir, "loss"))
        stopped, logged = False, started // 100
        show(f"isthmus {arguments[0]} starts; its output is in {log_file}")
        try:
            while process.poll() is None:
                losses = _metrics(run_dir, "loss")
                if len(losses) > started:
                    show(f"step {len(losses)}, loss {losses[-1]:.3f}")
                if len(losses) // 100 > logged:
                    logged = len(losses) // 100
                    log(f"   step {logged * 100}: loss {losses[logged * 100 - 1]:.3f}")
                if stop_after and not stopped and len(losses) >= stop_after:
                    process.send_signal(signal.SIGTERM)
                    stopped = True
                time.sleep(0.2)
        except BaseException:
            process.terminate()
            process.wait()
            raise
    expected = 75 if stop_after else 0
    if process.returncode != expected:
        shown = "" if debug else f" Its output is in {log_file}."
        error = IsthmusError(
            f"`isthmus {' '.join(arguments)}` exited with {process.returncode}, not {expected}.{shown}"
        )
        error.exit_code = process.returncode or error.exit_code
        raise error


def _metrics(run_dir: Path, key: str) -> list[float]:
    path = run_dir / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    rows = (json.loads(line) for line in lines if line.endswith("}"))
    return [float(row[key]) for row in rows if key in row]


def logits_difference(model_folder: Path, text_file: Path, *, max_tokens: int = 256) -> float:
    """Largest absolute difference of a model's float32 logits between transformers and Megatron-Core."""
    import torch

    from isthmus.engine.parallel.process_groups import close_groups
    from isthmus.hf.tiny_model import logits
    from isthmus.hf.tokenizer.tokenizer import load_tokenizer
    from isthmus.recipes.model.load_model import load_model, model_logits

    text = text_file.read_text(encoding="utf-8")[:4000]
    ids = torch.tensor(load_tokenizer(model_folder).encode(text)[:max_tokens])
    expected = logits(model_folder, ids[None])[0]
    try:
        return float((model_logits(load_model(model_folder), ids) - expected).abs().max())
    finally:
        close_groups()


def print_summary(result: DemoResult) -> None:
    table = Table(title="Results")
    for column in ("", "before", "after", "chance"):
        table.add_column(column, justify="right" if column else "left")
    table.add_row("pretraining: validation loss", *(f"{loss:.3f}" for loss in result.pretrain_loss), "")
    table.add_row("fine-tuning: validation loss", *(f"{loss:.3f}" for loss in result.sft_loss), "")
    for topic, scores in result.exact_match.items():
        table.add_row(f"exact match: {topic}", *(f"{score:.0%}" for score in scores.values()))
    console = Console(highlight=False)
    console.print(table)
    for question, answer, expected in result.examples:
        mark = "correct" if answer == expected else f"expected: {expected}"
        console.print(f"  Q: {question}\n  A: {answer}   ({mark})", markup=False)
    console.print(
        f"\nLogits of the export, transformers against Megatron-Core: largest difference {result.logits_difference:.1e}"
        f"\nStopped and resumed at step {result.resumed_at_step}; {result.tokens_per_s:,.0f} tokens/s; "
        f"{result.time_s:.0f} s in total\nModel: {result.model}\nRun:   {result.run}"
        f"\nNext:  isthmus sft --model {result.model} --data YOUR.jsonl --out runs/first --nproc 2 parallel.tp=2",
        markup=False,
        soft_wrap=True,
    )
