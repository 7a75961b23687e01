"""Preparation in shards: the corpus of one process, byte for byte, in any order and on Beam."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import json
import os
import random
import re
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from m4.data import beam
from m4.data.beam import cost
from m4.data.cache.cache import Cache
from m4.data.cache.corpus_text import Origin
from m4.data.cleaning import CleaningStage, chunk, clean
from m4.data.cleaning.stages import Duplicates, Empty
from m4.data.corpus import CorpusSpec
from m4.data.sources import SPLITS, Source, shards_of
from m4.data.sources.cldr import Cldr
from m4.data.sources.gettext import Gettext
from m4.data.sources.tsv import Tsv
from m4.settings import InputError, SettingError
from tests.command_line import TINY, contents, m4
from tests.data.cleaning.cases import Killed, Raises
from tests.data.corpora import WRITERS, joined, texts_of, write, write_files
from tests.data.corpus import Made

PAIRS = 300


@pytest.fixture(autouse=True)
def _several_chunks_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beam, "PAIRS", 64)
    monkeypatch.setattr(clean, "chunks", functools.partial(chunk.chunks, size=64))


def corpus(folder: Path, pairs: int = PAIRS) -> Callable[[], Source]:
    """Writes files in which every stage finds something, also across files and languages.

    The English of all languages is the same, so that overlap and duplicates are. Pairs of gl are
    in two files with the same pairs at the end; fr-wo has the French of a test sentence's English.
    gl~bt is Galician that a model wrote, gl~lexicon has words.
    """
    rng = random.Random(0)
    words = [pair.first for pair in Made({"gl": pairs}).pairs("en-gl", "train")]
    for pair, end in (("en-gl", "ou"), ("en-pt_BR", "ão"), ("en-fr", "ez")):
        rows = [f"{english}\t{english[::-1]} {end}" for english in words]
        write(folder / f"a.{pair}.test.tsv", "".join(f"{row}\n" for row in rows[3:9]))
        write(folder / f"a.{pair}.dev.tsv", "".join(f"{row}\n" for row in rows[9:13]))
        rng.shuffle(rows)
        half = [*rows[: pairs // 2], "Only one side", "\u200bcafe\u0301\tun caf\u00e9"]
        again = [*rows[pairs // 2 :], *half[:40], half[50].upper(), "the same text\tThe same text"]
        again.append("Yes\t" + "Si, claro que si, sen dúbida ningunha. " * 5)
        if pair == "en-fr":  # other translations of test sentences
            again += [f"{english}\tAutre {n}" for n, english in enumerate(words[3:8])]
        write(folder / f"a.{pair}.train.tsv", "".join(f"{row}\n" for row in half))
        write(folder / f"b.{pair}.train.tsv.gz", "".join(f"{row}\n" for row in again))
    rows = [f"{english[::-1]} ez\t{english[::-1]} wo" for english in words[:40]]
    rows += [f"Autre {n}\tmeneen {n}" for n in range(6)]
    write(folder / "a.fr-wo.train.tsv", "".join(f"{row}\n" for row in rows))
    rows = [f"{english}\t{english[::-1]} modelo" for english in words[20:60]]
    write(folder / "a.en-gl~bt.train.tsv", "".join(f"{row}\n" for row in rows))
    write(folder / "b.en-gl~bt.train.tsv", "\u200b\tDropped\n")  # nothing of a file is left
    write(folder / "a.en-gl~lexicon.train.tsv", "sea\tmar\nword\tpalabra\nsea\tmar\n")
    return lambda: Tsv(folder, files="*.{pair}.{split}.tsv", on_bad_line="skip")


def spec(source: Callable[[], Source], **settings: Any) -> CorpusSpec:
    given = {"vocabulary_size": 400, "workers": 1, "lengths": {"inputs": 64, "targets": 64}}
    return CorpusSpec(source(), **{**given, **settings})


def assert_same(
    folder: Path, source: Callable[[], Source], work: beam.Engine, **settings: Any
) -> Cache:
    """The corpus that an engine builds is that of this process."""
    one = spec(source, **settings).build(folder / "one")
    many = spec(source, **settings).build(Path(work.work.place, "many"), engine=work)
    assert contents(many.folder) == contents(one.folder)
    return one


def thorough() -> clean.Cleaning:
    """All stages but language identification, which takes seconds."""
    return clean.Cleaning([s for s in clean.thorough().stages if s.name != "language_id"])


@dataclasses.dataclass
class Shuffled(beam.Engine):
    """Beam's steps in this process: elements come in any order, and some of them twice."""

    seed: int = 0
    killed: float = 0.3

    def _python(self) -> str:
        return ""

    def _run(self, job: dict[str, Any], progress: Any) -> list[str]:
        rng = random.Random(self.seed)
        self.work.write("name.job", json.dumps({"m4": beam.code_digest(), **job}).encode())
        beam._opened.cache_clear()
        worker = beam._opened(self.work.place, "name")
        units = [*range(len(job["units"]))]
        rng.shuffle(units)
        ready: dict[int, list[Any]] = {unit: [] for unit in units}
        for number in range(len(job["barriers"]) + 1):
            outputs: dict[str, list[Any]] = defaultdict(list)
            for unit in rng.sample(units, len(units)):
                if rng.random() < 0.3:  # a worker is killed when it is done: another does it again
                    list(worker.segment(number, unit, rng.sample(ready[unit], len(ready[unit]))))
                for name, value in worker.segment(number, unit, ready[unit]):
                    outputs[name].append(value)
            facts = outputs["shards"]
            grouped: dict[Any, list[Any]] = defaultdict(list)
            for key, value in rng.sample(outputs["keys"], len(outputs["keys"])):
                grouped[key].append(value)
            for key, values in grouped.items():
                facts += worker.repeated(key, values)
            counts: dict[str, list[Any]] = defaultdict(list)
            for pair, counter in outputs["counts"]:
                counts[pair].append(counter)
            for pair, counters in counts.items():
                assert isinstance(worker, beam._Text)
                facts += worker.fitted(number, pair, beam._added(counters))
            ready = {unit: [fact for of, fact in facts if of == unit] for unit in units}
        return [next(f[1] for f in ready[unit] if f[0] == "shard") for unit in sorted(units)]


