"""Preparation in shards: the corpus of one process, byte for byte, in any order and on Beam."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from itertools import chain
from operator import itemgetter
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
from m4.data.cleaning import chunk, clean
from m4.data.cleaning.stages import Duplicates, Empty
from m4.data.corpus import CorpusSpec
from m4.data.sources import SPLITS, Source, shards_of
from m4.data.sources.cldr import Cldr
from m4.data.sources.gettext import Gettext
from m4.data.sources.jsonl import Jsonl
from m4.data.sources.moses import Moses
from m4.data.sources.seqio_tasks import SeqioTasks
from m4.data.sources.tfds import Tfds
from m4.data.sources.tsv import Tsv
from m4.settings import InputError, SettingError
from m4.storage.locks import Busy
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
    """Asserts that an engine builds the same corpus as this process."""
    one = spec(source, **settings).build(folder / "one")
    many = spec(source, **settings).build(Path(work.work.place, "many"), engine=work)
    assert contents(many.folder) == contents(one.folder)
    return one


def thorough() -> clean.Cleaning:
    """Returns all stages except language identification, which takes seconds."""
    return clean.Cleaning([s for s in clean.thorough().stages if s.name != "language_id"])


@dataclasses.dataclass
class Shuffled(beam.Engine):
    """Engine that runs Beam's steps in this process, in any order and some of them twice."""

    seed: int = 0

    def _python(self) -> str:
        return ""

    def _run(self, job: dict[str, Any], progress: Any) -> list[str]:
        rng = random.Random(self.seed)
        progress(self.work.made())
        self.work.write("name.job", json.dumps({"code": beam._code(), **job}).encode())
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
        progress(self.work.made())
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
    source, files = corpus(tmp_path / "text"), []
    for seed, size in enumerate((1000, 100_000)):  # keys of a language in many buckets, or in one
        monkeypatch.setattr(beam, "_BUCKET_BYTES", size)
        work = engine(tmp_path / str(seed), seed)
        one = assert_same(tmp_path, source, work, cleaning=cleaning)
        files.append(len([*Path(work.work.place).glob("*.keys")]))
    assert files[0] == files[1]
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


def po(folder: Path) -> Callable[[], Source]:
    """Writes PO files, whose splits a hash decides."""
    write_files(folder, "{lang}.po", joined(texts_of(Made({"gl": 60, "pt": 50}, held_out=4))))
    return lambda: Gettext(folder, dev_every=6, test_every=4, on_bad_line="skip")


def test_other_settings_and_sources(tmp_path: Path) -> None:
    """Segmentations, own vocabularies, PO files, sources without files; splits by a hash."""
    made = functools.partial(Cldr, {"gl": 60, "pt": 50}, test_pairs=4, dev_pairs=3)
    assert_same(tmp_path / "1", made, engine(tmp_path / "1" / "work"), segmentations=2)
    roles = {"target_vocabulary_size": 380, "mixture": "to_english"}
    assert_same(tmp_path / "2", po(tmp_path / "po"), engine(tmp_path / "2" / "work"), **roles)


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
    told: list[tuple[str, int, int]] = []
    more = {"engine": engine(place, 2), "progress": lambda *now: told.append(now)}
    again = spec(source).build(tmp_path / "again", **more)
    assert not written
    # What is there already is told as done from the start.
    stages = {beam.TEXT, f"{beam.TEXT} without English", "sentences", f"{beam.TEXT} to tokens"}
    assert {name for name, *_ in told} > stages
    assert all(done == total for name, done, total in told if name in stages)
    assert contents(again.folder) == contents(first.folder)
    # As a killed worker leaves it: what it was at is not there, or not whole.
    for name in (gone := sorted(set(made))[::3]):
        (place / f"{name}.json").unlink()
    again = spec(source).build(tmp_path / "third", engine=engine(place, 3))
    assert sorted(set(written)) == gone
    assert contents(again.folder) == contents(first.folder)
    # A corrected line of a file: what was read of the others stays.
    written.clear()
    path = tmp_path / "text" / "a.en-gl.train.tsv"
    path.write_text(path.read_text().replace("\t", "\tUn ", 1))
    again = spec(source).build(tmp_path / "more", engine=engine(place, 3))
    assert contents(again.folder) == contents(spec(source).build(tmp_path / "one").folder)
    assert len({name for name in written if name.split(".")[1:2] == ["0"]}) == 1


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
    assert not [*tmp_path.glob(".beam")]


