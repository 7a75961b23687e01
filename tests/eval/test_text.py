"""A growing file of translations: whatever kills its process, the next one makes the same file."""

import gzip
from pathlib import Path

import pytest
from etils import epath

from m4.eval.text import Output, Text

MADE_BY = {"step": 4, "to": "gl"}
LINES = ["uno", "dóus", "", "tres"]
NEVER = 99  # lines that a text has, so that its output is not finished


def begun(path: Path, whole: int = NEVER, overwrite: bool = False, **more: object) -> Output:
    output = Output(Text(epath.Path("a.txt"), "a.txt"), "gl", path)
    output.begin({**MADE_BY, **more}, whole, overwrite)
    return output


def append(output: Output, *lines: str) -> None:
    output.append(lines, [{"lines": 1}] * len(lines))


def test_an_output_appears_whole_with_nothing_next_to_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, empty = tmp_path / "a.txt", tmp_path / "empty.txt"
    output = begun(path, 2)
    append(output, "uno")
    assert not path.exists()
    append(output, "dous")
    assert path.read_text() == "uno\ndous\n"
    assert [*tmp_path.iterdir()] == [path]
    begun(empty, 0)
    assert empty.read_text() == ""
    assert begun(path).done
    assert capsys.readouterr().out.splitlines() == [
        f"{path}: 2 lines", f"{empty}: 0 lines",
        f"{path}: already there (--overwrite replaces it)",
    ]  # fmt: skip


@pytest.mark.parametrize("lost", [0, 1, 9, 30, 60, 10_000])
@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz"])
def test_lines_that_were_not_written_whole_are_written_again(
    tmp_path: Path, lost: int, name: str
) -> None:
    path, partial = tmp_path / name, tmp_path / f"{name}.partial"
    append(begun(path, 4), *LINES[:2])
    partial.write_bytes(partial.read_bytes()[: max(0, partial.stat().st_size - lost)])
    output = begun(path, 4)
    assert output.lines == output.counts["lines"] == (2 if lost == 0 else 1 if lost < 32 else 0)
    append(output, *LINES[output.lines :])
    assert output.counts["lines"] == 4
    content = path.read_bytes()
    assert (gzip.decompress(content) if name.endswith("gz") else content).decode() == (
        "uno\ndóus\n\ntres\n"
    )


def test_all_lines_of_a_killed_job_are_finished_by_the_next_one(tmp_path: Path) -> None:
    append(begun(tmp_path / "a.txt"), *LINES)
    append(begun(tmp_path / "a.txt", 5), "fin")
    assert (tmp_path / "a.txt").read_text().splitlines() == [*LINES, "fin"]


def test_lines_of_another_model_are_not_continued(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    append(begun(path, prefix="hai"), "hai uno")
    with pytest.raises(ValueError, match=r"another step \(4, now 5\); --overwrite begins again"):
        begun(path, prefix="hai", step=5)
    with pytest.raises(ValueError, match=r"another prefix \(hai, now None\)"):
        begun(path)  # a setting that is the default again
    # The same ones are continued with --overwrite, too.
    assert begun(path, overwrite=True, prefix="hai").lines == 1
    other = begun(path, 1, overwrite=True, step=5)
    assert other.lines == 0
    append(other, "un")
    assert path.read_text() == "un\n"


def test_two_jobs_do_not_write_one_file(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    first, second = begun(path), begun(path)
    append(first, "uno")
    with pytest.raises(ValueError, match="another m4 decode is at work"):
        append(second, "uno")
    late, third = begun(path, 2), begun(path, 2)
    append(third, "dous")  # finished, and gone
    with pytest.raises(ValueError, match="another m4 decode is at work"):
        append(late, "dous")
    assert path.read_text() == "uno\ndous\n"


@pytest.mark.parametrize("damage", ["1\n", "{\n", '{"step": 4, "to": "gl"}\n{}\n'])
def test_overwrite_begins_again_where_the_lines_are_damaged(tmp_path: Path, damage: str) -> None:
    (tmp_path / "a.txt.partial").write_text(damage)
    with pytest.raises(ValueError, match=r"partial: damaged \(.*\); --overwrite begins again"):
        begun(tmp_path / "a.txt")
    output = begun(tmp_path / "a.txt", 1, overwrite=True)
    assert output.lines == 0
    append(output, "uno")
    assert (tmp_path / "a.txt").read_text() == "uno\n"


def test_equal_lines_are_equal_bytes_of_gz(tmp_path: Path) -> None:
    for name in ("a.gz", "b.gz"):
        append(begun(tmp_path / name, 1), "uno")
    assert (tmp_path / "a.gz").read_bytes() == (tmp_path / "b.gz").read_bytes()
