"""Finds the files of a folder by a pattern of their names with fields in braces."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from etils import epath

from m4.data.directions import SIDES, pair_of
from m4.data.languages import describe, is_english
from m4.data.sources import SPLITS
from m4.data.sources.reading.files import unpacked
from m4.settings import InputError, SettingError, is_one_line

# Language codes in file names: gl, zh-Hant, pt_BR, sr@latin, srp_Latn, gl~bt.
_CODE = r"[A-Za-z0-9]+(?:[-_@][A-Za-z0-9]+)*(?:~[a-z0-9]+)?"
_CODE_IN_PAIR = _CODE.replace("[-_@]", "[_@]")
_FIELD = re.compile(r"\{(\w*)\}|(\*)")
_FIELDS = ("lang", "pair", "side", "split")
# Words that stand for splits in names, between separators or at an end.
SPLIT_WORDS = {
    "train": re.compile(r"train(ing|set)?", re.IGNORECASE),
    "dev": re.compile(
        r"(news|newsdiscuss)?dev(elopment|set)?\d*|valid(ation|set)?|val|tun(e|ing)", re.IGNORECASE
    ),
    "test": re.compile(
        r"((news|newsdiscuss|dev)?test(ing|set)?|tst)\d*|eval(uation)?|blind|heldout|holdout",
        re.IGNORECASE,
    ),
}
_BETWEEN = re.compile(r"[./_-]")
# Sides of a {pair} that are called by their place in it, as in the Tatoeba Challenge.
_SIDES = {"src": 0, "source": 0, "trg": 1, "tgt": 1, "target": 1}
_SHOWN = 20  # names in a message
# Codes are part of files' names.
_LONGEST_CODE = 64


@dataclass(frozen=True)
class File:
    """A file and what its name says; fields that the pattern does not have are None.

    Attributes:
        name: Its path below the folder, without .gz, .zst, .xz or .bz2.
        pair: Name of its languages, as "en-gl"; set by `FileLayout.find`.
        codes: Codes of these languages in names, in the order of the pair.
        swapped: Whether its name has them in the other order, as of 'wo-fr'; never with English.
        side: The side of the pair that it has, "first" or "second".
        stars: The texts in the places of `*`.
        language: m4's code of its language, where a file has one language.
    """

    path: epath.Path
    name: str
    pair: str | None
    codes: tuple[str, str] | None
    swapped: bool
    split: str | None
    side: str | None
    stars: tuple[str, ...]
    language: str | None = None

    @property
    def code(self) -> str | None:
        """Code of its second language."""
        return self.codes[1] if self.codes else None


def m4_code(code: str) -> str:
    """Makes a code fit for a direction's name: 'pt-BR' -> 'pt_BR', 'sr@latin' -> 'sr_latin'."""
    return re.sub(r"[^A-Za-z0-9_~]", "_", code)


def said_splits(name: str) -> dict[str, str]:
    """Returns split -> its word, for the splits that a file's name says it is."""
    parts = _BETWEEN.split(unpacked(name))
    return {
        split: part
        for split, words in SPLIT_WORDS.items()
        for part in parts[::-1]
        if words.fullmatch(part)
    }


def named(names: Sequence[str]) -> str:
    """Returns the first names of files for a line of text, and how many more there are."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(name if is_one_line(name) else repr(name) for name in names[:_SHOWN]) + more


class Codes:
    """Turns language codes in names and in data into m4's; InputError for two of one language.

    Args:
        given: m4's code -> the code in the data.
    """

    def __init__(self, owner: str, given: Mapping[str, str], folder: epath.Path) -> None:
        self._owner, self._folder = owner, folder
        self._by_code = {code: language for language, code in given.items()}
        self._seen: dict[str, tuple[str, epath.Path | None]] = {}

    def plain(self, code: str) -> str:
        """Returns m4's code without a look at others."""
        plain, *origin = code.split("~")
        return "~".join([self._by_code.get(plain) or m4_code(plain), *origin])

    def __call__(self, code: str, path: epath.Path | None = None) -> str:
        """Returns m4's code; `path` is the file of this language, or None for a record's."""
        language = self.plain(code)
        if len(language) > _LONGEST_CODE:
            raise InputError(
                f"{path or self._folder}: language code {code[:20]}... of {len(code)} letters: "
                f"must have at most {_LONGEST_CODE} (another name: {self._owner}.codes)"
            )
        other, place = self._seen.setdefault(language, (code, path))
        if code != other:
            raise InputError(
                f"{path or self._folder}: language code {code!r} next to {other!r}"
                f"{f' of {place}' if place else ''}: both would be {language!r}; use one code, "
                f"or give one another name: {self._owner}.codes = {{'{language}_2': {code!r}}}"
            )
        return language