def test_what_a_command_or_a_worker_cannot_use_is_one_line(tmp_path: Path) -> None:
    given = ["data", "prepare", f"--gin_file={TINY}", f"--model_dir={tmp_path}/m"]
    given.append("--runner=direct")
    assert "--beam_options='x: No closing quotation" in m4(*given, "--beam_options='x").mistake
    assert "--cpu_hour_price=-1.0: must be 0" in m4(*given, "--cpu_hour_price=-1").mistake
    with pytest.raises(InputError, match=r"--runner=dataflow needs a bucket, gs://"):
        Shuffled("dataflow", [], 1).open(str(tmp_path))
    for source in (Tfds("opus"), SeqioTasks("task", use="text")):
        with pytest.raises(InputError, match=r"--runner=direct: \S* needs TensorFlow"):
            Shuffled("direct", [], 1).check(source, clean.DEFAULT)
    with pytest.raises(InputError, match=r"finds no text\.job in .*all must see data_dir"):
        beam._opened(str(tmp_path), "text")


@pytest.mark.parametrize("of", [engine])
def test_bad_lines_and_stages_stop_it_as_on_one_machine(tmp_path: Path, of: Any) -> None:
    write(tmp_path / "gl.train.tsv", "One\tUn\nTwo\nOnly this\tIsto\n")
    cleaning = clean.Cleaning([Duplicates(), Raises("Only this")])
    for on_bad_line, place in (("fail", "2: "), ("skip", "3: stage 'raises' raises ZeroDiv")):
        source = functools.partial(Tsv, tmp_path, on_bad_line=on_bad_line)
        said = set()
        for work in (None, of(tmp_path / "work")):
            with pytest.raises(InputError, match=f"gl.train.tsv line {place}") as found:
                spec(source, cleaning=cleaning).build(tmp_path / "c", engine=work)
            said.add(str(found.value))
        assert len(said) == 1


def test_a_stage_that_is_corrected_makes_new_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = corpus(tmp_path / "text", 120)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.syspath_prepend(tmp_path)
    for word in ("the", "of"):
        write(tmp_path / "own_stage.py", OWN_STAGE.format(word=word))
        monkeypatch.delitem(sys.modules, "own_stage", raising=False)
        cleaning = clean.Cleaning([importlib.import_module("own_stage").Own()])
        assert_same(tmp_path / word, source, engine(tmp_path / "work"), cleaning=cleaning)
        shutil.rmtree(tmp_path / "work" / "many")


OWN_STAGE = """
from m4.data.cleaning import CleaningStage, Findings
from tests.data.test_beam import *
@dataclasses.dataclass(frozen=True)
class Own(CleaningStage):
    name = "own"
    def check(self, chunk):
        return Findings({{"word": ["{word}" in text for text in chunk.first] & np.bool_(True)}})
"""


def test_one_command_at_a_time_is_at_work_there(tmp_path: Path) -> None:
    work = Shuffled("direct", [], 1)
    with contextlib.suppress(Busy), work.opened(f"{tmp_path}/.beam"):
        work.work.write("kept", b"")
        with work.opened(f"{tmp_path}/.beam"):
            raise AssertionError("two are at work")
    assert (tmp_path / ".beam" / "kept").is_file()
    with work.opened(f"{tmp_path}/.beam"):
        pass
    assert not [*tmp_path.iterdir()]


def test_settings_come_back_from_json(tmp_path: Path) -> None:
    (tmp_path / "gl.train.tsv").write_text("a\tb\n")
    source = Tsv(tmp_path, codes={"gl": "gl_ES"}, on_bad_line="skip")
    again = beam.from_json(json.loads(json.dumps(beam.as_json(source, "source"))))
    assert (type(again), again.codes) == (Tsv, source.codes)
    assert again.layout.pattern == "{lang}.{split}.tsv"
    cleaning = beam.from_json(beam.as_json(thorough(), "cleaning"))
    assert cleaning.identity() == thorough().identity()
    with pytest.raises(SettingError, match=r"lambda.*: must be a dataclass or a function"):
        beam.as_json(lambda: None, "CorpusSpec.cleaning")


@pytest.mark.parametrize("name", ["m4", "tests", "checks"])
def test_a_worker_with_other_code_is_refused(tmp_path: Path, name: str) -> None:
    """A worker of the case "checks" has an identifier that the command lacks."""
    cleaning = beam.as_json(clean.Cleaning([Raises()]), "cleaning")
    code = {**beam._code(cleaning), **({} if name == "checks" else {name: "0" * 64})}
    job = {"kind": "text", "code": code, "cleaning": cleaning, "checks": "0" * 64}
    beam.Work(str(tmp_path)).write("name.job", json.dumps(job).encode())
    with pytest.raises(InputError, match=rf"a worker('s| has another) {name} .*the command"):
        beam._opened(str(tmp_path), "name")


