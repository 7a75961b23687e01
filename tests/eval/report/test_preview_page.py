"""The picture and the page of the data preview."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from m4.data.inspection.preview import Column, DrawnLanguage
from m4.eval.report import preview_page as page
from tests.data.inspection.test_preview import example


def test_the_page_is_whole_and_escaped() -> None:
    seen = example()
    hostile = "<script>alert('x')</script>"
    seen = seen._replace(
        sampler=hostile,
        columns=[
            seen.columns[0],
            seen.columns[1]._replace(problem=hostile),
            seen.columns[2]._replace(name=hostile),
        ],
    )
    text = page.html(seen, 16, page.figure(example(), 16))
    assert hostile not in text
    assert text.count("&lt;script&gt;") == 3
    assert "<script" not in text
    # Nothing is fetched: the figure lies in the page.
    assert not re.findall(r'(?:src|srcset|href)="(\w+:)', text)
    assert "default-src 'none'" in text
    assert "1 language is</span>" not in text
    assert re.search(r"1 language is repeated more than 16 times:</span>\s*gl&nbsp;20.0", text)
    rows = re.findall(r"<tr><th>(\w+) ?<?", text.split("<tbody>")[1])
    assert rows == ["es", "gl"]
    # T=1 has two empty cells a row, not the numbers of another column.
    assert text.count('<td class="number first"></td>') == 2
    # T=∞ has shares, epochs and separate repeated pairs.
    cells = re.findall(r"<tr><th>(?:es|gl).*?</tr>", text, re.DOTALL)
    assert [re.findall(r">([^<>]+)</td>", row)[-3:] for row in cells] == [
        ["10.00%", "20.0", "5"], ["90.00%", "0.90", "0"],
    ]  # fmt: skip
    assert text.count(">repeated</th>") == 3
    assert "No language is repeated more than 20 times" in page.html(
        seen, 20, page.figure(example(), 20)
    )


def test_what_is_never_drawn_has_no_point(tmp_path: Path) -> None:
    seen = example()
    drawn = dict(seen.columns[0].drawn) | {"gl": DrawnLanguage(0, 0.0, 0, 0.0, 0.0, 0, 0)}
    seen = seen._replace(columns=[Column("configured", drawn), *seen.columns[1:]])
    figure = page.figure(seen, 16.0)
    (line,) = (line for line in figure.axes[0].get_lines() if line.get_label() == "configured")
    y = np.asarray(line.get_ydata())
    assert y[0] == 0.9
    assert np.isnan(y[1])
    # A sampler that cannot be used has no line.
    assert "T=1" not in [line.get_label() for line in figure.axes[0].get_lines()]
    paths = page.write(seen, 16.0, tmp_path)
    assert [path.name for path in paths] == [
        "data_preview.html", "data_preview.png", "data_preview.pdf",
    ]  # fmt: skip
    assert paths[1].read_bytes()[:4] == b"\x89PNG"
    assert paths[2].read_bytes()[:4] == b"%PDF"
