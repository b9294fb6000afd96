"""Memory and time of rank 0 for the index of checkpoints of up to 16,384 ranks.

    python benchmarks/checkpoint_at_scale.py --record

The parts of all ranks are computed from traced ranks of the first two and the last pipeline stage (tests/fake_cuda),
and compared with those of two other traced ranks. A process then is rank 0: it joins what the ranks send and writes the
index; another one reads the index and takes the parts of a rank. The baseline is what torch's writer does on rank 0:
plans of all ranks, and its Metadata. No tensor data is written.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import pickle
import resource
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from certificate import REPOSITORY, certificate, publish_result

TESTS = REPOSITORY / "tests"
STATES = ("param", "exp_avg", "exp_avg_sq")
LAYOUTS: dict[str, dict[str, Any]] = {
    "8B, 64 ranks": {"preset": "llama3.1-8b", "tp": 2, "pp": 1, "dp": 32},
    "70B, 1,024 ranks": {"preset": "llama3.1-70b", "tp": 8, "pp": 4, "dp": 32},
    "70B, HSDP, 4,096 ranks": {"preset": "llama3.1-70b", "tp": 8, "pp": 1, "dp": 512, "fsdp": 16},
    "405B, 16,384 ranks": {"preset": "llama3.1-405b", "tp": 8, "pp": 16, "dp": 128},
}
_RECORD_BYTES = 1200
"""About what torch.save adds to the elements of a part."""


def local_range(parameter: dict[str, Any], d: int, dp: int, fsdp: int) -> tuple[int, int]:
    """The elements of a parameter that a data-parallel rank saves: of a bucket, or with ``fsdp`` of the first copy."""
    if not fsdp:
        share = parameter["bucket_elements"] // dp
        return max(0, d * share - parameter["start"]), min(parameter["elements"], (d + 1) * share - parameter["start"])
    rows, width = -(-parameter["rows"] // fsdp), parameter["elements"] // parameter["rows"]
    return min(parameter["elements"], d * rows * width), min(parameter["elements"], (d + 1) * rows * width)


def stage_ranks(
    stage: list[dict[str, Any]], tp: int, dp: int, fsdp: int = 0
) -> Iterator[tuple[int, int, list[list[Any]]]]:
    """Tensor-parallel and data-parallel rank and parts (key, shape, offset, size, element bytes) of a stage's ranks."""
    from isthmus.engine.checkpoint.optimizer_state import blocks

    for d in range(dp):
        for t in range(tp):
            parts: list[list[Any]] = []
            for parameter in stage if d < (fsdp or dp) else ():
                start, end = local_range(parameter, d, dp, fsdp)
                for piece in parameter["pieces"]:
                    axis, shape, key = piece["tp_axis"], piece["shape"], piece["key"]
                    if axis is None and t:
                        continue
                    ahead, origin = len(piece["offset"]) - len(shape), list(piece["offset"])
                    if axis is not None:
                        origin[axis] += t * shape[axis - ahead]
                    ones = [1] * ahead
                    if d == 0 and not fsdp:
                        parts.append([key, piece["full_shape"], origin, ones + shape, 2])
                    low, high = max(piece["first"], start), min(piece["first"] + math.prod(shape), end)
                    for corner, size in blocks(shape, low - piece["first"], high - piece["first"]):
                        at = [*origin[:ahead], *(a + b for a, b in zip(origin[ahead:], corner, strict=True))]
                        if fsdp:
                            parts.append([key, piece["full_shape"], at, [*ones, *size], 2])
                        for state in STATES:
                            parts.append([f"optimizer.state.{state}.{key}", piece["full_shape"], at, [*ones, *size], 4])
            yield t, d, parts


def rank_index(rank: int, parts: list[list[Any]], rng: str | None) -> Any:
    """The index of a rank, with the items and results of torch's writer that it is made from."""
    import torch
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    items, places, at = [], {}, 0
    for key, full_shape, offset, size, width in parts:
        chunk = ChunkStorageMetadata(torch.Size(offset), torch.Size(size))
        properties = TensorProperties(dtype=torch.bfloat16 if width == 2 else torch.float32)
        data = TensorWriteData(chunk, properties, torch.Size(full_shape))
        items.append(WriteItem(MetadataIndex(key, chunk.offsets), WriteItemType.SHARD, tensor_data=data))
        length = _RECORD_BYTES + width * chunk.sizes.numel()
        places[items[-1].index] = _StorageInfo(f"__{rank}_0.distcp", at, length)
        at += length
    if rng is not None:
        items.append(WriteItem(MetadataIndex(rng), WriteItemType.BYTE_IO))
        places[items[-1].index] = _StorageInfo(f"__{rank}_0.distcp", at, 20_000)
    return items, places


