"""Shards of the input: their plan, their parts, and the same output whoever makes them."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import fsspec
import numpy as np
import pytest

from isthmus.data.readers.data_names import hub_name, is_hub_name
from isthmus.data.readers.file_formats import read_chunks
from isthmus.data.readers.file_sources import find_sources
from isthmus.errors import MissingInput, OutputExists, OutputInUse, UsageError
from isthmus.files.folder_lock import FolderLock
from isthmus.hf.tiny_model import train_tokenizer
from isthmus.hf.tokenizer.tokenizer import save_tokenizer
from isthmus.recipes.data import prepare_resume, prepare_shards
from isthmus.recipes.data.prepare import InputPart, prepare
from isthmus.recipes.data.prepare_shards import InputShard, plan_shards

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(train_tokenizer(["the sea is wide and blue"], vocab_size=300), folder)
    return folder


@pytest.fixture
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("readers.json_chunks", "readers.chunks"):
        monkeypatch.setattr(f"isthmus.data.{module}.CHUNK_BYTES", 200)
    monkeypatch.setattr(prepare_shards, "CHUNK_BYTES", 200)
    monkeypatch.setattr(prepare_shards, "SHARD_BYTES", 1000)
    monkeypatch.setattr(prepare_shards, "PART_TOKENS", 100)


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """One file of several shards, and small ones."""
    for number, count in enumerate((60, 3, 2, 40)):
        lines = [json.dumps({"text": f"the sea {number} {k} " * (1 + k % 4)}) for k in range(count)]
        (tmp_path / f"{number}.jsonl").write_text("\n".join(lines) + "\n")
    return [str(tmp_path / f"{number}.jsonl") for number in range(4)]


def outputs(prefix: Path) -> dict[str, bytes]:
    return {path.name[len(prefix.name) :]: path.read_bytes() for path in prefix.parent.glob(f"{prefix.name}.[!p]*")}


def test_shards_cover_all_chunks_once(small_shards: None, files: list[str]) -> None:
    shards = plan_shards(files)
    assert len(shards) > 5 and InputShard(tuple(files[1:3])) in shards
    assert [shard.first for shard in shards if shard.names == (files[0],)][:2] == [0, 5]
    chunks = [chunk for shard in shards for chunk in shard.chunks()]
    assert chunks == list(read_chunks(files))
    assert plan_shards(files, max_records=7) == [InputShard(tuple(files), max_records=7)]


def test_large_files_have_few_shards(monkeypatch: pytest.MonkeyPatch, files: list[str]) -> None:
    monkeypatch.setattr(prepare_shards, "SHARD_BYTES", 10)
    assert len(plan_shards(files[:1])) == 16
    assert len(plan_shards([str(Path(files[0]).rename(Path(files[0]).with_suffix(".json")))])) == 1


def test_output_does_not_depend_on_shards(tmp_path: Path, tokenizer: Path, files: list[str], request) -> None:
    prepare(files, tmp_path / "one", tokenizer, workers=1)
    request.getfixturevalue("small_shards")
    prepare(files, tmp_path / "many", tokenizer, workers=2)
    assert outputs(tmp_path / "one") == outputs(tmp_path / "many")


def test_parts_of_several_processes(tmp_path: Path, tokenizer: Path, files: list[str], small_shards: None) -> None:
    """Each of them makes its shards; what is missing, foreign or damaged is made by the merge."""
    prepare(files, tmp_path / "whole", tokenizer, workers=1)
    out = tmp_path / "out"
    with pytest.raises(UsageError, match=r"out\.partial is not of this data"):
        prepare(files, out, tokenizer, workers=1, part=InputPart(0, 3))
    prepare(files, out, tokenizer, engine="slurm-array")
    folder = tmp_path / "out.partial"
    assert {path.name for path in folder.iterdir()} == {"inputs.json", "digests.json"}
    records = [prepare(files, out, tokenizer, workers=1, part=InputPart(k, 3)).stats.records for k in (0, 2)]
    with pytest.raises(UsageError, match=r"out\.partial is not of this data"):
        prepare(files[:2], out, tokenizer, workers=1, part=InputPart(1, 3))
    assert not outputs(out) and 0 < sum(records) < 105
    (folder / "00003-00001.npz").write_bytes(b"half")
    other = (folder / "00000-00000.npz").read_bytes()
    (folder / "00001-00000.npz").write_bytes(other)  # of another shard: its chunks are not the next
    seen: list[int] = []
    done = prepare(files, out, tokenizer, workers=1, on_progress=lambda stats: seen.append(stats.records))
    assert outputs(out) == outputs(tmp_path / "whole") and not folder.exists()
    assert (done.stats.records, seen[0] > sum(records)) == (105, True)


def test_parts_of_other_inputs_are_not_used(tmp_path: Path, tokenizer: Path, files: list[str], small_shards) -> None:
    """A process that was believed dead may write parts of an earlier call."""
    out = tmp_path / "out"
    prepare(files[:2], out, tokenizer, engine="slurm-array")
    prepare(files[:2], out, tokenizer, workers=1, part=InputPart(0, 2))
    stale = {path.name: path.read_bytes() for path in (tmp_path / "out.partial").glob("0*")}
    prepare(files, out, tokenizer, engine="slurm-array")
    for name, content in stale.items():
        (tmp_path / "out.partial" / name).write_bytes(content)
    prepare(files, out, tokenizer, workers=1)
    prepare(files, tmp_path / "whole", tokenizer, workers=1)
    assert outputs(out) == outputs(tmp_path / "whole")


def test_parts_exclude_the_merge(tmp_path: Path, tokenizer: Path, files: list[str], monkeypatch) -> None:
    """While a process makes parts, others may make other parts, but none merges."""
    out = tmp_path / "out"
    prepare(files, out, tokenizer, engine="slurm-array")
    monkeypatch.setattr("isthmus.files.folder_lock._WAIT_S", 0.0)
    held: list[str] = []

    def lock(path: Path, output: Path, *, shared: bool = False) -> FolderLock:
        held.append(f"{path.name} {shared}")
        return FolderLock(path, output, shared=shared)

    monkeypatch.setattr(prepare_resume, "FolderLock", lock)
    prepare(files, out, tokenizer, workers=1, part=InputPart(1, 2))
    assert held == [".lock True", "part-1.lock False"]


def test_shared_locks(tmp_path: Path, run_python) -> None:
    """Locks are of a process, so the others are processes."""
    code = """
