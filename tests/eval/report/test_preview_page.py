"""The picture and the page of the data preview."""

from __future__ import annotations

import re

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
