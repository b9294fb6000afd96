"""``isthmus config``: what a config says once its bases, variables and overrides are in, and what there is to set."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from isthmus.cli.train import Words
from isthmus.errors import NoSpace, UsageError

app = typer.Typer(help="Look at the settings of a run.", context_settings={"help_option_names": ["-h", "--help"]})


@app.command("show", short_help="Print the settings of a config file, its bases included.")
def show(
    words: Words = None,
    resolved: Annotated[
        bool, typer.Option("--resolved", help="Every setting there is, defaults included; checked as before a run.")
    ] = False,
    origin: Annotated[bool, typer.Option("--origin", help="A setting a line, and where it is from.")] = False,
    recipe: Annotated[
        str | None,
        typer.Option(metavar="RECIPE", help="sft, dpo or pretrain, for --resolved of a file that does not say."),
    ] = None,
) -> int:
    """Print the settings of a config file, with those of its bases, variables filled in and overrides applied."""
    from isthmus.cli.words import config_and_overrides
    from isthmus.config.load import origins_of, settle
    from isthmus.config.yaml_text import write_mapping

    file, overrides = config_and_overrides(words or [])
    if recipe is not None and not resolved:
        raise UsageError("--recipe is for --resolved, which checks the settings. Give that as well, or leave it out.")
    settled = settle(recipe, file, overrides, check=resolved)
    values = settled.given if settled.config is None else settled.config.model_dump(mode="json")
    if not origin:
        print(write_mapping(values).rstrip("\n"))
        return 0
    rows = [(name, json.dumps(value), where) for name, value, where in origins_of(values, settled.origins)]
    widths = [max((len(row[column]) for row in rows), default=0) for column in (0, 1)]
    for name, value, where in rows:
        print(f"{name:<{widths[0]}}  {value:<{min(widths[1], 40)}}  {where}")
    return 0


@app.command("ls", short_help="List the configs that come with Isthmus.")
def ls() -> int:
    """List the configs that come with Isthmus; preset:NAME stands for one wherever a config file can."""
    from isthmus.config.presets import PREFIX, about, preset_names

    width = max(map(len, preset_names()))
    for name in preset_names():
        print(f"{PREFIX}{name:<{width}}  {about(name)}")
    return 0


@app.command("cp", short_help="Copy a preset, to be changed.")
def cp(
    preset: Annotated[str, typer.Argument(metavar="NAME", help="As `isthmus config ls` prints it.")],
    destination: Annotated[Path, typer.Argument(metavar="FILE.yaml", help="The new file; it must not exist.")],
) -> int:
    """Copy a preset into a file of your own."""
    from isthmus.config.presets import PREFIX, config_path
    from isthmus.hf.staged import disk_errors

    source = config_path(f"{PREFIX}{preset.removeprefix(PREFIX)}")
    if destination.exists():
        raise NoSpace(f"{destination} exists already. Remove it or choose another name.")
    with disk_errors(destination):
        destination.write_bytes(source.read_bytes())
    return 0


@app.command("schema", short_help="Print the JSON schema of a config file, for editors.")
def schema() -> int:
    """Print the JSON schema of a config file, for editors."""
    from isthmus.config.inherit import FILE_KEYS
    from isthmus.config.schema import RunConfig

    found: dict[str, Any] = RunConfig.model_json_schema()
    found["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    found["properties"] |= FILE_KEYS
    # A file may leave to its bases, or to the command line, what a run needs.
    for part in (found, *found["$defs"].values()):
        part.pop("required", None)
    print(json.dumps(found, indent=2))
    return 0