import sys
from pathlib import Path
from isthmus.files import folder_lock
folder_lock._WAIT_S = 0.0
with folder_lock.FolderLock(Path(sys.argv[1]), Path("out"), shared=sys.argv[2] == "shared"):
    pass
"""
    path = tmp_path / "folder" / ".lock"
    for shared, codes in ((True, (0, 1)), (False, (1, 1))):
        with FolderLock(path, Path("out"), shared=shared):
            results = [run_python(code, str(path), other) for other in ("shared", "alone")]
        assert tuple(result.returncode for result in results) == codes
        assert OutputInUse.__name__ in results[1].stderr


@pytest.fixture
def run_python():
    return lambda code, *words: subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True)


@pytest.fixture
def memory() -> Iterator[fsspec.AbstractFileSystem]:
    system = fsspec.filesystem("memory")
    system.store.clear()
    yield system
    system.store.clear()


@pytest.mark.parametrize("interrupted", [False, True])
def test_data_and_output_at_urls(tmp_path, tokenizer, files, small_shards, memory, interrupted) -> None:
    for file in files:
        memory.put_file(file, f"/data/{Path(file).name}")
    memory.pipe_file("/data/notes.md", b"no data")
    expected = find_sources(["memory://data"])
    assert expected.names == find_sources(["memory://data/*.jsonl"]).names
    assert [Path(name).name for name in expected.names] == [Path(file).name for file in files]
    prepare(files, tmp_path / "local", tokenizer, workers=1)

    def ended(stats) -> None:
        raise KeyboardInterrupt

    if interrupted:
        monkeypatch = pytest.MonkeyPatch()
        monkeypatch.setattr(prepare_shards, "PART_S", -1.0)
        with pytest.raises(KeyboardInterrupt):
            prepare(["memory://data"], "memory://out/text", tokenizer, workers=1, on_progress=ended)
        monkeypatch.undo()
        assert memory.exists("/out/text.partial/00000-00000.npz") and not memory.exists("/out/text.bin")
    prepare(["memory://data"], "memory://out/text", tokenizer, workers=1)
    names = {path.rpartition("/")[2]: memory.cat_file(path) for path in memory.ls("/out", detail=False)}
    local = outputs(tmp_path / "local")
    assert (names["text.bin"], names["text.idx"]) == (local[".bin"], local[".idx"])
    assert json.loads(names["text.json"])["pair"] == json.loads(local[".json"])["pair"]
    assert not memory.glob("/out/text.partial/*")
    with pytest.raises(OutputExists, match=r"text\.\w+ exists already"):
        prepare(["memory://data"], "memory://out/text", tokenizer, workers=1)


def test_parquet_and_gzip_at_urls(tmp_path: Path, memory) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="needs pyarrow: pip install 'isthmus[data]'")
    parquet = pytest.importorskip("pyarrow.parquet", reason="needs pyarrow: pip install 'isthmus[data]'")
    parquet.write_table(pyarrow.table({"text": ["a", "b"]}), tmp_path / "t.parquet")
    memory.put_file(str(tmp_path / "t.parquet"), "/t.parquet")
    memory.pipe_file("/t.jsonl.gz", gzip.compress(b'{"text": "c"}\n'))
    chunks = read_chunks(["memory://t.parquet", "memory://t.jsonl.gz"])
    assert [record.value["text"] for chunk in chunks for record in chunk.parse()] == ["a", "b", "c"]


@pytest.mark.thorough
def test_s3(tmp_path: Path, tokenizer: Path, files: list[str], small_shards, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a server of moto; workers are spawned, since fsspec has a thread."""
    moto = pytest.importorskip("moto.server", reason="needs moto and s3fs: pip install 'moto[server]' s3fs")
    s3fs = pytest.importorskip("s3fs", reason="needs moto and s3fs: pip install 'moto[server]' s3fs")
    server = moto.ThreadedMotoServer(port=0)
    server.start()
    try:
        monkeypatch.setenv("AWS_ENDPOINT_URL", "http://{}:{}".format(*server.get_host_and_port()))
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        system = s3fs.S3FileSystem()
        system.mkdir("bucket")
        for file in files:
            system.put_file(file, f"bucket/data/{Path(file).name}")
        prepare(files, tmp_path / "local", tokenizer, workers=1)
        prepare(["s3://bucket/data"], "s3://bucket/out/text", tokenizer, workers=1)
        assert {path.rpartition("/")[2] for path in system.ls("bucket/out")} == {"text.bin", "text.idx", "text.json"}
        for suffix in (".bin", ".idx"):
            assert system.cat_file(f"bucket/out/text{suffix}") == (tmp_path / f"local{suffix}").read_bytes()
        manifest = json.loads(system.cat_file("bucket/out/text.json"))
        assert all(entry["digest"].startswith(f"{entry['name']} ETag ") for entry in manifest["files"])
    finally:
        server.stop()