def make_ranks(
    folder: Path, stages: list[list[dict[str, Any]]], tp: int, pp: int, dp: int, fsdp: int = 0
) -> tuple[int, int]:
    """Write what each rank sends to rank 0, in the order of ranks; returns the numbers of parts and of their bytes."""
    from isthmus.engine.checkpoint.checkpoint_index import compressed_index, written_index

    count, num_bytes, sent, plans = 0, 0, [b""] * (tp * pp * dp), (folder / "plans").open("wb")
    with plans:
        for number, stage in enumerate(stages):
            for t, d, parts in stage_ranks(stage, tp, dp, fsdp):
                rank = (number * dp + d) * tp + t
                items, places = rank_index(rank, parts, f"rng_state/shard_{number}.{t}_{pp}.{tp}" if d == 0 else None)
                count += len(items)
                num_bytes += sum(width * math.prod(size) for *_, size, width in parts)
                sent[rank] = compressed_index(written_index(items, places))
                pickle.dump((rank, items, list(places.items())), plans)
    (folder / "sent").write_bytes(pickle.dumps(sent))
    return count, num_bytes


def write(folder: Path) -> dict[str, Any]:
    """Rank 0 of a save."""
    from isthmus.engine.checkpoint.checkpoint_index import merged_index
    from isthmus.engine.checkpoint.index_file import INDEX, write_index

    sent = pickle.loads((folder / "sent").read_bytes())
    started = time.perf_counter()
    write_index(folder / INDEX, merged_index(sent), None)
    seconds = time.perf_counter() - started
    return {"seconds": seconds, "sent_mib": sum(map(len, sent)) / 2**20, "index_mib": _mib(folder / INDEX)}


def read(folder: Path) -> dict[str, Any]:
    """The rank of a machine that reads the index, and its search for the parts of a rank."""
    from isthmus.engine.checkpoint.checkpoint_index import CheckpointIndex
    from isthmus.engine.checkpoint.index_file import read_index

    started = time.perf_counter()
    index = read_index(folder)
    seconds = time.perf_counter() - started
    sent = CheckpointIndex.from_bytes(zlib.decompress(pickle.loads((folder / "sent").read_bytes())[-1]))
    started, parts = time.perf_counter(), 0
    for name, tensor in sent.tensors.items():
        for offset, size in zip(tensor.offsets.tolist(), tensor.sizes.tolist(), strict=True):
            parts += len(index.tensors[name].within(offset, size))
    return {"seconds": seconds, "parts": index.num_parts, "rank_parts": parts, "rank_s": time.perf_counter() - started}


def write_by_torch(folder: Path) -> dict[str, Any]:
    """Rank 0 of a save by torch: plans of all ranks, its global plan, their results and the pickle of Metadata."""
    import torch.distributed.checkpoint.default_planner as planner
    from torch.distributed.checkpoint.planner import SavePlan

    plans: dict[int, SavePlan] = {}
    results: dict[int, Any] = {}
    with (folder / "plans").open("rb") as file:
        while file.peek(1):
            rank, items, places = pickle.load(file)
            plans[rank], results[rank] = SavePlan(items), places
    started = time.perf_counter()
    global_plans, metadata = planner.create_default_global_save_plan([plans[rank] for rank in sorted(plans)])
    metadata.storage_data = {index: place for rank in sorted(results) for index, place in results[rank]}
    with (folder / "torch").open("wb") as file:
        pickle.dump(metadata, file)
    return {"seconds": time.perf_counter() - started, "ranks": len(global_plans), "index_mib": _mib(folder / "torch")}


def read_by_torch(folder: Path) -> dict[str, Any]:
    """Each rank of a load by torch."""
    started = time.perf_counter()
    with (folder / "torch").open("rb") as file:
        metadata = pickle.load(file)
    return {"seconds": time.perf_counter() - started, "parts": len(metadata.storage_data)}


