"""A growing file of translations: whatever kills its process, the next one makes the same file."""

import gzip
import os
from pathlib import Path

import pytest

from m4.eval.text.work_file import WorkFile
from m4.settings import InputError

MADE_BY = {"step": 4, "to": "gl"}


def finished(output: Path, lines: list[str], **more: object) -> None:
    work = WorkFile(output, {**MADE_BY, **more})
    work.append(lines[work.lines :], {"lines": len(lines) - work.lines})
    assert work.counts["lines"] == len(lines)
    work.finish()


def test_an_output_appears_whole_with_nothing_next_to_it(tmp_path: Path) -> None:
    output = tmp_path / "a.txt"
    work = WorkFile(output, MADE_BY)
    work.append(["uno", "dous"], {"lines": 2})
    assert not output.exists()
    work.finish()
    assert output.read_text() == "uno\ndous\n"
    assert [*tmp_path.iterdir()] == [output]
    assert WorkFile(output, MADE_BY).done


@pytest.mark.parametrize("behind", [b"", b"tres", b"tr\xc3", b"tres\ncatro\n"])
def test_what_a_note_does_not_count_is_written_again(tmp_path: Path, behind: bytes) -> None:
    output, lines = tmp_path / "a.txt", ["uno", "dóus", "", "tres"]
    killed = WorkFile(output, MADE_BY)
    killed.append(lines[:2], {"lines": 2})
    killed.close()
    with (tmp_path / "a.txt.partial").open("ab") as file:
        file.write(behind)
    finished(output, lines)
    assert output.read_text() == "uno\ndóus\n\ntres\n"


def test_lines_without_their_note_or_a_file_shorter_than_it_begin_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "a.txt"
    (tmp_path / "a.txt.partial").write_text("other\n")
    killed = WorkFile(output, MADE_BY)
    assert killed.lines == 0
    killed.append(["uno"], {"lines": 1})
    killed.close()
    (tmp_path / "a.txt.partial").write_bytes(b"u")
    finished(output, ["uno", "dous"])
    assert "shorter than in its note" in capsys.readouterr().err
    assert output.read_text() == "uno\ndous\n"


def test_lines_of_another_model_are_not_continued(tmp_path: Path) -> None:
    output = tmp_path / "a.txt"
    killed = WorkFile(output, MADE_BY)
    killed.append(["uno"], {"lines": 1})
    killed.close()
    with pytest.raises(ValueError, match=r"another step \(4, now 5\); --overwrite begins again"):
        WorkFile(output, {**MADE_BY, "step": 5})
    # The same ones are continued with it, too.
    again = WorkFile(output, MADE_BY, overwrite=True)
    assert again.lines == 1
    again.close()
    other = WorkFile(output, {**MADE_BY, "step": 5}, overwrite=True)
    assert other.lines == 0
    other.append(["un"], {"lines": 1})
    other.finish()
    assert output.read_text() == "un\n"


def test_what_is_there_stays_until_its_replacement_is_whole(tmp_path: Path) -> None:
    output = tmp_path / "a.txt"
    output.write_text("old\n")
    assert WorkFile(output, MADE_BY).done
    work = WorkFile(output, MADE_BY, overwrite=True)
    work.append(["new"], {"lines": 1})
    assert output.read_text() == "old\n"
    work.finish()
    assert output.read_text() == "new\n"


def test_lines_of_a_setting_that_is_the_default_again_are_not_continued(tmp_path: Path) -> None:
    killed = WorkFile(tmp_path / "a.txt", {**MADE_BY, "prefix": "hai"})
    killed.append(["hai uno"], {"lines": 1})
    killed.close()
    with pytest.raises(ValueError, match=r"another prefix \(hai, now None\)"):
        WorkFile(tmp_path / "a.txt", MADE_BY)


def test_two_jobs_do_not_write_one_file(tmp_path: Path) -> None:
    output = tmp_path / "a.txt"
    first, second = WorkFile(output, MADE_BY), WorkFile(output, MADE_BY)
    first.append(["uno"], {"lines": 1})
    for job in (lambda: WorkFile(output, MADE_BY), lambda: second.append(["uno"], {"lines": 1})):
        with pytest.raises(ValueError, match="another m4 decode is at work"):
            job()
    first.close()
    # What came meanwhile is not written twice.
    late = WorkFile(output, MADE_BY)
    third = WorkFile(output, MADE_BY)
    third.append(["dous"], {"lines": 1})
    third.close()
    with pytest.raises(ValueError, match="another m4 decode is at work"):
        late.append(["dous"], {"lines": 1})
    late.close()
    assert (tmp_path / "a.txt.partial").read_text() == "uno\ndous\n"


def test_many_outputs_are_not_open_together(tmp_path: Path) -> None:
    def opened() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = opened()
    works = [WorkFile(tmp_path / f"{number}.txt", MADE_BY) for number in range(20)]
    for work in works:
        work.append(["uno"], {"lines": 1})
        assert opened() == before + 1
        work.finish()
    assert opened() == before


def test_gz_is_packed_and_equal_lines_are_equal_bytes(tmp_path: Path) -> None:
    for name in ("a.gz", "b.gz"):
        finished(tmp_path / name, ["uno", "dous"])
    assert gzip.decompress((tmp_path / "a.gz").read_bytes()) == b"uno\ndous\n"
    assert (tmp_path / "a.gz").read_bytes() == (tmp_path / "b.gz").read_bytes()


@pytest.mark.parametrize("damage", ["", "{}", '{"made_by": {}, "lines": "2"}'])
def test_overwrite_begins_again_where_the_note_is_damaged(tmp_path: Path, damage: str) -> None:
    output = tmp_path / "a.txt"
    killed = WorkFile(output, MADE_BY)
    killed.append(["uno"], {"lines": 1})
    killed.close()
    (tmp_path / "a.txt.partial.json").write_text(damage)
    with pytest.raises(InputError, match=r"json: damaged, .*--overwrite begins again"):
        WorkFile(output, MADE_BY)
    again = WorkFile(output, MADE_BY, overwrite=True)
    assert again.lines == 0
    again.close()
