"""Every reader of files that Isthmus did not write, and the file of ``seeds`` whose damaged versions it gets."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from hostile import mutations
from isthmus.cli.config.translate import _split
from isthmus.config.dialects.megatron.training_command import read_command
from isthmus.config.dialects.megatron.translate_megatron import translate_command
from isthmus.config.dialects.primus.translate_primus import translate_experiment
from isthmus.config.dialects.rocm_scripts.read_variables import SCRIPTS, read_script
from isthmus.config.load import load_config
from isthmus.config.model_file import read_model
from isthmus.convert.legacy.model_from_args import architecture_from_args, config_from_args
from isthmus.convert.open_model import checkpoint_folder, open_model
from isthmus.convert.torch_dist.from_torch_dist import TorchDistFolder
from isthmus.convert.torch_pickle import args_in, read_torch_pickle
from isthmus.data.chat.chat_records import kinds_of, parse_document, parse_record
from isthmus.data.chat.preference_records import parse_labelled, parse_preference
from isthmus.data.readers.file_formats import chunk_records, read_chunks
from isthmus.data.store.indexed_dataset import open_indexed, scan_indexed
from isthmus.engine.checkpoint.checkpoint_folder import latest
from isthmus.errors import DataError
from isthmus.families.adapted_linears import HfLinear
from isthmus.families.inferred.family_file import load_family
from isthmus.families.registry import all_families, family_for
from isthmus.files.checked_files import ChecksumVerifier
from isthmus.files.input_files import parse_json
from isthmus.hf.model_folder import ModelFolder, read_json
from isthmus.hf.peft_folder import PeftFolder
from isthmus.hf.tensors.safetensors_format import TensorInfo, TensorReader, read_header
from isthmus.hf.tokenizer.sentencepiece_model import read_sentencepiece
from isthmus.hf.tokenizer.tokenizer import load_tokenizer
from isthmus.recipes.data.eval_prompts import _read as read_prompts
from isthmus.recipes.model_card import _losses
from isthmus.train.row_file import RowFile, first_valid_loss
from isthmus.train.trackers import TrackedRun

SEEDS = Path(__file__).parent / "seeds"


@dataclass(frozen=True, slots=True)
class Reader:
    """A function of a folder with the file ``file``, and the versions of that file that it gets."""

    name: str
    read: Callable[[Path], object]
    """Of the damaged file; the rest of its seed is beside it."""
    file: str
    """Relative to its seed."""
    mutate: mutations.Mutate
    share: float = 1.0
    """Of the inputs, relative to the others: less for slow readers."""
    others: tuple[str, ...] = ()
    """Further files that are damaged, and that have the name of ``file`` then."""

    @property
    def seed(self) -> Path:
        """The folder with the valid file."""
        return SEEDS / self.file.partition("/")[0]

    def content(self, number: int, campaign: int = 0) -> bytes:
        """The input ``number`` of a campaign, always the same."""
        rng = random.Random(f"{campaign}/{self.name}/{number}")
        chosen = rng.choice((self.file, *self.others))
        try:
            return self.mutate(_seed(chosen), rng)
        except RecursionError:  # nested beyond what Python's own JSON writes
            return b"[" * 5000


@functools.cache
def _seed(file: str) -> bytes:
    return (SEEDS / file).read_bytes()


def _tensors(infos: Iterator[TensorInfo]) -> None:
    reader = TensorReader()
    for info in infos:
        if info.nbytes < 1 << 16:
            reader.read(info)
    reader.close()


def _safetensors(path: Path) -> None:
    _tensors(iter(read_header(path, ChecksumVerifier()).values()))


def _index(path: Path) -> None:
    with ModelFolder.open(path.parent) as folder:
        _tensors(iter(folder.tensors.values()))


def _config(path: Path) -> None:
    config = read_json(path)
    family = family_for(config)
    arch = family.to_architecture(config)
    family.check_training(config)
    dropout = family.read_dropout(config)
    family.to_hf_config(arch, config, dropout=dropout)


def _torch_dist(path: Path) -> None:
    folder = TorchDistFolder(path.parent)
    for key, meta in folder.tensors.items():
        for chunk in meta.chunks:
            folder._info(key, chunk)
    args_in(read_torch_pickle(path.parent / "common.pt"))


def _legacy(path: Path) -> None:
    state = read_torch_pickle(path, strided=True)
    args = args_in(state)
    if args is not None:
        architecture_from_args(args)
        config_from_args(args)


def _model(path: Path) -> None:
    opened = open_model(path.parents[1] if path.parent.name == "release" else path.parents[2])
    opened.weights.read(opened.family.rules[0].canonical, slice(0, 1))


def _records(path: Path) -> None:
    for chunk in read_chunks([path]):
        for record in chunk_records(chunk):
            for kind in kinds_of(record):
                parsers = {"text": parse_document, "preference": parse_preference, "unpaired": parse_labelled}
                try:
                    parsers.get(kind, parse_record)(record)  # type: ignore[operator]
                except DataError:
                    pass


def _dataset(path: Path) -> None:
    for chunk in read_chunks([path.parent]):
        list(chunk_records(chunk))


def _indexed(path: Path) -> None:
    scan_indexed(open_indexed(path.parent / "indexed"))


def _tokenizer(path: Path) -> None:
    tokenizer = load_tokenizer(path.parent)
    tokenizer.encode_with_mask(["Hi é<|im_end|>"], [[(0, 2)]])


def _peft(path: Path) -> None:
    folder = PeftFolder(path.parent)
    for module in folder.modules:
        folder.factors(HfLinear(module, 0, 0, (), ()))
    _tensors(iter(folder.saved.values()))


def _overrides(path: Path) -> None:
    words = path.read_bytes().decode("utf-8", "replace").splitlines()
    load_config("sft", None, words, {"model": "m", "data": ["d"], "out": "o"})


def _megatron(path: Path) -> None:
    words = _split(path, path.read_bytes().decode("utf-8", "replace"))
    translated = translate_command(read_command(words))
    if translated.model:
        rows = {"padded_vocab_size": 100, "vocab_size": 100, "tokenizer_type": None}
        config_from_args(translated.model | rows)
    translation = translated.translation
    load_config(None, None, [], {"recipe": "pretrain", "model.path": "m", **translation.settings}, translation.origins)


def _rocm(path: Path) -> None:
    words = path.read_bytes().decode("utf-8", "replace").split(" ")
    variables = dict(word.partition("=")[::2] for word in words[: len(words) // 2])
    script = SCRIPTS[len(words) % len(SCRIPTS)]
    translation = read_script(script, variables, words[len(words) // 2 :]).translation
    load_config(None, None, [], {"recipe": translation.recipe, **translation.settings}, translation.origins)


def _family(path: Path) -> None:
    family = load_family(path, all_families)
    config = parse_json(_seed("configs/qwen3.json"))
    family.to_hf_config(family.to_architecture(config))


def _tracker(path: Path) -> None:
    checkpoint_folder(path.parent)
    latest(path.parent)


def _metrics(path: Path) -> None:
    first_valid_loss(path)
    _losses(path, 1)
    RowFile(path, start=1, warn=print).close()


def _checksums(path: Path) -> None:
    ChecksumVerifier().check_complete(path.parent)


def _of_families() -> tuple[str, ...]:
    return tuple(f"configs/{path.name}" for path in sorted((SEEDS / "configs").glob("*.json")))


_JSON, _TEXT = mutations.json_tree, mutations.text
READERS = (
    Reader("safetensors", _safetensors, "peft/adapter_model.safetensors",
           mutations.safetensors, 2, ("model/model-00001-of-00002.safetensors",)),
    Reader("index", _index, "model/model.safetensors.index.json", _JSON),
    Reader("config", _config, "configs/qwen3.json", _JSON, 3, _of_families()),
    Reader("generation-config", lambda path: ModelFolder.open(path.parent).end_tokens(), "model/generation_config.json",
           _JSON),
    Reader("torch-save", lambda path: read_torch_pickle(path, strided=True), "torch/state.pt", mutations.torch_zip, 2),
    Reader("megatron-args", _legacy, "torch/release/mp_rank_00/model_optim_rng.pt", mutations.torch_zip, 1,
           ("torch_dist/release/common.pt",)),
    Reader("legacy", _model, "torch/release/mp_rank_00/model_optim_rng.pt", mutations.torch_zip, 0.5),
    Reader("metadata", _torch_dist, "torch_dist/release/.metadata", mutations.torch_pickle, 2),
    Reader("distcp", _torch_dist, "torch_dist/release/__0_0.distcp", mutations.havoc, 0.5),
    Reader("torch-dist", _model, "torch_dist/release/.metadata", mutations.torch_pickle, 0.5),
    Reader("idx", _indexed, "store/indexed.idx", mutations.havoc, 2),
    Reader("bin", _indexed, "store/indexed.bin", mutations.havoc, 0.5),
    Reader("manifest", _indexed, "store/indexed.json", _JSON),
    Reader("run-config", lambda path: load_config("sft", path), "texts/run.yaml", _TEXT, 0.5),
    Reader("model-config", lambda path: read_model(str(path)), "texts/model.yaml", _TEXT),
    Reader("overrides", _overrides, "texts/overrides.txt", _TEXT),
    Reader("jsonl", _records, "data/a.jsonl", mutations.json_lines, 3),
    Reader("json", _records, "data/a.json", _JSON, 2),
    Reader("csv", _records, "data/a.csv", _TEXT, 2),
    Reader("gzip", _records, "data/a.jsonl.gz", mutations.gzipped),
    Reader("zstd", _records, "data/a.jsonl.zst", mutations.havoc),
    Reader("parquet", _records, "data/a.parquet", mutations.havoc),
    Reader("arrow", _dataset, "arrow/data-00000-of-00001.arrow", mutations.havoc, 0.1),
    Reader("arrow-state", _dataset, "arrow/state.json", _JSON, 0.1),
    Reader("tokenizer", _tokenizer, "tokenizer/tokenizer.json", _JSON, 0.1),
    Reader("tokenizer-config", _tokenizer, "tokenizer/tokenizer_config.json", _JSON, 0.1),
    Reader("sentencepiece", lambda path: read_sentencepiece(path), "sentencepiece/tokenizer.model", mutations.havoc,
           0.2),
    Reader("sentencepiece-config", lambda path: read_sentencepiece(path.parent / "tokenizer.model"),
           "sentencepiece/tokenizer_config.json", _JSON, 0.2),
    Reader("adapter-config", _peft, "peft/adapter_config.json", _JSON),
    Reader("adapter-model", _peft, "peft/adapter_model.safetensors", mutations.safetensors),
    Reader("megatron-arguments", _megatron, "texts/megatron.txt", _TEXT, 0.5),
    Reader("primus", lambda path: translate_experiment(path), "primus/first.yaml", _TEXT, 0.2),
    Reader("rocm-variables", _rocm, "texts/rocm.txt", _TEXT, 0.5),
    Reader("family", _family, "texts/family.json", _JSON),
    Reader("prompts", lambda path: read_prompts(path), "texts/prompts.jsonl", mutations.json_lines),
    Reader("tracker", _tracker, "texts/latest_checkpointed_iteration.txt", mutations.havoc),
    Reader("metrics", _metrics, "texts/metrics.jsonl", mutations.json_lines),
    Reader("tracker-ids", lambda path: TrackedRun(path.parent, 1, "p", "n", {}).known_id("wandb"),
           "texts/trackers.json", _JSON, 0.5),
    Reader("checksums", _checksums, "checksums/checksums.json", _JSON),
)  # fmt: skip
BY_NAME: dict[str, Reader] = {reader.name: reader for reader in READERS}
