"""Draws the pictures of the report and of the live display, from two short runs on this machine.

    python docs/pictures.py DEMO_DIR

``DEMO_DIR`` is the folder of ``isthmus demo --out DEMO_DIR``. The runs are written to ``DEMO_DIR/pictures``, once. The
report is photographed by a headless Chromium (``apt-get install chromium``); Pillow reduces its colours.
"""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import fields
from pathlib import Path
from typing import Any
from unittest.mock import patch

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY / name) for name in ("src", "tests")]

from PIL import Image  # noqa: E402
from rich._export_format import CONSOLE_SVG_FORMAT  # noqa: E402
from rich.console import Console as RichConsole  # noqa: E402
from rich.text import Text  # noqa: E402

from isthmus.tools.report.write_report import write_report  # noqa: E402
from isthmus.train.console import Console  # noqa: E402
from isthmus.train.metrics import StepMetrics  # noqa: E402
from unit.tools.report.browser import browser  # noqa: E402

IMAGES = REPOSITORY / "docs" / "images"
STEPS = 120
LEARNING_RATES = ("4e-3", "2e-4")
COLUMNS = 100
LIVE_STEP, LIVE_LINES = 66, 14
REPORT_WIDTH = 1440
COLOURS = 128


def train(demo: Path, lr: str) -> Path:
    """The folder of a run; what it prints is in the folder above."""
    out = demo / "pictures" / f"lr-{lr}"
    if (out / "hf").is_dir():
        return out
    out.parent.mkdir(exist_ok=True)
    chats = [json.loads(line)["messages"] for line in (demo / "valid-chats.jsonl").read_text().splitlines()]
    questions = [{"prompt": chat[0]["content"]} for chat in chats[::100]]
    (out.parent / "prompts.jsonl").write_text("".join(json.dumps(question) + "\n" for question in questions))
    # Relative paths, since the pictures show them.
    command = [sys.executable, "-m", "isthmus", "sft", "--model", "pretrain/hf", "--out", str(out.relative_to(demo))]
    command += ["--data", "chats.jsonl", "data.valid_files=valid-chats.jsonl"]
    command += ["data.seq_length=256", "train.precision=fp32", "train.global_batch_size=4", "optim.warmup_steps=10"]
    command += [f"optim.lr={lr}", f"train.steps={STEPS}", "train.eval_every=20", "checkpoint.every=50"]
    command += ["eval.generate=true", "eval.prompts=pictures/prompts.jsonl", "eval.max_new_tokens=16"]
    path = os.pathsep.join([str(REPOSITORY / "src"), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path}
    with (out.parent / f"output-{lr}.txt").open("w") as output:
        subprocess.run(command, stdout=output, stderr=output, check=True, cwd=demo, env=environment)
    return out


def draw_live(run: Path, output: Path) -> None:
    """The printed lines of a run until a step, and the bar of this step, as SVG."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "loss" in row and row["step"] <= LIVE_STEP]
    lines = output.read_text().splitlines()
    last = next(index for index, line in enumerate(lines) if re.match(rf"step +{LIVE_STEP}/", line))
    terminal = RichConsole(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, highlight=False)
    for line in lines[last + 1 - LIVE_LINES : last + 1]:
        terminal.print(Text(line), soft_wrap=True)
    terminal.print(bar_of(rows, steps))
    # The fonts of rich are files of another host.
    page = re.sub(r"@font-face \{\{.*?\}\}\n", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    page = page.replace("Fira Code, monospace", "Fira Code, DejaVu Sans Mono, Menlo, Consolas, monospace")
    svg = terminal.export_svg(title="isthmus sft", code_format=page, unique_id="live")
    assert "http" not in svg.replace("http://www.w3.org/2000/svg", "").replace("https://www.textualize.io", "")
    (IMAGES / "live.svg").write_text(svg + "\n")


def bar_of(rows: list[dict[str, Any]], steps: list[dict[str, Any]]) -> Any:
    """What a run shows below its lines, after the last of ``steps``."""
    first, now = steps[0], steps[-1]
    names = {field.name for field in fields(StepMetrics)}
    left_s = (now["time_s"] - first["time_s"]) / (now["step"] - first["step"]) * (STEPS - now["step"])
    validations = [row["valid_loss"] for row in rows if "valid_loss" in row and row["step"] <= now["step"]]
    console = Console("bar")
    with patch.object(sys, "stderr", io.StringIO()), patch.dict(os.environ, {"COLUMNS": str(COLUMNS)}):
        console.show_progress(STEPS)
        console.validated(validations[-1])
        console.advance(StepMetrics(**{name: now[name] for name in names & now.keys()}), STEPS, left_s)
        assert console._bar is not None
        bar = console._bar[0].get_renderable()
        console.close()
    return bar


def draw_report(demo: Path, runs: list[Path]) -> None:
    """The top of the report of two runs."""
    with tempfile.TemporaryDirectory() as folder:
        page_file = Path(folder) / "report.html"
        os.chdir(demo)
        write_report(runs, page_file)
        with browser(Path(folder) / "profile") as page:
            page.open(page_file, width=REPORT_WIDTH)
            assert page.problems() == []
            bottom = page.ask("document.querySelectorAll('.panels')[1].getBoundingClientRect().bottom")
            page.screenshot(IMAGES / "report.png", height=round(bottom) + 20)
    with Image.open(IMAGES / "report.png") as image:
        image.convert("RGB").quantize(COLOURS).save(IMAGES / "report.png", optimize=True)


def main() -> None:
    demo = Path(sys.argv[1]).resolve()
    runs = [train(demo, lr) for lr in LEARNING_RATES]
    draw_live(runs[0], demo / "pictures" / f"output-{LEARNING_RATES[0]}.txt")
    draw_report(demo, runs)


if __name__ == "__main__":
    main()
