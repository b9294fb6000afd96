"""Tests with the newest releases of megatron-core, transformers, torch and peft: make canary

    python benchmarks/canary.py transformers
    python benchmarks/canary.py megatron-core transformers megatron-core,transformers --record

Each argument is a case: packages, joined by commas, whose newest releases are tested together; the others keep the
tested versions. Without arguments: each package alone, then all together. The newest releases, and what they require
besides, are installed into ``build/canary/CASE``, never into the environment. A test that fails there runs again with
the tested versions, so that a failure of this checkout is not reported as one of the newest release. Needs the package
index.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections import Counter
from importlib import metadata
from pathlib import Path
from typing import Any

from certificate import REPOSITORY, certificate, publish_result
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

RANKS = [
    f"tests/ranks/test_{name}.py" for name in ("layouts", "pipeline", "experts", "fsdp", "checkpoint", "optimizers")
]
ADAPTERS = ["tests/parity/test_peft.py", "tests/parity/test_lora.py", "tests/parity/test_expert_adapters.py"]
LOGITS = "tests/parity/test_logits.py"
TESTS = {
    "megatron-core": ["tests/unit/engine", LOGITS, *RANKS],
    "transformers": ["tests/unit/hf", "tests/unit/families", LOGITS, "tests/parity/test_round_trip.py"],
    "torch": ["tests/unit/engine", "tests/unit/launch", LOGITS, *RANKS],
    "peft": [*ADAPTERS, "tests/unit/convert/test_merged_weights.py"],
}
"""The tests of what is used of a package."""
SKIPPED = "tests/unit/engine/upstream/test_dataset_helpers.py"
"""Compiled helpers of megatron-core, which a wheel for another Python does not have."""
OTHER_PYTHON = {"megatron-core": ["--python-version", "3.12", "--only-binary=:all:", "--ignore-requires-python"]}
"""Wheels of megatron-core 0.17 and newer are for Python 3.12; the parts in Python run with older ones."""


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("cases", nargs="*", metavar="PACKAGE[,PACKAGE...]", help=f"of {', '.join(TESTS)}")
    parser.add_argument("--tests", nargs="+", metavar="PATH", help="run these instead of the tests of the packages")
    parser.add_argument("--workers", type=int, default=4, help="processes of pytest (default: %(default)s)")
    parser.add_argument("--record", action="store_true", help="write the result to benchmarks/results")
    parser.add_argument("--out", type=Path, help="write the result to this file")
    options = parser.parse_args(arguments)
    options.cases = [tuple(case.split(",")) for case in options.cases or [*TESTS, ",".join(TESTS)]]
    unknown = {package for case in options.cases for package in case} - TESTS.keys()
    if unknown:
        parser.error(f"no tests are listed for {', '.join(sorted(unknown))}. Packages: {', '.join(TESTS)}")
    return options


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    certified = certificate([__file__, *arguments])
    cases: dict[str, Any] = {}
    for packages in options.cases:
        name = ",".join(packages)
        folder = REPOSITORY / "build" / "canary" / name.replace(",", "+")
        tests = options.tests or [path for package in packages for path in TESTS[package]]
        cases[name] = run_case(packages, folder, list(dict.fromkeys(tests)), options.workers)
        print(json.dumps({name: cases[name]}, indent=1), flush=True)
        publish_result("canary", {"certificate": certified, "cases": cases}, record=options.record, out=options.out)
    return int(any(case.get("failed_only_with_newest") for case in cases.values()))


def run_case(packages: tuple[str, ...], folder: Path, tests: list[str], workers: int) -> dict[str, Any]:
    """Versions and outcomes of a case; its logs and the installed packages are in ``folder``."""
    shutil.rmtree(folder, ignore_errors=True)
    site = folder / "site"
    install(site, packages)
    versions = {name: (metadata.version(name), release) for name, release in releases(site).items() if name in packages}
    newer = {
        name: {"tested": tested, "newest": newest} for name, (tested, newest) in versions.items() if tested != newest
    }
    result: dict[str, Any] = {"packages": newer, "unchanged": sorted(set(packages) - newer.keys())}
    if not newer:
        return result | {"result": "the tested versions are the newest: nothing to test"}
    result["also_installed"] = {name: release for name, release in releases(site).items() if name not in packages}
    start, counts, failed, alike = time.monotonic(), Counter[str](), [], []
    for path in tests:
        cache = folder / path.replace("/", "-").removesuffix(".py")
        failures = run_tests(path, cache, workers, site)
        counts += outcomes(cache / "junit.xml")
        if failures:
            tested = set(run_tests(path, cache, workers, None, "--last-failed"))
            failed += [test for test in failures if test not in tested]
            alike += [test for test in failures if test in tested]
    result |= {"outcomes": dict(counts), "failed_only_with_newest": failed, "failed_with_tested_versions_too": alike}
    return result | {"time_s": time.monotonic() - start, "result": "failed" if failed else "passed"}


def install(site: Path, packages: tuple[str, ...]) -> None:
    """Install the newest releases and, of what they require, what the environment lacks or has too old."""
    missing = list(packages)
    for _ in range(10):
        for requirement in missing:
            command = [
                sys.executable,
                "-m",
                "pip",
                "install",
                "--quiet",
                "--no-deps",
                "--upgrade",
                "--target",
                str(site),
            ]
            subprocess.run([*command, *OTHER_PYTHON.get(requirement, []), requirement], check=True)
        missing = unmet(site)
        if not missing:
            return
    raise SystemExit(
        f"The newest {', '.join(packages)} cannot be installed together: {', '.join(missing)} stays unmet."
    )


def unmet(site: Path) -> list[str]:
    """Requirements of the packages in ``site`` that neither they nor the environment meet."""
    available = {canonicalize_name(each.name): each.version for each in metadata.distributions()} | releases(site)
    requirements = [
        Requirement(line) for each in metadata.distributions(path=[str(site)]) for line in each.requires or ()
    ]
    needed = [each for each in requirements if each.marker is None or each.marker.evaluate({"extra": ""})]
    return sorted(
        {
            f"{each.name}{each.specifier}"
            for each in needed
            if not each.specifier.contains(available.get(canonicalize_name(each.name), "0.dev0"), prereleases=True)
            or canonicalize_name(each.name) not in available
        }
    )


def releases(site: Path) -> dict[str, str]:
    return {canonicalize_name(each.name): each.version for each in metadata.distributions(path=[str(site)])}


def run_tests(path: str, cache: Path, workers: int, site: Path | None, *options: str) -> list[str]:
    """Ids of the tests that fail; with the packages in ``site``, or with the tested versions.

    A file or folder has a process of its own: a crash of the interpreter ends no other tests. ``isthmus.engine`` is a
    plugin, since megatron-core 0.18 and newer cannot be imported alone without Triton.
    """
    source = [str(REPOSITORY / "src")]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(site), *source] if site else source),
        "OMP_NUM_THREADS": "1",
    }
    command = [
        *(sys.executable, "-m", "pytest", "-n", str(workers), "--dist", "loadfile", "--no-loadscope-reorder", "-q"),
        *("-p", "isthmus.engine", "-m", "not thorough", f"--ignore={SKIPPED}", "-o", f"cache_dir={cache}"),
    ]
    report = [] if options else [f"--junitxml={cache / 'junit.xml'}"]
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / ("tested-versions.log" if options else "newest.log")).open("w") as log:
        done = subprocess.run(
            [*command, *report, *options, path], cwd=REPOSITORY, env=environment, stdout=log, stderr=log
        )
    failures = cache / "v/cache/lastfailed"
    failed = sorted(json.loads(failures.read_text())) if failures.exists() else []
    # pytest ends with 5 if it selects no test, and with other codes if it could not run.
    return failed or ([] if done.returncode in (0, 5) else [f"{path} (pytest ended with {done.returncode})"])


def outcomes(junit: Path) -> Counter[str]:
    if not junit.exists():
        return Counter()
    suite = next(ET.parse(junit).iter("testsuite"))
    number = {name: int(suite.get(name, "0")) for name in ("tests", "failures", "errors", "skipped")}
    failed = number["failures"] + number["errors"]
    return Counter(passed=number["tests"] - failed - number["skipped"], failed=failed, skipped=number["skipped"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
