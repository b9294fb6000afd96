"""The live report: a page on loopback that follows its runs, for those who know its address."""

from __future__ import annotations

import gzip
import http.client
import json
import os
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from html import unescape
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from isthmus.cli.main import main
from isthmus.errors import UsageError
from isthmus.files.folder_lock import locked_folder, writer_of
from isthmus.hf.tiny_model import train_tokenizer
from isthmus.hf.tokenizer.tokenizer import save_tokenizer
from isthmus.recipes.run_dir import RunDir
from isthmus.tools.report.live_report import LivePage, LiveReport
from isthmus.tools.report.live_server import LiveServer
from isthmus.tools.report.run_history import HistoryReader, RowReader
from isthmus.train.row_file import RowFile
from unit.tools.report.browser import CHROMIUM, Browser, browser
from unit.tools.report.runs import HOSTILE, STEPS, make_run, step_row

Answer = tuple[int, dict[str, str], bytes]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("live") / "tokenizer"
    save_tokenizer(train_tokenizer(["say and answer"], vocab_size=280), folder)
    return folder


@pytest.fixture(scope="module")
def finished(tokenizer: Path) -> RunDir:
    return make_run(tokenizer.parent / "finished", tokenizer)


@pytest.fixture
def growing(finished: RunDir, tmp_path: Path) -> RunDir:
    """The folder of a run after its first step."""
    run = RunDir(tmp_path / "growing")
    shutil.copytree(finished.root, run.root)
    add_rows(run, 1, anew=True)
    return run


def add_rows(run: RunDir, *steps: int, anew: bool = False, scale: float = 1.0) -> None:
    """Write rows as a run does; ``anew`` begins another file."""
    path = run.root / "metrics.jsonl"
    if anew:
        path.unlink(missing_ok=True)
    file = RowFile(path, start=0 if anew else 1 << 40, warn=print)
    for step in steps:
        file.add([step_row(step, scale) | {"time_s": time.time()}])
    file.close()


@contextmanager
def served(*runs: RunDir) -> Iterator[LiveServer]:
    with LiveServer(LiveReport([run.root for run in runs], num_samples=1)) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def ask(server: LiveServer, path: str | None = None, method: str = "GET", **headers: str) -> Answer:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=60)
    try:
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, server.path if path is None else path, headers=names)
        response = connection.getresponse()
        return response.status, {name.lower(): value for name, value in response.getheaders()}, response.read()
    finally:
        connection.close()


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def contents(root: Path) -> dict[str, tuple[int, int]]:
    """Size and time of all files and folders."""
    paths = [root, *root.rglob("*")]
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in paths}


def zoom_in(page: Browser) -> None:
    """Drag the mouse over the middle half of the first plot."""
    page.ask("document.querySelector('.uplot').scrollIntoView({ behavior: 'instant', block: 'center' })")
    x, y, width = page.ask(
        "(({ x, y, width }) => [x, y, width])(document.querySelector('.u-over').getBoundingClientRect())"
    )
    for kind, share in (("Pressed", 0.25), ("Moved", 0.5), ("Moved", 0.75), ("Released", 0.75)):
        mouse = {"x": x + share * width, "y": y + 50, "button": "left", "buttons": 1, "clickCount": 1}
        page.call("Input.dispatchMouseEvent", type=f"mouse{kind}", **mouse)


def steps_of(page: bytes, run: int = 0) -> list[int]:
    """The steps of the training loss of a run."""
    data = json.loads(page.partition(b'id="curves-data">')[2].partition(b"</script>")[0])
    loss = next(panel for panel in data["panels"] if panel["title"] == "Loss")
    return next(curve["steps"] for curve in loss["curves"] if (curve["run"], curve["part"]) == (run, "training"))


