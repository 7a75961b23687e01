"""ΔBLEU: differences of a system from the bilingual baselines, by language and resource level.

GShard, section 4.4 and Table 1: ΔBLEU = BLEU - BLEU of the bilingual baseline.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

import numpy as np
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from m4.data.directions import key_of, label_of, pair_of, side_of
from m4.data.languages import closely_related, title_of
from m4.eval.metrics import bootstrap
from m4.eval.scoring.levels import DEFAULT_LEVELS, LEVELS, SIDES, ResourceLevels
from m4.eval.scoring.score import COPY, METRIC_NAMES, Measured, text_table
from m4.settings import InputError, counted

BILINGUAL = "bilingual"
# Shown instead of a difference.
UNDERTRAINED = "undertrained"
MOST_LINES = 40  # maximum rows of a table in a terminal
UNDERTRAINED_MEANS = "below the score of the source itself as the translation"
SIGNIFICANT = 0.05
SIGNIFICANT_MEANS = "significant at 5% over all directions (Holm)"


@dataclass(frozen=True)
class Delta:
    """Difference of a system from its baseline in one direction, on the same sentences, in percent.

    `low` and `high` are the 95% interval of the difference by paired bootstrap.
    """

    direction: str
    language: str  # the language next to English; without English, the direction
    name: str
    side: str  # one of `SIDES`
    system: str
    baseline: str
    metric: str
    train_pairs: int
    sentences: int
    baseline_score: float
    system_score: float
    copy_score: float | None
    delta: float
    low: float
    high: float
    p_value: float
    closely_related: tuple[str, ...] = ()  # languages of the run with nearly equal texts
    p_holm: float = 1.0  # corrected over all directions of a system and metric (`bootstrap.holm`)
    lower_is_better: bool = False
    # The difference in every resample; empty if read from a file.
    replicates: np.ndarray = field(default_factory=lambda: np.zeros(0), repr=False, compare=False)

    @property
    def undertrained(self) -> bool:
        """True if the source itself scores better as the translation, so Δ means nothing."""
        sign = -1 if self.lower_is_better else 1
        return self.copy_score is not None and sign * (self.system_score - self.copy_score) < 0

    @property
    def significant(self) -> bool:
        """True if the systems differ, in a test over all directions together."""
        return self.p_holm < SIGNIFICANT


@dataclass(frozen=True)
class Average:
    """The mean over the languages of a resource level ('all': over every language).

    It is undertrained if the copies' mean score is above the system's.
    """

    side: str
    level: str
    system: str
    languages: int
    baseline_score: float
    system_score: float
    delta: float
    low: float
    high: float
    undertrained: bool = False


def deltas(
    measured: Measured, train_pairs: Mapping[str, int], metric: str, baseline: str = BILINGUAL
) -> list[Delta]:
    """Returns the differences from the baseline, by system, falling training size and side.

    Directions without translations of both are left out.

    Raises:
        InputError: The baseline has no hypotheses, or a language has no training size.
    """
    ours = set(measured.directions(baseline))
    if not ours:
        known = ", ".join(system.name for system in measured.systems)
        raise InputError(f"no hypotheses of the baseline {baseline!r} among: {known}")
    languages = {label_of(direction) for direction in ours}
    related = {name: tuple(closely_related(name, sorted(languages))) for name in languages}

    def made(direction: str, system: str) -> Delta:
        language, pair = label_of(direction), key_of(pair_of(direction))
        if pair not in train_pairs:
            raise InputError(f"no number of training pairs for {pair!r} ({direction})")
        ours, theirs, copy = (
            measured.statistics.get((name, direction, metric)) for name in (system, baseline, COPY)
        )
        assert ours is not None
        assert theirs is not None
        return Delta(
            direction, language, title_of(language), side_of(direction), system, baseline, metric,
            train_pairs[pair], ours.sentences, theirs.value(), ours.value(),
            copy.value() if copy else None, **bootstrap.paired_difference(ours, theirs)._asdict(),
            closely_related=related[language], lower_is_better=ours.lower_is_better,
        )  # fmt: skip

    found: list[Delta] = []
    for system in (one.name for one in measured.systems if one.name != baseline):
        mine = [made(each, system) for each in measured.directions(system) if each in ours]
        # Languages of equal size have the same order on both sides and in all systems.
        mine.sort(key=lambda r: (-r.train_pairs, r.language, SIDES.index(r.side)))
        p_values = [bootstrap.normal_p_value(row.delta, row.replicates) for row in mine]
        corrected = zip(mine, bootstrap.holm(p_values), strict=True)
        found += [replace(row, p_holm=p_value) for row, p_value in corrected]
    return found


def plain(rows: Iterable[Delta]) -> list[dict]:
    """Returns the rows for deltas.jsonl: everything but the replicates."""
    return [{name: x for name, x in asdict(row).items() if name != "replicates"} for row in rows]


def from_plain(rows: Iterable[dict]) -> list[Delta]:
    """Returns the rows of deltas.jsonl as they were, without replicates."""
    return [Delta(**{**row, "closely_related": tuple(row["closely_related"])}) for row in rows]


def small_tests(rows: Iterable[Delta], levels: ResourceLevels) -> dict[str, str]:
    """Returns direction -> language for directions with too few test sentences for means."""
    least = levels.min_test_sentences
    return {row.direction: row.language for row in rows if row.sentences < least}


def small_tests_line(small: Mapping[str, str], levels: ResourceLevels) -> str:
    """Returns a sentence on the languages left out of means, or ''."""
    languages = sorted(set(small.values()))
    said = f"with fewer than {levels.min_test_sentences} test sentences in no mean: "
    many = counted(len(languages), "language")
    return f"{many} {said}{', '.join(languages)}" if languages else ""


def averages(rows: Sequence[Delta], levels: ResourceLevels = DEFAULT_LEVELS) -> list[Average]:
    """Returns mean Δ by side, system and resource level, for levels with languages.

    Test sets of fewer than `levels.min_test_sentences` do not count. The interval has the
    percentiles of the languages' mean in every bootstrap replicate. Replicate r draws the same
    sentences from all test sets of one size, so that what parallel test sets have in common does
    not count as independent evidence.
    """
    small, systems = small_tests(rows, levels), dict.fromkeys(row.system for row in rows)
    result = []
    for side, system, level in itertools.product(SIDES, systems, (*LEVELS, "all")):
        group = [row for row in rows
                 if (row.side, row.system) == (side, system) and row.direction not in small
                 and level in ("all", levels.of(row.train_pairs))]  # fmt: skip
        if not group:
            continue
        low, high = bootstrap.interval(np.mean([row.replicates for row in group], axis=0))
        baseline, ours, delta = (
            float(np.mean([getattr(row, name) for row in group]))
            for name in ("baseline_score", "system_score", "delta")
        )
        copies = [row.copy_score for row in group if row.copy_score is not None]
        sign = -1 if group[0].lower_is_better else 1
        bad = len(copies) == len(group) and sign * (ours - float(np.mean(copies))) < 0
        result.append(
            Average(side, level, system, len(group), baseline, ours, delta, low, high, bad)
        )
    return result


def tables(
    rows: Sequence[Delta],
    means: Sequence[Average],
    width: int = 120,
    levels: ResourceLevels = DEFAULT_LEVELS,
) -> list[Table]:
    """Returns a table per system: languages by falling training size, then the averages.

    A table wider than `width` characters is split by side. With more than `MOST_LINES` languages,
    it has only the averages; the rest is in files.
    """
    sides = [side for side in SIDES if any(row.side == side for row in rows)]
    systems = list(dict.fromkeys(row.system for row in rows))
    wide = Console(width=1000)
    result = [_table(rows, means, system, sides, levels) for system in systems]
    if any(Measurement.get(wide, wide.options, table).maximum > width for table in result):
        return [_table(rows, means, s, [side], levels) for s in systems for side in sides]
    return result


def _table(
    all_rows: Sequence[Delta], all_means: Sequence[Average], system: str, sides: Sequence[str],
    levels: ResourceLevels,
) -> Table:  # fmt: skip
    rows = [row for row in all_rows if row.system == system and row.side in sides]
    means = [mean for mean in all_means if mean.system == system and mean.side in sides]
    metric = METRIC_NAMES.get(rows[0].metric, rows[0].metric)
    small, related = small_tests(rows, levels), any(row.closely_related for row in rows)
    table = text_table(
        f"{system} against {rows[0].baseline}",
        f"{metric}{', lower is better' * rows[0].lower_is_better}; "
        "[95% interval of the difference, paired bootstrap]"
        + (f"; * {SIGNIFICANT_MEANS}" if any(row.significant for row in rows) else "")
        + ("; ≈ closely related to another language" if related else "")
        + (f"; {UNDERTRAINED}: {UNDERTRAINED_MEANS}" if any(r.undertrained for r in rows) else "")
        + (f"; ○ {small_tests_line(small, levels)}" if small else ""),
    )
    table.add_column("\n\nlanguage", no_wrap=True)
    table.add_column("\ntraining\npairs", justify="right", no_wrap=True)
    two = ("\nbilin-\ngual", "\nmulti-\nlingual")
    two = two if rows[0].baseline == BILINGUAL else ("\nbase-\nline", f"\n\n{system}")
    for side in sides:
        for heading in (f"{side}\n\ncopy", *two, f"\n\nΔ{metric}"):
            table.add_column(heading, justify="right", no_wrap=True)
    at = {(row.language, row.side): row for row in rows}
    many = len({row.language for row in rows}) > MOST_LINES
    for language, row in {} if many else {row.language: row for row in rows}.items():
        label = f"{language} {row.name}" if row.name != language else language
        marks = " ≈" * bool(row.closely_related) + " ○" * (language in small.values())
        cells = [label + marks, f"{row.train_pairs:,}"]
        for side in sides:
            one = at.get((language, side))
            copy = "" if one is None or one.copy_score is None else f"{one.copy_score:.1f}"
            cells += [copy, *_cells(one)]
        table.add_row(*cells)
    table.add_section()
    for name in (*LEVELS, "all"):
        group = {mean.side: mean for mean in means if mean.level == name}
        if group:
            cells = [f"{name} ({max(mean.languages for mean in group.values())})", ""]
            for side in sides:
                cells += ["", *_cells(group.get(side))]
            table.add_row(*cells, style="bold")
    return table


def _cells(row: Delta | Average | None) -> list[str]:
    if row is None:
        return ["", "", ""]
    mark = "*" * (isinstance(row, Delta) and row.significant)
    said = f"{row.delta:+.1f}{mark} [{row.low:+.1f}, {row.high:+.1f}]"
    scores = f"{row.baseline_score:.1f}", f"{row.system_score:.1f}"
    return [*scores, UNDERTRAINED if row.undertrained else said]
