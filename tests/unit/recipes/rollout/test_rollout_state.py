"""The state of rollouts in a checkpoint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from isthmus.data.batching.rollout_batches import GeneratedAnswers
from isthmus.errors import DataError
from isthmus.recipes.rollout.rollout_state import Rollout, RolloutState


def rollout() -> Rollout:
    answers = GeneratedAnswers(
        prompts=[[1, 2], [3]],
        answers=[[4], [5, 6, 7]],
        advantages=np.array([1.0, -1.0]),
        weights=np.array([1.0, 0.0]),
        sampling_logps=[np.array([-0.5]), np.array([-0.1, -0.2, -0.3])],
        old_logps=[np.array([-0.6]), np.array([-0.1, -0.2, -0.4])],
    )
    return Rollout(first_step=4, answers=answers, metrics={"reward": 0.5, "generation_s": 3.0})


def test_round_trip(tmp_path: Path) -> None:
    RolloutState(7, rollout()).write(tmp_path)
    state = RolloutState.read(tmp_path)
    assert state.consumed == 7 and state.rollout is not None
    assert state.rollout.first_step == 4 and state.rollout.metrics == {"reward": 0.5}
    restored, expected = state.rollout.answers, rollout().answers
    assert (restored.prompts, restored.answers) == (expected.prompts, expected.answers)
    assert restored.old_logps is not None and expected.old_logps is not None
    for logps, others in zip(restored.old_logps, expected.old_logps, strict=True):
        assert np.array_equal(logps, others)
    assert restored.reference_logps is None and np.array_equal(restored.weights, expected.weights)


def test_replayed_experts(tmp_path: Path) -> None:
    experts = [np.arange(8, dtype=np.uint8).reshape(2, 2, 2), np.full((3, 2, 2), 300, np.uint16)]
    for kind in (np.uint8, np.uint16):
        expected = [array.astype(kind) for array in experts]
        state = replace(rollout(), answers=replace(rollout().answers, routed_experts=expected))
        RolloutState(7, state).write(tmp_path)
        restored = RolloutState.read(tmp_path).rollout
        assert restored is not None and restored.answers.routed_experts is not None
        for array, other in zip(restored.answers.routed_experts, expected, strict=True):
            assert array.dtype == kind and np.array_equal(array, other)


def test_the_next_rollout_of_earlier_weights(tmp_path: Path) -> None:
    ahead = replace(rollout(), first_step=6)
    ahead = replace(ahead, answers=replace(ahead.answers, old_logps=None, policy_logps=ahead.answers.sampling_logps))
    RolloutState(7, None, ahead).write(tmp_path)
    state = RolloutState.read(tmp_path)
    assert state.rollout is None and state.next_rollout is not None and state.next_rollout.first_step == 6
    answers = state.next_rollout.answers
    assert answers.answers == ahead.answers.answers and answers.old_logps is None
    assert answers.policy_logps is not None
    assert list(map(list, answers.policy_logps)) == list(map(list, ahead.answers.sampling_logps))


def test_between_two_rollouts(tmp_path: Path) -> None:
    RolloutState(7, None).write(tmp_path)
    assert RolloutState.read(tmp_path) == RolloutState(7, None)


def test_equal_states_are_equal_files(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        RolloutState(7, rollout()).write(tmp_path / name)
    assert (tmp_path / "a/rollout.npz").read_bytes() == (tmp_path / "b/rollout.npz").read_bytes()


@pytest.mark.parametrize("content", [b"", b"no archive"])
def test_damaged_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "rollout.npz").write_bytes(content)
    with pytest.raises(DataError, match=r"rollout\.npz: cannot be read.*Resume from another checkpoint"):
        RolloutState.read(tmp_path)


class Payload:
    """Runs code where it is unpickled."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return exec, ("import pathlib; pathlib.Path('ran').touch()",)


def test_a_pickled_object_does_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    np.savez(tmp_path / "rollout.npz", header=np.array([Payload()], dtype=object))
    with pytest.raises(DataError, match="Object arrays cannot be loaded"):
        RolloutState.read(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_arrays_that_expand_are_refused(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "rollout.npz", header=np.zeros(1_000_000, np.uint8))
    with pytest.raises(DataError, match="its arrays are compressed"):
        RolloutState.read(tmp_path)
