"""`scripts/tatoeba.py`: Tatoeba's exports become a folder that m4 reads."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from m4.data.sources.tsv import Tsv

ROOT = Path(__file__).parents[2]
# language -> its sentences; each translates the English sentence of its number.
SIZES = {"deu": 400, "glg": 150, "xxx": 20}


@pytest.fixture
def exports(tmp_path: Path) -> Path:
    """Writes English sentences 1 to 400, their translations, and pairs without English."""
    sentences = [f"{n}\teng\tThis is sentence {n}." for n in range(1, 401)]
    links = []
    for number, (code, size) in enumerate(SIZES.items(), 1):
        for n in range(1, size + 1):
            own = 1000 * number + n
            sentences.append(f"{own}\t{code}\t{code} {n}")
            links += [f"{n}\t{own}", f"{own}\t{n}"]
    sentences += ["9001\tdeu\tfrom Galician", "9002\t\\N\tno language", "9003\teng\tThis is it."]
    links += ["2001\t9001", "9001\t2001", "1\t9002", "1\t9003", "9003\t1", "77777\t1001"]
    for name, lines in {"sentences": sentences, "links": links}.items():
        (tmp_path / f"{name}.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return tmp_path


def run(folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    script = str(ROOT / "scripts" / "tatoeba.py")
    words = [sys.executable, script, "sentences.csv", "links.csv", "out", *more]
    return subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)


def test_pairs_with_english_by_split(exports: Path) -> None:
    done = run(exports, "--most=300", "--least_test=20")
    assert done.returncode == 0, done.stderr
    source = Tsv(str(exports / "out"))
    assert sorted(source.language_pairs()) == ["en-deu", "en-glg"]  # 20 pairs are too few
    found = {(code, split): [*source.pairs(code, split)]
             for code in ("deu", "glg") for split in ("train", "dev", "test")}  # fmt: skip
    for (code, _), pairs in found.items():
        for english, translation in ((pair.first, pair.second) for pair in pairs):
            assert english == f"This is sentence {translation.removeprefix(f'{code} ')}."
    total = sum(len(pairs) for (code, _), pairs in found.items() if code == "glg")
    assert total == 150
    assert len(found["deu", "train"]) == 300
    # One hash for all languages: an English test sentence is in no training set.
    held_out = {pair.first for code in ("deu", "glg") for pair in found[code, "test"]}
    assert not held_out & {pair.first for code in ("deu", "glg") for pair in found[code, "train"]}
    name, _, names = done.stdout.partition(" = ")
    assert (name, ast.literal_eval(names)) == ("LANGUAGES", ["deu"])
    assert len(found["deu", "test"]) >= 20 > len(found["glg", "test"])
    again = run(exports)
    assert again.returncode == 2
    assert "out: is there; give a new folder" in again.stderr


def test_a_line_of_another_file_is_named(exports: Path) -> None:
    (exports / "links.csv").write_text("1\t2\n1 2\n", encoding="utf-8")
    done = run(exports)
    assert (done.returncode, done.stderr) == (1, "links.csv line 2: 1 columns, not 2\n")
    assert not (exports / "out").exists()
