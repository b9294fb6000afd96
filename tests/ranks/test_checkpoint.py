"""Resumed runs equal uninterrupted runs in every layout; damaged checkpoints are refused."""

from __future__ import annotations

import importlib.util
import io
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

from isthmus.config.schema import RunConfig
from isthmus.data.store.sample_store import SampleStore
from isthmus.engine.tensor_names import COMMON_OBJECT
from isthmus.errors import DataError
from isthmus.platforms.torch_features import fsdp_sums_gradients
from isthmus.recipes.data.corpus import Corpus, check_fingerprint
from ranks.rank_pool import RankPool
from ranks.tasks import TOTAL_STEPS
from ranks.test_layouts import CURVES, TOLERANCE, max_relative_difference
from ranks.tiny import build_model_folder, build_samples, open_samples

HALF = TOTAL_STEPS // 2
NEEDS_FSDP = pytest.mark.skipif(not fsdp_sums_gradients(), reason="fully_shard of this torch averages gradients")
NEEDS_BITSANDBYTES = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed (extra: lora)"
)


@pytest.fixture(scope="module")
def halves(
    worlds: dict[int, RankPool],
    models: dict[str, Path],
    samples: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[..., tuple[dict[str, Any], Path]]:
    """A run with a checkpoint at half of its steps, once per layout: (result, checkpoint folder)."""
    cache: dict[str, tuple[dict[str, Any], Path]] = {}

    def make(ranks: int, **layout: Any) -> tuple[dict[str, Any], Path]:
        key = f"{ranks} {sorted(layout.items())}"
        if key not in cache:
            root = tmp_path_factory.mktemp("checkpoints")
            settings = {"model": models["qwen3-tied"], "samples": samples, "micro_batch_size": 4, **layout}
            run = worlds[ranks].run("ranks.tasks.train", save_at=[HALF], root=root, **settings)
            cache[key] = run, root / f"iter_{HALF:07d}"
        return cache[key]

    return make


@pytest.mark.thorough_cases("fp32", "dp2-bf16", "pp2-fp32")
@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        pytest.param(1, {"precision": "fp32"}, id="fp32"),
        pytest.param(2, {"precision": "bf16"}, id="dp2-bf16"),
        pytest.param(2, {"precision": "bf16", "tp": 2}, id="tp2-bf16"),
        pytest.param(2, {"precision": "fp32", "pp": 2}, id="pp2-fp32"),
    ],
)
def test_resume_is_bitwise_identical(
    ranks: int,
    layout: dict[str, Any],
    worlds: dict[int, RankPool],
    models: dict[str, Path],
    samples: Path,
    halves: Callable[..., tuple[dict[str, Any], Path]],
) -> None:
    full, saved = halves(ranks, **layout)
    if ranks == 1:
        worlds[1].close()  # resume in a new process
    settings = {"model": models["qwen3-tied"], "samples": samples, "micro_batch_size": 4, **layout}
    rest = worlds[ranks].run("ranks.tasks.train", resume=saved, **settings)
    assert rest["first"] == HALF
    for curve in ("loss", "grad_norm", "lr", "loss_tokens"):
        assert rest[curve] == full[curve][HALF:]
    assert rest["digest"] == full["digest"]


def test_optimizer_offload_is_bitwise_identical(
    two_ranks: RankPool,
    models: dict[str, Path],
    samples: Path,
    halves: Callable[..., tuple[dict[str, Any], Path]],
    tmp_path: Path,
) -> None:
    """On a CPU the memory is the same: this tests arithmetic and checkpoints, to offload and back."""
    full, saved = halves(2, precision="bf16")
    settings = {"model": models["qwen3-tied"], "samples": samples, "micro_batch_size": 4, "precision": "bf16"}
    offloaded = two_ranks.run(
        "ranks.tasks.train", resume=saved, optim={"offload": True}, save_at=[5], root=tmp_path, **settings
    )
    back = two_ranks.run("ranks.tasks.train", resume=tmp_path / "iter_0000005", **settings)
    for curve in ("loss", "grad_norm", "lr", "loss_tokens"):
        assert offloaded[curve] == full[curve][HALF:] and back[curve] == full[curve][5:]
    assert offloaded["digest"] == back["digest"] == full["digest"]