def test_only_new_rows_of_a_file_are_read(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    reader = RowReader(path)

    def steps() -> list[int]:
        return [row["step"] for row in reader.new_rows()]

    assert not reader.restart_if_replaced() and steps() == []
    path.write_text('{"step": 1, "loss": 1}\n{"step": 2, "lo')
    assert steps() == [1] and not reader.restart_if_replaced()
    with path.open("a") as file:
        file.write('ss": 2}')  # without the end of its line
    assert steps() == [2] and steps() == []
    with path.open("a") as file:
        file.write('\n{"step": 3}\ndamaged\n{}\n')
    assert not reader.restart_if_replaced() and steps() == [3]
    assert reader.notes() == ["metrics.jsonl: 2 lines are not rows of a run and are left out"]
    path.write_text('{"step": 1, "loss": 5}\n{"step": 2, "loss": 5}\n{"step": 3, "loss": 5}\n{"step": 4, "loss": 5}\n')
    assert reader.restart_if_replaced() and steps() == [1, 2, 3, 4] and reader.notes() == []
    path.write_text('{"step": 1, "loss": 5}\n')
    assert reader.restart_if_replaced() and steps() == [1]
    path.unlink()
    assert reader.restart_if_replaced() and steps() == [] and not reader.restart_if_replaced()


def test_a_resumed_run_replaces_the_rows_of_later_steps(growing: RunDir) -> None:
    reader = HistoryReader(growing.root, "run")
    assert reader.read().metrics["loss"].steps.tolist() == [1]
    add_rows(growing, 2, 3, 4)
    assert reader.read().metrics["loss"].steps.tolist() == [1, 2, 3, 4]
    RowFile(growing.root / "metrics.jsonl", start=2, warn=print).close()
    add_rows(growing, 3, scale=2.0)
    losses = reader.read().metrics["loss"]
    assert losses.steps.tolist() == [1, 2, 3] and losses.last == step_row(3, 2.0)["loss"]


@pytest.mark.slow
def test_runs_that_begin_grow_and_disappear_are_followed(growing: RunDir, finished: RunDir) -> None:
    late = RunDir(growing.root.parent / "late")
    before = contents(finished.root)
    with served(growing, late) as server:
        status, headers, first = ask(server)
        assert (status, headers["etag"]) == (200, '"1"') and steps_of(first) == [1]
        assert f"late is not shown: {late.root} does not exist" in unescape(first.decode())
        assert server.address.waiting == ["late"]
        assert b"not running" in first and b"<mark>Answer" in first
        add_rows(growing, 2)
        shutil.copytree(finished.root, late.root)
        wait_for(lambda: "is not shown" not in ask(server)[2].decode())
        both = ask(server)[2]
        assert steps_of(both) == [1, 2] and steps_of(both, 1) == list(range(1, STEPS + 1))
        written = contents(growing.root.parent)
        assert ask(server)[2] == both and contents(growing.root.parent) == written
        shutil.rmtree(growing.root)
        wait_for(lambda: b"growing is not shown" in ask(server)[2])
        assert steps_of(ask(server)[2]) == list(range(1, STEPS + 1))
        shutil.rmtree(late.root)
        wait_for(lambda: b"late is not shown" in ask(server)[2])
        assert b"curves-data" in ask(server)[2] and b"<figure" not in ask(server)[2]
    assert contents(finished.root) == before


@pytest.mark.thorough
@pytest.mark.slow
def test_a_new_row_of_a_long_run_costs_a_small_part_of_all_rows(growing: RunDir) -> None:
    """The times of decision 98, which ``pytest -s`` shows."""
    cost_s: dict[str, float] = {}

    def page_of(what: str) -> LivePage:
        report._next_s = 0.0  # without the pause
        start_s = time.process_time()
        page = report.page()
        cost_s[what] = time.process_time() - start_s
        return page

    for steps in (500, 100_000):
        rows = [step_row(20, 1.0) | {"step": step, "loss": 1 + step % 97} for step in range(1, steps + 1)]
        (growing.root / "metrics.jsonl").unlink()
        file = RowFile(growing.root / "metrics.jsonl", start=0, warn=print)
        file.add(rows)
        file.close()
        report = LiveReport([growing.root])
        page_of(f"first page of {steps:,} steps")
        add_rows(growing, steps + 1)
        page = page_of(f"new row of {steps:,} steps")
        assert page_of(f"unchanged folder of {steps:,} steps") is page and page.version == 2
        print(f"{steps:,} steps: {len(page.content):,} bytes, {len(page.compressed):,} in gzip")
    print({what: round(seconds, 4) for what, seconds in cost_s.items()})
    assert cost_s["new row of 100,000 steps"] < cost_s["first page of 100,000 steps"] / 5
    assert cost_s["unchanged folder of 100,000 steps"] < cost_s["new row of 500 steps"] / 2


@pytest.mark.slow
def test_an_unchanged_page_is_not_sent_again(growing: RunDir) -> None:
    with served(growing) as server:
        _, headers, page = ask(server, Accept_Encoding="gzip, deflate")
        assert headers["content-encoding"] == "gzip" and len(page) == int(headers["content-length"])
        assert gzip.decompress(page) == ask(server)[2]
        assert ask(server, If_None_Match=headers["etag"])[::2] == (304, b"")
        status, head, nothing = ask(server, method="HEAD")
        assert (status, nothing) == (200, b"") and int(head["content-length"]) == len(ask(server)[2])
        add_rows(growing, 2)
        wait_for(lambda: ask(server, If_None_Match=headers["etag"])[0] == 200)


@pytest.mark.slow
def test_requests_need_the_token_and_the_name_of_this_machine(growing: RunDir) -> None:
    with served(growing) as server:
        port, path = server.server_address[1], server.path
        assert len(path) > 32 and server.address.url == f"http://127.0.0.1:{port}{path}"
        assert server.address.ssh == f"ssh -N -L {port}:127.0.0.1:{port} {socket.gethostname()}"
        for other in ("/", path[:-1], f"{path}x", f"{path}/../../etc/passwd", f"{path}?a=/etc", "/metrics.jsonl", "*"):
            status, _, text = ask(server, other)
            assert status == 404 and b"isthmus report --live has printed" in text
        for host in ("evil.example", f"evil.example:{port}", "127.0.0.1.evil.example", "127.0.0.1:1@evil.example", ""):
            assert ask(server, Host=host)[0] == 403, host
        for host in ("localhost", "localhost:9999", "127.0.0.1:1"):  # a tunnel may have another port
            assert ask(server, Host=host)[0] == 200, host
        for method in ("POST", "PUT", "DELETE", "OPTIONS"):
            assert ask(server, method=method)[0] == 501
        _, headers, _ = ask(server)
        assert headers["content-security-policy"] == "frame-ancestors 'none'; base-uri 'none'"
        assert (headers["cache-control"], headers["referrer-policy"]) == ("no-store", "no-referrer")
        assert "access-control-allow-origin" not in headers and headers["server"] == "isthmus"
        with socket.create_connection(("127.0.0.1", port)) as raw:
            raw.sendall(b"\x16\x03\x01 no request\r\n\r\n")
            assert raw.recv(1000).startswith(b"Bad request")
        with pytest.raises(OSError), socket.create_connection(("127.0.0.2", port), timeout=1):  # loopback, not bound
            pass
        with pytest.raises(UsageError, match=f"--port {port} is in use"):
            LiveServer(server.report, port)


@pytest.mark.slow
def test_a_run_is_running_while_a_process_locks_its_folder(growing: RunDir) -> None:
    assert writer_of(growing.root) is None
    with locked_folder(growing.root):
        lock = growing.root / ".lock"
        holder = json.loads(lock.read_text())
        for pid, host in ((os.getppid(), socket.gethostname()), (1 << 22, "node7")):
            lock.write_text(json.dumps(holder | {"pid": pid, "host": host}))
            assert writer_of(growing.root) == host
            assert f'<td class="name">running on {host}</td>' in LiveReport([growing.root]).page().content.decode()
        for content in (holder | {"pid": 1 << 22}, holder | {"pid": 1 << 80}, [], "x"):
            lock.write_text(json.dumps(content))
            assert writer_of(growing.root) is None


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--live", "--out", "r.html"], "--out is of a report in a file, and --live writes none"),
        (["--live", "--verify"], "--verify is of a report in a file"),
        (["--port", "8000"], "--port 8000 is the port of --live"),
        (["--live", *(["none"] * 33)], "at most 32"),
    ],
)
def test_options_that_do_not_fit_are_errors(
    finished: RunDir, capsys: pytest.CaptureFixture[str], more: list[str], message: str
) -> None:
    assert main(["report", str(finished.root), *more]) == UsageError.exit_code
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_ctrl_c_ends_the_report(growing: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    before, status = contents(growing.root.parent), []

    def use() -> None:
        text = ""
        while "\n" not in text:
            text += capsys.readouterr().out
            time.sleep(0.05)
        address = json.loads(text)
        url = urlsplit(address["url"])
        connection = http.client.HTTPConnection(url.netloc, timeout=60)
        connection.request("GET", url.path)
        status.append(connection.getresponse().status)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=use)
    thread.start()
    assert main(["report", str(growing.root), "--live", "--json"]) == 130
    thread.join()
    assert status == [200] and contents(growing.root.parent) == before
    assert "The live report has ended." in capsys.readouterr().err


