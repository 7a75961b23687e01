"""The arithmetic of the paper's Table 3, against what it prints."""

from pathlib import Path

import pytest

from m4.plan.table3 import MODEL_SECONDS, TABLE3, band, core_years, days, paper_row_of

TIMED = [row for row in TABLE3 if row.steps_per_second is not None]


@pytest.mark.parametrize("row", TIMED, ids=lambda row: row.config)
def test_papers_days_and_core_years_follow_from_its_steps_a_second(row) -> None:
    # (1): 10^12 / (4 * 10^6 * 0.72) s / 86,400 s = 4.0188 days, times 2048 / 365: 22.549 years.
    found = days(row.batch_tokens, 1 / row.steps_per_second)
    # As printed, to the last digit: (2) is 1.346, printed 1.4.
    assert found == pytest.approx(float(row.days), abs=0.06)
    # The paper's core-years come from rounded days: (1) 4.0 * 2048 / 365 = 22.4.
    assert core_years(found, row.cores) == pytest.approx(float(row.core_years), rel=8e-3, abs=0.06)


def test_the_dense_models_days_and_core_years_agree() -> None:
    row = paper_row_of("t_96l")
    assert row is not None
    assert row.days
    # 42 * 2048 / 365 = 235.7; printed "~235.5".
    assert core_years(float(row.days), row.cores) == pytest.approx(235.5, abs=0.2)


def test_sixteen_times_the_model_costs_less_than_four_times_as_much() -> None:
    large, small = paper_row_of("moe_2048e_36l"), paper_row_of("moe_128e_36l")
    assert large is not None
    assert small is not None
    # Section 5: 37 to 600 billion parameters, 6 to 22 core-years.
    assert large.parameters / small.parameters == pytest.approx(16, abs=0.3)
    assert float(large.core_years or 0) / float(small.core_years or 1) == pytest.approx(
        3.6, abs=0.1
    )
    assert paper_row_of("demo") is None


def test_band_is_of_the_documents_table() -> None:
    text = (Path(__file__).parents[2] / "docs" / "pod.md").read_text("utf-8")
    for row in TABLE3:
        if row.config not in MODEL_SECONDS:
            continue
        (line,) = (line for line in text.splitlines() if line.startswith(f"| {row.model} |"))
        *_, model, paper, _ = (cell.strip() for cell in line.split("|"))
        assert float(model) == MODEL_SECONDS[row.config]
        assert float(paper) == pytest.approx(1 / (row.steps_per_second or 1), abs=5e-4)
    assert band(512, 2048) == pytest.approx((1.09, 1.27), abs=5e-3)
