"""``isthmus config``: prints configs and presets, and translates the settings of other programs."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from isthmus.cli.options import argument, config_and_overrides, flag, group, option, verb
from isthmus.cli.terminal import interruptible, say
from isthmus.cli.train_verbs import DATA, WORDS
from isthmus.errors import OutputExists, UsageError

if TYPE_CHECKING:
    from isthmus.config.dialects.trainers.translate_trainer import Program

app: typer.Typer = group("Show configs and presets; translate other programs' settings.")
_AS_JSON = partial(flag, "Print settings, origins and remarks as JSON.", "--json")
_OVERRIDES = partial(argument, "KEY=VALUE", "Settings of Isthmus such as optim.lr=2e-5, which win.", None)


@dataclass(frozen=True, kw_only=True, slots=True)
class ShowOptions:
    words: list[str] | None = WORDS()
    resolved: bool = flag("Print every setting with its default, validated as for a run.")
    origin: bool = flag("Print one setting per line with its origin.")
    recipe: str | None = option("RECIPE", "sft, dpo or pretrain, if --resolved reads a file without recipe.")


@app.command("show", short_help="Print the settings of a config file or preset.")
@verb
def show(options: ShowOptions) -> int:
    """Print the settings of a config file, with its base files, variables and overrides applied.

    For a model preset, print the keys of its config.json.
    """
    from isthmus.config.load import load_settings, origins_of
    from isthmus.config.presets import Kind, kind_of
    from isthmus.config.yaml_text import write_mapping

    kind: Kind = "models" if any(kind_of(word) == "models" for word in options.words or []) else "train"
    if kind == "models" and options.resolved:
        raise UsageError("--resolved is for run configs, got a model. Leave it out.")
    file, overrides = config_and_overrides(options.words or [], kind)
    if options.recipe is not None and not options.resolved:
        raise UsageError("--recipe needs --resolved, which validates the settings. Add --resolved, or leave it out.")
    loaded = load_settings(options.recipe, file, overrides, check=options.resolved, kind=kind)
    values = loaded.values if loaded.config is None else loaded.config.model_dump(mode="json")
    if not options.origin:
        say(write_mapping(values).rstrip("\n"), exact=True)
        return 0
    rows = [(name, json.dumps(value), where) for name, value, where in origins_of(values, loaded.origins)]
    widths = [max((len(row[column]) for row in rows), default=0) for column in (0, 1)]
    for name, value, where in rows:
        say(f"{name:<{widths[0]}}  {value:<{min(widths[1], 40)}}  {where}")
    return 0


@dataclass(frozen=True, kw_only=True, slots=True)
class ListOptions:
    words: list[str] | None = argument("WORD", "Only presets whose name or description contains all words.", None)


@app.command("ls", short_help="List the shipped run configs and models.")
@verb
def ls(options: ListOptions) -> int:
    """List the shipped run configs, which can replace a config file, and models, for --model."""
    from isthmus.config.presets import PREFIX, PRESETS_PAGE, Kind, about, matches, nearest, preset_names

    words = options.words or []
    titles: dict[Kind, str] = {
        "train": "run configs",
        "models": "models (model.init=random)",
        "bench": "tables (isthmus bench)",
    }
    presets = [(kind, name, about(name, kind)) for kind in titles for name in preset_names(kind)]
    listed = [preset for preset in presets if matches(words, *preset[1:])]
    if not listed:
        guess = nearest(" ".join(words), [name for _, name, _ in presets], PREFIX)
        raise UsageError(f"no preset matches {' '.join(words)}. {guess} All presets: {PRESETS_PAGE}.")
    width = max(len(name) for _, name, _ in listed)
    for kind, title in titles.items():
        rows = [f"  {PREFIX}{name:<{width}}  {text}" for of_kind, name, text in listed if of_kind == kind]
        if rows:
            say("\n".join([title, *rows]))
    return 0


@dataclass(frozen=True, kw_only=True, slots=True)
class CopyOptions:
    preset: str = argument("NAME", "A name that `isthmus config ls` prints.")
    destination: Path = argument("FILE.yaml", "The new file. It must not exist.")


@app.command("cp", short_help="Copy a preset into a file to edit.")
@verb
def cp(options: CopyOptions) -> int:
    """Copy a preset into a file to edit; a model preset with its bases merged, for --model FILE.yaml."""
    from isthmus.config.model_file import read_model
    from isthmus.config.presets import PREFIX, config_path, kind_of, opening_lines
    from isthmus.config.yaml_text import write_mapping
    from isthmus.files.atomic_write import write_atomic

    name = f"{PREFIX}{options.preset.removeprefix(PREFIX)}"
    source = config_path(name, kind_of(name))
    text = source.read_text(encoding="utf-8")
    if kind_of(name) == "models":
        comment = "".join(f"# {line}".rstrip() + "\n" for line in opening_lines(source))
        text = comment + write_mapping(read_model(name))
    if options.destination.exists():
        raise OutputExists(f"{options.destination} exists already. Remove it, or choose another name.")
    write_atomic(options.destination, text)
    return 0


@app.command("schema", short_help="Print the JSON schema of a config file, for editors.")
def schema() -> int:
    """Print the JSON schema of a config file, for editors."""
    from isthmus.config.inherit import FILE_KEYS
    from isthmus.config.schema import RunConfig

    document: dict[str, Any] = RunConfig.model_json_schema()
    for part in (document, *document["$defs"].values()):
        part["properties"] = {
            name: _or_variable(property_schema) for name, property_schema in part["properties"].items()
        }
    document["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    document["properties"] |= FILE_KEYS
    plain = {"type": "string", "description": "The same as model.path."}
    document["properties"]["model"] = {"anyOf": [plain, document["properties"]["model"]]}
    # Required settings may come from a base file or from the command line.
    for part in (document, *document["$defs"].values()):
        part.pop("required", None)
    print(json.dumps(document, indent=2))
    return 0


def _or_variable(schema: dict[str, Any]) -> dict[str, Any]:
    """A setting may also be ``${VAR}``; text and sections are unchanged."""
    if (schema.get("type") in ("string", "object") and "enum" not in schema) or "$ref" in schema:
        return schema
    labels = {key: schema[key] for key in ("title", "description", "default") if key in schema}
    types = {key: value for key, value in schema.items() if key not in labels}
    return labels | {"anyOf": [*types.get("anyOf", [types]), {"type": "string", "pattern": r"\$\{"}]}


@dataclass(frozen=True, kw_only=True, slots=True)
class FromMegatronOptions:
    words: list[str] | None = argument(
        "[FILE] [-- ARGS...]",
        "Arguments of pretrain_gpt.py, also with the launcher before them; or a file of arguments, then more; or a "
        "shell script that only sets variables and starts one training.",
        None,
    )
    run: Path | None = option(
        "SCRIPT",
        "Like a script as FILE, with stand-ins for python, torchrun and srun that record the training and start "
        "nothing, but its other commands do run. The arguments are those of the script, then Megatron-LM's.",
    )
    as_json: bool = _AS_JSON()


@app.command(
    "from-megatron",
    short_help="Translate a training command of Megatron-LM into a config.",
    context_settings={"ignore_unknown_options": True},
)
@verb
def from_megatron(options: FromMegatronOptions) -> int:
    """Print the config of a training that is started with Megatron-LM's arguments."""
    from isthmus.cli.config.translate import from_megatron as translated
    from isthmus.cli.config.translate import print_translation

    return print_translation(translated(options.words or [], options.run), as_json=options.as_json)