def make_checksums(folder: Path, count: int, size: int) -> None:
    """The list of a checkpoint of ``count`` files of ``size`` bytes, which do not exist, and its packed copy."""
    from isthmus.files.file_checksums import BLOCK_BYTES, CHECKSUMS, HASH_BYTES, FileChecksums, content_checksum
    from isthmus.files.packed_checksums import packed

    blocks = -(-size // BLOCK_BYTES)
    files = {f"__{n}_0.distcp": FileChecksums(size, os.urandom(HASH_BYTES * blocks)) for n in range(count)}
    content = {"algorithm": "xxh3_64", "files": {name: files[name].as_json() for name in sorted(files)}}
    text = json.dumps({**content, "checksum": content_checksum(content)}, indent=1)
    (folder / CHECKSUMS).write_text(text)
    (folder / "packed").write_bytes(packed(files))


def parse_checksums(folder: Path) -> dict[str, Any]:
    """The rank of a machine that reads the list of checksums, and packs it for the others."""
    from isthmus.files.checked_files import ChecksumVerifier
    from isthmus.files.file_checksums import CHECKSUMS

    verifier, started = ChecksumVerifier(), time.perf_counter()
    verifier.has_list(folder)
    parsed = time.perf_counter() - started
    verifier.packed_list(folder)
    return {"seconds": parsed, "packed_s": time.perf_counter() - started - parsed, "mib": _mib(folder / CHECKSUMS)}


def map_checksums(folder: Path) -> dict[str, Any]:
    """The other ranks of the machine."""
    from isthmus.engine.checkpoint.opened_checkpoint import _mapped
    from isthmus.files.checked_files import ChecksumVerifier

    started, verifier = time.perf_counter(), ChecksumVerifier()
    verifier.use_packed_list(folder, _mapped(folder / "packed"))
    seconds = time.perf_counter() - started
    assert verifier.has_list(folder)
    return {"seconds": seconds, "mib": _mib(folder / "packed")}


MEASURED = {
    task.__name__: task for task in (write, read, write_by_torch, read_by_torch, parse_checksums, map_checksums)
}


def _mib(path: Path) -> float:
    return path.stat().st_size / 2**20


def measure(name: str, folder: Path) -> dict[str, Any]:
    """Run a task in a process of its own; adds its peak memory and that before the task."""
    command = [sys.executable, "-W", "ignore", __file__, "--task", name, "--folder", str(folder)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def _peak_gib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def run_task(name: str, folder: Path) -> None:
    import isthmus.engine.checkpoint.opened_checkpoint  # noqa: F401  the imports of a rank

    gc.collect()
    before = _peak_gib()
    result = MEASURED[name](folder)
    print(json.dumps({"task": name, **result, "peak_gib": _peak_gib(), "imports_gib": before}))


def shifted(stage: list[dict[str, Any]], stages: int) -> list[dict[str, Any]]:
    """The layout of a later stage with as many layers."""
    layers = {piece["offset"][0] for parameter in stage for piece in parameter["pieces"]}
    result: list[dict[str, Any]] = json.loads(json.dumps(stage))
    for parameter in result:
        for piece in parameter["pieces"]:
            piece["offset"][0] += stages * len(layers)
    return result


def layouts(only: str, quick: bool) -> Iterator[dict[str, Any]]:
    from fake_cuda.checkpoint_parts import stage_layout, written_parts
    from fake_cuda.runner import FakeCuda

    for name, layout in LAYOUTS.items():
        if only not in name or (quick and layout["preset"] != "llama3.1-8b"):
            continue
        sizes = {key: layout[key] for key in ("tp", "pp", "dp", "fsdp") if key in layout}
        world_size = sizes["tp"] * sizes["pp"] * sizes["dp"]
        with tempfile.TemporaryDirectory() as path:
            folder = Path(path)
            fake = FakeCuda(folder / "log")
            try:
                last = sizes["pp"] - 1
                traced_stages = {n: fake.run(stage_layout, stage=n, **layout) for n in sorted({0, min(1, last), last})}
                stages = [traced_stages.get(n) or shifted(traced_stages[1], n - 1) for n in range(sizes["pp"])]
                fsdp = sizes.get("fsdp", 0)
                compared = [1, *([(fsdp - 1) * sizes["tp"] + 1] if fsdp else []), world_size // 2 + 1]
                for rank in compared:
                    traced = fake.run(written_parts, rank=rank, **layout)
                    t, d = rank % sizes["tp"], rank // sizes["tp"] % sizes["dp"]
                    stage = stages[rank // (sizes["tp"] * sizes["dp"])]
                    ranks = {(t, d): parts for t, d, parts in stage_ranks(stage, sizes["tp"], sizes["dp"], fsdp)}
                    computed = [[key, offset, size] for key, _, offset, size, _ in ranks[t, d]]
                    if sorted(computed) != sorted(traced):
                        raise SystemExit(f"{name}: the computed parts of rank {rank} are not those of the traced rank")
            finally:
                fake.close()
            count, num_bytes = make_ranks(folder, stages, **sizes)
            writers = sizes["tp"] * sizes["pp"] * (fsdp or sizes["dp"])
            make_checksums(folder, writers, num_bytes // writers)
            measured = {}
            for task in MEASURED:
                measured[task] = measure(task, folder)
                print(f"{name}: {json.dumps(measured[task])}", flush=True)
        row = {"layout": name, **layout, "ranks": world_size, "parts": count, "compared_ranks": compared, **measured}
        texts = (f"{task} {row[task]['peak_gib']:.2f} GiB {row[task]['seconds']:.1f} s" for task in MEASURED)
        print(f"{name}: {count:,} parts; {'; '.join(texts)}", flush=True)
        yield row


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", metavar="TEXT", help="only layouts whose name contains it")
    parser.add_argument("--quick", action="store_true", help="only the smallest layout")
    parser.add_argument("--record", action="store_true", help="write the result into benchmarks/results")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the result there")
    parser.add_argument("--task", choices=[*MEASURED], help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if chosen.task is not None:
        run_task(chosen.task, chosen.folder)
        return
    sys.path.insert(0, str(TESTS))
    certified = certificate([__file__, *arguments])
    with tempfile.TemporaryDirectory(suffix=f"-{os.getpid()}") as servers:
        os.environ.setdefault("ISTHMUS_TEST_SERVERS", servers)
        os.environ.setdefault("HF_MODULES_CACHE", servers)
        rows = list(layouts(chosen.only, chosen.quick))
    result = {"certificate": certified, "layouts": rows}
    publish_result("checkpoint-at-scale", result, record=chosen.record, out=chosen.out)


if __name__ == "__main__":
    main(sys.argv[1:])
