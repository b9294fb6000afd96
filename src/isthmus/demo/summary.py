"""Result table of the demo."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from isthmus.demo.run_demo import DemoResult


def print_summary(result: DemoResult) -> None:
    table = Table(title="Results")
    for column in ("", "before", "after", "chance"):
        table.add_column(column, justify="right" if column else "left")
    table.add_row("pretraining: validation loss", *(f"{loss:.3f}" for loss in result.pretrain_loss), "")
    table.add_row("fine-tuning: held-out loss", *(f"{loss:.3f}" for loss in result.sft_loss), "")
    for topic, scores in result.exact_match.items():
        table.add_row(f"held-out exact match: {topic}", *(f"{score:.0%}" for score in scores.values()))
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
