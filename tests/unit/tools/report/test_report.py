"""Reports of runs: everything recorded is shown, as text, in one small file."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

import isthmus.tools.report
from isthmus.cli.main import main
from isthmus.config.load import dump, load_config
from isthmus.errors import DataError, MissingInput, UsageError
from isthmus.hf.tiny_model import train_tokenizer
from isthmus.hf.tokenizer.tokenizer import save_tokenizer
from isthmus.recipes.run_dir import RunDir
from isthmus.tools.report.curves import panels, thinned
from isthmus.tools.report.run_history import RunHistory, Series, read_history
from isthmus.tools.report.write_report import write_report
from unit.tools.report.browser import CHROMIUM, browser
from unit.tools.report.runs import HOSTILE, STEPS, make_run, write_lines

PANELS = 12


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report") / "tokenizer"
    save_tokenizer(train_tokenizer(["say and answer"], vocab_size=280), folder)
    return folder


@pytest.fixture(scope="module")
def runs(tokenizer: Path) -> list[RunDir]:
    """Two runs, the second with a hostile name and other settings."""
    other = tokenizer.parent / HOSTILE.replace("/", "|")
    return [make_run(tokenizer.parent / "first", tokenizer), make_run(other, tokenizer, lr=2e-3, scale=2.0)]


class Page(HTMLParser):
    """Elements of a page with their attributes, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.marked = ""
        self._in_mark = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._in_mark = tag == "mark"

    def handle_endtag(self, tag: str) -> None:
        self._in_mark = False

    def handle_data(self, data: str) -> None:
        self.marked += data if self._in_mark else ""

    def count(self, tag: str) -> int:
        return [name for name, _ in self.elements].count(tag)


@pytest.mark.slow
def test_a_report_escapes_everything_that_a_run_folder_contains(runs: list[RunDir], tmp_path: Path) -> None:
    written = write_report([run.root for run in runs], tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    page = Page(text)
    assert (written.plots, written.num_bytes) == (PANELS, len(text.encode())) and written.num_bytes < 400_000
    assert (page.count("script"), page.count("img"), page.count("figure")) == (3, 0, PANELS)
    assert not [attrs for _, attrs in page.elements if any(name.startswith("on") for name in attrs)]
    assert not [attrs for _, attrs in page.elements if "src" in attrs or (attrs.get("href") or "#")[0] not in "#d"]
    assert "<script>hack" not in text and "<img" not in text
    # run name, metric, event, sample, answer, profile, setting and environment
    assert unescape(text).count(HOSTILE) > 15
    assert page.marked.count(f"Answer {HOSTILE}<|im_end|>") == 2 * 3
    policy = next(str(attrs["content"]) for _, attrs in page.elements if attrs.get("http-equiv"))
    assert policy.startswith("default-src 'none'; script-src 'sha256-") and "'unsafe-inline'" in policy
    data = json.loads(re.findall(r'id="curves-data">(.*?)</script>', text, re.DOTALL)[0])
    loss = next(panel for panel in data["panels"] if panel["title"] == "Loss")
    assert [(los["run"], los["part"], len(los["steps"])) for los in loss["curves"]] == [
        *((run, part, count) for run in (0, 1) for part, count in (("training", STEPS), ("validation", 4)))
    ]
    assert loss["curves"][0]["values"][19] is None and data["events"] == [30]


@pytest.mark.slow
def test_a_report_has_the_facts_of_a_run(runs: list[RunDir], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(runs[0].root), "--json", "--samples", "1"]) == 0
    written = json.loads(capsys.readouterr().out)
    assert written["out"] == str(runs[0].root / "report.html") and written["notes"] == []
    text = " ".join(unescape(re.sub("<[^>]*>", " ", Path(written["out"]).read_text())).split())
    for words in (
        "sft",
        "54,000 0:30 5,000 40.0% 1.50 GiB",  # tokens, time, speed, MFU, memory
        "An epoch has 3 samples in 2 sequences of",
        "30 resume",
        "attention 6.000 50.0%",
        "weights 1.5000",
        "complete, with the sizes of checksums.json",
        "optim.lr 0.001 2e-05",
        "torch 2.13.0",
        "129-256 3",
    ):
        assert words in text, words
    assert (
        "data.packing" in text.partition("All settings")[2] and "data.packing" not in text.partition("All settings")[0]
    )


@pytest.mark.slow
def test_settings_are_compared(runs: list[RunDir], tmp_path: Path) -> None:
    write_report([run.root for run in runs], tmp_path / "r.html", num_samples=0)
    text = (tmp_path / "r.html").read_text()
    different = text.partition("Different between the runs")[2].partition("</table>")[0]
    assert re.findall(r"<tr><th>([\w.]+)</th>", different) == ["setting", "out", "data.files", "optim.lr"]
    assert '<td class="changed">0.002</td>' in different


