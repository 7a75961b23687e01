"""`m4 train --new_chapter`: training continues from the last checkpoint with a changed config.

How a chapter begins is a function of that checkpoint and of the config: a run that is killed before
the chapter's first checkpoint begins it again, with the same batches and the same weights.
"""

import datetime
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from m4.config import Config
from m4.data.cache.cache import Cache
from m4.data.cache.identity import differences, shown
from m4.data.preprocess import tag_symbol
from m4.data.stream.mixture import takes
from m4.data.vocabulary.vocabulary import SPACE
from m4.experiment import Experiment
from m4.jobs import corpus, prepare
from m4.parallel import distributed
from m4.settings import InputError, Kind, SettingError
from m4.storage import chapters, manifest, remote, run_folder
from m4.storage.checkpoints import Checkpoints
from m4.storage.steps import whole_step
from m4.train import initial
from m4.train.initial import Rows
from m4.train.loop.chapter import next_state
from m4.train.loop.program import TrainProgram
from m4.train.multitask.grouped import DirectionGroups
from m4.train.state import TrainState


def begin(experiment: Experiment, config: Config, reason: str) -> list[dict[str, Any]]:
    """The run's chapters with the one that begins now, for run.json; by the primary process.

    What the chapter before leaves is kept. One that has no checkpoint yet is replaced: the last
    checkpoint is still where it began.

    Raises:
        InputError: there is no checkpoint, nothing changed, or something that may never change.
    """
    folder = prepare.run_folder(experiment)
    run_folder.check(folder, config.settings, config.kinds, new_chapter=True)
    record, step = run_folder.read(folder), whole_step(folder / "checkpoints")
    if step is None:
        raise InputError(
            f"--new_chapter: {remote.shown(folder)} has no checkpoint yet at which a chapter could "
            "begin; start over with --fresh"
        )
    known = chapters.listed(record)
    present = known[-1]
    changes = run_folder.changed(record, config.settings, config.kinds)
    before = known[-2] if _unsaved(known, step) else present
    note = read_note(folder, step)
    _position(note)  # an earlier version's has none
    text = _text_changes(experiment, note["manifest"], before.get("vocabulary_from"))
    if not (_decisive(experiment, changes) or text):
        if reason and present["reason"] == reason:
            return known  # the same command again: whoever supervises it starts it so
        raise InputError(
            f"--new_chapter: nothing has changed since chapter {present['chapter']} of "
            f"{remote.shown(folder)} that needs one; leave it out to resume"
        )
    if before is present:
        chapters.keep(folder, present["chapter"])
    else:
        known.pop()
        record = run_folder.read(chapters.ended(folder, before["chapter"]))
        changes = run_folder.changed(record, config.settings, config.kinds)
    chapter = {
        "chapter": before["chapter"] + 1,
        "step": step,
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "reason": reason or None,
        "changes": _decisive(experiment, changes),
        "text": text,
    }
    if text:
        kept = chapters.ended(folder, before["chapter"])
        if before is present:
            _keep_vocabulary(experiment, kept)
        _check_room(experiment, Cache(kept))
        chapter["vocabulary_from"] = kept.relative_to(folder).as_posix()
    elif "vocabulary_from" in before:
        chapter["vocabulary_from"] = before["vocabulary_from"]
    return [*known, chapter]


def _decisive(experiment: Experiment, changes: run_folder.Changes) -> dict[str, list[str]]:
    """The changes that a chapter is for. Some samplers' rates depend on how long training is."""
    free = changes[Kind.FREE] if takes(experiment.data.sampler, "drawn") else {}
    steps = {name: one for name, one in free.items() if name == f"{_TRAINING}.total_steps"}
    return {**changes[Kind.FROM_NOW_ON], **steps}


_TRAINING = "experiment.Training"


def _unsaved(known: list[dict[str, Any]], step: int) -> bool:
    """Whether the present chapter has no checkpoint yet. step: of the latest."""
    return len(known) > 1 and known[-1]["step"] >= step


def _text_changes(
    experiment: Experiment, made: Mapping[str, Any], vocabulary_from: str | None
) -> list[str]:
    """In what the corpus is another one than `made`, the summary of a checkpoint's, for people.

    InputError: a language is missing, or roles share a vocabulary which did not.
    """
    spec = corpus.spec_of(experiment, vocabulary_from)
    now = spec.identity(corpus.fetched(corpus.place_of(experiment), corpus.settings))
    if lost := [code for code in made["languages"] if code not in now["languages"]]:
        raise InputError(
            f"--new_chapter: the corpus has {', '.join(lost)} no more: a chapter may add languages "
            "and draw fewer of the others (experiment.Data.sampler)"
        )
    size = "target_vocabulary_size"
    was, here = made["identity"][size], now[size]
    if (was is None) != (here is None):
        raise SettingError(f"CorpusSpec.{size}", here, f"{was}, as the trained model has it")
    return differences(made["identity"], now)


def _keep_vocabulary(experiment: Experiment, to: Path) -> None:
    there = corpus.open_vocabulary(experiment).folder
    for path in [*there.glob("vocabulary.*model"), there / "manifest.json"]:
        chapters.copy(path, to)


