"""Configs from other programs' commands and files: ``isthmus config from-megatron`` and ``from-primus``."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from isthmus.cli.terminal import interruptible, say
from isthmus.config.dialects.megatron.model_args import rows_by_name
from isthmus.config.dialects.megatron.training_command import read_command, script_command
from isthmus.config.dialects.megatron.translate_megatron import MegatronTranslation, translate_command
from isthmus.config.dialects.primus.translate_primus import translate_experiment
from isthmus.config.dialects.scripts.record_script import SHELL_SUFFIXES, without_comments
from isthmus.config.dialects.translation import Translation, World, as_yaml
from isthmus.config.dialects.translation import as_json as translation_json
from isthmus.config.load import LoadedSettings, load_config, load_settings, origins_of
from isthmus.config.schema import RunConfig
from isthmus.errors import UsageError
from isthmus.files.input_files import read_text


def from_megatron(words: Sequence[str], script: Path | None) -> Translation:
    """Translate a Megatron-LM training run.

    ``words`` are Megatron-LM's arguments, with or without launcher and Python file, or a file of arguments or a shell
    script, and further ones. ``script`` is run with stand-ins for python and torchrun; then ``words`` are the script's
    arguments, followed by Megatron-LM's, which win. A UsageError contains all errors.
    """
    if script is not None:
        return _from_script(script, words, restricted=False)
    if not words:
        raise UsageError("give the arguments of pretrain_gpt.py after --, a file of arguments, or a shell script.")
    path = Path(words[0])
    is_command = words[0].startswith("-") or any(word.endswith(".py") for word in words)
    if path.suffix in SHELL_SUFFIXES or not is_command:
        text = read_text(path, missing="file. Check the path, or put -- before arguments.")
        if path.suffix in SHELL_SUFFIXES or text.startswith("#!"):
            return _from_script(path, words[1:], restricted=True)
        with _lines_of(path):
            return _with_model(translate_command(read_command(_split(path, text)), words[1:], path.stem))
    return _with_model(translate_command(read_command(words)))


def _from_script(script: Path, words: Sequence[str], *, restricted: bool) -> Translation:
    flags = next((place for place, word in enumerate(words) if word.startswith("--")), len(words))
    with interruptible():  # a signal ends the script too
        command = script_command(script, words[:flags], restricted=restricted)
    with _lines_of(script):
        return _with_model(translate_command(command, words[flags:], script.stem))


@contextmanager
def _lines_of(path: Path) -> Iterator[None]:
    """Put the file and line of an argument before it in an error."""

    def with_line(match: re.Match[str]) -> str:
        word = re.compile(rf"(?<![\w-]){match[2]}(?![\w-])")
        number = next((n for n, line in lines if word.search(line.partition("# ")[0])), None)
        return match[0] if number is None else f"{match[1]}{path}:{number}: {match[2]}"

    try:
        yield
    except UsageError as error:
        lines = list(enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), start=1))
        raise UsageError(re.sub(r"(?m)^( *)(--[\w-]+)", with_line, str(error))) from error


def from_primus(experiment: Path, models: Path | None, overrides: Sequence[str], data: Sequence[str]) -> Translation:
    """Translate a Primus experiment and its model. A UsageError contains all errors.

    ``overrides`` (``optim.lr=2e-5``) and ``data``, the training files, win over the experiment.
    """
    overridden = load_settings(None, None, overrides, {"data": data or None}, check=False)
    translated = translate_experiment(experiment, models)
    override(translated.translation, overridden)
    return _with_model(translated)  # the tokenizer gives the vocabulary size


def override(translation: Translation, given: LoadedSettings) -> None:
    """Put settings of the command line; one of exclusive settings, such as train.steps, replaces the others."""
    for name, value, origin in origins_of(given.values, given.origins):
        section, _, last = name.partition(".")
        exclusive = (
            getattr(RunConfig.model_fields[section].annotation, "exclusive", ())
            if section in RunConfig.model_fields
            else ()
        )
        for other in exclusive if last.partition(".")[0] in exclusive else ():
            translation.settings.pop(f"{section}.{other}", None)
        translation.put(name, value, origin)


def print_translation(translation: Translation, *, as_json: bool, command: str = "", title: str = "") -> int:
    """Validate a translation and print it as a config file, or as JSON; ``title`` is the first comment."""
    load_config(None, None, [], {"recipe": translation.recipe, **translation.settings}, translation.origins)
    command = command or start_command(translation.recipe, translation.world, "run.yaml")
    if as_json:
        print(json.dumps(translation_json(translation) | {"command": command}, indent=2))
    else:
        say(as_yaml(translation, title or f"Start it with\n\n  {command}"), end="", exact=True)
    return 0


def start_command(recipe: str, world: World, name: str) -> str:
    ranks = "" if world.nproc_per_node is None else str(world.nproc_per_node)
    if world.nnodes == 1:
        return f"isthmus {recipe} {name}" + (f" --nproc {ranks}" if ranks not in ("", "1") else "")
    at = f" --master-addr {world.master_addr}" if world.master_addr else ""
    at += f" --master-port {world.master_port}" if world.master_port else ""
    nodes = f"--nnodes {world.nnodes} --node-rank {world.node_rank} --nproc-per-node {ranks or 'gpu'}"
    return f"torchrun {nodes}{at} -m isthmus {recipe} {name}"


def _with_model(translated: MegatronTranslation) -> Translation:
    """Convert the model's arguments to a Hugging Face config."""
    translation = translated.translation
    if translated.model:
        from isthmus.convert.legacy.model_from_args import config_from_args

        rows = translated.model.get("padded_vocab_size") or _vocab_size(translation)
        config = config_from_args(
            translated.model | {"padded_vocab_size": rows, "vocab_size": rows, "tokenizer_type": None}
        )
        rest, origin = dict(translation.settings), "the arguments of the model"
        translation.settings.clear()
        for name, value in (("out", rest.pop("out")), ("model.config", config), ("model.init", "random")):
            translation.put(name, value, translation.origins.get(name, origin))
        translation.settings.update(rest)
    return translation


