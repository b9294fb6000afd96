"""The output of ``isthmus prepare`` while it is made: the parts of all shards, from which the indexed files are made.

``OUT.partial/`` contains ``inputs.json`` (data, tokenizer and options), the parts and records of the shards, and
``digests.json``, with which other processes need not read the input again to see that it is the same. From all parts
the indexed files are assembled in the same folder, or for an output at a URL in a temporary one, and get their final
names, the manifest last.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy.typing as npt
import xxhash

from isthmus.data.readers.chunks import CHUNK_BYTES
from isthmus.data.readers.data_names import PARTIAL
from isthmus.data.store.indexed_dataset import IndexedWriter
from isthmus.data.store.manifest import COLUMNS, MASK, VALUES, indexed_file, write_manifest
from isthmus.data.tokenize.stats import TokenizeStats
from isthmus.errors import DataError, OutputExists, UsageError, disk_errors
from isthmus.files.atomic_write import rename
from isthmus.files.folder_lock import LOCK, FolderLock
from isthmus.files.remote_files import Folder, RemoteFolder, exists, is_url, open_folder, upload
from isthmus.recipes.data.prepare_shards import SHARD_BYTES, DamagedParts, InputShard, ShardParts

_INPUTS, _DIGESTS = "inputs.json", "digests.json"
_PUBLISHED = (MASK, VALUES, COLUMNS, ".bin", ".idx", ".json")
"""In the order of renaming: the manifest comes last."""


class PartialOutput:
    def __init__(self, prefix: Path | str) -> None:
        """``prefix`` is an absolute path or a URL."""
        self.prefix: str = str(prefix)
        self.is_remote: bool = is_url(prefix)
        self.folder: str = f"{prefix}{PARTIAL}"
        self.files: Folder = open_folder(self.folder)
        self.shards: list[ShardParts] = []

    @property
    def stats(self) -> TokenizeStats:
        """Counts of all shards."""
        total = TokenizeStats()
        for parts in self.shards:
            total.add(parts.stats)
        return total

    @property
    def incomplete(self) -> list[ShardParts]:
        return [parts for parts in self.shards if not parts.complete]

    def refuse_existing(self) -> None:
        """Raises OutputExists if a file of the output exists, unless an interrupted call may have published it."""
        if not self.files.names():
            self._refuse_published(_PUBLISHED)

    def known_digests(self) -> dict[str, str]:
        """Digests of input files by path, size and time."""
        content = self.files.read(_DIGESTS)
        return {} if content is None else dict(json.loads(content))

    @contextmanager
    def opened(
        self, inputs: dict[str, Any], digests: Mapping[str, str], shards: Sequence[InputShard]
    ) -> Iterator[bool]:
        """Load the parts of an earlier call with the same inputs, or remove other parts; locks the folder.

        Yields whether the indexed files are complete and only need renaming. A DataError in the block removes all
        parts.
        """
        content = _inputs_content(inputs)
        with self._lock():
            with disk_errors(Path(self.prefix)):
                same = self.files.read(_INPUTS) == content
                complete = self._check_published(same)
                if not same:
                    self._clear()
                    self.files.write(_DIGESTS, json.dumps(digests).encode())
                    self.files.write(_INPUTS, content)
                self._load(content, shards)
            try:
                yield complete
            except DataError:
                self._remove()
                raise

    @contextmanager
    def joined(self, inputs: dict[str, Any], shards: Sequence[InputShard], part: str) -> Iterator[None]:
        """Load the parts, beside other processes that make other shards; ``part`` is locked.

        UsageError if the folder is not that of a call with the same inputs.
        """
        content = _inputs_content(inputs)
        if self.files.read(_INPUTS) != content:
            raise UsageError(
                f"{self.folder} is not of this data, tokenizer, options and version of isthmus, so this part of the "
                "work does not belong to it. Submit all parts again: isthmus prepare --engine slurm-array."
            )
        with self._lock(shared=True), self._lock(name=f"part-{part}{LOCK}"):
            self._load(content, shards)
            yield

    def _lock(self, name: str = LOCK, *, shared: bool = False) -> AbstractContextManager[Any]:
        """Object stores have no locks."""
        if self.is_remote:
            return nullcontext()
        return FolderLock(Path(self.folder, name), Path(self.prefix), shared=shared)

    def _check_published(self, same: bool) -> bool:
        """Whether all indexed files are assembled; OutputExists if the output exists, which removes the parts."""
        if self.is_remote:
            names = _PUBLISHED if not same else (".json",)
            self._refuse_published(names, remove_parts=True)
            return False
        assembled = self._staged(".json").exists()
        if same and assembled:
            return True
        if assembled:
            for suffix in _PUBLISHED:  # the interrupted call has renamed the files that are missing here
                if not self._staged(suffix).exists():
                    indexed_file(self.prefix, suffix).unlink(missing_ok=True)
        # Published by the process that had the lock before, or killed while it removed the parts.
        is_published = self.files.read(_INPUTS) is None or indexed_file(self.prefix, ".json").exists()
        self._refuse_published(_PUBLISHED, remove_parts=is_published)
        return False

    def _refuse_published(self, suffixes: Sequence[str], *, remove_parts: bool = False) -> None:
        for suffix in suffixes:
            path = f"{self.prefix}{suffix}"
            if exists(path) if self.is_remote else Path(path).exists():
                if remove_parts:
                    self._remove()
                raise OutputExists(f"{path} exists already. Remove it or name another output.")

    def _load(self, content: bytes, shards: Sequence[InputShard]) -> None:
        identity = xxhash.xxh3_128(content).hexdigest()
        self.shards = [ShardParts(self.files, number, shard, identity) for number, shard in enumerate(shards)]
        names = self.files.names()
        by_shard: dict[str, list[str]] = {}
        for name in names:
            by_shard.setdefault(name[:5], []).append(name)
        for parts in self.shards:
            parts.load(by_shard.get(f"{parts.number:05d}", []))

    def set_shards(self, shards: Sequence[InputShard]) -> None:
        """Use these shards, with the same chunks, for the parts that are missing."""
        for parts, shard in zip(self.shards, shards, strict=True):
            parts.shard = shard

    def assemble(self, dtype: npt.DTypeLike, masked: bool, manifest: dict[str, Any], folder: Path | None) -> bool:
        """Write the indexed files and the manifest from the parts, into ``folder`` or that of the parts.

        False if a part was damaged: its shard is incomplete again.
        """
        try:
            self._assemble(dtype, masked, manifest, folder)
        except DamagedParts as damaged:
            old = self.shards[damaged.number]
            self.shards[damaged.number] = parts = ShardParts(self.files, old.number, old.shard, old.inputs)
            parts.load([name for name in self.files.names() if name.startswith(f"{old.number:05d}")])
            return False
        return True

    def _assemble(self, dtype: npt.DTypeLike, masked: bool, manifest: dict[str, Any], folder: Path | None) -> None:
        staged = self._staged("", folder)
        has_values, has_columns = (
            any(getattr(parts, name) for parts in self.shards) for name in ("has_values", "has_columns")
        )
        with IndexedWriter(staged, dtype, masked, has_values, has_columns) as writer:
            for parts in self.shards:
                for tokenized in parts.read():
                    writer.extend(
                        tokenized.tokens, tokenized.lengths, tokenized.mask, tokenized.values, tokenized.columns
                    )
                    writer.end_documents(tokenized.documents)
        write_manifest(staged, manifest | {"pair": writer.close()})

    @contextmanager
    def staging(self) -> Iterator[Path | None]:
        """The folder of the assembled files of an output at a URL; None for that of the parts."""
        if not self.is_remote:
            yield None
            return
        with TemporaryDirectory(prefix="isthmus-") as folder:
            yield Path(folder)

    def publish(self, folder: Path | None) -> None:
        """Give the assembled files their final names and remove the parts."""
        with disk_errors(Path(self.prefix)):
            for suffix in _PUBLISHED:
                staged = self._staged(suffix, folder)
                if staged.exists() and self.is_remote:
                    upload(staged, f"{self.prefix}{suffix}")
                elif staged.exists():
                    rename(staged, indexed_file(self.prefix, suffix))
            self._remove()

    def _clear(self) -> None:
        """Remove all but locks."""
        if isinstance(self.files, RemoteFolder):
            self.files.remove_all()
        for name in self.files.names():
            if Path(self.folder, name).is_dir():
                shutil.rmtree(Path(self.folder, name))
            elif not name.endswith(LOCK):
                self.files.remove(name)

    def _remove(self) -> None:
        if isinstance(self.files, RemoteFolder):
            self.files.remove_all()
        else:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _staged(self, suffix: str, folder: Path | None = None) -> Path:
        return indexed_file((folder or Path(self.folder)) / "pair", suffix)


def _inputs_content(inputs: dict[str, Any]) -> bytes:
    sizes = {"chunk_bytes": CHUNK_BYTES, "shard_bytes": SHARD_BYTES}  # parts are counted in chunks
    return json.dumps(inputs | sizes, indent=1).encode()
