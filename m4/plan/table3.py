"""The GShard paper's Table 3 (arXiv 2006.16668), and its arithmetic: steps to days, core-years."""

from typing import NamedTuple

# The paper counts training by source-side pieces (footnote 7).
TOKENS = 10**12


class PaperRow(NamedTuple):
    """One model of Table 3, as printed, and its size of Table 1; None: the paper gives none."""

    model: str
    config: str
    cores: int
    parameters: float
    steps_per_second: float | None
    batch_tokens: int
    core_years: str | None
    days: str | None
    tokens: int = TOKENS  # that its days and core-years are for


TABLE3 = (
    PaperRow("(1) MoE(2048E, 36L)", "moe_2048e_36l", 2048, 600e9, 0.72, 4_000_000, "22.4", "4.0"),
    PaperRow("(2) MoE(2048E, 12L)", "moe_2048e_12l", 2048, 200e9, 2.15, 4_000_000, "7.5", "1.4"),
    PaperRow("(3) MoE(512E, 36L)", "moe_512e_36l", 512, 150e9, 1.05, 1_000_000, "15.5", "11.0"),
    PaperRow("(4) MoE(512E, 12L)", "moe_512e_12l", 512, 50e9, 3.28, 1_000_000, "4.9", "3.5"),
    PaperRow("(5) MoE(128E, 36L)", "moe_128e_36l", 128, 37e9, 0.67, 1_000_000, "6.1", "17.3"),
    PaperRow("(6) MoE(128E, 12L)", "moe_128e_12l", 128, 12.5e9, 2.16, 1_000_000, "1.9", "5.4"),
    PaperRow("* MoE(2048E, 60L)", "moe_2048e_60l", 2048, 1e12, None, 4_000_000, None, None),
    # 300,000 steps (section 4.2) of 4 million pieces.
    PaperRow("T(96L)", "t_96l", 2048, 2.3e9, None, 4_000_000, "235.5", "42", 12 * 10**11),
)

# Seconds of these steps by our model (`m4.plan.step_time`), of the programs of docs/pod.md.
MODEL_SECONDS = {
    "moe_2048e_36l": 1.513,
    "moe_2048e_12l": 0.523,
    "moe_512e_36l": 1.106,
    "moe_512e_12l": 0.387,
    "moe_128e_36l": 3.052,
    "moe_128e_12l": 1.052,
}


def band(*cores: int) -> tuple[float, float]:
    """Returns the least and the most of our model's step over the paper's, on so many cores."""
    ratios = [
        MODEL_SECONDS[row.config] * row.steps_per_second
        for row in TABLE3
        if row.cores in cores and row.steps_per_second
    ]
    return min(ratios), max(ratios)


def days(batch_tokens: float, step_seconds: float) -> float:
    """Returns the days to `TOKENS`. For model (1), 10^12 / (4 * 10^6 * 0.72) seconds are 4.02."""
    return TOKENS / batch_tokens * step_seconds / (24 * 60 * 60)


def core_years(days: float, cores: int) -> float:
    """Returns days of `cores` cores in years of 365 days of one core."""
    return days * cores / 365


def paper_row_of(config: str) -> PaperRow | None:
    """Returns the row of the model in the config of this name (a file's stem)."""
    return next((row for row in TABLE3 if row.config == config), None)