def _vocab_size(translation: Translation) -> int:
    """Embedding rows: from the tokenizer's files, or those of the model that its name belongs to."""
    path = translation.settings.get("tokenizer.path")
    local = Path(path) if path is not None and Path(path).exists() else None
    if local is not None and (local.is_file() or any(local.glob("tokenizer*")) or any(local.glob("*vocab.json"))):
        from isthmus.hf.tokenizer.tokenizer_kinds import open_tokenizer

        code = bool(translation.settings.get("model.trust_remote_code"))
        return open_tokenizer(local, translation.settings.get("tokenizer.type"), trust_remote_code=code).vocab_size
    if (rows := rows_by_name(translation)) is not None:
        why = f"The tokenizer is not on this machine; by its name it has {rows} tokens. --vocab-size changes that."
        if translation.settings.get("data.mock"):
            why += " Mock data has no text, so no tokenizer is loaded."
            origin = translation.origins["tokenizer.path"]
            translation.settings.pop("tokenizer.path")
            translation.put("tokenizer.type", "NullTokenizer", origin)
            translation.put("tokenizer.vocab_size", rows - 1, origin)
        translation.remark(translation.origins["tokenizer.path"], "different", why)
        return rows
    what = f"the tokenizer {path} is not on this machine" if path else "no tokenizer is given"
    raise UsageError(
        f"the size of the vocabulary is unknown: {what}. Add --vocab-size N to the arguments, or vocab_size: N to the "
        "overrides of an experiment."
    )


def _split(path: Path, text: str) -> list[str]:
    """Split a file of arguments in shell syntax; lines may end with a backslash."""
    try:
        return shlex.split(without_comments(text))
    except ValueError as error:
        raise UsageError(f"{path} is not a list of arguments: {error}.") from error
