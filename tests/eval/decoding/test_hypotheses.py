"""Files of hypotheses: written once, whole, and by what they were made."""

import json

import pytest

from m4.eval.decoding.hypotheses import check_hypotheses, decode_to_files


class Upper:
    """Translator into capitals that notes its requests."""

    def __init__(self):
        self.calls = []

    def __call__(self, sources, directions):
        self.calls.append((sources, directions))
        return [{"hypothesis": source.upper()} for source in sources]


PAIRS = {
    "gl-en": [("ola", "hello"), ("adeus", "goodbye")],
    "en-gl": [("hello", "ola")],
    "en-sr_Latn": [("yes", "da"), ("no", "ne")],
}


def lines(path):
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def test_files_are_written_and_reused(tmp_path):
    folder, settings = tmp_path / "decodes", {"checkpoint_step": 7, "buckets": (16, 32)}
    upper = Upper()
    done = decode_to_files(upper, folder, "test", PAIRS, settings, sentences_at_once=3)
    assert done == list(PAIRS)
    # Three sentences make a call full: gl-en and en-gl; then the rest.
    assert upper.calls == [
        (["<2en> ola", "<2en> adeus", "<2gl> hello"], ["gl-en", "gl-en", "en-gl"]),
        (["<2sr_Latn> yes", "<2sr_Latn> no"], ["en-sr_Latn", "en-sr_Latn"]),
    ]
    assert lines(folder / "test.gl-en.jsonl") == [
        {"source": "ola", "reference": "hello", "hypothesis": "<2EN> OLA"},
        {"source": "adeus", "reference": "goodbye", "hypothesis": "<2EN> ADEUS"},
    ]
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        f"test.{direction}.{suffix}" for direction in PAIRS for suffix in ("json", "jsonl")
    )
    # The same again: nothing to do.
    again = Upper()
    assert decode_to_files(again, folder, "test", PAIRS, settings) == []
    assert again.calls == []
    # Another checkpoint: all; another sentence: that direction; a lost note: that direction.
    assert decode_to_files(Upper(), folder, "test", PAIRS, {"checkpoint_step": 8}) == list(PAIRS)
    changed = {**PAIRS, "en-gl": [("hello!", "ola")]}
    assert decode_to_files(Upper(), folder, "test", changed, {"checkpoint_step": 8}) == ["en-gl"]
    (folder / "test.gl-en.json").unlink()
    assert decode_to_files(Upper(), folder, "test", changed, {"checkpoint_step": 8}) == ["gl-en"]


def test_an_interrupted_run_keeps_what_is_whole(tmp_path):
    class FailsSecond(Upper):
        def __call__(self, sources, directions):
            if self.calls:
                raise KeyboardInterrupt
            return super().__call__(sources, directions)

    with pytest.raises(KeyboardInterrupt):
        decode_to_files(FailsSecond(), tmp_path, "dev", PAIRS, {}, sentences_at_once=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dev.gl-en.json", "dev.gl-en.jsonl"]
    assert decode_to_files(Upper(), tmp_path, "dev", PAIRS, {}) == ["en-gl", "en-sr_Latn"]


DAMAGE = {
    "a letter": lambda path: path.write_text(
        path.read_text("utf-8").replace("OLA", "OLE"), "utf-8"
    ),
    "half": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "missing": lambda path: path.unlink(),
    "its note": lambda path: path.with_suffix(".json").unlink(),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_hypotheses_that_are_not_as_written_are_named_and_translated_again(tmp_path, what, capsys):
    decode_to_files(Upper(), tmp_path, "test", PAIRS, {"step": 7})
    check_hypotheses(tmp_path, "test", PAIRS, "m4 decode")
    path = tmp_path / "test.gl-en.jsonl"
    before = path.read_bytes()
    DAMAGE[what](path)
    with pytest.raises(ValueError, match=r"gl-en.*with m4 decode$") as said:
        check_hypotheses(tmp_path, "test", PAIRS, "m4 decode")
    assert "\n" not in str(said.value)
    assert decode_to_files(Upper(), tmp_path, "test", PAIRS, {"step": 7}) == ["gl-en"]
    assert ("is translated again" in capsys.readouterr().err) == (what in ("a letter", "half"))
    assert path.read_bytes() == before
    check_hypotheses(tmp_path, "test", PAIRS, "m4 decode")
