"""What another program was told, as a config: ``isthmus config from-megatron`` and ``from-primus``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from isthmus.config.dialects.megatron.model_args import rows_by_name
from isthmus.config.dialects.megatron.translate_megatron import Told, from_script, from_words
from isthmus.config.dialects.primus.translate_primus import from_experiment
from isthmus.config.dialects.render import as_json, as_yaml
from isthmus.config.dialects.translation import Translation, World
from isthmus.config.load import load_config
from isthmus.errors import IOFailure, MissingInput, UsageError

_SHELL = (".sh", ".bash", ".slurm", ".sbatch")


def from_megatron(words: Sequence[str]) -> Translation:
    """The training of a script with what it is called with, or of a command's words.

    Raises:
        MissingInput: there is no such script.
        UsageError: it cannot be read, or says what is not built; all of it.
    """
    if not words:
        raise UsageError("give a script, or -- and the arguments that pretrain_gpt.py gets.")
    command = any(word.endswith(".py") for word in words) and not words[0].endswith(_SHELL)
    if words[0].startswith("-") or command:
        return _whole(from_words(words))
    path = Path(words[0])
    flags = next((place for place, word in enumerate(words) if word.startswith("--")), len(words))
    return _whole(from_script(_read(path), words[1:flags], words[flags:], path.stem))


def from_primus(experiment: Path, models: Path | None) -> Translation:
    """An experiment of Primus with its model.

    Raises:
        MissingInput, IOFailure: a file is not there, or cannot be read.
        UsageError: it is no experiment of Megatron's, or says what is not built; all of it.
    """
    return _whole(from_experiment(experiment, models))


def print_translation(translation: Translation, *, json_wanted: bool, name: str = "run.yaml") -> int:
    """Print it, once it is known to be a config.

    Raises:
        UsageError: settings of it clash.
    """
    load_config(None, None, [], {"recipe": translation.recipe, **translation.settings})
    command = start_command(translation.recipe, translation.world, name)
    if json_wanted:
        print(json.dumps(as_json(translation) | {"command": command}, indent=2))
    else:
        print(as_yaml(translation, f"Start it with\n\n  {command}").rstrip("\n"))
    return 0


def start_command(recipe: str, world: World, name: str) -> str:
    """The command that starts a run of a config file over these ranks."""
    ranks = "" if world.nproc_per_node is None else str(world.nproc_per_node)
    if world.nnodes == 1:
        return f"isthmus {recipe} {name}" + (f" --nproc {ranks}" if ranks not in ("", "1") else "")
    at = f" --master-addr {world.master_addr}" if world.master_addr else ""
    at += f" --master-port {world.master_port}" if world.master_port else ""
    nodes = f"--nnodes {world.nnodes} --node-rank {world.node_rank} --nproc-per-node {ranks or 'gpu'}"
    return f"torchrun {nodes}{at} -m isthmus {recipe} {name}"


def _whole(told: Told) -> Translation:
    """With the model as Hugging Face says it."""
    if told.model:
        from isthmus.convert.legacy.config_from_args import config_of

        rows = told.model.get("padded_vocab_size") or _rows_of(told.translation)
        config = config_of(told.model | {"padded_vocab_size": rows, "vocab_size": rows, "tokenizer_type": None})
        rest, words = dict(told.translation.settings), "the arguments of the model"
        told.translation.settings.clear()
        for name, value in (("out", rest.pop("out")), ("model.config", config), ("model.init", "random")):
            told.translation.put(name, value, told.translation.origins.get(name, words))
        told.translation.settings.update(rest)
    return told.translation


def _rows_of(translation: Translation) -> int:
    """Rows of the embedding: as many as the tokenizer has tokens, or as the model has that it belongs to."""
    path = translation.settings.get("tokenizer.path")
    here = Path(path) if path is not None and Path(path).exists() else None
    if here is not None and (here.is_file() or list(here.glob("tokenizer*")) or list(here.glob("vocab.json"))):
        from isthmus.hf.tokenizer.tokenizer import load_tokenizer

        return load_tokenizer(here.parent if here.is_file() else here).vocab_size
    if (rows := rows_by_name(translation)) is not None:
        why = f"It is not here, and goes by its name for one of {rows} tokens; --vocab-size says another number."
        translation.remark(translation.origins["tokenizer.path"], "otherwise", why)
        return rows
    what = f"the tokenizer {path} is no folder here" if path else "there is no tokenizer"
    raise UsageError(
        f"nothing tells the size of the vocabulary: {what}. Add --vocab-size N to the arguments, or vocab_size: N "
        "to the overrides of an experiment."
    )


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (FileNotFoundError, IsADirectoryError) as error:
        raise MissingInput(f"{path}: there is no such file. Check the path.") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 text (byte {error.start}).") from error
    except OSError as error:
        raise IOFailure(f"{path} cannot be read: {error.strerror}.") from error