@pytest.mark.thorough_cases("tp2")
@pytest.mark.parametrize("layout", [{"precision": "bf16"}, {"tp": 2}], ids=["dp2-bf16", "tp2"])
def test_checkpoints_need_little_memory(
    layout: dict[str, Any], two_ranks: RankPool, models: dict[str, Path], samples: Path, tmp_path: Path
) -> None:
    """No rank copies its optimizer state, or gathers that of others."""
    settings = {"model": models["qwen3-tied"], "samples": samples, "root": tmp_path}
    for rank in two_ranks.run("ranks.data_parallel_tasks.memory_of_checkpoints", **settings, **layout):
        assert max(rank["saving"], rank["loading"]) < rank["state"] / 2  # most of it are messages of torch


ONE: tuple[int, dict[str, Any]] = (1, {})
TP2: tuple[int, dict[str, Any]] = (2, {"tp": 2})
PP2: tuple[int, dict[str, Any]] = (2, {"pp": 2})
DP2: tuple[int, dict[str, Any]] = (2, {})
TP2_PP2: tuple[int, dict[str, Any]] = (4, {"tp": 2, "pp": 2})
TP2_BF16: tuple[int, dict[str, Any]] = (2, {"tp": 2, "precision": "bf16"})
TP2_DP2: tuple[int, dict[str, Any]] = (4, {"tp": 2})


@pytest.mark.thorough_cases("pp2-to-dp2", "tp2-dp2-to-one", "tp2-to-pp2")
@pytest.mark.parametrize(
    ("writer", "reader"),
    [
        pytest.param(ONE, TP2_PP2, id="one-to-tp2-pp2"),
        pytest.param(TP2, PP2, id="tp2-to-pp2"),
        pytest.param(PP2, DP2, id="pp2-to-dp2"),
        pytest.param(DP2, ONE, id="dp2-to-one"),
        pytest.param(TP2_DP2, ONE, id="tp2-dp2-to-one"),
    ],
)
def test_resume_in_another_layout(
    writer: tuple[int, dict[str, Any]],
    reader: tuple[int, dict[str, Any]],
    worlds: dict[int, RankPool],
    models: dict[str, Path],
    samples: Path,
    halves: Callable[..., tuple[dict[str, Any], Path]],
) -> None:
    full, saved = halves(writer[0], **writer[1])
    settings = {"model": models["qwen3-tied"], "samples": samples, "micro_batch_size": 4, **reader[1]}
    rest = worlds[reader[0]].run("ranks.tasks.train", resume=saved, **settings)
    assert rest["lr"] == full["lr"][HALF:]
    differences = {curve: max_relative_difference(rest[curve], full[curve][HALF:]) for curve in CURVES}
    assert max(differences.values()) < TOLERANCE


