"""The time that bilingual models will take."""

import pytest

from m4.jobs.bilingual import progress as baselines_progress
from m4.jobs.bilingual.progress import Progress

LEVELS = {"de": "high", "es": "high", "gl": "low", "fy": "low"}
EARLIER = {"gd": "low"}


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The clock: its one element."""
    now = [0.0]
    monkeypatch.setattr(baselines_progress.time, "monotonic", lambda: now[0])
    return now


def test_models_are_expected_to_end_where_those_of_their_level_did(seconds: list[float]) -> None:
    shown = Progress(
        dict.fromkeys(LEVELS, 1000), {"high": 3, "low": 1}, LEVELS | EARLIER, {"gd": 0.2}
    )
    # None of these has ended, but a model of an earlier run did: after a fifth of its steps.
    assert [shown.expected(name) for name in LEVELS] == [200] * 4
    shown.heard("de", 300, "")
    assert shown.expected("de") == 300  # longer than that
    shown.finished("de", 600)
    shown.finished("gl", 0)
    assert shown.expected("es") == 600
    assert shown.expected("fy") == 100  # the median of 0.2 and 0


def test_time_left_counts_work_not_steps(seconds: list[float]) -> None:
    shown = Progress(dict.fromkeys(LEVELS, 1000), {"high": 3, "low": 1}, LEVELS, {})
    assert shown.seconds_left() is None
    shown.finished("de", 400)
    seconds[0] = 12.0  # 400 steps of 3 units: 100 units a second
    # es: 400 steps of 3 units; gl and fy, of whose level none has ended: 400 of 1.
    assert shown.line()[2:] == (1600, pytest.approx((1200 + 800) / 100))


def test_a_trained_model_has_nothing_to_train(seconds: list[float]) -> None:
    shown = Progress({"de": 1000, "es": 800}, {"high": 1}, LEVELS, {"es": 0.5})
    assert shown.to_train() == (1, 500, 1000)  # de as long as es
    assert shown.line() == (400, "1/2 models", 900, None)
    shown.heard("de", 0, "")
    shown.heard("de", 100, "")
    shown.finished("es", 400)
    seconds[0] = 10.0
    assert shown.seconds_left() == pytest.approx(400 / 10)


def test_a_resumed_model_has_not_worked_before(seconds: list[float]) -> None:
    shown = Progress({"de": 1000}, {"high": 1}, LEVELS, {"es": 1.0})
    shown.heard("de", 500, "")  # of its checkpoint
    shown.heard("de", 600, "")
    seconds[0] = 10.0
    assert shown.seconds_left() == pytest.approx(400 / 10)
