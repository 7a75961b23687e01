"""The results of corpora, sources and streams are pinned next to their formats."""

import hashlib
from importlib.metadata import version
from pathlib import Path

import pytest

from m4.data.cache.cache import FORMAT, Cache
from m4.data.cleaning import clean
from m4.data.cleaning.clean import Cleaning, thorough
from m4.data.cleaning.script import Script
from m4.data.corpus import CorpusSpec
from m4.data.directions import key_of
from m4.data.sources import SPLITS, Pair
from m4.data.stream import stream
from m4.data.stream.stream import Stream
from tests.data.cleaning.cases import Listed, run
from tests.data.corpora import WRITERS, texts_of
from tests.data.corpus import Made

# FORMAT, version of SentencePiece, which trains the vocabulary, and what `digest` then gives.
PINNED = (11, "0.2.3", "1222e1558bdd88b695cbdd4b8e839c58512a20c9637499f35322ba7845d05c6a")
# The same of text that every stage of cleaning finds something in.
CLEANED = "ef567e2b1f91989b18dc40cd4b66203ff488cb4ab550241e69faa1ade5945113"
# SHA-256 of the pairs that each source reads out of its kind of files; a cache's FORMAT is theirs.
READ: dict[str, str] = dict.fromkeys(
    ("tsv", "moses", "aligned", "tmx", "jsonl", "huggingface"),
    "82561ab93a53f36c6b0acf8e0f2acac222ec7b6afaf44b962e3ed45d5e9405c4",
) | {
    # Its own splits; the order of TFDS's files.
    "gettext": "c3ecf338ca721ab82e1afdf6f5d1740cd59c4cd6a681e9f5fd80e3f166fd348a",
    "tfds": "ace3d3e8706b3e5daba8e3caeb5e68433f7e30442a330ed863f496c0f3518512",
}
# stream.FORMAT, and SHA-256 of batches by layout.
BATCHES = (
    2,
    {
        "packed": "275b485496ae8177d45ae68bfe6d8d125020e80832be36a963cc2125ce45f1cc",
        "single": "8d24e127d6c507b6217b1c2ef95d18ee1fd9aa435ce08a879c82708c3422c1f1",
    },
)


def digest(folder: Path) -> str:
    """Returns the SHA-256 of the names and bytes of all arrays, texts and vocabularies."""
    files = [*folder.rglob("*.npy"), *folder.rglob("*.txt"), *folder.rglob("*.model")]
    assert len(files) > 10
    total = hashlib.sha256()
    for path in sorted(files, key=lambda path: path.relative_to(folder).as_posix()):
        name = path.relative_to(folder).as_posix()
        total.update(f"{name} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return total.hexdigest()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Cache:
    trainer = PINNED[1]
    if version("sentencepiece") != trainer:
        pytest.skip(f"needs sentencepiece {trainer}: another one may train another vocabulary")
    return CorpusSpec(
        Made({"gl": 80, "sr_Latn": 30, "pt_BR": 20}), vocabulary_size=400, segmentations=2,
        cleaning=Cleaning((*clean.DEFAULT.stages, Script())), workers=1,
        lengths={"inputs": 64, "targets": 64},
    ).build(tmp_path_factory.mktemp("format") / "c")  # fmt: skip


def test_the_format_is_raised_with_every_change_of_the_files(made: Cache) -> None:
    assert (FORMAT, digest(made.folder)) == (PINNED[0], PINNED[2]), (
        "the same settings give other files: raise FORMAT in cache/cache.py and pin again"
    )


def messy() -> Listed:
    """Returns a source of text in which every stage of cleaning finds something."""
    words = [pair.first for pair in Made({"gl": 60}).pairs("en-gl", "train")]
    sound = [(english, " ".join(reversed(english.split()))) for english in words]
    bad = [
        ("cafe\u0301 \u200bone", "o caf\u00e9 un"),  # not NFC, an invisible character
        ("", "ningunha"),
        ("long " * 500, "longo " * 500),  # Length: 2,000 characters at most
        ("The same on both sides", "the same on both sides"),
        ("A sentence in another script", "Это не галисийский язык"),
        sound[3],
        (sound[4][0].upper() + " !", sound[4][1].upper() + "!"),
        sound[7],  # in the test set
        ("Yes", "Si, claro que si, sen dúbida ningunha, como non podía ser doutro xeito " * 4),
    ]
    return Listed({("gl", "train"): sound + bad, ("gl", "test"): sound[7:9], ("gl", "dev"): []})


def test_the_format_is_raised_with_every_change_of_what_cleaning_does(tmp_path: Path) -> None:
    # Language identification is what is installed.
    stages = [stage for stage in thorough().stages if stage.name != "language_id"]
    kept, ledger = run(stages, messy(), tmp_path)
    count = ledger.total("train")
    at_work = {reason.partition(":")[0] for reason in [*count.dropped, *count.changed]}
    assert at_work == {stage.name for stage in stages}, (count.dropped, count.changed)
    text = repr((sorted(kept.items()), ledger.as_json()["pairs"]))
    assert (FORMAT, hashlib.sha256(text.encode()).hexdigest()) == (PINNED[0], CLEANED), (
        "cleaning does something else: raise FORMAT in cache/cache.py and pin again"
    )


SLOW = (pytest.mark.slow, pytest.mark.thorough)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=SLOW if n == "tfds" else ()) for n in WRITERS]
)
def test_the_format_is_raised_with_every_change_of_what_a_source_reads(
    tmp_path: Path, name: str
) -> None:
    texts = texts_of(Made({"gl": 12, "pt": 9}, held_out=4))
    texts["gl"]["train"] += [
        Pair("cafe\u0301", "caf\u00e9 \u00ab\u00a0\u00bb"),  # as it stands: normalising comes later
        Pair('a "quoted" \\ word', "unha \u201cpalabra\u201d \\"),
        Pair("night", "\u591c \u05dc\u05d9\u05dc\u05d4\u200f"),
    ]
    source = WRITERS[name](tmp_path, texts)
    read = repr([(key_of(code), split, [tuple(pair) for pair in source.pairs(code, split)])
                 for code in source.language_pairs() for split in SPLITS])  # fmt: skip
    assert (FORMAT, hashlib.sha256(read.encode()).hexdigest()) == (PINNED[0], READ[name]), (
        f"{name} reads other pairs out of the same files: raise FORMAT, pin again"
    )


@pytest.mark.parametrize("layout", stream.LAYOUTS)
def test_the_format_is_raised_with_every_change_of_the_batches(made: Cache, layout: str) -> None:
    drawn, total = Stream(made, seed=3, batch_rows=8, layout=layout), hashlib.sha256()
    # Some of the first group of steps, and of a later one (gl comes again after 80 pairs).
    for step in (0, 1, drawn.span_steps, 3 * drawn.span_steps + 1):
        for key, array in sorted(drawn.batch(step).items()):
            total.update(f"{key} {array.dtype} {array.shape}".encode() + array.tobytes())
    assert (stream.FORMAT, total.hexdigest()) == (BATCHES[0], BATCHES[1][layout]), (
        "the same arguments give other batches: raise FORMAT in stream/stream.py and pin again"
    )
