"""Everything that a release publishes, in build/release, without a tag and without publishing: make release-dry

- ``dist/``: wheel and sdist of the last commit, built twice and compared byte for byte;
- ``sbom.cdx.json``: what an installation of the wheel consists of, with the locked versions and hashes (CycloneDX);
- ``statement.json``: the in-toto statement that the release workflow signs, with the SHA-256 of each file. It is not
  signed here: signatures are keyless, with the identity of the workflow;
- ``notes.md``: the section of CHANGELOG.md;
- the wheel is installed into an empty environment, whose ``isthmus`` then has to run.

Runs with the Python of the locked tools. ``--final`` also refuses what a tag may not have: uncommitted changes, and a
section without a date.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import uuid
import zipfile
from collections.abc import Iterable
from datetime import datetime, timezone
from email.parser import Parser
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REPOSITORY = Path(__file__).resolve().parent.parent
LOCK = REPOSITORY / "constraints/cpu-py311.lock"
COMMANDS = (["--version"], ["doctor"], ["config", "ls"], ["config", "schema"])
"""They read the version, the tested versions, the presets and the settings of the installed wheel."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--python", type=Path, required=True, help="an environment with the locked dependencies")
    parser.add_argument("--out", type=Path, default=REPOSITORY / "build/release")
    parser.add_argument("--final", action="store_true", help="refuse what a tag may not have")
    options = parser.parse_args()
    version = package_version((REPOSITORY / "src/isthmus/__init__.py").read_text(encoding="utf-8"))
    notes = release_notes((REPOSITORY / "CHANGELOG.md").read_text(encoding="utf-8"), version, dated=options.final)
    check_citation((REPOSITORY / "CITATION.cff").read_text(encoding="utf-8"), version)
    if changed := git("status", "--porcelain"):
        message = f"{len(changed.splitlines())} uncommitted changes are not a part of the build"
        if options.final:
            raise SystemExit(f"{message}. Commit or remove them.")
        print(f"note       {message}")
    out: Path = options.out
    shutil.rmtree(out, ignore_errors=True)
    files = build(out / "dist", options.python)
    (out / "notes.md").write_text(notes, encoding="utf-8")
    print(f"notes      {len(notes.splitlines())} lines for {version}")
    wheel = next(path for path in files if path.suffix == ".whl")
    sbom = out / "sbom.cdx.json"
    sbom.write_text(bill_of_materials(wheel, version, options.python), encoding="utf-8")
    subjects = json.dumps(statement([*files, sbom]), indent=1)
    (out / "statement.json").write_text(f"{subjects}\n", encoding="utf-8")
    print(f"statement  {len(files) + 1} files by SHA-256; not signed, since only the release workflow can")
    check_installed(wheel, version, options.python)
    print(f"written to {out}")


def package_version(source: str) -> str:
    (version,) = re.findall(r'^__version__ = "(.+)"$', source, re.MULTILINE)
    return str(version)


def release_notes(changelog: str, version: str, *, dated: bool) -> str:
    """The newest section of the changelog, which has to be that of the version and to contain changes."""
    sections = re.split(r"^## ", changelog, flags=re.MULTILINE)[1:]
    if not sections:
        raise SystemExit("CHANGELOG.md has no section. Add one for each version: ## [1.2.3] - 2026-01-31")
    heading, _, text = sections[0].partition("\n")
    parts = re.fullmatch(r"\[(.+?)\] - (.+)", heading)
    if parts is None or parts[1] != version:
        expected = f"## [{version}] - YYYY-MM-DD"
        raise SystemExit(
            f"CHANGELOG.md: the newest section is {heading!r}, not that of __version__. Expected {expected}."
        )
    if not re.search(r"^[-*] \S", text, re.MULTILINE):
        raise SystemExit(f"CHANGELOG.md: the section of {version} lists no change. Write what users can notice.")
    if not re.fullmatch(r"\d{4}-\d\d-\d\d", parts[2]):
        message = f"CHANGELOG.md: the section of {version} has no date, got {parts[2]!r}"
        if dated:
            raise SystemExit(f"{message}. Expected ## [{version}] - YYYY-MM-DD.")
        print(f"note       {message}")
    return text.strip() + "\n"


