"""Separate test sets: sentences with references, in files outside any corpus.

Published layouts are settings of `sources.aligned.Aligned` or `Table` (gin_configs/testsets). Any
source of sentence pairs can also be a test set, by its test split.
"""

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol, runtime_checkable

from etils import epath

from m4.data.cldr import tags
from m4.data.directions import directions_of, languages_of, pair_of, sides_of, split_direction
from m4.data.languages import base_of, describe, is_english
from m4.data.sources import Source
from m4.data.sources.reading.files import folder_at, names_below, unpacked
from m4.data.sources.reading.folder import m4_code
from m4.data.sources.reading.lines import text_lines
from m4.settings import InputError, SettingError, checked
from m4.storage.files import parsed, undamaged

MOST_BYTES = 1 << 26  # bytes of a line, which may be a document
# Code of a language in the name of a pair.
_ONE = r"[A-Za-z0-9]+(?:[_@][A-Za-z0-9]+)*"


class Segment(NamedTuple):
    """A sentence, or a longer part of a document, to translate."""

    source: str
    references: tuple[str, ...]
    document: str | None = None

    def more(self) -> dict[str, Any]:
        """Returns further fields for a file of hypotheses, besides source and first reference."""
        several = {"references": list(self.references)} if len(self.references) > 1 else {}
        return several | ({} if self.document is None else {"document": self.document})


@runtime_checkable
class Segments(Protocol):
    """A test set that lists segments; for other sources, test pairs are the segments."""

    def directions(self) -> list[str]:
        """Returns its directions in its own language codes: "eng_Latn-fra_Latn"."""
        ...

    def segments(self, direction: str) -> list[Segment]:
        """Returns the segments of a direction, in order."""
        ...