@pytest.mark.thorough_cases(
    "gpt2",
    "olmo2",
    "gemma2",
    "jamba",
    "kimi_linear",
    "nemotron_h-bf16",
    "nemotron_h-same",
    "nemotron_h",
    "qwen3_5_text-same",
)
@pytest.mark.parametrize(
    ("family", "writer", "reader"),
    [
        pytest.param("gpt2", TP2, PP2, id="gpt2"),  # position embeddings, biases
        pytest.param("olmo2", TP2, ONE, id="olmo2"),  # norms after blocks and over all heads
        pytest.param("gemma2", PP2, TP2, id="gemma2"),  # norms before and after blocks
        pytest.param("nemotron_h", TP2, ONE, id="nemotron_h"),  # Mamba-2, single blocks, experts
        pytest.param("jamba", TP2, ONE, id="jamba"),  # Mamba-1
        pytest.param("nemotron_h", TP2, TP2, id="nemotron_h-same"),
        pytest.param("kimi_linear", TP2, ONE, id="kimi_linear"),  # decays of channels, float32 in 16-bit models
        pytest.param("qwen3_5_text", TP2, TP2, id="qwen3_5_text-same"),
        pytest.param("qwen3_5_text", TP2_BF16, TP2_BF16, id="qwen3_5_text-bf16"),
        pytest.param("nemotron_h", TP2_BF16, TP2_BF16, id="nemotron_h-bf16"),
    ],
)
def test_other_families_resume_in_another_layout(
    family: str,
    writer: tuple[int, dict[str, Any]],
    reader: tuple[int, dict[str, Any]],
    worlds: dict[int, RankPool],
    samples: Path,
    tmp_path: Path,
) -> None:
    model = build_model_folder(tmp_path / "model", family)
    settings = {"model": model, "samples": samples, "micro_batch_size": 4, "steps": 4}
    full = worlds[writer[0]].run("ranks.tasks.train", save_at=[2], root=tmp_path / "root", **settings, **writer[1])
    saved = tmp_path / "root/iter_0000002"
    rest = worlds[reader[0]].run("ranks.tasks.train", resume=saved, **settings, **reader[1])
    assert max(max_relative_difference(rest[curve], full[curve][2:]) for curve in CURVES) < TOLERANCE
    assert writer != reader or rest["digest"] == full["digest"]


def test_learning_rate_comes_from_the_config(
    one_rank: RankPool, models: dict[str, Path], samples: Path, halves: Callable[..., tuple[dict[str, Any], Path]]
) -> None:
    full, saved = halves(1)
    settings = {"model": models["qwen3-tied"], "samples": samples, "micro_batch_size": 4}
    optim = {"lr": 6e-3, "min_lr": 6e-4}  # twice the values of the first part
    rest = one_rank.run("ranks.tasks.train", resume=saved, optim=optim, **settings)
    assert rest["lr"] == pytest.approx([2 * lr for lr in full["lr"][HALF:]])


@pytest.mark.thorough_cases("dp2-bf16-lora", "fsdp2", "pp2-8bit")
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param({"tp": 2, "optim": {"optimizer": "muon"}}, id="tp2-muon"),
        pytest.param({"precision": "bf16", "lora": {"rank": 4}}, id="dp2-bf16-lora"),
        pytest.param({"fsdp": True}, marks=NEEDS_FSDP, id="fsdp2"),
        pytest.param({"pp": 2, "optim": {"optimizer": "adamw_8bit"}}, marks=NEEDS_BITSANDBYTES, id="pp2-8bit"),
    ],
)
def test_background_save_writes_the_same_files(
    layout: dict[str, Any], two_ranks: RankPool, models: dict[str, Path], samples: Path, tmp_path: Path
) -> None:
    """The state changes while it is written."""
    waits = two_ranks.run(
        "ranks.tasks.save_both_ways", model=models["qwen3-tied"], samples=samples, root=tmp_path, **layout
    )
    here, behind = (tmp_path / name / "iter_0000001" for name in ("synchronous", "asynchronous"))
    files = sorted(path.name for path in here.iterdir())
    assert files == sorted(path.name for path in behind.iterdir()) and "checksums.json" in files
    for name in files:
        if name not in (".metadata", "checksums.json"):  # have the time and a name of the save
            assert (here / name).read_bytes() == (behind / name).read_bytes(), name
    indices = [dcp.FileSystemReader(folder).read_metadata() for folder in (here, behind, tmp_path / "torch")]
    for index in indices[1:]:
        assert index.storage_data == indices[0].storage_data
        assert index.state_dict_metadata == indices[0].state_dict_metadata
    data_files = [name for name in files if name.endswith(".distcp")]
    assert len(data_files) == 2
    for name in data_files:
        assert (here / name).read_bytes() == (tmp_path / "torch" / name).read_bytes()
    assert (tmp_path / "asynchronous/latest_checkpointed_iteration.txt").read_text() == "2"
    assert waits == ["the checkpoint of step 2 waits for that of step 1, which is being written"]