def opened(work: beam.Engine, place: Path) -> beam.Engine:
    work.open(str(place))
    return work


def engine(place: Path, seed: int = 0) -> beam.Engine:
    return opened(Shuffled("direct", [], 1, seed=seed), place)


@pytest.mark.parametrize("cleaning", [clean.DEFAULT, thorough()], ids=["default", "thorough"])
def test_shards_in_any_order_give_the_corpus_of_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cleaning: clean.Cleaning
) -> None:
    monkeypatch.setattr(beam, "_BUCKET_BYTES", 1000)  # keys of a language in many buckets
    source = corpus(tmp_path / "text")
    for seed in range(2):
        work = engine(tmp_path / str(seed), seed)
        one = assert_same(tmp_path, source, work, cleaning=cleaning)
    dropped = one.ledger().total("train").dropped
    assert dropped["duplicates: exact pair"] >= 3 * 40
    assert dropped["overlap: first side in a translation of a test set"] == 5
    # What a source says of a pair besides its text: that a model wrote it, its file and line.
    origins = one.origins("en-gl~bt", "train")
    assert origins == [Origin("a.en-gl~bt.train.tsv", line) for line in range(1, 41)]
    assert one.size("en-gl~lexicon", "train") == 2


@given(st.lists(st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=150), max_size=5))
def test_numbers_are_those_of_a_dictionary(shards: list[list[tuple[bool, int]]]) -> None:
    """`shards` has, for each pair, whether it was dropped, and its sentence."""
    numbers, firsts = beam.Numbers([*map(len, shards)]), {}
    for shard, pairs in enumerate(shards):
        kept = [(place, text) for place, (gone, text) in enumerate(pairs, 1) if not gone]
        places = [place for place, _ in kept]
        again = [firsts.setdefault(text, (shard, place)) for place, text in kept]
        new = [first == (shard, place) for first, place in zip(again, places, strict=True)]
        rows = [(place, *of) for place, of, one in zip(places, again, new, strict=True) if not one]
        found = numbers.add(shard, np.array(places, np.int64), np.array(rows, beam._AGAIN))
        known = [*firsts]
        assert [*map(np.ndarray.tolist, found)] == [[known.index(text) for _, text in kept], new]


