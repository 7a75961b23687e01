"""Early stopping: what counts as a rise, what is kept, and that a note brings all of it back."""

import numpy as np
import pytest

from m4.train.early_stopping import EarlyStopper, EarlyStopping


def after(rule, values):
    """Returns the progress, and the number of evaluations until training stops, or all."""
    progress = EarlyStopper(rule)
    for step, value in enumerate(values, 1):
        progress.evaluated(step, {"dev/chrf": value}, {"w": np.array([step])})
        if progress.stopped:
            return progress, step
    return progress, len(values)


@pytest.mark.parametrize(
    ("min_delta", "values", "stops", "best"),
    [
        # Two without a rise above 3.
        (0.0, [1, 3, 2, 3, 9], 4, 2),
        # 80.4 is no rise of more than 0.5, and neither is 80.5; 80.4 is better than 80 still.
        (0.5, [70, 80, 80.4, 80.5, 99], 4, 4),
        # 80.3 is none and 80.6 is one: small rises count together, from the last one that counted.
        (0.5, [70, 80, 80.3, 80.6, 80.9, 81.0, 99], 6, 6),
        # The best of all is kept, though what came after it fell.
        (0.5, [70, 80, 80.4, 80.2, 99], 4, 3),
    ],
)
def test_patience_counts_what_is_no_rise(min_delta, values, stops, best):
    progress, seen = after(EarlyStopping("dev/chrf", 2, min_delta), values)
    assert (seen, progress.best_step) == (stops, best)
    assert progress.best == {"w": [best]}
    assert progress.best_value == max(values[:stops])


def test_resume_stops_at_the_same_evaluation():
    # 80.6 is a rise of more than 0.5 above 80, and not above 80.4, which is the best before it.
    values = [70, 80, 80.4, 80.6, 80.5, 80.5, 99]
    rule = EarlyStopping("dev/chrf", 2, 0.5)
    for kept in range(1, 6):
        first, _ = after(rule, values[:kept])
        again = EarlyStopper(rule)
        again.resume(first.note(), first.best)
        for step, value in enumerate(values[kept:], kept + 1):
            again.evaluated(step, {"dev/chrf": value}, {"w": np.array([step])})
            if again.stopped:
                break
        assert (step, again.best_step) == (6, 4)


def test_without_a_rule_or_its_metric_nothing_is_kept():
    for rule in (None, EarlyStopping("dev/chrf/en-gl", 1)):
        progress, _ = after(rule, [1.0, 0.5, 0.2])
        assert not progress.stopped
        assert progress.note() == {}
