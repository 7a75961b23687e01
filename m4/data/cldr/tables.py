"""Reads the locale tables of CLDR through Babel: a locale's own data, and its substitutes.

Babel merges every locale into the root locale and resolves aliases in place, in dictionaries that
all locales share, so what it returns depends on which locales came before (python-babel issue
1234: after `ja`, the German stand-alone months are "5月"). Nothing here reads merged tables: a
locale is its own file over its parents' files, without root, loaded into an emptied cache that is
put back afterwards. So Babel's other users in the process neither harm us nor are harmed.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from babel import core, localedata
from babel.localedata import Alias

Tables = dict[str, Any]


def cldr_version() -> str:
    """Returns the CLDR release of the installed Babel, '47': the text changes with it."""
    return core.get_cldr_version()


@contextmanager
def _empty_cache() -> Iterator[None]:
    with localedata._cache_lock:
        saved = dict(localedata._cache)
        localedata._cache.clear()
        try:
            yield
        finally:
            localedata._cache.clear()
            localedata._cache.update(saved)


def _parent(code: str) -> str:
    """Returns the locale that `code` inherits from (LDML part 1, section 4.1.3), or 'root'."""
    exception = core.get_global("parent_exceptions").get(code)
    if exception:
        return exception
    head, _, tail = code.rpartition("_")
    # A language in another script (sr_Latn, zh_Hant) inherits nothing from its first script.
    return head if head and len(tail) != 4 else "root"


def own_data(code: str) -> Tables:
    """Returns the tables of a locale over those of its parents, without the root locale's.

    What is missing here CLDR's contributors have not given, or it equals root; root's texts are
    codes or English ("M01", "{0} km"), no translations.
    """
    chain = []
    while code != "root":
        chain.append(code)
        code = _parent(code)
    tables: Tables = {}
    with _empty_cache():
        for name in reversed(chain):
            # merge() copies the dictionaries that it changes, so the files' data stay apart.
            localedata.merge(tables, localedata.load(name, merge_inherited=False))
    return tables


@lru_cache(maxsize=1)
def root_data() -> Tables:
    """Returns the root locale as in its file, with aliases: for structure, never for words."""
    with _empty_cache():
        return localedata.load("root", merge_inherited=False)


def find(tables: Mapping, *path: object) -> Any:
    """Returns the entry at `path`, or None."""
    node: Any = tables
    for key in path:
        if not isinstance(node, Mapping) or key not in node:
            return None
        node = node[key]
    return node


def own_names(own: Tables, *path: str) -> dict | None:
    """Returns a table of names at `path`, as ('months', 'stand-alone', 'wide'), from own data.

    Follows root's aliases (stand-alone months are the format months where not given), and returns
    None where the last parent is root's own text.
    """
    names: dict = {}
    while True:
        names = {**(find(own, *path) or {}), **names}
        target = find(root_data(), *path)
        if not isinstance(target, Alias):
            return names or None
        path = target.keys


@lru_cache(maxsize=1)
def zones() -> tuple[str, ...]:
    """Returns CLDR's identifiers of the time zones that are named by a city, sorted."""
    return tuple(sorted(zone for zone in core.get_global("meta_zones") if "/" in zone))


@lru_cache(maxsize=1)
def current_currencies() -> frozenset[str]:
    """Returns the codes of the currencies that are legal tender somewhere today."""
    uses = core.get_global("territory_currencies").values()
    return frozenset(code for use in uses for code, _, end, tender in use if tender and not end)