def test_other_settings_and_sources(tmp_path: Path) -> None:
    """Segmentations, own vocabularies, PO files, sources without files; splits by a hash."""
    texts = texts_of(Made({"gl": 60, "pt": 50}, held_out=4))
    write_files(tmp_path / "po", "{lang}.po", joined(texts))

    def po() -> Source:
        return Gettext(tmp_path / "po", dev_every=6, test_every=4, on_bad_line="skip")

    def made() -> Source:
        return Cldr({"gl": 60, "pt": 50}, test_pairs=4, dev_pairs=3)

    roles = {"target_vocabulary_size": 380, "mixture": "to_english"}
    for name, source, settings in (("po", po, roles), ("made", made, {"segmentations": 2})):
        assert_same(tmp_path / name, source, engine(tmp_path / name / "work"), **settings)


@pytest.mark.parametrize("name", sorted(set(WRITERS) - {"tfds"}))
def test_the_shards_of_a_source_are_its_pairs_in_their_order(tmp_path: Path, name: str) -> None:
    source = WRITERS[name](tmp_path, texts_of(Made({"gl": 12, "pt": 9}, held_out=4)))
    for pair in source.language_pairs():
        for split in SPLITS:
            shards = shards_of(source, pair, split)
            assert [p for s in shards for p in s.pairs()] == [*source.pairs(pair, split)]


def test_what_is_made_is_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = corpus(tmp_path / "text", 100)
    written: list[str] = []
    write, most = beam._Job._end, 0

    def end(job: beam._Job, name: str, about: Any) -> None:
        if len(written) == most:
            raise KeyboardInterrupt
        write(job, name, about)
        written.append(name)

    monkeypatch.setattr(beam._Job, "_end", end)
    place = tmp_path / "work"
    first = None
    while first is None:  # the command is killed when it has made six shards
        most += 6
        with contextlib.suppress(KeyboardInterrupt):
            first = spec(source).build(tmp_path / "first", engine=engine(place, most))
    assert most > 18
    made, most = [*written], 10**6
    assert len(set(made)) == len(made)
    assert contents(first.folder) == contents(spec(source).build(tmp_path / "one").folder)
    # Text is there once, of each file.
    assert len([*place.glob("*.first")]) == len([*(tmp_path / "text").glob("*.train.*")])
    assert not [*place.glob("*.text")]
    written.clear()
    again = spec(source).build(tmp_path / "again", engine=engine(place, 2))
    assert not written
    assert contents(again.folder) == contents(first.folder)
    # As a killed worker leaves it: what it was at is not there, or not whole.
    for name in (gone := sorted(set(made))[::3]):
        (place / f"{name}.json").unlink()
    again = spec(source).build(tmp_path / "third", engine=engine(place, 3))
    assert sorted(set(written)) == gone
    assert contents(again.folder) == contents(first.folder)
    # Another text of one pair of languages: the shards of the others stay.
    written.clear()
    write_more = tmp_path / "text" / "c.en-gl.train.tsv"
    write_more.write_text("One more sentence\tUnha frase máis\n")
    spec(source).build(tmp_path / "more", engine=engine(place, 3))
    assert 0 < len(set(written)) < len(set(made))


def mistakes(folder: Path) -> tuple[CorpusSpec, CorpusSpec]:
    """Returns corpora that cannot be built: line 2 is no pair, a stage raises for line 3."""
    write(folder / "gl.train.tsv", "One\tUn\nTwo\nOnly this\tIsto\n")
    cleaning = clean.Cleaning([Raises("Only this")])
    skips = spec(lambda: Tsv(folder, on_bad_line="skip"), cleaning=cleaning)
    return spec(lambda: Tsv(folder)), skips


@pytest.mark.parametrize("runner", ["local", "direct"])
def test_a_corpus_is_written_where_its_folder_can_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runner: str
) -> None:
    """Nothing can be made next to /proc/self/cwd, as next to a disk that is mounted."""
    monkeypatch.setattr(beam, "Engine", Shuffled)
    monkeypatch.chdir(tmp_path)
    given = ["data", "prepare", f"--gin_file={TINY}", f"--model_dir={tmp_path}/m"]
    given.append(f"--runner={runner}")
    said = m4(*given, "--gin.experiment.Data.data_dir='/proc/x'").mistake
    assert "data_dir = /proc/x: cannot be written" in said
    m4(*given, "--gin.experiment.Data.data_dir='/proc/self/cwd'").ok()
    assert [*tmp_path.glob("*/manifest.json")]


def test_what_a_command_or_a_worker_cannot_use_is_one_line(tmp_path: Path) -> None:
    given = ["data", "prepare", f"--gin_file={TINY}", f"--model_dir={tmp_path}/m"]
    given.append("--runner=direct")
    assert "--beam_options='x: No closing quotation" in m4(*given, "--beam_options='x").mistake
    assert "--cpu_hour_price=-1.0: must be 0" in m4(*given, "--cpu_hour_price=-1").mistake
    with pytest.raises(InputError, match=r"finds no text\.job in .*all must see data_dir"):
        beam._opened(str(tmp_path), "text")


