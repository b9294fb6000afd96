"""The whole way in a few minutes on a laptop: a model and real text are made, trained, exported and put to use.

Everything is done by the commands a user would type; the demo only prepares their input, stops one of them half way
to show that it goes on, and looks at what came out.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from isthmus.errors import CheckFailed, IsthmusError, NoSpace

QUESTION = "What does str.split do?"
TOLERANCE = 1e-4


@dataclass(frozen=True, slots=True)
class DemoResult:
    """The figures of the closing table."""

    pretrain_loss_before: float
    pretrain_loss_after: float
    sft_loss_before: float
    sft_loss_after: float
    tokens_per_s: float
    resumed_at_step: int
    logits_difference: float
    """Largest absolute difference in float32 between transformers' logits of the export and Megatron-Core's."""
    answer: str
    model: str
    run: str
    time_s: float

    def as_dict(self) -> dict[str, Any]:
        """All fields by name."""
        return asdict(self)


def run(
    out: Path, *, nproc: int = 2, pretrain_steps: int = 120, sft_steps: int = 100, say: Callable[[str], None] = print
) -> DemoResult:
    """Build, pretrain, fine-tune with one stop on the way, export, compare, generate.

    Args:
        out: a folder that does not exist yet.
        nproc: ranks, all tensor parallel.
        pretrain_steps: optimizer steps on the documents.
        sft_steps: optimizer steps on the chats.
        say: told what is going on.

    Raises:
        NoSpace: ``out`` exists.
        CheckFailed: the export's logits differ from the trained model's.
        IsthmusError: a step failed, with the exit code of its command.
    """
    started_s = time.monotonic()
    out = Path(out).absolute()
    if out.exists():
        raise NoSpace(f"{out} exists already. Remove it or choose another folder with --out.")
    out.mkdir(parents=True)
    model, documents, chats = _make_input(out, say)
    common = ["--nproc", str(nproc), f"parallel.tp={nproc}", "train.global_batch_size=8", "train.micro_batch_size=8"]
    common += ["data.seq_length=256", "optim.warmup_steps=10", "logging.every=20", "train.precision=fp32"]

    say(f"\n1. Pretraining on {documents.name}: {nproc} ranks, tensor parallel, on Megatron-Core")
    pretrained = out / "pretrain"
    arguments = ["pretrain", "--model", str(model), "--data", str(documents), "--out", str(pretrained), *common]
    _command([*arguments, f"train.steps={pretrain_steps}", "optim.lr=4e-3", "checkpoint.save_final=false"])
    before_text, after_text = _valid_losses(pretrained)

    tuned = out / "sft"
    arguments = ["sft", "--model", str(pretrained / "hf"), "--data", str(chats), "--out", str(tuned), *common]
    arguments += [f"train.steps={sft_steps}", "optim.lr=2e-3"]
    half = sft_steps // 2
    say(f"\n2. Fine-tuning on {chats.name}; after step {half} it is told to stop, as a cluster would")
    _command(arguments, stop_after=(tuned / "metrics.jsonl", half))
    say("\n3. The same command again: it goes on from the checkpoint and exports")
    _command(arguments)
    before_chat, after_chat = _valid_losses(tuned)
    rows = _rows(tuned)
    resumed_at = max(
        int(path.name.removeprefix("iter_"))
        for path in (tuned / "checkpoints").glob("iter_*")
        if path.name != f"iter_{sft_steps:07d}"
    )

    say("\n4. The export in transformers: same logits, and an answer")
    exported = tuned / "hf"
    difference = logits_difference(exported, chats)
    if difference > TOLERANCE:
        raise CheckFailed(f"logits of {exported} in transformers and Megatron-Core differ by {difference:.2e}.")
    from isthmus.hf.tiny_model import generate

    answer = generate(exported, [{"role": "user", "content": QUESTION}], max_new_tokens=48)
    speeds = sorted(row["tokens_per_s"] for row in rows)
    return DemoResult(
        pretrain_loss_before=before_text,
        pretrain_loss_after=after_text,
        sft_loss_before=before_chat,
        sft_loss_after=after_chat,
        tokens_per_s=speeds[len(speeds) // 2],
        resumed_at_step=resumed_at,
        logits_difference=difference,
        answer=answer,
        model=str(exported),
        run=str(tuned),
        time_s=time.monotonic() - started_s,
    )


def _make_input(out: Path, say: Callable[[str], None]) -> tuple[Path, Path, Path]:
    from isthmus.demo.python_docs import python_documentation, write_chats, write_texts
    from isthmus.hf.tiny_model import build_tiny_qwen3

    say("0. Making the input from this Python's own documentation")
    entries = python_documentation()
    documents, chats = out / "documents.jsonl", out / "chats.jsonl"
    write_texts(entries, documents)
    write_chats(entries, chats)
    model = build_tiny_qwen3(out / "model", (entry.document for entry in entries))
    say(f"   {len(entries)} entries; a Qwen3 model with random weights and a tokenizer trained on them in {model}")
    return model, documents, chats


def _command(arguments: list[str], *, stop_after: tuple[Path, int] | None = None) -> None:
    """Run one isthmus command; with ``stop_after`` send SIGTERM once its metrics reach that step and expect 75."""
    process = subprocess.Popen([sys.executable, "-m", "isthmus", *arguments], env=os.environ)
    stopped = False
    try:
        while process.poll() is None:
            if stop_after and not stopped and _last_step(stop_after[0]) >= stop_after[1]:
                process.send_signal(signal.SIGTERM)
                stopped = True
            time.sleep(0.05)
    except BaseException:
        process.terminate()
        process.wait()
        raise
    wanted = 75 if stopped else 0
    if process.returncode != wanted:
        error = IsthmusError(f"`isthmus {' '.join(arguments)}` ended with code {process.returncode}, not {wanted}.")
        error.exit_code = process.returncode or error.exit_code
        raise error


def _rows(run_folder: Path) -> list[dict[str, Any]]:
    lines = (run_folder / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if "tokens_per_s" in row]


def _last_step(metrics: Path) -> int:
    if not metrics.exists():
        return 0
    steps = [json.loads(line).get("step", 0) for line in metrics.read_text().splitlines() if line.endswith("}")]
    return max(steps, default=0)


def _valid_losses(run_folder: Path) -> tuple[float, float]:
    """Held-out loss before the first and after the last step."""
    lines = map(json.loads, (run_folder / "metrics.jsonl").read_text().splitlines())
    losses = [float(row["valid_loss"]) for row in lines if "valid_loss" in row]
    return losses[0], losses[-1]


def logits_difference(model_folder: Path, chats: Path, *, max_tokens: int = 256) -> float:
    """Largest absolute difference of the float32 logits of a model folder between transformers and Megatron-Core."""
    import torch

    from isthmus.engine.parallel.process_groups import close_groups
    from isthmus.hf.tiny_model import logits
    from isthmus.hf.tokenizer.tokenizer import load_tokenizer
    from isthmus.recipes.setup.load_model import load_model, model_logits

    text = chats.read_text(encoding="utf-8")[:4000]
    ids = torch.tensor(load_tokenizer(model_folder).encode(text)[:max_tokens])
    expected = logits(model_folder, ids[None])[0]
    try:
        return float((model_logits(load_model(model_folder), ids) - expected).abs().max())
    finally:
        close_groups()
