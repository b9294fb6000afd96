"""The reference log-probabilities are computed once with the starting weights, and reused for the same pairs."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from isthmus.data.batching.batches import BatchSettings, PairBatches
from isthmus.data.store.sample_store import SampleStore
from isthmus.engine.parallel.process_groups import Position
from isthmus.errors import Preempted
from isthmus.recipes import reference_logps
from isthmus.recipes.reference_logps import compute_reference
from isthmus.train.stop import StopFlag


def part(token: int, pairs: int) -> PairBatches:
    store = SampleStore.from_samples(
        [([token, k], [0, 1]) for k in range(2 * pairs)], [k // 2 for k in range(2 * pairs)]
    )
    return PairBatches(store, BatchSettings(seq_length=4, micro_batch_size=1, global_batch_size=1, packing=True))


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many answers each pass over the data was shown."""
    seen: list[int] = []

    def pass_over(_stepper: Any, part: PairBatches, _position: Position, _stop: StopFlag) -> Any:
        seen.append(len(part.store))
        return np.arange(len(part.store)) / len(seen)

    monkeypatch.setattr(reference_logps, "_reference_logps", pass_over)
    monkeypatch.setattr(reference_logps, "agree", lambda stage: stage())
    return seen


def find(path: Path, train: PairBatches, valid: PairBatches, *, fresh: bool) -> tuple[list[float], list[float]]:
    place = Position(0, 0, 0, 0, 0, 0, 0, True)
    stepper: Any = None
    parts = {"train": train, "valid": valid}
    compute_reference(stepper, parts, path, place, fresh=fresh, stop=StopFlag(), log=lambda _: None)
    assert train.reference is not None and valid.reference is not None
    return train.reference.tolist(), valid.reference.tolist()


def test_reference_is_cached(tmp_path: Path, passes: list[int]) -> None:
    path = tmp_path / "reference.npz"
    first = find(path, part(1, 2), part(2, 1), fresh=True)
    assert (passes, first) == ([4, 2], ([0, 1, 2, 3], [0, 0.5]))
    assert find(path, part(1, 2), part(2, 1), fresh=False) == first
    assert passes == [4, 2]
    assert [file.name for file in tmp_path.iterdir()] == ["reference.npz"]
    # Another start may be one of other weights.
    assert find(path, part(1, 2), part(2, 1), fresh=True)[0] == [0, 1 / 3, 2 / 3, 1]


def test_other_pairs_or_a_damaged_cache_recompute_it(tmp_path: Path, passes: list[int]) -> None:
    path = tmp_path / "reference.npz"
    first, _ = find(path, part(1, 2), part(2, 1), fresh=True)
    again, _ = find(path, part(1, 2), part(3, 3), fresh=False)
    assert (passes, again) == ([4, 2, 6], first)
    path.write_bytes(path.read_bytes()[:100])
    find(path, part(1, 2), part(3, 3), fresh=False)
    assert passes == [4, 2, 6, 4, 6]


def test_stop_between_two_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stop, shown = StopFlag(), []

    def evaluate(batches: Any, _recorder: Any) -> None:
        for lines in batches:
            shown.append(lines)
            stop.request()

    monkeypatch.setattr(reference_logps, "sum_over_ranks", lambda values, _device: list(values))
    stepper: Any = SimpleNamespace(device="cpu", evaluate=evaluate)
    place, path = Position(0, 0, 0, 0, 0, 0, 0, True), tmp_path / "reference.npz"
    with pytest.raises(Preempted, match="before the first step"):
        compute_reference(stepper, {"train": part(1, 3)}, path, place, fresh=True, stop=stop, log=lambda _: None)
    assert len(shown) == 1 and not path.exists()


class Payload:
    """Runs code where it is unpickled."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return exec, ("import pathlib; pathlib.Path('ran').touch()",)


def test_a_pickled_object_in_the_cache_does_not_run(
    tmp_path: Path, passes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "reference.npz"
    np.savez(path, digest=np.array([Payload()], dtype=object))
    find(path, part(1, 2), part(2, 1), fresh=False)
    assert passes == [4, 2] and not (tmp_path / "ran").exists()