def test_bad_lines_and_stages_stop_it_as_on_one_machine(tmp_path: Path) -> None:
    line, stage = mistakes(tmp_path)
    said = []
    for work in (None, engine(tmp_path / "work")):
        with pytest.raises(InputError, match=r"gl.train.tsv line 2: ") as found:
            line.build(tmp_path / "c", engine=work)
        said.append(str(found.value))
        with pytest.raises(ZeroDivisionError, match="a mistake of Raises"):
            stage.build(tmp_path / "c", engine=work)
    assert said[0] == said[1]


def test_settings_come_back_from_json(tmp_path: Path) -> None:
    (tmp_path / "gl.train.tsv").write_text("a\tb\n")
    source = Tsv(tmp_path, codes={"gl": "gl_ES"}, on_bad_line="skip")
    again = beam.from_json(json.loads(json.dumps(beam.as_json(source, "source"))))
    assert (type(again), again.codes) == (Tsv, source.codes)
    assert again.layout.pattern == "{lang}.{split}.tsv"
    cleaning = beam.from_json(beam.as_json(thorough(), "cleaning"))
    assert cleaning.identity() == thorough().identity()

    @dataclasses.dataclass(frozen=True)
    class Here(CleaningStage):
        name = "here"

    with pytest.raises(SettingError, match=r"Here'>: must be a dataclass or a function"):
        beam.as_json(Here(), "CorpusSpec.cleaning")


def test_a_worker_with_another_m4_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = beam.Work(str(tmp_path))
    work.write("name.job", json.dumps({"m4": "0" * 64, "kind": "text"}).encode())
    with pytest.raises(InputError, match=r"a worker has another m4 .* than the command"):
        beam._opened(work.place, "name")


