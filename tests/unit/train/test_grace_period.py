"""What is abandoned after a stop request."""

from __future__ import annotations

import torch
from pytest import MonkeyPatch, raises

from isthmus.train import grace_period
from isthmus.train.grace_period import Abandoned, GracePeriod
from isthmus.train.stop import StopFlag


def test_step_is_abandoned_only_if_it_does_not_fit(monkeypatch: MonkeyPatch) -> None:
    now_s = 0.0
    monkeypatch.setattr(grace_period, "sum_over_ranks", lambda values, _device: values)
    monkeypatch.setattr("time.monotonic", lambda: now_s)
    stop = StopFlag()
    period = GracePeriod(stop, 25.0, torch.device("cpu"), has_stages=False, step_s=100.0, save_s=5.0)
    check = period.before_micro_batch(7, 10)
    assert check is not None
    now_s = 40.0
    check(4)  # no request
    stop.request()
    with raises(Abandoned) as abandoned:
        check(4)  # the other six take 60 s
    assert (abandoned.value.done, abandoned.value.part) == (7, "step 8")
    now_s = 90.0
    late = StopFlag()
    late.request()
    period.stop = late
    check(9)  # the last one takes 10 s, and the save 5 s
    now_s += 11.0
    with raises(Abandoned):
        check(9)


def test_short_steps_and_pipeline_stages_are_not_checked() -> None:
    stop, cpu = StopFlag(), torch.device("cpu")
    assert GracePeriod(stop, 25.0, cpu, has_stages=False, step_s=15.0, save_s=9.0).before_micro_batch(1, 8) is None
    assert GracePeriod(stop, 25.0, cpu, has_stages=False, step_s=15.0, save_s=11.0).before_micro_batch(1, 8)
    assert GracePeriod(stop, 25.0, cpu, has_stages=False, step_s=None).before_micro_batch(0, 1) is None
    assert GracePeriod(stop, 25.0, cpu, has_stages=True, step_s=90.0).before_micro_batch(1, 8) is None


def test_a_stage_is_late_if_the_rest_of_its_step_and_a_save_do_not_fit(monkeypatch: MonkeyPatch) -> None:
    now_s = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now_s)
    stop = StopFlag()
    period = GracePeriod(stop, 25.0, torch.device("cpu"), has_stages=True, step_s=100.0, save_s=5.0)
    is_late = period.late_in_step()
    now_s = 50.0
    assert not is_late()  # no request
    stop.request()
    assert is_late()  # 50 s are left
    now_s = 90.0
    period.stop = StopFlag()
    period.stop.request()
    assert not is_late()  # 10 s and the save fit
    now_s = 105.0
    assert not is_late()  # the step takes longer than the one before
    now_s = 111.0
    assert is_late()