def _check_room(experiment: Experiment, old: Cache) -> None:
    """SettingError: the vocabulary's size does not hold the old pieces and new tags."""
    spec = experiment.data.corpus
    pieces = set(old.source_vocabulary.pieces)
    new = [code for code in spec.settings()["languages"] if SPACE + tag_symbol(code) not in pieces]
    least = {"vocabulary_size": old.source_vocabulary.size + len(new)}
    if old.separate:
        least["target_vocabulary_size"] = old.target_vocabulary.size
    for name, size in least.items():
        if getattr(spec, name) < size:
            allowed = f"at least {size}: the trained vocabulary and {len(new)} new tags"
            raise SettingError(f"CorpusSpec.{name}", getattr(spec, name), allowed)


def read_note(folder: Path, step: int) -> dict[str, Any]:
    """The note of a checkpoint of a model's folder. InputError: it is not as it was written."""
    there = remote.remote_path(folder / "checkpoints") / str(step)
    if (said := manifest.problem(there, {"note"})) is not None:
        raise InputError(f"{there}: damaged ({said})")
    store = Checkpoints(folder / "checkpoints", read_only=True)
    try:
        return store.note(step)
    finally:
        store.close()


class Standing(NamedTuple):
    """Where a model stands in the run's chapters.

    number: of the present chapter. begins: whether it begins at the latest checkpoint. saved: that
    checkpoint's note. start: the position of the stream at which the chapter began.
    """

    number: int
    begins: bool = False
    saved: Mapping[str, Any] = {}
    start: Mapping[str, Any] | None = None

    def note(self) -> dict[str, Any]:
        """What the chapter's checkpoints say of it."""
        return {"chapter": self.number} | ({"chapter_start": self.start} if self.start else {})


def standing(experiment: Experiment, folder: Path, latest: int | None) -> Standing:
    """Of the model in a folder, with its latest step."""
    number = chapters.of_run(prepare.run_folder(experiment))[-1]["chapter"]
    if latest is None:
        return Standing(number)
    saved = read_note(folder, latest)
    if saved.get("chapter", 1) == number:
        return Standing(number, saved=saved, start=saved.get("chapter_start"))
    return Standing(number, True, saved, _position(saved))


def _position(note: Mapping[str, Any]) -> Mapping[str, Any]:
    if "position" not in note:
        raise InputError(
            f"--new_chapter: the checkpoint of step {note['step']} is an earlier version's, which "
            "has no record of where its stream stood; train to another checkpoint first"
        )
    return note["position"]


class Turn:
    """How a chapter takes over the state of the checkpoint at which it begins."""

    def __init__(
        self,
        experiment: Experiment,
        folder: Path,
        at: Standing,
        cache: Cache,
        groups: DirectionGroups | None,
    ) -> None:
        """folder: the model's. groups: of its directions."""
        self._run, self._folder = prepare.run_folder(experiment), folder
        self._at, self._cache = at, cache
        about = groups.note() if groups else {}
        self._same_groups = at.saved.get("gradients") == about.get("gradients")

    def state(self, program: TrainProgram) -> TrainState:
        """The state at the chapter's beginning; what became of the optimizer's is printed, and in
        run.json."""
        state, optimizer = self.taken_over(program)
        self._report(optimizer)
        return state

    def taken_over(self, program: TrainProgram) -> tuple[TrainState, str]:
        """The state, and what became of the optimizer's, in words; nothing is written."""
        same = self._at.saved["vocabulary"] == self._cache.vocabulary.fingerprint
        old = self._cache if same else self._old_vocabulary()

        def rows(path: str) -> Rows:
            role = "source" if "source_token_embedder" in path else "target"
            before, now = (getattr(one, f"{role}_vocabulary") for one in (old, self._cache))
            return initial.rows_of(before, now, "bytes")

        step = self._at.saved["step"]
        store = Checkpoints(self._folder / "checkpoints", read_only=True)
        try:
            return next_state(store, step, program, rows, same=same, same_groups=self._same_groups)
        finally:
            store.close()

    def _old_vocabulary(self) -> Cache:
        """The vocabulary that the checkpoint was trained with."""
        for number in range(self._at.saved.get("chapter", 1), self._at.number):
            folder = chapters.ended(self._run, number)
            if (folder / "manifest.json").is_file():
                cache = Cache(folder, self._cache.mixture)
                if cache.vocabulary.fingerprint == self._at.saved["vocabulary"]:
                    return cache
        raise InputError(
            f"{self._run / chapters.FOLDER}: the vocabulary of the checkpoint of step "
            f"{self._at.saved['step']} is missing"
        )

    def _report(self, optimizer: str) -> None:
        if not distributed.is_primary():
            return
        known = chapters.of_run(self._run)
        changes = [f"{name} {was} -> {now}" for name, (was, now) in known[-1]["changes"].items()]
        text = [shown(known[-1]["text"])] if known[-1]["text"] else []
        print(
            f"chapter {self._at.number} begins after step {self._at.saved['step']}: "
            f"{'; '.join([*changes, *text])}; the optimizer's state: {optimizer}"
        )
        if self._folder == self._run:
            known[-1] = {**known[-1], "optimizer": optimizer}
            run_folder.note(self._run, chapters=known)