@pytest.mark.processes
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install chromium")
def test_a_browser_follows_a_run_without_losing_its_place(growing: RunDir, finished: RunDir, tmp_path: Path) -> None:
    add_rows(growing, *range(2, 50), anew=True)
    with browser(tmp_path / "profile") as page:
        with served(growing, finished) as server:
            page.open(server.address.url, width=390, dark=True)
            plots = page.ask("document.querySelectorAll('figure .uplot canvas').length")
            assert plots > 10 and page.ask("document.documentElement.scrollWidth") == 390
            page.ask("document.querySelectorAll('details').forEach((box) => { box.open = !box.open; })")
            page.ask("document.querySelector('.uplot').marked = true")
            page.ask("document.querySelector('#summary .scroll').scrollLeft = 70")
            page.ask("document.querySelector('.u-legend .u-series:last-child th').click()")  # hides its curve
            zoom_in(page)
            drawn = "document.querySelector('.uplot canvas').toDataURL()"
            zoomed = page.ask(drawn)
            page.ask("document.querySelector('#samples h2').scrollIntoView({ behavior: 'instant' })")
            opened = page.ask("[...document.querySelectorAll('details')].map((box) => box.open)")
            place = "document.querySelector('#samples h2').getBoundingClientRect().top"
            before = page.ask(place)
            with (growing.root / "events.jsonl").open("a") as file:
                file.write(json.dumps({"step": 50, "event": "spike", "text": HOSTILE}) + "\n")
            add_rows(growing, 50)
            wait_for(lambda: page.ask("document.querySelectorAll('#events tbody tr').length") == 5)
            assert page.ask("[...document.querySelectorAll('details')].map((box) => box.open)") == opened
            assert abs(page.ask(place) - before) <= 1 and page.ask("scrollY") > 1000
            assert page.ask("document.querySelector('#summary .scroll').scrollLeft") == 70
            assert page.ask("document.querySelector('.uplot').marked")  # the plots were not built anew
            assert page.ask(drawn) == zoomed
            assert page.ask("document.getElementById('live').textContent") == "live"
            with (growing.root / "metrics.jsonl").open("a") as file:
                file.write('{"step": 50, "valid_new": 1.0}\n')
            wait_for(lambda: page.ask("document.querySelectorAll('figure .uplot canvas').length") == plots + 1)
            assert not page.ask("document.querySelector('.uplot').marked")
            assert page.ask("document.querySelectorAll('.u-legend .u-off').length") == 1
            assert page.problems() == []
        wait_for(lambda: "does not answer" in page.ask("document.getElementById('live').textContent"))