@dataclass(frozen=True, kw_only=True, slots=True)
class FromPrimusOptions:
    experiment: Path = argument("FILE.yaml", "An experiment of the Megatron backend.")
    overrides: list[str] | None = _OVERRIDES()
    data: list[str] | None = DATA()
    models: Path | None = option(
        "DIR", "Folder with model files, searched besides the experiment's own and PRIMUS_PATH."
    )
    as_json: bool = _AS_JSON()


@app.command("from-primus", short_help="Translate an experiment of Primus into a config.")
@verb
def from_primus(options: FromPrimusOptions) -> int:
    """Print the config of a Primus experiment and its model files, with settings given here."""
    from isthmus.cli.config.translate import from_primus as translated
    from isthmus.cli.config.translate import print_translation

    return print_translation(
        translated(options.experiment, options.models, options.overrides or [], options.data or []),
        as_json=options.as_json,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class FromTrainerOptions:
    file: Path = argument("FILE", "A config (YAML, JSON), or a shell script that starts the training.")
    overrides: list[str] | None = _OVERRIDES()
    data: list[str] | None = DATA()
    nproc: int | None = option("N", "Ranks of the training, which multiply the batch of a rank.", min=1, max=1024)
    as_json: bool = _AS_JSON()


@dataclass(frozen=True, kw_only=True, slots=True)
class FromLlamaFactoryOptions(FromTrainerOptions):
    dataset_info: Path | None = option(
        "FILE", "dataset_info.json with the files of the data sets; default: in dataset_dir."
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class FromCommandOptions(FromTrainerOptions):
    recipe: str | None = option("VERB", "The verb of the program, such as sft or dpo, if FILE does not have it.")


def _add_trainer(name: str, program: Program, what: str, task: str, options: type[FromTrainerOptions]) -> None:
    """Add the command that translates ``what`` of a program, a training for some ``task``."""

    def command(options: FromTrainerOptions) -> int:
        return _from_trainer(program, options)

    command.__annotations__["options"] = options
    command.__doc__ = (
        f"Print the config of a training of {program}{task}. A key without an equal setting is an error, or a comment."
    )
    app.command(name, short_help=f"Translate {what} of {program}.")(verb(command))


_add_trainer("from-llamafactory", "LLaMA-Factory", "a config", "", FromLlamaFactoryOptions)
_add_trainer("from-axolotl", "axolotl", "a config", "", FromTrainerOptions)
_add_trainer("from-trl", "TRL", "a config", "", FromCommandOptions)
_add_trainer("from-verl", "verl", "a config or a command", " with GRPO", FromTrainerOptions)
_add_trainer("from-swift", "ms-swift", "a config or a command", "", FromCommandOptions)


def _from_trainer(program: Program, options: FromTrainerOptions) -> int:
    from isthmus.cli.config.translate import override, print_translation
    from isthmus.config.dialects.trainers.translate_trainer import translate_trainer
    from isthmus.config.load import load_settings

    overridden = load_settings(None, None, options.overrides or [], check=False)
    with interruptible():  # a signal ends a script too
        translation = translate_trainer(
            program,
            options.file,
            nproc=options.nproc,
            dataset_info=options.dataset_info if isinstance(options, FromLlamaFactoryOptions) else None,
            recipe=options.recipe if isinstance(options, FromCommandOptions) else None,
            data=tuple(options.data or ()),
        )
    override(translation, overridden)
    return print_translation(translation, as_json=options.as_json)


@dataclass(frozen=True, kw_only=True, slots=True)
class ToMegatronOptions:
    words: list[str] | None = WORDS()
    as_json: bool = flag("Print arguments and remarks as JSON.", "--json")


@app.command("to-megatron", short_help="Translate a config into Megatron-LM's arguments.")
@verb
def to_megatron(options: ToMegatronOptions) -> int:
    """Print the arguments of Megatron-LM's pretrain_gpt.py for a config, one per line.

    Settings that they do not express are named on stderr.
    """
    from isthmus.cli.config.to_megatron import print_arguments

    return print_arguments(options.words or [], as_json=options.as_json)


@dataclass(frozen=True, kw_only=True, slots=True)
class FromEnvOptions:
    script: str = argument("SCRIPT", "llama2, llama3, deepseek_v2, qwen3-0.6b or llama3.2-1b.")
    words: list[str] | None = argument(
        "NAME=VALUE", "Variables of the script, which override the environment, and settings.", None
    )
    run: bool = flag("Train as the script would: with its log file, its ranks and the means at the end.")
    as_json: bool = _AS_JSON()


@app.command("from-env", short_help="Translate variables of ROCm Megatron-LM's scripts into a config.")
@verb
def from_env(options: FromEnvOptions) -> int:
    """Print the config of a run of ROCm Megatron-LM's scripts, from their variables in the environment."""
    from isthmus.cli.config.from_env import print_config, run_script

    if options.run and options.as_json:
        raise UsageError("--json prints the settings and --run trains with them. Leave one of them out.")
    if options.run:
        return run_script(options.script, options.words or [])
    return print_config(options.script, options.words or [], as_json=options.as_json)