@pytest.mark.parametrize(("name", "is_hub"), [("hf:a/b", True), ("hf://datasets/a/b/c.jsonl", False), ("a/b", False)])
def test_names_of_the_hub(name: str, is_hub: bool) -> None:
    assert (is_hub_name(name), hub_name(name)) == (is_hub, "hf:a/b" if name == "a/b" else name)


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("memory://none.jsonl", MissingInput, "memory://none.jsonl: no such data file"),
        ("memory://none/*.jsonl", MissingInput, "no such data file"),
        ("nonsense://a.jsonl", UsageError, "nonsense://a.jsonl cannot be opened: Protocol not known"),
    ],
)
def test_missing_urls(memory, name: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        find_sources([name])


@pytest.mark.thorough
def test_ray_engine(tmp_path: Path, tokenizer: Path, files: list[str], small_shards: None) -> None:
    ray = pytest.importorskip("ray", reason="needs Ray: pip install 'isthmus[ray]'")
    prepare(files, tmp_path / "local", tokenizer, workers=1)
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        seen: list[int] = []
        done = prepare(
            files, tmp_path / "ray", tokenizer, engine="ray", on_progress=lambda stats: seen.append(stats.records)
        )
    finally:
        ray.shutdown()
    assert outputs(tmp_path / "ray") == outputs(tmp_path / "local")
    assert (done.stats.records, seen[-1], len(seen)) == (105, 105, len(plan_shards(files)))
    assert np.all(np.diff(seen) >= 0)