def test_steps_of_a_process_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A runner gives a process several bundles at once, and a job has one source and cleaner."""
    told: list[str] = []

    def step(unit: int) -> Iterator[int]:
        told.append("begins")
        time.sleep(0.01)
        told.append("ends")
        yield unit

    monkeypatch.setattr(beam, "_opened", lambda *_: SimpleNamespace(step=step))
    with ThreadPoolExecutor(4) as pool:
        found = pool.map(lambda unit: beam._do((unit,), "place", "name", "step"), range(8))
    assert [*found] == [[unit] for unit in range(8)]
    assert told == ["begins", "ends"] * 8


class WithoutIdentifier(Shuffled):
    """Workers that lack, or have, the identifier of languages that the command has, or lacks."""

    def _run(self, job: dict[str, Any], progress: Any) -> list[str]:
        other = {**clean.thorough().identity(), "language_id": {"identifier": None}}
        return super()._run({**job, "checks": beam._hash(other)}, progress)


def test_a_worker_with_another_identifier_of_languages_is_refused(tmp_path: Path) -> None:
    work = opened(WithoutIdentifier("direct", [], 1), tmp_path / "work")
    given = spec(corpus(tmp_path / "text"), cleaning=clean.thorough())
    with pytest.raises(InputError, match=r"a worker's checks are others than the command's"):
        given.build(tmp_path / "built", engine=work)


def test_cost_is_measured_on_the_corpus(tmp_path: Path) -> None:
    given = spec(corpus(tmp_path / "text"))
    # A dollar a second.
    said = cost(given.opened_source, given.cleaning, given.language_pairs(), 3600.0)
    number = int(said.split()[1].replace(",", ""))
    # Pairs in all files for training; the packed ones' sizes are guessed.
    assert 0.5 < number / (3 * (PAIRS + 40) + 40) < 2
    found = re.search(r": (\S+) CPU hours .*, (\S+) GB of keys shuffled, (\S+) dollars$", said)
    assert found is not None
    hours, gigabytes, dollars = map(float, found.groups())
    assert gigabytes > 0
    # Hours have two digits, dollars two places.
    assert 3600 * hours == pytest.approx(dollars, rel=0.05, abs=0.006)


def test_the_cost_of_a_source_without_files_is_at_least_the_samples() -> None:
    said = cost(Made({"gl": 40}), clean.DEFAULT, ["en-gl"], None)
    assert said.startswith("at least 40 pairs: ")


# Beam itself.


def has_beam() -> bool:
    try:
        beam.Engine("direct", [], 1)
    except InputError:
        return False
    return True


def of_beam(test: Callable[..., None]) -> Callable[..., None]:
    """Marks a test that runs Beam, which takes minutes."""
    without = pytest.mark.skipif(not has_beam(), reason="Apache Beam is not installed: make beam")
    return without(pytest.mark.slow(pytest.mark.thorough(test)))


def direct(place: Path, workers: int = 2) -> beam.Engine:
    return opened(beam.Engine("direct", [], workers), place)


@of_beam
@pytest.mark.every_part
def test_beam_gives_the_corpus_of_one_process(tmp_path: Path) -> None:
    assert_same(tmp_path, corpus(tmp_path / "text", 200), direct(tmp_path / "work"))


@of_beam
@pytest.mark.parametrize("workers", [1, 4])
def test_any_number_of_workers_gives_the_same_corpus(
    tmp_path: Path, tatoeba: Path, workers: int
) -> None:
    """A slice of Tatoeba, by all stages."""
    for path in (p for code in ("glg", "epo", "isl") for p in tatoeba.glob(f"{code}.*.tsv")):
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        write(tmp_path / "text" / path.name, "".join(lines[:3000]))

    def source() -> Source:
        return Tsv(tmp_path / "text", on_bad_line="skip")

    given = {"cleaning": thorough(), "vocabulary_size": 1000}
    assert_same(tmp_path, source, direct(tmp_path / "work", workers), **given)


@of_beam
def test_a_killed_worker_is_replaced(tmp_path: Path) -> None:
    source = corpus(tmp_path / "text", 200)
    write(tmp_path / "text" / "k.en-gl.train.tsv", "Kill\tMatar\n")
    mark = tmp_path / "mark"
    cleaning = clean.Cleaning([Empty(), Killed(str(mark)), Duplicates()])
    one = spec(source, cleaning=cleaning).build(tmp_path / "one")
    mark.touch()
    work = direct(tmp_path / "work")
    many = spec(source, cleaning=cleaning).build(tmp_path / "many", engine=work)
    assert not mark.exists()
    assert contents(many.folder) == contents(one.folder)


@of_beam
def test_workers_that_raise_stop_it_with_what_they_said(tmp_path: Path) -> None:
    line, stage = mistakes(tmp_path)
    work = direct(tmp_path / "work")
    with pytest.raises(InputError) as alone:
        line.build(tmp_path / "c")
    with pytest.raises(InputError, match=re.escape(str(alone.value))):
        line.build(tmp_path / "c", engine=work)
    with pytest.raises(beam.WorkersFailed, match="ZeroDivisionError: a mistake of Raises"):
        stage.build(tmp_path / "c", engine=work)


@of_beam
@pytest.mark.parametrize(
    ("runner", "options", "said"),
    [
        ("direct", ["--no_such_option=1"], "--beam_options: Beam has no option '--no_such"),
        ("direct", ["--direct_num_workers=many"], "--beam_options: .*invalid int value: 'many'"),
        ("flink", [], "--runner: FlinkRunner needs java on the PATH, or "),
        ("dataflow", [], "--runner=dataflow needs Google's clients next to Beam: uv pip in"),
    ],
)
def test_what_beam_refuses_is_said_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runner: str, options: list[str], said: str
) -> None:
    monkeypatch.setattr(os, "environ", {**os.environ, "PATH": str(tmp_path)})
    work = beam.Engine(runner, options, 1)
    work.work = beam.Work(str(tmp_path / "work"))
    with pytest.raises(InputError, match=said):
        spec(corpus(tmp_path / "text", 120)).build(tmp_path / "c", engine=work)


@of_beam
def test_prism_gives_the_corpus_of_one_process(tmp_path: Path) -> None:
    work = opened(beam.Engine("prism", [], 1), tmp_path / "work")
    try:
        assert_same(tmp_path, corpus(tmp_path / "text", 100), work)
    except InputError as error:
        pytest.skip(str(error))


def test_dataflow_needs_a_bucket(tmp_path: Path) -> None:
    work = Shuffled("dataflow", [], 1)
    with pytest.raises(InputError, match=r"--runner=dataflow needs a bucket, gs://"):
        work.open(str(tmp_path))


def test_beam_that_is_not_installed_is_said_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    with pytest.raises(InputError, match=r"--runner=flink needs Apache Beam, which is not .*make"):
        beam.Engine("flink", [], 1)
