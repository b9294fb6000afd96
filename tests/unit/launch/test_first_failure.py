from __future__ import annotations

from pathlib import Path

from isthmus.launch.first_failure import RankReport, cause, read_reports, report_of_death


def ended(rank: int, code: int, time_s: float) -> RankReport:
    return RankReport(rank=rank, exit_code=code, time_s=time_s)


def test_reports_survive_the_way_through_a_file(tmp_path: Path) -> None:
    reports = [ended(1, 0, 2.0), RankReport(rank=0, exit_code=65, message="ä: bad.", traceback="a\nb", time_s=1.0)]
    for report in reports:
        report.write(tmp_path)
    assert read_reports(tmp_path) == reports[::-1]
    ended(0, 0, 1.0).write(tmp_path / "gone")


def test_all_well_is_no_cause() -> None:
    assert cause([ended(0, 0, 1), ended(1, 0, 2)], {}) is None


def test_what_says_more_goes_before_its_echo() -> None:
    assert cause([ended(0, 70, 1.0), ended(1, 65, 1.2)], {}) == ended(1, 65, 1.2)
    assert cause([ended(0, 70, 1.0), ended(1, 70, 0.9)], {}) == ended(1, 70, 0.9)


def test_a_rank_that_died_unheard_goes_before_later_echoes() -> None:
    death = report_of_death(1, -9, time_s=10.0)
    assert death.exit_code == 137
    assert cause([ended(0, 70, 10.3)], {0: report_of_death(0, 70, time_s=9.0), 1: death}) == death
    # killed by us, long after the rank that failed
    assert cause([ended(0, 70, 10.3)], {1: report_of_death(1, -9, time_s=40.0)}) == ended(0, 70, 10.3)


def test_being_asked_to_stop_counts_only_if_nothing_failed() -> None:
    assert cause([ended(0, 75, 1), ended(1, 75, 2)], {}) == ended(0, 75, 1)
    assert cause([ended(0, 75, 1), ended(1, 73, 2)], {}) == ended(1, 73, 2)


def test_words_for_a_death() -> None:
    assert "SIGKILL" in report_of_death(2, -9, time_s=0).message
    assert "SIGSEGV" in report_of_death(2, -11, time_s=0).message
    assert "exit code 3" in report_of_death(2, 3, time_s=0).message