@checked
@dataclass(eq=False)
class Table:
    """A folder of files with a segment per line: JSON lines (.jsonl, .json) or columns with tabs.

    A field with a list next to a text has several references; two lists have the sentences of a
    document. All files may be compressed.

    Attributes:
        folder: Folder on a disk, or an address in a bucket.
        files: Pattern of names, in which {pair} is 'en-de' and '*' any part of a name.
        header: Names of the columns, for files without them in the first line.
        source: Field of the text to translate.
        target: Field of the reference, or several fields.
        languages: Fields of both languages, or one field with 'en-de_DE'. Defaults to {pair}.
        document: Field of a document's name. A list of sentences is also a document.
        where: Values that fields of a line must have; other lines are left out.
        both_ways: Whether references are translated too.
        codes: m4's code -> code in the data, if m4 cannot match them.
    """

    folder: str | os.PathLike[str]
    files: str = "*.jsonl"
    header: Sequence[str] | None = None
    source: str = "source"
    target: str | Sequence[str] = "target"
    languages: str | Sequence[str] | None = None
    document: str | None = None
    where: Mapping[str, Any] | None = None
    both_ways: bool = False
    codes: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        if self.languages is None and "{pair}" not in self.files:
            allowed = "fields of the languages, or Table.files with {pair}"
            raise SettingError("Table.languages", self.languages, allowed)

    def directions(self) -> list[str]:
        """Returns the directions of the lines."""
        return [*self._segments]

    def segments(self, direction: str) -> list[Segment]:
        """Returns the lines of a direction."""
        return self._segments[direction]

    @cached_property
    def _segments(self) -> dict[str, list[Segment]]:
        found: dict[str, list[Segment]] = {}
        for match, path in _find(self.folder, self.files):
            for number, row in self._rows(path):
                where = f"{path} line {number}"
                if any(_field(row, name, where) != v for name, v in (self.where or {}).items()):
                    continue
                source, target = self._languages(match, row, where)
                for one in self._of(row, where):
                    found.setdefault(f"{source}-{target}", []).append(one)
                    if self.both_ways and one.references:
                        back = Segment(one.references[0], (one.source,), one.document)
                        found.setdefault(f"{target}-{source}", []).append(back)
        return found

    def _rows(self, path: epath.Path) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yields (number, fields) of each line."""
        as_json = unpacked(path.name).endswith((".jsonl", ".json"))
        header = self.header
        for number, line in enumerate(text_lines(path, MOST_BYTES), 1):
            if as_json:
                with undamaged(f"{path} line {number}"):
                    yield number, parsed(line.encode())
            elif header is None:
                header = line.split("\t")
            else:
                cells = line.split("\t")
                if len(cells) != len(header):
                    said = f"{len(cells)} columns, not {len(header)} ({', '.join(header)}"
                    raise InputError(f"{path} line {number}: {said}; Table.header)")
                yield number, dict(zip(header, cells, strict=True))

    def _languages(self, match: re.Match, row: Mapping[str, Any], where: str) -> tuple[str, ...]:
        if self.languages is None:
            return m4_code(match["first"]), m4_code(match["second"])
        names = [self.languages] if isinstance(self.languages, str) else [*self.languages]
        texts = [_field(row, name, where) for name in names]
        codes = texts[0].split("-") if len(names) == 1 and isinstance(texts[0], str) else texts
        if len(codes) != 2 or not all(isinstance(code, str) and code for code in codes):
            raise InputError(f"{where}: {', '.join(names)} is {texts}: must be two languages")
        return tuple(map(m4_code, codes))

    def _of(self, row: Mapping[str, Any], where: str) -> Iterator[Segment]:
        """Yields the segments of a line."""
        names = [self.source, *([self.target] if isinstance(self.target, str) else self.target)]
        source, *targets = (_field(row, name, where) for name in names)
        document = None if self.document is None else str(_field(row, self.document, where))
        if isinstance(source, list):
            counts = [len(of) if isinstance(of, list) else 1 for of in (source, *targets)]
            if len(set(counts)) > 1:
                fields = ", ".join(names)
                raise InputError(f"{where}: {fields} have {counts} sentences: must be as many")
            for text, *references in zip(source, *targets, strict=True):
                yield _segment(text, references, document or where)
        else:
            flat = [one for each in targets for one in (each if isinstance(each, list) else [each])]
            yield _segment(source, flat, document)


def _segment(source: Any, references: Iterable[Any], document: str | None) -> Segment:
    given = tuple(text for text in references if isinstance(text, str) and text.strip())
    return Segment("" if source is None else str(source), given, document)


def _field(row: Mapping[str, Any], name: str, where: str) -> Any:
    if name not in row:
        raise InputError(f"{where}: no field {name!r}; there is {', '.join(map(str, row))}")
    return row[name]


def _find(folder: str | os.PathLike[str], pattern: str) -> list[tuple[re.Match, epath.Path]]:
    """Returns the files that match a pattern, sorted by name, each with its match."""
    fields = {"{pair}": f"(?P<first>{_ONE})-(?P<second>{_ONE})", "*": "[^/]*"}
    parts = re.split(r"(\{pair\}|\*)", pattern)
    expression = re.compile("".join(fields.get(part, re.escape(part)) for part in parts))
    top = folder_at(folder, "Table.folder")
    names = names_below(top, pattern.count("/") + 1)
    matches = ((expression.fullmatch(unpacked(name)), path) for name, path in names)
    found = [(match, path) for match, path in matches if match]
    if not found:
        raise InputError(f"{folder}: no file is called like {pattern} (Table.files)")
    return found


def directions_for(name: str, testset: Segments | Source, trained: Iterable[str]) -> dict[str, str]:
    """Returns, for a model's directions in a test set, their names in the set's own codes.

    Languages are matched by m4's codes, ISO 639 and scripts, and at last without territory:
    'eng_Latn' is 'en', and 'de_DE' is 'de' if there is no other German.

    Raises:
        InputError: Two languages of the test set match one of the model's, or none does.
    """
    trained = list(trained)
    if isinstance(testset, Segments):
        own = testset.directions()
    else:
        own = directions_of("direct", testset.language_pairs())
    codes = languages_of(own)
    by_setting: Mapping[str, str] = getattr(testset, "codes", None) or {}
    given = {ours: m4_code(theirs) for ours, theirs in by_setting.items()}
    if hasattr(testset, "language_pairs"):  # a source names these languages itself
        given = {ours: theirs for ours, theirs in given.items() if theirs in codes}
    same: dict[str, str] = {}
    for language in languages_of(trained):
        if language in given:
            same[language] = given[language]
            continue
        wanted = _forms(language)
        for form in range(3):
            alike = [code for code in codes if _forms(code)[form] == wanted[form]]
            if len(alike) > 1:
                raise InputError(
                    f"testset {name}: {' and '.join(alike)} are both {language}; choose one: "
                    f"codes = {{'{language}': '{alike[0]}'}}"
                )
            if alike:
                same[language] = alike[0]
                break
    named = ("-".join(str(same.get(code)) for code in split_direction(d)) for d in trained)
    found = {ours: theirs for ours, theirs in zip(trained, named, strict=True) if theirs in own}
    if not found:
        raise InputError(
            f"testset {name}: has none of the model's directions ({', '.join(trained[:8])}); it "
            f"has {', '.join(own[:8])}; other codes of languages: codes = {{'gl': '...'}}"
        )
    return found


def segments_for(name: str, testset: Segments | Source, direction: str) -> list[Segment]:
    """Returns the segments of a direction in the test set's own codes.

    Raises:
        InputError: A segment has no reference, or there is no segment.
    """
    own = isinstance(testset, Segments)
    found = testset.segments(direction) if own else segments_of_pairs(testset, direction)
    lacking = [number for number, one in enumerate(found, 1) if not one.references]
    if lacking or not found:
        which = f"of segment {lacking[0]:,} of {len(found):,}" if lacking else ""
        raise InputError(f"testset {name}: {direction} has no reference {which}".rstrip())
    return found


def segments_of_pairs(source: Source, direction: str) -> list[Segment]:
    """Returns a source's test pairs as segments."""
    first, second = sides_of(direction)
    pairs = source.pairs(pair_of(direction), "test")
    return [Segment(getattr(pair, first), (getattr(pair, second),)) for pair in pairs]


def _forms(code: str) -> tuple[str, str, str]:
    """Returns a code unchanged, in m4's form, and without territory."""
    if is_english(code):
        tag = tags.parse(code)
        return code, f"en_{tag.territory}" if tag and tag.territory else "en", "en"
    return code, describe(code).code, base_of(code)