def test_one_rank_of_a_machine_reads_index_and_checksums(
    two_ranks: RankPool, models: dict[str, Path], samples: Path, tmp_path: Path
) -> None:
    """A rank whose parts are those of the save before does not send them again."""
    ranks = two_ranks.run("ranks.tasks.index_readers", model=models["qwen3-tied"], samples=samples, root=tmp_path)
    sent = {"sent 1": 1, "sent 2": 1, "sent 3": 2}
    assert ranks == [{"full_checks": n, "indices": 0, "lists": n, "step": 2, **sent} for n in (1, 0)]


def test_checkpoints_in_a_store(two_ranks: RankPool, models: dict[str, Path], samples: Path, tmp_path: Path) -> None:
    """In the background; a block that differs from its checksum is refused on both ranks."""
    url = f"file://{tmp_path}/store/run"
    result = two_ranks.run(
        "ranks.tasks.stored_checkpoints", model=models["qwen3-tied"], samples=samples, root=tmp_path / "out", store=url
    )
    assert result["addresses"] == [f"{url}/iter_0000001", f"{url}/iter_0000002"] and result["latest"] == 2
    for equal, changed, step, refusal in result["ranks"]:
        assert equal and changed and step == 1
        assert refusal.startswith("65 ") and "__1_0.distcp is damaged: bytes" in refusal
    assert not [path for path in (tmp_path / "out").rglob("*.distcp")]


def test_rng_state_is_restored(two_ranks: RankPool, models: dict[str, Path], samples: Path, tmp_path: Path) -> None:
    drawn = two_ranks.run(
        "ranks.tasks.random_streams", model=models["qwen3-tied"], samples=samples, root=tmp_path, tp=2
    )
    assert drawn["loaded"] == drawn["expected"] != drawn["fresh"]
    (shared_0, own_0), (shared_1, own_1) = drawn["expected"]
    assert shared_0 == shared_1
    assert own_0 != own_1


def test_only_the_newest_checkpoints_are_kept(
    one_rank: RankPool, models: dict[str, Path], samples: Path, tmp_path: Path
) -> None:
    one_rank.run(
        "ranks.tasks.train",
        model=models["qwen3-tied"],
        samples=samples,
        micro_batch_size=4,
        steps=4,
        save_at=[1, 2, 3, 4],
        root=tmp_path,
        keep=2,
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "iter_0000003",
        "iter_0000004",
        "latest_checkpointed_iteration.json",
        "latest_checkpointed_iteration.txt",
    ]
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "4"


def test_run_resumed_from_an_older_checkpoint_keeps_new_saves(
    one_rank: RankPool, models: dict[str, Path], samples: Path, tmp_path: Path
) -> None:
    settings = {"model": models["qwen3-tied"], "samples": samples, "micro_batch_size": 4, "root": tmp_path}
    one_rank.run("ranks.tasks.train", steps=3, save_at=[1, 3], keep=2, **settings)
    one_rank.run("ranks.tasks.train", steps=2, save_at=[2], keep=1, resume=tmp_path / "iter_0000001", **settings)
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "2"
    assert (tmp_path / "iter_0000002").is_dir()


@pytest.fixture
def damaged(halves: Callable[..., tuple[dict[str, Any], Path]], tmp_path: Path) -> Path:
    """A copy of a checkpoint that a test can damage."""
    _, saved = halves(2, precision="fp32")
    return Path(shutil.copytree(saved, tmp_path / saved.name))


def truncate(path: Path, share: float) -> None:
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])


def largest(folder: Path) -> Path:
    """The largest data file; a rank without tensors writes an empty one."""
    return max(folder.glob("*.distcp"), key=lambda path: path.stat().st_size)


def truncate_data_file(folder: Path) -> None:
    truncate(largest(folder), 0.9)


def remove_data_file(folder: Path) -> None:
    largest(folder).unlink()


def truncate_index(folder: Path) -> None:
    truncate(folder / ".metadata", 0.5)


def empty_index(folder: Path) -> None:
    truncate(folder / ".metadata", 0)


def truncate_common_state(folder: Path) -> None:
    truncate(folder / "common.pt", 0.5)


