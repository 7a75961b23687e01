"""In what two corpora differ, in words."""

from m4.data.cache.identity import differences


def test_each_leaf_that_differs_is_named_with_both_values() -> None:
    before = {"seed": 0, "files": {"gl": {"gl.train.tsv": [5, "b"]}, "pt": {"pt.tsv": [5, "b"]}}}
    now = {"seed": 1, "files": {"gl": {"gl.train.tsv": [6, "c"]}, "pt": {"pt.tsv": [5, "b"]}}}
    assert differences(before, now | {"languages": ["gl"] * 40}) == [
        "seed = 0, now 1",
        "files.gl.gl.train.tsv = [5, 'b'], now [6, 'c']",
        "languages = None, now ['gl', 'gl', 'gl', 'gl', 'gl', 'gl', 'gl', 'gl', '... (240 letters)",
    ]
