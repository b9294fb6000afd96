"""A process reads and writes only what its ruleset has."""

from __future__ import annotations

import socket
import subprocess
from pathlib import Path

import pytest

from isthmus.files.landlock import restrict, restricted_files

pytestmark = pytest.mark.processes


def test_files_of_a_restricted_process(tmp_path: Path) -> None:
    for name in ("readable", "writable", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    (tmp_path / "readable/link").symlink_to(tmp_path / "other/file")
    ruleset = restricted_files(
        [Path("/usr"), Path("/lib"), Path("/bin"), tmp_path / "readable", tmp_path / "none"], [tmp_path / "writable"]
    )
    if ruleset is None:
        pytest.skip("this kernel has no Landlock (Linux 5.13 with CONFIG_SECURITY_LANDLOCK)")
    with socket.create_server(("127.0.0.1", 0)) as server:
        commands = {
            "read readable": "cat readable/file",
            "write writable": "echo x > writable/file",
            "write readable": "echo x > readable/file",
            "read other": "cat other/file",
            "read link": "cat readable/link",
            "list other": "ls other",
            "connect": f"bash -c 'exec 3<>/dev/tcp/127.0.0.1/{server.getsockname()[1]}'",
        }
        results = {
            name: subprocess.run(
                ["/bin/sh", "-c", command], cwd=tmp_path, capture_output=True, preexec_fn=lambda: restrict(ruleset)
            ).returncode == 0
            for name, command in commands.items()
        }  # fmt: skip
    assert [name for name, succeeded in results.items() if succeeded] == ["read readable", "write writable"]