def test_thinned_curves_keep_minima_maxima_and_gaps() -> None:
    values = np.random.default_rng(0).normal(size=100_000)
    values[[17, 51_234]], values[70_000:80_000] = (-99.0, 99.0), np.nan
    remaining = thinned(values, 2000)
    assert len(remaining) <= 2000 and {0, 17, 51_234, 99_999} <= set(remaining.tolist())
    assert 0 < np.isnan(values[remaining]).sum() < 300
    assert np.array_equal(thinned(values[:50], 50), np.arange(50))


@pytest.mark.slow
def test_reports_of_long_runs_are_small(runs: list[RunDir]) -> None:
    steps = np.arange(1, 100_001)
    noise = np.random.default_rng(0).normal(5.0, 1.0, size=100_000)
    metrics = {f"moe_{number}": Series(steps, noise) for number in range(9)} | {"loss": Series(steps, noise)}
    config = load_config(None, runs[0].config)
    histories = [RunHistory(f"r{k}", runs[0], config, metrics, [], [], {}, [], "", []) for k in range(4)]
    result = panels(histories)
    assert len(result) == 10 and len(json.dumps([panel.curves for panel in result])) < 4_500_000
    (curve, *_) = panels(histories[:1])[0].curves
    assert 1900 < len(curve["steps"]) <= 2000 and len(curve["means"]) == 100
    assert max(curve["values"]) == pytest.approx(noise.max(), rel=1e-5)
    assert np.mean(curve["means"]) == pytest.approx(noise.mean(), rel=1e-4)


