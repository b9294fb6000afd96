"""Engines decide which process tokenizes which shard: the processes of this machine, or the tasks of a Ray cluster.

The array jobs of Slurm run this command again, each for some of the shards
(``isthmus.recipes.data.prepare_slurm``).
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal, Protocol

from isthmus.data.readers.chunks import RecordChunk, kept_records
from isthmus.data.tokenize.stats import TokenizeStats
from isthmus.data.tokenize.tokenize_records import RecordTokenizer
from isthmus.errors import Hang, IsthmusError
from isthmus.extras import optional_package
from isthmus.files.remote_files import Folder
from isthmus.platforms.cpu_threads import cores
from isthmus.recipes.data.prepare_shards import InputShard, ShardParts
from isthmus.recipes.data.prepare_workers import StartMethod, call_each, limit_threads, tokenize_chunks

EngineName = Literal["local", "ray", "slurm-array"]
OnProgress = Callable[[TokenizeStats], None]
"""Called with the counts so far."""
_MOST_DEATHS = 16
"""Deaths of workers of one shard, after which the shard itself is likely to end them, for lack of memory."""

_tokenizers: dict[str, RecordTokenizer] = {}  # in a worker of Ray: that of the last call, by its reference


class Engine(Protocol):
    def complete(self, shards: Sequence[ShardParts], tokenizer: RecordTokenizer, on_progress: OnProgress) -> None:
        """Make the parts of ``shards`` that are missing."""

    def each(self, function: Callable[[Any], None], items: Sequence[Any]) -> None:
        """Call ``function`` for each item, in several processes."""


@dataclass(frozen=True, slots=True)
class LocalEngine:
    """Processes of this machine: one reads the chunks of all shards, and the others tokenize them."""

    workers: int | None = None
    """None: one per core."""
    method: StartMethod | None = None

    def complete(self, shards: Sequence[ShardParts], tokenizer: RecordTokenizer, on_progress: OnProgress) -> None:
        """Make the missing parts in order."""
        owners: deque[ShardParts] = deque()
        chunks = _stream(shards, owners)
        total, current = TokenizeStats(), None
        for parts in shards:
            total.add(parts.stats)
        with closing(tokenize_chunks(tokenizer, chunks, self.workers or cores(), self.method)) as tokenized:
            for chunk in tokenized:
                parts = owners.popleft()
                if current is not None and current is not parts:
                    current.finish()
                current = parts
                parts.add(chunk)
                total.add(chunk.stats)
                on_progress(total)
        for parts in shards:
            if not parts.complete:
                parts.finish()

    def each(self, function: Callable[[Any], None], items: Sequence[Any]) -> None:
        """Call ``function`` for each item in a process of this machine."""
        call_each(function, items, self.workers or cores(), self.method)


def _stream(shards: Sequence[ShardParts], owners: deque[ShardParts]) -> Iterator[RecordChunk]:
    """The missing chunks of all shards, whose parts ``owners`` gets; a file of several shards is read once."""
    reader: Iterator[RecordChunk] = iter(())
    names: tuple[str, ...] = ()
    position = 0
    for parts in shards:
        shard = parts.shard
        start = shard.first + parts.chunks
        if names != shard.names or position > start:
            reader, names, position = InputShard(shard.names, max_records=shard.max_records).chunks(), shard.names, 0
        for _ in islice(reader, start - position):
            position += 1
        dropped = shard.dropped_records()
        while shard.end is None or position < shard.end:
            chunk = next(reader, None)
            if chunk is None:
                break
            owners.append(parts)
            yield kept_records(chunk, dropped.get(position - shard.first))
            position += 1


@dataclass(frozen=True, slots=True)
class RayEngine:
    """A task per shard, with one core each, on the Ray cluster of ``RAY_ADDRESS`` or of this machine."""

    def complete(self, shards: Sequence[ShardParts], tokenizer: RecordTokenizer, on_progress: OnProgress) -> None:
        """Make the missing parts; a task whose worker ends is started again, and continues from its parts."""
        ray = _started_ray()
        shared, total = [ray.put(tokenizer)], TokenizeStats()  # in a list, Ray passes the reference
        items = [(parts.folder, parts.number, parts.shard, parts.inputs, shared) for parts in shards]
        for number in _finished_tasks(ray, complete_shard_in_task, items):
            if not shards[number].load_record():
                raise Hang("a Ray task has ended, but its parts are not there. Is the output on a shared file system?")
            total.add(shards[number].stats)
            on_progress(total)

    def each(self, function: Callable[[Any], None], items: Sequence[Any]) -> None:
        """Call ``function`` for each item in a task."""
        for _ in _finished_tasks(_started_ray(), function, [(item,) for item in items]):
            pass


def _finished_tasks(ray: Any, function: Callable[..., None], items: Sequence[tuple[Any, ...]]) -> Iterator[int]:
    """Numbers of the items whose task has ended; the first error ends all tasks."""
    task = ray.remote(num_cpus=1, max_retries=_MOST_DEATHS)(function)
    running = {task.remote(*item): number for number, item in enumerate(items)}
    try:
        while running:
            (done,), _ = ray.wait(list(running))
            ray.get(done)
            yield running.pop(done)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, IsthmusError):
            raise error.cause from None
        raise
    except ray.exceptions.RayError as error:
        raise Hang(
            f"a Ray worker ended {_MOST_DEATHS + 1} times on the same part of the data, or the cluster is lost: "
            f"{type(error).__name__}. Run the same command again to continue from the finished parts."
        ) from error
    finally:
        for rest in running:
            ray.cancel(rest, force=True)


def complete_shard(folder: Folder, number: int, shard: InputShard, inputs: str, tokenizer: RecordTokenizer) -> None:
    """Make the missing parts of a shard in this process."""
    limit_threads()
    parts = ShardParts(folder, number, shard, inputs)
    parts.load(folder.names())
    if not parts.complete:
        for chunk in parts.remaining_chunks():
            parts.add(tokenizer(chunk))
        parts.finish()


def complete_shard_in_task(
    folder: Folder, number: int, shard: InputShard, inputs: str, reference: Sequence[Any]
) -> None:
    """:func:`complete_shard` with a tokenizer that the process has loaded once."""
    with optional_package("isthmus prepare --engine ray", "ray"):
        import ray

    key = reference[0].hex()
    if key not in _tokenizers:
        _tokenizers.clear()
        _tokenizers[key] = ray.get(reference[0])
    complete_shard(folder, number, shard, inputs, _tokenizers[key])


def _started_ray() -> Any:
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # tasks without GPUs leave the variables alone
    with optional_package("isthmus prepare --engine ray", "ray"):
        import ray
    if not ray.is_initialized():
        ray.init(include_dashboard=False, logging_level="warning", log_to_driver=False)
    return ray
