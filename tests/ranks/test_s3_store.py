"""Checkpoints in an object store that speaks S3: a server of moto on this machine, through s3fs."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from ranks.rank_pool import RankPool

pytestmark = [pytest.mark.thorough, pytest.mark.ranks]


@pytest.fixture
def bucket(tmp_path: Path) -> Iterator[tuple[str, str]]:
    """URL of a bucket, and the address of its server."""
    for package in ("s3fs", "moto.server"):
        pytest.importorskip(package, reason=f"{package} is not installed: pip install s3fs 'moto[server]'")
    program = (
        "from moto.server import ThreadedMotoServer as Server\n"
        "server = Server(ip_address='127.0.0.1', port=0, verbose=False); server.start()\n"
        "print(server.get_host_and_port()[1], flush=True); input()"
    )
    server = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert server.stdout is not None
    address = f"http://127.0.0.1:{int(server.stdout.readline())}"
    try:
        for _ in range(50):
            try:
                urllib.request.urlopen(urllib.request.Request(f"{address}/checkpoints", method="PUT"), timeout=5)
                break
            except OSError:
                time.sleep(0.1)
        yield "s3://checkpoints/run", address
    finally:
        server.terminate()
        server.wait()


def test_checkpoints_in_s3(
    bucket: tuple[str, str], two_ranks: RankPool, models: dict[str, Path], samples: Path, tmp_path: Path
) -> None:
    url, address = bucket
    credentials = {"AWS_ENDPOINT_URL": address, "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}
    result = two_ranks.run(
        "ranks.tasks.stored_in_s3",
        environment=credentials,
        model=models["qwen3-tied"],
        samples=samples,
        root=tmp_path / "out",
        store=url,
    )
    assert result["addresses"] == [f"{url}/iter_0000001", f"{url}/iter_0000002"] and result["latest"] == 2
    for equal, changed, step, refusal in result["ranks"]:
        assert equal and changed and step == 1
        assert refusal.startswith("65 ") and "__1_0.distcp is damaged: bytes" in refusal
    assert "AWS_ENDPOINT_URL" not in os.environ
