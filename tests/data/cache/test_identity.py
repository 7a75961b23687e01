"""In what two corpora differ, in words."""

from m4.data.cache.identity import differences


def test_files_are_compared_by_size_and_hash_and_long_lists_by_their_items() -> None:
    codes = [f"x{i}" for i in range(40)]
    before = {
        "languages": codes,
        "seed": 0,
        "files": {"gl": {"gl.train.tsv": [1234, "a" * 64]}, "pt": {"pt.tsv": [5, "b" * 64]}},
    }
    now = {
        "languages": [*codes[1:], "el"],
        "seed": 1,
        "files": {
            "gl": {"gl.train.tsv": [2345, "c" * 64]},
            "el": {f"el.{i}.tsv": [1000, "d" * 64] for i in range(3)},
            "pt": {"pt.tsv": [5, "b" * 64]},
        },
    }
    assert differences(before, now) == [
        "languages: 40 items, now 40; more: el; no more: x0",
        "seed = 0, now 1",
        "files.gl.gl.train.tsv = 1,234 bytes, SHA-256 aaaaaaaaaaaa, now 2,345 bytes, "
        "SHA-256 cccccccccccc",
        "files.el = None, now 3 files of 3,000 bytes",
    ]