def test_steps_of_a_process_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A runner gives a process several bundles at once, and a job has one source and cleaner."""
    worker = SimpleNamespace(step=lambda unit: [unit, beam._TURN.locked()])
    monkeypatch.setattr(beam, "_opened", lambda *_: worker)
    assert beam._do((5,), "place", "name", "step") == [5, True]


@pytest.mark.parametrize("source", [Tsv, Moses, functools.partial(Jsonl, files="{lang}.{split}")])
def test_cost_is_measured_on_the_corpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: Any
) -> None:
    """A dollar a second; a tenth of the pairs, which have equal lengths, is measured."""
    monkeypatch.setattr(beam, "_SAMPLED_PAIRS", 100)
    rows = [(f"sentence {n}", f"frase {n}") for n in range(1000, 2000)]
    files = {"gl.train.tsv": "\t".join, "train.en-gl.en": itemgetter(0)}
    files |= {"train.en-gl.gl": itemgetter(1)}
    files |= {"gl.train": lambda row: json.dumps({"translation": {"en": row[0], "gl": row[1]}})}
    for file, line in files.items():
        write(tmp_path / file, "".join(f"{line(row)}\n" for row in rows))
    made, tokenizer = [], beam.RangeTokenizer
    monkeypatch.setattr(beam, "RangeTokenizer", lambda *of: made.append(of) or tokenizer(*of))
    said = cost(spec(lambda: source(tmp_path), segmentations=3), 3600.0)
    assert made[0][1] == 3
    assert cost(spec(lambda: Made({"gl": 40})), None).startswith("at least 40 pairs: ")
    assert int(said.split()[1].replace(",", "")) == pytest.approx(1000, rel=0.01)
    found = re.search(r": (\S+) CPU hours .*, (\S+) GB of keys shuffled, (\S+) dollars$", said)
    assert found is not None
    hours, gigabytes, dollars = map(float, found.groups())
    assert gigabytes > 0
    # Hours have two digits, dollars two places.
    assert 3600 * hours == pytest.approx(dollars, rel=0.05, abs=0.006)


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
@pytest.mark.parametrize("workers", [1, 2])
def test_beam_gives_the_corpus_of_one_process(tmp_path: Path, workers: int) -> None:
    """Tables and PO files are prepared; the counters are those of the ledger."""
    source = po(tmp_path / "po") if workers == 1 else corpus(tmp_path / "text", 200)
    one = assert_same(tmp_path, source, direct(tmp_path / "work", workers))
    said = [*chain(*(path.read_text().splitlines() for path in tmp_path.glob("work/*.log")))]
    for pair in one.language_pairs():
        count = one.ledger().count(pair, "train")
        for reason, pairs in count.dropped.items():  # others than reading and tokenizing drop
            if not reason.startswith(("source", "pieces")):
                assert f"{pair}: dropped: {reason}: {pairs}" in said


@of_beam
def test_a_pipeline_ends_with_its_command(tmp_path: Path) -> None:
    """Also where nothing can be done any more: after kill -9."""
    write(tmp_path / "text" / "gl.train.tsv", "".join(f"{n} a\t{n} b\n" for n in range(300_000)))
    write(tmp_path / "text" / "gl.test.tsv", "One\tUn\n")
    program = f"""from tests.data.test_beam import *
work = direct(Path("{tmp_path}/work"))
spec(lambda: Tsv("{tmp_path}/text")).build("{tmp_path}/c", engine=work)"""
    command = subprocess.Popen([sys.executable, "-c", program])
    while not [*tmp_path.glob("work/.*first")]:  # a worker writes text
        assert command.poll() is None
        time.sleep(0.1)
    command.kill()
    assert command.wait()
    deadline = time.monotonic() + 60
    while subprocess.run(["pgrep", "-f", str(tmp_path)], check=False).returncode != 1:
        assert time.monotonic() < deadline
        time.sleep(0.5)


@of_beam
@pytest.mark.parametrize("workers", [1, 4])
def test_any_number_of_workers_gives_the_same_corpus(
    tmp_path: Path, tatoeba: Path, workers: int
) -> None:
    """A slice of Tatoeba, by all stages."""
    for path in (p for code in ("glg", "epo", "isl") for p in tatoeba.glob(f"{code}.*.tsv")):
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        write(tmp_path / "text" / path.name, "".join(lines[:3000]))
    source = functools.partial(Tsv, tmp_path / "text", on_bad_line="skip")
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
    test_bad_lines_and_stages_stop_it_as_on_one_machine(tmp_path, direct)


def test_what_workers_said_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beam, "_PROGRAM", "1 / 0")
    monkeypatch.setattr(beam.Engine, "_python", lambda _: sys.executable)
    with pytest.raises(beam.WorkersFailed, match=r"ZeroDiv.*: (.*/work/\w+\.log)\)$") as found:
        spec(corpus(tmp_path / "text", 120)).build(tmp_path / "c", engine=direct(tmp_path / "work"))
    assert found.value.status == 1
    assert "division by zero" in Path(str(found.value).rpartition(" ")[2][:-1]).read_text()


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


def test_beam_that_is_not_installed_is_said_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    with pytest.raises(InputError, match=r"--runner=flink needs Apache Beam, which is not .*make"):
        beam.Engine("flink", [], 1)