def check_citation(text: str, version: str) -> None:
    results = re.findall(r"^version: (.+)$", text, re.MULTILINE)
    if results != [version]:
        raise SystemExit(
            f"CITATION.cff: the version is {', '.join(results) or 'missing'}, but __version__ is {version}."
        )


def build(out: Path, python: Path) -> list[Path]:
    """Wheel and sdist of the last commit, from two copies without anything that is not committed."""
    digests: list[dict[str, str]] = []
    environment = os.environ | {"SOURCE_DATE_EPOCH": str(commit_time())}
    for attempt in range(2):
        with tempfile.TemporaryDirectory() as folder:
            source, target = Path(folder, "source"), out if attempt == 0 else Path(folder, "dist")
            source.mkdir()
            archive = subprocess.run(["git", "archive", "HEAD"], cwd=REPOSITORY, check=True, stdout=subprocess.PIPE)
            subprocess.run(["tar", "x", "-C", str(source)], input=archive.stdout, check=True)
            uv = str(Path(sys.executable).parent / "uv")
            command = [uv, "build", "--quiet", "--no-build-isolation", "--python", str(python.absolute())]
            subprocess.run([*command, "--out-dir", str(target.absolute())], cwd=source, env=environment, check=True)
            (target / ".gitignore").unlink(missing_ok=True)
            digests.append({path.name: sha256(path) for path in sorted(target.iterdir())})
    if digests[0] != digests[1]:
        raise SystemExit(f"Two builds of one commit differ: {digests[0]} and {digests[1]}.")
    for name, digest in digests[0].items():
        print(f"built      {name} sha256:{digest}, twice the same bytes")
    return sorted(out.iterdir())


def bill_of_materials(wheel: Path, version: str, python: Path) -> str:
    """CycloneDX of the wheel and of its dependencies, without extras, at the versions of the lock."""
    from cyclonedx.model.bom import Bom, BomMetaData  # of the locked tools
    from cyclonedx.output.json import JsonV1Dot6

    locked = {}
    for line in LOCK.read_text(encoding="utf-8").splitlines():
        pin, *hashes = line.split(" --hash=sha256:")
        name, release = pin.split("==")
        locked[canonicalize_name(name)] = (release, hashes)
    requires = {
        canonicalize_name(each.name): each.requires or [] for each in metadata.distributions(path=[purelib(python)])
    }
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        requires["isthmus"] = Parser().parsestr(archive.read(name).decode()).get_all("Requires-Dist", [])
    needed = {"isthmus": direct(requires["isthmus"], frozenset())}
    pending = set(needed["isthmus"].items())
    while pending:
        package, extras = pending.pop()
        if package not in locked or package not in requires:
            raise SystemExit(
                f"{package} is required, but {LOCK.name} or {python} does not have it: make lock, make setup"
            )
        packages = direct(requires[package], extras)
        pending |= {item for item in packages.items() if item[0] not in needed}
        needed[package] = needed.get(package, {}) | packages
    root = component("isthmus", version, [sha256(wheel)])
    components = {name: component(name, *locked[name]) for name in needed if name != "isthmus"} | {"isthmus": root}
    details = BomMetaData(component=root, timestamp=datetime.fromtimestamp(commit_time(), timezone.utc))
    serial = uuid.uuid5(uuid.NAMESPACE_URL, sha256(wheel))
    bom = Bom(
        components=[each for each in components.values() if each is not root], metadata=details, serial_number=serial
    )
    for name, packages in needed.items():
        bom.register_dependency(components[name], [components[other] for other in packages])
    print(f"sbom       {len(components) - 1} packages that an installation of {wheel.name} requires")
    return f"{JsonV1Dot6(bom).output_as_string(indent=1)}\n"


