"""The data of a run that has begun, opened again from its folder: the same samples in the same order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from isthmus.config.load import load_recorded
from isthmus.config.schema import RunConfig
from isthmus.convert.open_model import HF_SUBFOLDER
from isthmus.data.batching.batches import Batches
from isthmus.engine.checkpoint.checkpoint_folder import latest
from isthmus.engine.parallel.process_groups import FIRST_RANK
from isthmus.errors import DataError, MissingInput, UnsafeInput, UsageError
from isthmus.hf.model_folder import read_json
from isthmus.hf.tokenizer.tokenizer import Tokenizer
from isthmus.hf.tokenizer.tokenizer_kinds import NumberTokenizer, open_tokenizer
from isthmus.recipes.data.corpus import split_sources
from isthmus.recipes.data.data_sources import data_settings, find_data_sources
from isthmus.recipes.data.shown_samples import ShownSample, shown_step
from isthmus.recipes.data.source_samples import open_sources
from isthmus.recipes.model.model_source import answer_end
from isthmus.recipes.registry import recipe_of
from isthmus.recipes.run_dir import RunDir


@dataclass(frozen=True, slots=True)
class RecordedData:
    tokenizer: Tokenizer
    train: Batches
    """Batches of one data-parallel rank, so that its steps have all sequences."""

    def samples(self, first: int, count: int) -> Iterator[ShownSample]:
        """``count`` training samples from sample ``first`` on, in the order of the steps, counted from 0.

        Raises:
            UsageError: there is no sample ``first``.
        """
        shown = 0
        for sample in islice(self._in_order(), first, first + count):
            shown += 1
            yield sample
        if count and not shown:
            raise UsageError(f"no sample {first}. The samples of an epoch are counted from 0; lower --index.")

    def _in_order(self) -> Iterator[ShownSample]:
        for step in range(self.train.steps_per_epoch):
            for sample in shown_step(self.train, step, self.tokenizer.decode):
                yield replace(sample, name=f"step {step + 1}, {sample.name}")


def open_recorded(run: RunDir) -> RecordedData:
    """Open the tokenized data of a run and its tokenizer. Nothing is downloaded, written or executed.

    Raises:
        MissingInput: the folder is no run folder, or data or tokenizer do not exist any more.
        UsageError: the run has no data files, or settings of another version.
        DataError: the data is damaged.
    """
    if not run.config.is_file():
        raise MissingInput(f"{run.root} has no config.yaml, so it is not a run folder. Name the --out of a run.")
    config = load_recorded(run.config)
    if config.data.mock:
        raise UsageError(f"{run.root}: this run has data.mock=true: its samples are random tokens without text.")
    sources = find_data_sources(config, run.data)
    tokenizer = _tokenizer(run, config)
    stores = open_sources(data_settings(config), sources, run.data, tokenizer, tokenizer.vocab_size, lambda _: None, {})
    end = None
    if recipe_of(config).trains_scores:
        hf_config: dict[str, Any] = {}
        with suppress(OSError, DataError, MissingInput):
            hf_config = read_json(run.export() / "config.json")
        end = answer_end(hf_config, tokenizer)
    train, _, _ = split_sources(config.data, sources, stores).batches(
        config, FIRST_RANK, 1, eod=tokenizer.eos_id, device_type="cpu", end=end
    )
    return RecordedData(tokenizer, train)


def _tokenizer(run: RunDir, config: RunConfig) -> Tokenizer:
    """The tokenizer from the folder that the config names, or else from an export or a checkpoint of the run."""
    settings = config.tokenizer
    if settings.type == "NullTokenizer":
        assert settings.vocab_size is not None
        return NumberTokenizer(settings.vocab_size)
    tokenizer_path = settings.path or config.model.path
    places = [*([] if tokenizer_path is None else [Path(tokenizer_path)]), run.export(), run.adapter()]
    with suppress(DataError):
        if (checkpoint := latest(run.checkpoints)) is not None:
            places.append(checkpoint / HF_SUBFOLDER)
    reasons = []
    for place in places:
        try:
            tokenizer = open_tokenizer(place, settings.type if str(place) == tokenizer_path else None)
            tokenizer.use_chat_template(config.chat.template)
            return tokenizer
        except (MissingInput, DataError, UsageError, UnsafeInput) as error:
            reasons.append(str(error))
    raise MissingInput(f"{run.root}: its tokenizer cannot be read, nor that of an export: {reasons[0]}")