@pytest.mark.slow
def test_a_run_that_is_still_running_or_damaged_is_reported(runs: list[RunDir], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    with pytest.raises(MissingInput, match=r"no config\.yaml"):
        write_report([folder])
    (folder / "config.yaml").write_text(runs[0].config.read_text())
    with pytest.raises(MissingInput, match=r"metrics\.jsonl: no such file\. The run has not begun"):
        write_report([folder])
    metrics = folder / "metrics.jsonl"
    metrics.write_text('{"step": 1}\n[]\n')
    with pytest.raises(DataError, match="no row with a step and a number"):
        write_report([folder])
    damaged = '{"step": 9, "loss": 9, "checksum": "00000000"}\n'
    metrics.write_text(
        damaged + '{"step": 2, "loss": 2, "x": true}\nnull\n{"step": 1, "loss": 1e999}\n{"step": 3, "loss": 1'
    )
    (folder / "events.jsonl").write_text('{"step": "1"}\n')
    (folder / "environment.json").write_text("{")
    (folder / "error.txt").write_text("Traceback\nValueError: <b>\n")
    history = read_history(folder, "run")
    assert {name: (item.steps.tolist(), item.last) for name, item in history.metrics.items()} == {"loss": ([1, 2], 2.0)}
    assert history.notes[0] == "metrics.jsonl: 2 lines are not rows of a run and are left out"
    assert [Path(note.partition(" ")[0]).name.rstrip(":") for note in history.notes] == [
        *("metrics.jsonl", "environment.json", "events.jsonl")
    ]
    written = write_report([folder])
    assert any("data has no tokenized samples" in note for note in written.notes)
    assert "ValueError: &lt;b&gt;" in (folder / "report.html").read_text()
    (folder / "config.yaml").write_text("recipe: sft\nnew_key: 1\n")
    with pytest.raises(UsageError, match="new_key"):
        write_report([folder])


@pytest.mark.slow
def test_text_without_utf8_and_a_hostile_manifest_are_no_bugs(tokenizer: Path, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", tokenizer)
    (run.root / "samples.jsonl").write_text('{"step": 1, "prompt": "\\ud800", "answer": [1]}\n')
    manifest = json.loads((run.data / "train.json").read_text())
    del manifest["checksum"]
    for change in ({"tokenizer": True}, {"kind": []}, {"settings": {"chat": 1}}, {"settings": {"chat": {"x": 1}}}):
        (run.data / "train.json").write_text(json.dumps(manifest | change))
        (note,) = {note.partition(": ")[2].replace("data: ", "") for note in write_report([run.root]).notes}
        assert "not a manifest of indexed files" in note or "unknown settings of chats" in note
    assert "?" in (run.root / "report.html").read_text()


def test_rewarded_answers_are_shown(runs: list[RunDir], tmp_path: Path) -> None:
    shutil.copytree(runs[0].root, tmp_path / "run")
    rows = [
        {"step": 60, "prompt": "1 + 1", "completion": text, "reward": reward}
        for text, reward in (("2", 1.0), ("3", 1 / 3))
    ]
    write_lines(tmp_path / "run" / "samples.jsonl", rows)
    write_report([tmp_path / "run"], num_samples=0)
    text = (tmp_path / "run" / "report.html").read_text().partition('id="answers"')[2].partition("</table>")[0]
    assert re.findall("<t[hd](?: [^>]*)?>([^<]*)<", text) == [
        *("step", "prompt", "answer", "reward"),
        *("60", "1 + 1", "2", "1"),
        *("60", "1 + 1", "3", "0.3333"),
    ]


@pytest.mark.slow
def test_damage_of_an_export_is_an_error_in_its_row(tokenizer: Path, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", tokenizer)
    weights = run.export() / "model.safetensors"
    weights.write_bytes(b"WEIGHTS")
    write_report([run.root])
    assert "complete, with the sizes" in (run.root / "report.html").read_text()
    write_report([run.root], verify=True)
    assert re.search(
        r'class="error">error</td><td class="text">[^<]*model\.safetensors', (run.root / "report.html").read_text()
    )
    weights.unlink()
    write_report([run.root])
    assert re.search(
        r'class="error">error</td><td class="text">[^<]*model\.safetensors', (run.root / "report.html").read_text()
    )


@pytest.mark.parametrize(
    ("more", "code", "message"),
    [
        (["--out", "report.txt"], 2, "its name ends in .html"),
        (["none"], 66, "is not a run folder"),
        (33 * ["none"], 2, "at most 32"),
    ],
)
def test_invalid_arguments_are_errors(
    runs: list[RunDir], capsys: pytest.CaptureFixture[str], more: list[str], code: int, message: str
) -> None:
    assert main(["report", str(runs[0].root), *more]) == code
    assert message in capsys.readouterr().err


def test_the_plotting_library_is_the_published_one() -> None:
    """uPlot 1.6.32 of the npm registry; a newer one changes docs/decisions/0055 too."""
    folder = Path(isthmus.tools.report.__file__).parent / "uplot"
    hashes = {path.name: hashlib.sha256(path.read_bytes()).hexdigest()[:16] for path in folder.iterdir()}
    assert hashes["uPlot.iife.min.js"] == "19c8d4c6ad88929a"
    assert hashes["uPlot.min.css"] == "df630c6a8d6f8eea"
    assert "MIT License" in (folder / "LICENSE").read_text()


@pytest.mark.processes
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install chromium")
def test_a_browser_draws_the_report_without_errors_and_network(runs: list[RunDir], tmp_path: Path) -> None:
    write_report([run.root for run in runs], tmp_path / "report.html")
    colours = set()
    with browser(tmp_path / "profile") as page:
        for width, dark in ((1440, False), (390, True)):
            page.open(tmp_path / "report.html", width=width, dark=dark)
            assert page.problems() == []
            assert page.ask("document.querySelectorAll('figure .uplot canvas').length") == PANELS
            assert page.ask("document.documentElement.scrollWidth") == width
            sizes = page.ask("[...document.querySelectorAll('canvas')].map((one) => one.clientWidth)")
            assert min(sizes) > 0.2 * width and max(sizes) < width
            assert page.ask("document.body.innerText").count("hack()") > 15
            drawn = "[...document.querySelectorAll('canvas')].filter((one) => one.getContext('2d').getImageData(0, 0,"
            assert page.ask(f"{drawn} one.width, one.height).data.some((value) => value > 0)).length") == PANELS
            colours.add(page.ask("getComputedStyle(document.body).backgroundColor"))
        assert colours == {"rgb(255, 255, 255)", "rgb(18, 22, 28)"}
        page.open(tmp_path / "report.html", width=800)
        page.call("Emulation.setDeviceMetricsOverride", width=500, height=900, deviceScaleFactor=1, mobile=False)
        assert page.problems() == [] and page.ask("document.documentElement.scrollWidth") == 500


def test_metrics_of_earlier_versions_have_their_new_names(tmp_path: Path) -> None:
    rows = [{"step": step, "loss": 1.0, "learned_tokens": 5 * step} for step in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {"model": "m", "out": "o", "data": ["d.jsonl"]}
    (tmp_path / "config.yaml").write_text(dump(load_config("sft", None, flags=settings)))
    metrics = read_history(tmp_path, "run").metrics
    assert metrics["loss_tokens"].values.tolist() == [5, 10] and "learned_tokens" not in metrics
