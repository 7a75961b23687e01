"""A corpus with broken lines of all sorts, and the corpus without them."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

from m4.settings import InputError
from tests.chaos.trial import Trial

# Each makes a line, without its line feed, of which no pair can be read.
_Line = Callable[[random.Random], bytes]
_TEXTS = ("good morning", "bom dia", "<2gl>", "<unk>", "ola\u200dmundo", "\u202eabc", "{}", "0")


def _words(draw: random.Random, least: int = 1) -> bytes:
    return " ".join(draw.choices(_TEXTS, k=draw.randrange(least, 9))).encode()


BROKEN: dict[str, _Line] = {
    "no tab": lambda draw: _words(draw),
    "more than one tab": lambda draw: b"\t".join(_words(draw) for _ in range(draw.randrange(3, 9))),
    "an empty line": lambda draw: b"",
    "blanks": lambda draw: b" " * draw.randrange(1, 50),
    "no English": lambda draw: b"\t" + _words(draw),
    "no translation": lambda draw: _words(draw) + b"\t" + "\u00a0\u2003 ".encode(),
    "only a tab": lambda draw: b"\t",
    "NUL": lambda draw: _words(draw) + b"\0\t" + _words(draw),
    "control": lambda draw: _words(draw) + b"\t" + bytes([draw.choice([1, 7, 8, 27, 127])]) + b"x",
    "carriage return": lambda draw: _words(draw) + b"\r" + _words(draw) + b"\t" + _words(draw),
    "UTF-16": lambda draw: _words(draw).decode().encode("utf-16-be").replace(b"\n", b"") + b"\xff",
    "Latin-1": lambda draw: b"caf\xe9 " + _words(draw) + b"\t" + _words(draw),
    "cut UTF-8": lambda draw: _words(draw) + b"\t" + "\u20ac".encode()[: draw.randrange(1, 3)],
    "overlong": lambda draw: b"\xc0\xaf\t" + _words(draw),
    "a surrogate": lambda draw: b"\xed\xa0\x80\t" + _words(draw),
    "beyond Unicode": lambda draw: b"\xf5\x80\x80\x80\t" + _words(draw),
    "noise": lambda draw: bytes(draw.choices([b for b in range(256) if b != 10], k=60)) + b"\xff",
    "too long": lambda draw: b"a" * 70_000 + b"\tb",
    "too long, no tab": lambda draw: b"ab " * 30_000,
}


def broken(count: int, draw: random.Random) -> list[bytes]:
    """Of every sort as many; long lines are rare, or the file would be a gigabyte."""
    sorts = [name for name in BROKEN if not name.startswith("too long")]
    lines = [BROKEN[sorts[n % len(sorts)]](draw) for n in range(count - count // 100)]
    return lines + [
        BROKEN["too long, no tab" if n % 2 else "too long"](draw) for n in range(count // 100)
    ]


def among(base: Path, draw: random.Random, count: int = 10_000) -> list[Trial]:
    """Broken lines in the training text of a corpus: with on_bad_line = 'fail', the default, the
    first one is named; with 'skip' all are counted, and the tokens are those of the text without
    them."""
    good = [f"the house {n} is old\ta casa {n} vella {n * n}".encode() for n in range(300)]
    mixed = [*good, *broken(count, draw)]
    draw.shuffle(mixed)
    pairs = {*good}
    kept = [line for line in mixed if line in pairs]
    for name, train in (("mixed", mixed), ("kept", kept)):
        folder = base / name
        folder.mkdir(parents=True)
        (folder / "gl.train.tsv").write_bytes(b"\n".join(train) + b"\n")
        for split in ("dev", "test"):
            (folder / f"gl.{split}.tsv").write_bytes(f"a {split} house\tunha casa\n".encode())
    first = next(number for number, line in enumerate(mixed, 1) if line not in pairs)
    detail = f"{count} broken lines among {len(good)}"
    text, verdict = "nothing was refused", "silent"
    try:
        _built(base / "mixed", base / "cache.fail", "fail")
    except InputError as error:
        text = str(error)
        verdict = "named" if f"gl.train.tsv line {first}:" in text else "unnamed"
    trials = [Trial("broken lines", "fail", detail, verdict, text)]
    whole = _built(base / "kept", base / "cache.kept", "fail")
    found = _built(base / "mixed", base / "cache.skip", "skip")
    same = found["tokens"] == whole["tokens"] and found["skipped"] == count
    text = f"{found['skipped']} of {count} counted, {found['reasons']} reasons"
    return [
        *trials,
        Trial("broken lines", "skip", detail, "survived" if same else "silent", text),
    ]


def _built(folder: Path, cache: Path, on_bad_line: str) -> dict:
    from m4.data.corpus import CorpusSpec
    from m4.data.sources.tsv import Tsv
    from tests.chaos.world import digest

    source = Tsv(folder, on_bad_line=on_bad_line)
    spec = CorpusSpec(source, vocabulary_size=300, lengths={"inputs": 64, "targets": 64})
    folder = spec.build(cache).folder
    skipped = source.reading.skipped
    return {
        "tokens": {path.name: digest(path.read_bytes()) for path in sorted(folder.glob("*.npy"))},
        "skipped": sum(skipped.values()),
        "reasons": len({reason for _, reason in skipped}),
    }