def remove_common_state(folder: Path) -> None:
    (folder / "common.pt").unlink()


def flip(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


def flip_index(folder: Path) -> None:
    flip(folder / ".metadata", 100)


def flip_moment(folder: Path) -> None:
    """A bit of a number, which resumed another state before there were checksums."""
    stored = dcp.FileSystemReader(folder).read_metadata().storage_data
    place = next(place for key, place in stored.items() if key.fqn.startswith("optimizer.state.exp_avg."))
    flip(folder / place.relative_path, place.offset + place.length // 2)


def without_checksums(damage: Callable[[Path], None]) -> Callable[[Path], None]:
    """As in a checkpoint of an older version."""

    def both(folder: Path) -> None:
        (folder / "checksums.json").unlink()
        damage(folder)

    return both


@pytest.mark.parametrize(
    ("damage", "names"),
    [
        (truncate_data_file, ".distcp has "),
        (remove_data_file, ".distcp is missing"),
        (truncate_index, ".metadata has "),
        (without_checksums(truncate_index), ".metadata cannot be read"),
        (without_checksums(empty_index), ".metadata cannot be read"),
        (truncate_common_state, "common.pt has "),
        (without_checksums(truncate_common_state), "it is damaged"),
        (remove_common_state, "common.pt is missing"),
        (flip_moment, ".distcp is damaged: bytes 0 to "),
        (flip_index, ".metadata is damaged: bytes 0 to "),
    ],
)
def test_damaged_checkpoint_is_refused_on_every_rank(
    damage: Callable[[Path], None],
    names: str,
    two_ranks: RankPool,
    models: dict[str, Path],
    samples: Path,
    damaged: Path,
) -> None:
    damage(damaged)
    refused = two_ranks.run(
        "ranks.tasks.refusal", task="train", model=models["qwen3-tied"], samples=samples, resume=damaged, timeout_s=60
    )
    assert (refused["kind"], refused["code"]) == ("DataError", 65)
    assert names in refused["text"] and str(damaged) in refused["text"] and "another checkpoint" in refused["text"]
    assert "\n" not in refused["text"] and len(refused["text"]) < 800


class CreateFolder:
    """Unpickled without protection, it creates a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self.path),)


def hostile_index(folder: Path, code: CreateFolder) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(code))


def hostile_common_state(folder: Path, code: CreateFolder) -> None:
    torch.save({"isthmus": code}, folder / "common.pt")


def replace_object(folder: Path, prefix: str, value: Any) -> None:
    """Replace the first object whose key has the prefix, or add it."""
    index = dcp.FileSystemReader(folder).read_metadata()
    results = (key for key in index.storage_data if key.fqn.startswith(prefix))
    key, file = next(results, MetadataIndex(prefix)), largest(folder)
    torch.save(value, content := io.BytesIO())
    index.state_dict_metadata[key.fqn] = BytesStorageMetadata()
    index.storage_data[key] = _StorageInfo(file.name, file.stat().st_size, len(content.getvalue()))
    file.write_bytes(file.read_bytes() + content.getvalue())
    (folder / ".metadata").write_bytes(pickle.dumps(index))


def hostile_random_state(folder: Path, code: CreateFolder) -> None:
    replace_object(folder, "rng_state", code)


def hostile_common_object(folder: Path, code: CreateFolder) -> None:
    replace_object(folder, COMMON_OBJECT, [{"isthmus": code}])
    (folder / "common.pt").unlink()


def test_common_state_as_an_object(
    one_rank: RankPool,
    models: dict[str, Path],
    samples: Path,
    halves: Callable[..., tuple[dict[str, Any], Path]],
    damaged: Path,
) -> None:
    """As megatron-core 0.19 writes it."""
    replace_object(damaged, COMMON_OBJECT, [torch.load(damaged / "common.pt", weights_only=False)])
    for name in ("common.pt", "checksums.json"):
        (damaged / name).unlink()
    settings = {"model": models["qwen3-tied"], "samples": samples, "micro_batch_size": 4}
    _, saved = halves(2, precision="fp32")
    results = [one_rank.run("ranks.tasks.train", resume=folder, **settings) for folder in (saved, damaged)]
    assert results[0] == results[1] and results[0]["first"] == HALF


@pytest.mark.parametrize("attack", [hostile_index, hostile_common_state, hostile_common_object, hostile_random_state])
def test_checkpoint_runs_no_code(
    attack: Callable[[Path, CreateFolder], None],
    two_ranks: RankPool,
    models: dict[str, Path],
    samples: Path,
    damaged: Path,
    tmp_path: Path,
) -> None:
    attack(damaged, CreateFolder(tmp_path / "executed"))
    (damaged / "checksums.json").unlink(missing_ok=True)
    refused = two_ranks.run(
        "ranks.tasks.refusal", task="train", model=models["qwen3-tied"], samples=samples, resume=damaged, timeout_s=60
    )
    assert (refused["kind"], refused["code"]) == ("UnsafeInput", 77), refused
    assert str(damaged) in refused["text"] and not (tmp_path / "executed").exists()


def test_folder_without_a_checkpoint(
    one_rank: RankPool, models: dict[str, Path], samples: Path, tmp_path: Path
) -> None:
    refused = one_rank.run(
        "ranks.tasks.refusal", task="train", model=models["qwen3-tied"], samples=samples, resume=tmp_path
    )
    assert (refused["kind"], refused["code"]) == ("MissingInput", 66)


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        pytest.param("qwen3", {"hidden_size": 64}, id="wider"),
        pytest.param("qwen3", {"num_hidden_layers": 3}, id="deeper"),
        pytest.param("qwen3", {"num_hidden_layers": 1}, id="shallower"),
        pytest.param("qwen2", {}, id="another-family"),
    ],
)
def test_checkpoint_of_another_model_is_refused(
    family: str,
    settings: dict[str, int],
    one_rank: RankPool,
    samples: Path,
    halves: Callable[..., tuple[dict[str, Any], Path]],
    tmp_path: Path,
) -> None:
    _, saved = halves(1)
    sizes = {"num_hidden_layers": 2} | settings
    other = build_model_folder(tmp_path / "other", family, tie_word_embeddings=True, **sizes)
    refused = one_rank.run("ranks.tasks.refusal", task="train", model=other, samples=samples, resume=saved)
    assert (refused["kind"], refused["code"]) == ("DataError", 65)
    assert "\n" not in refused["text"] and len(refused["text"]) < 800


def test_data_fingerprint_covers_content_and_order(samples: Path, tmp_path: Path) -> None:
    store = open_samples(samples)
    names = {"out": "unused", "model": {"path": "unused"}, "data": {"files": ["unused"]}}

    def fingerprint(samples_store: SampleStore, **sections: dict[str, Any]) -> str:
        values = {name: {**names.get(name, {}), **section} for name, section in sections.items()}
        return Corpus(samples_store, None).fingerprint(RunConfig.model_validate({"recipe": "sft", **names, **values}))

    same = fingerprint(store)
    assert fingerprint(open_samples(build_samples(tmp_path / "again"))) == same
    assert fingerprint(store, train={"micro_batch_size": 4}, parallel={"tp": 2}, optim={"lr": 1.0}) == same
    others = [
        fingerprint(open_samples(build_samples(tmp_path / "other", seed=1))),
        fingerprint(store.select(range(len(store) - 1))),
        fingerprint(store.select([1, 0, *range(2, len(store))])),
        fingerprint(store, data={"seq_length": 64}),
        fingerprint(store, data={"packing": False}),
        fingerprint(store, data={"seed": 7}),
        fingerprint(store, train={"global_batch_size": 8}),
    ]
    assert len({same, *others}) == 1 + len(others)


def test_resume_with_other_data_is_refused() -> None:
    check_fingerprint("these samples", "these samples", Path("iter_0000010"))
    with pytest.raises(DataError, match="differ from those of"):
        check_fingerprint("these samples", "other samples", Path("iter_0000010"))
