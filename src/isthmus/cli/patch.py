"""``isthmus patch``: fixes Megatron-LM's async saver, in its files or when Python imports it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from isthmus.cli.options import Debug, Json, verb
from isthmus.cli.terminal import show
from isthmus.errors import CheckFailed, UsageError

app: typer.Typer = typer.Typer(
    help="Fix the async saver of Megatron-LM, for newer torch.",
    context_settings={"help_option_names": ["-h", "--help"]},
)


@dataclass(frozen=True)
class PatchResult:
    file: str
    state: str
    fault: str | None = None
    diff: str | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class RuntimePatch:
    files: list[str]
    state: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class SaverOptions:
    megatron: Annotated[
        Path,
        typer.Option("--megatron", metavar="DIR", help="Checkout of Megatron-LM, or a folder that contains megatron/."),
    ]
    revert: Annotated[bool, typer.Option("--revert", help="Remove the patch.")] = False
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the diff and change nothing.")] = False
    check: Annotated[bool, typer.Option("--check", help="Change nothing; exit code 1 if the saver has the fault.")] = (
        False
    )
    debug: Debug = False
    json: Json = False


@app.command("checkpoint-saver", short_help="Change the file in a checkout of Megatron-LM.")
@verb
def checkpoint_saver(options: SaverOptions) -> int:
    """Let the async saver of a Megatron-LM checkout (core 0.6 to 0.12, ROCm's fork) work with torch 2.7 and newer.

    Prints the diff. The result works with older torch, too. A second call changes nothing, and a saver without the
    fault stays as it is.
    """
    if options.check and (options.revert or options.dry_run):
        raise UsageError("--check changes nothing and prints no diff. Leave --revert and --dry-run out.")
    from isthmus.engine.upstream.saver_patch import plan_patch, plan_revert

    plan = plan_revert(options.megatron) if options.revert else plan_patch(options.megatron)
    if options.check and plan.changes:
        raise CheckFailed(
            f"{plan.file}: {plan.fault}. Fix it: isthmus patch checkpoint-saver --megatron {options.megatron}"
        )
    if plan.changes and not options.dry_run:
        plan.write()
    diff = plan.diff(options.megatron)
    if diff and not options.json:
        print(diff, end="")
    state = ("reverted" if options.revert else "patched") if plan.changes else plan.unchanged
    state = f"would be {state}" if options.dry_run and plan.changes else state
    show(PatchResult(str(plan.file), state, plan.fault, diff if options.json else None), as_json=options.json)
    return 0


@dataclass(frozen=True, kw_only=True, slots=True)
class RuntimeOptions:
    install: Annotated[
        bool, typer.Option("--install", help="Write two files into site-packages, which Python reads at its start.")
    ] = False
    list_: Annotated[bool, typer.Option("--list", help="Show the files and whether they exist.")] = False
    remove: Annotated[bool, typer.Option("--remove", help="Delete the files.")] = False
    debug: Debug = False
    json: Json = False


@app.command("runtime", short_help="Fix Megatron-LM whenever this Python environment imports it.")
@verb
def runtime(options: RuntimeOptions) -> int:
    """Fix the async saver when any program of this environment imports Megatron-LM, whose files do not change.

    Processes that the saver spawns are fixed too. A saver without the fault stays as it is.
    """
    if options.install + options.list_ + options.remove != 1:
        raise UsageError("choose one of --install, --list and --remove.")
    from isthmus.engine.upstream import startup_hook

    files = startup_hook.hook_files()
    if options.install:
        startup_hook.install(files)
    elif options.remove:
        startup_hook.remove(files)
    state = "installed" if startup_hook.installed(files) else "not installed"
    show(RuntimePatch([str(path) for path in files], state), as_json=options.json)
    return 0
