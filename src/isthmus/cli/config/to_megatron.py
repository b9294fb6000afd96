"""``isthmus config to-megatron``: a config as Megatron-LM's arguments."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from isthmus.cli.options import config_and_overrides
from isthmus.cli.terminal import note, say
from isthmus.config.dialects.megatron.translate_megatron import write_arguments
from isthmus.config.dialects.translation import remark_line
from isthmus.config.load import load_config
from isthmus.errors import UsageError


def print_arguments(words: Sequence[str], *, as_json: bool) -> int:
    """Print the arguments, one flag per line, and on stderr what they do not express."""
    from isthmus.convert.legacy.megatron_args import model_args, unsupported_features
    from isthmus.data.readers.data_names import is_hub_name
    from isthmus.data.readers.file_sources import is_data_file
    from isthmus.families.registry import family_for
    from isthmus.hf.model_folder import tokenizer_files
    from isthmus.recipes.model.model_source import open_source
    from isthmus.recipes.plan.model_plan import dropout_of

    file, overrides = config_and_overrides(words)
    config = load_config(None, file, overrides)
    source = open_source(config.model.model_copy(update={"init": "random"}))  # downloads no weights
    family = family_for(source.config)
    arch = family.to_architecture(source.config, source.tensors or None)
    if lacking := unsupported_features(arch):
        raise UsageError(
            f"{source}: Megatron-LM 0.16.1 has no option for {', '.join(lacking)}: it trains in Isthmus only."
        )
    dropout = dropout_of(config.train, family.read_dropout(source.config))
    rates = {"attention_dropout": dropout.attention, "hidden_dropout": dropout.hidden}
    tokenizer = config.tokenizer
    if tokenizer.path is None and tokenizer_files(source.path):
        tokenizer = tokenizer.model_copy(update={"path": config.model.path})
    train = config.train.model_copy(update=rates)
    config = config.model_copy(update={"train": train, "tokenizer": tokenizer})
    written = write_arguments(config, model_args(arch), arch.vocab_size)
    if dropout.embedding != dropout.hidden:
        why = f"The embedding has dropout {dropout.embedding:g}; Megatron-LM has one rate, {dropout.hidden:g}."
        written.remark("train.hidden_dropout", "different", why)
    data = config.data
    files = [*data.files, *data.valid_files, *data.test_files]
    files += [file for item in data.sets.values() for file in item.files]
    if raw := [file for file in files if is_hub_name(file) or is_data_file(Path(file))]:
        written.remark(", ".join(raw), "unsupported", "Megatron-LM reads indexed files. isthmus prepare writes them.")
    if as_json:
        arguments = [word for words in written.words() for word in words]
        print(json.dumps({"arguments": arguments, "remarks": [asdict(item) for item in written.remarks]}, indent=2))
        return 0
    for remark in written.remarks:
        note(remark_line(remark))
    for words_of_flag in written.words():
        say(shlex.join(words_of_flag), exact=True)
    return 0