class FileLayout:
    """A pattern such as '{split}.{pair}.{side}' or '{lang}/*.po' and what it finds in a folder.

    {lang} is the code of a language that is paired with English, {pair} is 'en-gl', 'gl-en' or
    'fr-wo', {side} the code of the side that the file holds, {split} train, dev, test, or as
    `splits` says, and '*' any part of a name. Every file may have .gz, .zst, .xz or .bz2 after its
    name.

    Args:
        splits: Split -> its word in names; a split that is left out does not exist. Defaults to
            train, dev and test.
        codes: m4's code -> the code in names, where they differ by more than '-' and '_'.
        one_language: {lang} is the language of the file's text, which may be English.
    """

    def __init__(
        self,
        owner: str,
        folder: epath.Path,
        pattern: str,
        english: str = "en",
        splits: Mapping[str, str] | None = None,
        codes: Mapping[str, str] | None = None,
        one_language: bool = False,
    ) -> None:
        self.one_language = one_language
        self.owner, self.folder, self.pattern, self.english = owner, folder, pattern, english
        self.splits = dict(splits or {split: split for split in SPLITS})
        self.codes = dict(codes or {})
        self._by_word = {word: split for split, word in self.splits.items()}
        self.language = Codes(owner, {"en": english, **self.codes}, folder)
        self._pairs: dict[tuple[str, str], str] = {}
        for name, given, inverse in (
            ("splits", self.splits, self._by_word),
            ("codes", self.codes, set(self.codes.values())),
        ):
            if len(inverse) < len(given):
                raise SettingError(f"{owner}.{name}", given, "a dictionary of different values")
        if "train" not in self.splits or not set(self.splits) <= set(SPLITS):
            raise SettingError(f"{owner}.splits", self.splits, "of train (needed), dev and test")
        fields = {field for field, star in _FIELD.findall(pattern) if not star}
        if wrong := sorted(fields.difference(_FIELDS)):
            known = ", ".join(f"{{{field}}}" for field in _FIELDS)
            raise SettingError(
                f"{owner}.files", pattern, f"a pattern of {known} and *, not {{{wrong[0]}}}"
            )
        self.fields = fields
        parts = pattern.split("/")
        if pattern.startswith("/") or any(part in ("", ".", "..") for part in parts):
            raise SettingError(f"{owner}.files", pattern, f"a path below {owner}.folder")
        self._parts = [re.compile(self._expression(part, named=False)) for part in parts]
        self._whole = re.compile(self._expression(pattern, named=True))
        self.not_taken: list[str] = []

    def _expression(self, pattern: str, named: bool) -> str:
        """Returns the pattern as a regular expression; a repeated field must be the same text."""
        english = re.escape(self.english)
        # The longest word first: of 'test' and 'test2' the latter.
        words = "|".join(map(re.escape, sorted(self._by_word, key=len, reverse=True)))
        expression, position, seen = "", 0, set()
        for match in _FIELD.finditer(pattern):
            expression += re.escape(pattern[position : match.start()])
            position = match.end()
            field = match[1]
            if match[2]:
                expression += "([^/]*)" if named else "[^/]*"
            elif not named:
                expression += "[^/]+"
            elif field in seen:
                expression += f"(?P={field})"
            elif field == "pair":
                expression += (
                    f"(?P<pair>{english}-(?P<after>{_CODE})|(?P<before>{_CODE})-{english}"
                    f"|(?P<one>{_CODE_IN_PAIR})-(?P<other>{_CODE_IN_PAIR}))"
                )
            else:
                expression += f"(?P<{field}>{words if field == 'split' else _CODE})"
            seen.add(field)
        return expression + re.escape(pattern[position:])

    def find(self) -> list[File]:
        """Returns the files that fit, sorted by name; `not_taken` are all others there.

        Raises:
            InputError: A file exists packed and unpacked; two codes in names are one language.
        """
        found: dict[str, File] = {}
        self.not_taken = []
        for name, path in self._candidates(self.folder, "", 0):
            if (file := self.file(name, path)) is None:
                self.not_taken.append(name)
                continue
            if (plain := file.name) in found:
                raise InputError(f"{path}: {found[plain].path} is there too; remove one of them")
            found[plain] = file
        # What made a file may stand beside it (`m4 decode --format=tsv`).
        self.not_taken = [
            name for name in self.not_taken if name.removesuffix(".json") not in found
        ]
        return [
            replace(file, pair=self.pair(file.codes, file.path))
            if file.codes
            else replace(file, language=file.language and self.language(file.language, file.path))
            for _, file in sorted(found.items())
        ]

    def swapped(self, codes: tuple[str, str]) -> bool:
        """Returns whether the name of the pair has two codes in the other order."""
        return self._place(codes[0]) > self._place(codes[1])

    def pair(self, codes: tuple[str, str], path: epath.Path | None = None) -> str:
        """Returns the name of the pair of two languages in names or data."""
        if path is None and codes in self._pairs:
            return self._pairs[codes]
        first, second = (self.language(code, path) for code in codes)
        if first == second:
            place = path or self.folder
            raise InputError(f"{place}: {codes[0]!r} and {codes[1]!r} are one language")
        return self._pairs.setdefault(codes, pair_of(f"{first}-{second}"))

    def _candidates(
        self, folder: epath.Path, name: str, level: int
    ) -> Iterator[tuple[str, epath.Path]]:
        last = level == len(self._parts) - 1
        for path in folder.iterdir():
            if path.name.startswith("."):
                continue
            fits = self._parts[level].fullmatch(unpacked(path.name) if last else path.name)
            if last and fits:
                yield name + path.name, path
            elif fits and path.is_dir():
                yield from self._candidates(path, f"{name}{path.name}/", level + 1)
            else:
                self.not_taken.append(f"{name}{path.name}{'/' if path.is_dir() else ''}")

    def file(self, name: str, path: epath.Path) -> File | None:
        """Returns a file by its name below the folder, or None; `pair` is not set yet."""
        name = unpacked(name)
        match = self._whole.fullmatch(name)
        if match is None:
            return None
        field = match.groupdict()
        lang, side = field.get("lang"), field.get("side")
        codes: tuple[str, str] | None = None
        language = None
        if self.one_language:
            language, lang = lang, None
            if not language or not (self._known(language) or is_english(language)):
                return None  # 'train/README'
        if field.get("pair"):
            first, second = field["before"] or field["one"], field["after"] or field["other"]
            codes = first or self.english, second or self.english
            if codes[0] == codes[1] or not (field["one"] is None or all(map(self._known, codes))):
                return None
        elif (code := lang or side) != self.english:
            codes = (self.english, code) if code else None
        if codes and side in _SIDES:
            side = codes[_SIDES[side]]
        if any(code and code not in (codes or (self.english,)) for code in (lang, side)):
            return None  # 'en-gl.pt': the side is neither
        if lang and lang == self.english:
            return None
        ordered = (codes[1], codes[0]) if codes and self.swapped(codes) else codes
        groups = set(match.re.groupindex.values())
        return File(
            path=path,
            name=name,
            pair=None,
            codes=ordered,
            swapped=bool(codes and codes != ordered and self.english not in codes),
            split=self._by_word[field["split"]] if field.get("split") else None,
            side=None if side is None else SIDES[ordered.index(side)] if ordered else SIDES[0],
            stars=tuple(
                match[group] for group in range(1, match.re.groups + 1) if group not in groups
            ),
            language=language,
        )

    def _known(self, code: str) -> bool:
        """Returns whether a code is a language: no variant of English, but a model's ("en~bt")."""
        known = code in self.codes.values() or bool(describe(code).script)
        return known and ("~" in code or not is_english(code))

    def _place(self, code: str) -> tuple[bool, str]:
        """Returns a code's place in the name of a pair (`directions.pair_of`)."""
        return code != self.english, self.language.plain(code)

    @property
    def names_language(self) -> bool:
        """True if a file's name has its language."""
        return bool({"lang", "pair", "side"} & self.fields)

    def identity(self) -> dict:
        """Returns the settings that decide the text, without the files."""
        return {
            "files": self.pattern,
            "english": self.english,
            "splits": self.splits,
            "codes": self.codes,
        }
