"""Damage to files of JSON, by kinds: for tests of whatever reads them."""

import json
from collections.abc import Callable, Iterator

from m4.settings import InputError


def damaged_json(text: str) -> Iterator[bytes]:
    """Yields the text emptied, halved, not in UTF-8, nested too deeply and of another kind.

    On the first two levels a name is missing too, or a value of another kind. None has lines.
    """
    yield from (b"", text.encode()[: len(text) // 2], b"\xff" + text.encode(), b"[" * 100_000)
    yield from (b"null", b"[]", b"{}", b'"text"', b"3")
    found = json.loads(text)
    for inside in (found, *(value for value in found.values() if isinstance(value, dict))):
        for name, value in list(inside.items()):
            for other in (None, [], {}, "text", 3, [3], {"a": 3}):
                inside[name] = other
                yield json.dumps(found).encode()
            del inside[name]
            yield json.dumps(found).encode()
            inside[name] = value


def refused(read: Callable[[], object], name: str) -> bool:
    """Tells if reading is refused, with one line that names the file; no other error."""
    try:
        read()
    except InputError as error:
        said = str(error)
    else:
        return False
    assert name in said or "cache format" in said
    assert "\n" not in said
    return True