def direct(lines: Iterable[str], extras: frozenset[str]) -> dict[str, frozenset[str]]:
    """Packages that requirements name on Linux with Python 3.11, with the extras of each."""
    python = {"python_version": "3.11", "python_full_version": "3.11.5", "sys_platform": "linux"}
    requirements = [Requirement(line) for line in lines]
    return {
        canonicalize_name(each.name): frozenset(each.extras)
        for each in requirements
        if each.marker is None or any(each.marker.evaluate(python | {"extra": extra}) for extra in ("", *extras))
    }


def component(name: str, version: str, hashes: list[str]) -> Any:
    """A package; one with several files has the hash of each, of which an installer takes one."""
    from cyclonedx.model import HashAlgorithm, HashType
    from cyclonedx.model.component import Component, ComponentType
    from packageurl import PackageURL

    kind = ComponentType.APPLICATION if name == "isthmus" else ComponentType.LIBRARY
    files = [HashType(alg=HashAlgorithm.SHA_256, content=digest) for digest in hashes]
    address = PackageURL("pypi", name=name, version=version)
    return Component(type=kind, name=name, version=version, purl=address, bom_ref=str(address), hashes=files)


def statement(files: Iterable[Path]) -> dict[str, Any]:
    """The files that the release workflow attests, and the commit that they are built from."""
    commit = {"uri": "git+file:.", "digest": {"gitCommit": git("rev-parse", "HEAD")}}
    return {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": path.name, "digest": {"sha256": sha256(path)}} for path in files],
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {
            "buildDefinition": {
                "buildType": "urn:isthmus:make-release-dry",
                "externalParameters": {"command": "make release-dry"},
                "resolvedDependencies": [commit, {"uri": f"file:{LOCK.name}", "digest": {"sha256": sha256(LOCK)}}],
            },
            "runDetails": {"builder": {"id": "urn:isthmus:unsigned-dry-run"}},
        },
    }


def check_installed(wheel: Path, version: str, python: Path) -> None:
    """Run the commands of the wheel in an environment that has, besides, only the dependencies of ``python``."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([str(python), "-m", "venv", "--without-pip", f"{folder}/venv"], check=True)
        installed = Path(folder, "venv/bin/python")
        pip = [str(python), "-m", "pip", "--python", str(installed), "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "install", "--no-deps", "--no-index", str(wheel)], check=True)
        # A path in a .pth file brings packages, but not the .pth files in it, by which a checkout is installed.
        Path(purelib(installed), "dependencies.pth").write_text(f"{purelib(python)}\n", encoding="utf-8")
        environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
        command = [str(installed), "-c", "import isthmus; print(isthmus.__file__)"]
        module = subprocess.run(
            command, cwd=folder, env=environment, check=True, stdout=subprocess.PIPE, text=True
        ).stdout
        if not module.startswith(folder):
            raise SystemExit(f"The new environment imports {module.strip()} instead of the wheel.")
        for arguments in COMMANDS:
            command = [str(installed.with_name("isthmus")), *arguments]
            done = subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True)
            if done.returncode or not done.stdout.strip():
                raise SystemExit(
                    f"isthmus {' '.join(arguments)} of the wheel ended with {done.returncode}: {done.stdout}"
                )
            if arguments == ["--version"] and version not in done.stdout.split():
                raise SystemExit(f"isthmus --version of the wheel prints {done.stdout.strip()!r}, expected {version}.")
            print(f"installed  isthmus {' '.join(arguments)}: {len(done.stdout.splitlines())} lines")


def purelib(python: Path) -> str:
    command = [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def commit_time() -> int:
    return int(git("log", "-1", "--format=%ct"))


def git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=REPOSITORY, check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout.strip()


if __name__ == "__main__":
    main()
