"""The text of data_report.html: the ledger as tables, with examples."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from m4 import html
from m4.data.cleaning.ledger import ANY, Count, Ledger
from m4.data.languages import describe
from m4.data.sources import SPLITS

TEMPLATE = Path(__file__).with_name("audit.html.j2")
# What shows nothing: controls, marks of direction, joiners, halves of surrogate pairs ...
_UNSEEN = re.compile(
    "[\x00-\x1f\x7f-\xa0\xad\u034f\u061c\u115f\u1160\u180e\u2000-\u200f\u2028-\u202f\u205f-\u206f"
    "\u3000\u3164\ud800-\udfff\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb\ufffe\uffff]"
)
_COUNTERS = ("dropped", "changed", "flagged", "not_checked")


def page(ledger: Ledger, not_run: Sequence[str], warnings: Sequence[str]) -> str:
    """The text of the page, self-contained (`m4.html.render`)."""
    filters = {"seen": seen, "tag": lambda code: describe(code).code.replace("_", "-")}
    filters["share"] = _share
    total = ledger.total("train")
    return html.render(
        TEMPLATE,
        filters,
        total=total,
        dropped=sum(total.dropped.values()),
        splits={split: ledger.total(split) for split in SPLITS},
        stages=_stages(ledger),
        not_run=not_run,
        warnings=warnings,
        reasons=_reasons(ledger),
        columns=ledger.reasons("dropped"),
        languages=_languages(ledger),
        flagged=_held_out(ledger),
        flagged_columns=ledger.reasons("flagged"),
        not_checked=_by_reason(ledger, "not_checked"),
        examples=_examples(ledger),
    )


def seen(text: str) -> list[tuple[bool, str]]:
    """[(is it a code?, text)]: characters that show nothing as their code points."""
    parts, last = [], 0
    for match in _UNSEEN.finditer(text):
        parts += [(False, text[last : match.start()]), (True, f"U+{ord(match[0]):04X}")]
        last = match.end()
    return [part for part in [*parts, (False, text[last:])] if part[1]]


def _share(part: int, whole: int) -> str:
    """'3.1%', or '<0.1%': something is never shown as nothing."""
    if not part or not whole:
        return ""
    share = 100 * part / whole
    return "<0.1%" if share < 0.05 else f"{share:.1f}%"


def _stages(ledger: Ledger) -> list[dict[str, Any]]:
    """A row a stage: its name, its settings, and what it did in all splits."""
    total = ledger.total()
    names = [*ledger.stages]
    for counter in _COUNTERS:  # the source's own reading and the pieces are no stages of cleaning
        names += [reason.split(":")[0] for reason in getattr(total, counter)]
    return [
        {
            "name": name,
            "settings": ", ".join(f"{k} = {v}" for k, v in ledger.stages.get(name, {}).items()),
            **{counter: _sum_of(getattr(total, counter), name) for counter in _COUNTERS},
        }
        for name in dict.fromkeys(names)
    ]


def _sum_of(counted: dict[str, int], stage: str) -> int:
    return sum(pairs for reason, pairs in counted.items() if reason.split(":")[0] == stage)


def _reasons(ledger: Ledger) -> list[dict[str, Any]]:
    """A row a reason, what dropped most first."""
    total = ledger.total()
    counters = (total.dropped, total.changed, total.flagged)
    names = dict.fromkeys(why for counter in counters for why, n in counter.most_common() if n)
    return [
        {"reason": why, "dropped": total.dropped[why], "changed": total.changed[why],
         "flagged": total.flagged[why]}
        for why in names
    ]  # fmt: skip


def _languages(ledger: Ledger) -> list[dict[str, Any]]:
    """A row a language: its training pairs, what lost most first."""
    rows = [
        {"code": code, "name": _name(code), "split": split, "count": count,
         "dropped": sum(count.dropped.values())}
        for code, splits in ledger.counts.items()
        for split, count in splits.items()
        if split in ("train", ANY) and count.read
    ]  # fmt: skip
    return sorted(rows, key=lambda row: -row["dropped"] / row["count"].read)


def _held_out(ledger: Ledger) -> list[dict[str, Any]]:
    """A row a language and dev or test split where something was flagged."""
    return [
        {"code": code, "name": _name(code), "split": split, "count": count}
        for code, splits in ledger.counts.items()
        for split, count in splits.items()
        if sum(count.flagged.values())
    ]


def _by_reason(ledger: Ledger, counter: str) -> list[dict[str, Any]]:
    """Reason -> pairs and languages."""
    rows = []
    for why in ledger.reasons(counter):
        languages = [
            _name(code)
            for code, splits in ledger.counts.items()
            if any(getattr(count, counter)[why] for count in splits.values())
        ]
        rows.append(
            {"reason": why, "pairs": getattr(ledger.total(), counter)[why], "languages": languages}
        )
    return rows


def _examples(ledger: Ledger) -> list[dict[str, Any]]:
    """A block a reason: what it found, language by language."""
    found: dict[str, list[dict[str, Any]]] = {}
    for code, splits in ledger.counts.items():
        for split, count in splits.items():
            for why, some in count.examples.items():
                found.setdefault(why, []).extend(
                    {"code": code, "name": _name(code), "split": split, "example": one}
                    for one in some
                )
    order = [row["reason"] for row in _reasons(ledger)]
    total = ledger.total()
    return [
        {"reason": why, "pairs": _pairs(total, why), "rows": _spread(found[why])}
        for why in order
        if why in found
    ]


def _pairs(total: Count, why: str) -> int:
    return total.dropped[why] + total.changed[why] + total.flagged[why]


def _spread(rows: list[dict[str, Any]], most: int = 40) -> list[dict[str, Any]]:
    """At most so many, of as many languages as there are: the first of each, the second ..."""
    seen_of: dict[str, int] = {}
    ranked = []
    for row in rows:
        seen_of[row["code"]] = rank = seen_of.get(row["code"], -1) + 1
        ranked.append((rank, row))
    return [row for _, row in sorted(ranked, key=lambda one: one[0])[:most]]


def _name(code: str) -> str:
    return "several languages" if code == ANY else describe(code).name
