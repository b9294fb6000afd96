"""A headless Chromium, driven through its debugging pipe: pages in any width and colour scheme."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Browser:
    """One page. ``events`` are all messages of the browser that are no answers."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._out, self._in = to_browser, os.fdopen(from_browser, "rb", buffering=0)
        self._number, self._rest, self._session, self._page = 0, b"", None, ""
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def open(self, page: Path | str, *, width: int, dark: bool = False) -> None:
        """Load a local file, or a page of this machine, ``width`` pixels wide; returns when its scripts have run."""
        self.events.clear()
        self._page = page.resolve().as_uri() if isinstance(page, Path) else page
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=self._page)
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self._receive()

    def ask(self, expression: str) -> Any:
        """The value of JavaScript."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def screenshot(self, file: Path, *, height: int | None = None) -> None:
        """The whole page as PNG, or the upper part of it."""
        size = self.ask("[document.documentElement.clientWidth, document.documentElement.scrollHeight]")
        clip = {"x": 0, "y": 0, "width": size[0], "height": height or size[1], "scale": 1}
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        file.write_bytes(base64.b64decode(shot["data"]))

    def problems(self) -> list[str]:
        """Errors and warnings of the console, exceptions, and requests other than of local files and of the page."""
        self.ask("new Promise((resolve) => requestAnimationFrame(() => setTimeout(resolve, 50)))")
        results = []
        for event in self.events:
            method, details = event["method"], event["params"]
            if method == "Runtime.exceptionThrown" or (method == "Log.entryAdded"):
                results.append(json.dumps(details))
            elif method == "Runtime.consoleAPICalled" and details["type"] in ("error", "warning", "assert"):
                results.append(json.dumps(details["args"]))
            elif method == "Network.requestWillBeSent":
                url = details["request"]["url"]
                results += [] if url.startswith(("file:", "data:")) or url == self._page else [url]
        return results

    def call(self, method: str, **parameters: Any) -> Any:
        """A command of the Chrome DevTools Protocol."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        message |= {"sessionId": self._session} if self._session else {}
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            piece = self._in.read(1 << 16)
            assert piece, "the browser has ended"
            self._rest += piece
        raw, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(raw)
        if "method" in message:
            self.events.append(message)
        return message


@contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """A browser that reaches only this machine; ``profile`` is an empty folder."""
    (child_in, to_browser), (from_browser, child_out) = os.pipe(), os.pipe()
    hosts = "MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"
    flags = "--headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run --hide-scrollbars"
    command = f'exec "$0" {flags} --host-resolver-rules="{hosts}" --user-data-dir="$1" --remote-debugging-pipe'
    process = subprocess.Popen(
        ["bash", "-c", f"{command} 3<&{child_in} 4>&{child_out}", str(CHROMIUM), str(profile)],
        pass_fds=(child_in, child_out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    os.close(child_in)
    os.close(child_out)
    try:
        yield Browser(to_browser, from_browser)
    finally:
        process.kill()
        process.wait()
        os.close(to_browser)
