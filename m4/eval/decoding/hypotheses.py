"""Files of hypotheses: translated test sets of all directions, and a note on how each was made.

Translations can also be written as T5X's inference does, one JSON line per example. One translation
per example is T5X's mode `predict`: {"inputs": {"inputs_pretokenized": ...}, "prediction": text}.
Several (`Decoding.n_best`) are `predict_with_aux` of all decodes: the prediction is a list, the
best one last, and {"aux": {"scores": ...}} follows.
"""

import hashlib
import json
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from m4.data.directions import split_direction
from m4.data.preprocess import tag
from m4.eval.decoding.decode import Translations
from m4.parallel import distributed
from m4.settings import InputError, some
from m4.storage.files import read_json, read_jsonl, whole, whole_folder, write_json, write_jsonl
from m4.storage.records import count, listed, number, record, text

# Field of a note: digest of the file of hypotheses when it was written.
_DIGEST = "hypotheses_sha256"
# Other fields that do not influence the search.
_NO_SEARCH = (_DIGEST, "step", "config", "vocabulary", "sentences", "sha256", "length_factors",
              "batch_rows", "through")  # fmt: skip

_NOTE = record({"step?": count, "config?": text})
_ROW = record(
    {
        **dict.fromkeys(("source", "reference", "hypothesis"), text),
        "translations?": listed(text),
        "scores?": listed(number),
    }
)

# Direction ("en-gl") -> (source without a tag, reference, further fields of a separate test set).
Pairs = Mapping[str, Sequence[tuple[Any, ...]]]

# Takes tagged sources and their directions; returns the fields of a line for each.
Translate = Callable[[list[str], list[str]], list[dict[str, Any]]]


def hypotheses_path(folder: Path, split: str, direction: str) -> Path:
    """Returns the file of a direction's translations: FOLDER/<split>.<direction>.jsonl."""
    return Path(folder) / f"{split}.{direction}.jsonl"


def decode_to_files(
    translate: Translate,
    folder: Path | str,
    split: str,
    pairs: Pairs,
    settings: Mapping[str, Any],
    *,
    sentences_at_once: int = 1024,
) -> list[str]:
    """Translates test sets and writes one file per direction; returns the directions done.

    A file has a line {"source", "reference", "hypothesis"} per sentence, in order, and appears
    whole or not at all. The note `<split>.<direction>.json` has its settings and SHA-256. An
    unchanged file that was made with the same settings from the same sentences is kept. All
    processes call this; the primary one reads and writes.

    Args:
        settings: JSON of everything that decides the result: step, search, vocabulary fingerprint.
        sentences_at_once: Directions are decoded together, for fuller batches, up to this many
            sentences. An interrupted run loses at most these.
    """
    folder = Path(folder)
    waiting = missing(folder, split, pairs, settings)
    group: list[str] = []
    for position, direction in enumerate(waiting):
        group.append(direction)
        of_each = [(each, *pair) for each in group for pair in pairs[each]]
        if len(of_each) < sentences_at_once and position + 1 < len(waiting):
            continue
        tagged = [tag(source, split_direction(each)[1]) for each, source, *_ in of_each]
        found = iter(translate(tagged, [each for each, *_ in of_each]))
        for each in group if distributed.is_primary() else ():
            rows = [
                {"source": source, "reference": reference, **dict(*more), **next(found)}
                for source, reference, *more in pairs[each]
            ]
            path = hypotheses_path(folder, split, each)
            note = path.with_suffix(".json")
            note.unlink(missing_ok=True)  # an old note must never stand next to new translations
            write_jsonl(path, rows)
            made_by = _made_by(pairs[each], settings)
            write_json(note, {**made_by, _DIGEST: _digest_of(path)}, indent=1)
        group = []
    return waiting


def missing(folder: Path, split: str, pairs: Pairs, settings: Mapping[str, Any]) -> list[str]:
    """Returns, in all processes, the directions that `decode_to_files` would translate."""

    def is_done(direction: str) -> bool:
        path = hypotheses_path(folder, split, direction)
        about = _read_note(path)
        digest, wanted = about.pop(_DIGEST, None), _made_by(pairs[direction], settings)
        if not path.is_file() or about != wanted:
            return False
        if digest != _digest_of(path):
            print(f"{path}: its content is not what was written; it is translated again",
                  file=sys.stderr)  # fmt: skip
            return False
        return True

    return distributed.on_primary_then_broadcast(
        "the translations that are missing", lambda: [each for each in pairs if not is_done(each)]
    )


def _made_by(pairs: Sequence[tuple[Any, ...]], settings: Mapping[str, Any]) -> dict[str, Any]:
    said = json.dumps([list(pair) for pair in pairs]).encode()
    made_by = {**settings, "sentences": len(pairs), "sha256": hashlib.sha256(said).hexdigest()}
    return json.loads(json.dumps(made_by))  # as it will be read: tuples become lists


def steps_of(folder: Path, split: str) -> dict[str, int]:
    """Returns direction -> the step of the checkpoint that made its translations."""
    return _noted(folder, split, "step")


def configs_of(folder: Path, split: str) -> dict[str, str]:
    """Returns direction -> config of its model, for gathered translations."""
    return _noted(folder, split, "config")


def _noted(folder: Path, split: str, name: str) -> dict[str, Any]:
    notes = {path.name.split(".")[1]: _read_note(path) for path in folder.glob(f"{split}.*.jsonl")}
    return {direction: note[name] for direction, note in notes.items() if name in note}


def gather(made: Mapping[str, tuple[Path, str]], folder: Path, split: str) -> None:
    """Copies translations of several models into one folder: direction -> (its folder, config)."""
    with whole_folder(folder) as unfinished:
        for direction, (decodes, config) in made.items():
            path = hypotheses_path(decodes, split, direction)
            shutil.copyfile(path, unfinished / path.name)
            note = _read_note(path) | {"config": config}
            write_json(unfinished / path.with_suffix(".json").name, note, indent=1)


def same_sentences(folder: Path, other: Path, split: str, directions: Iterable[str]) -> bool:
    """Returns whether two folders translate the same sentences, by their notes."""
    paths = ([hypotheses_path(at, split, each) for at in (folder, other)] for each in directions)
    notes = ([_read_note(path).get("sha256") for path in both] for both in paths)
    return all(ours == theirs for ours, theirs in notes)


def _read_note(path: Path) -> dict[str, Any]:
    """Returns the note of a file of hypotheses, or nothing if the file was not completed."""
    try:
        direction = path.name.split(".")[1]
        remedy = f"remove it, and {direction} is translated again"
        return read_json(path.with_suffix(".json"), _NOTE, remedy=remedy)
    except FileNotFoundError:
        return {}


def _digest_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def other_search(
    folder: Path, split: str, directions: Iterable[str], search: Mapping[str, Any]
) -> str | None:
    """Describes how translations differ from this `Decoding.search`, or returns None."""
    wanted = _searched(json.loads(json.dumps(search)))
    for path in (hypotheses_path(folder, split, direction) for direction in directions):
        found = search_of(path) or wanted
        for name in {**wanted, **found}:
            there, here = (one.get(name, "not set") for one in (found, wanted))
            if there != here:
                return f"{path} was translated with {name} = {there}, not {here}"
    return None


def search_of(path: Path) -> dict[str, Any] | None:
    """Returns the `Decoding.search` of a file of hypotheses, or None if no note has it."""
    return _searched(_read_note(path)) or None


def _searched(note: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in note.items() if name not in _NO_SEARCH}


def check_hypotheses(
    folder: Path,
    split: str,
    directions: Iterable[str],
    remedy: str,
    search: Mapping[str, Any] | None = None,
) -> None:
    """Raises InputError unless translations of all directions exist and are unchanged.

    `remedy` is the command that makes them, `search` the `Decoding.search` that they must have.
    """
    paths = {direction: hypotheses_path(folder, split, direction) for direction in directions}
    if absent := [direction for direction, path in paths.items() if not path.is_file()]:
        raise InputError(f"{folder}: no translations of {some(absent, 3)}; make them with {remedy}")
    for path in paths.values():
        if (note := _read_note(path)).get(_DIGEST) != _digest_of(path):
            said = f"{path.with_suffix('.json')}: missing"
            said = f"{path}: its content is not what was written" if note else said
            raise InputError(f"{said}; make it again with {remedy}")
    if search is not None and (other := other_search(folder, split, paths, search)) is not None:
        raise InputError(f"{other}; make it again with {remedy}")


def t5x_line(line: str, found: Translations, to: str) -> str:
    """Returns a line of text with its translations in T5X's format."""
    return _line({"inputs_pretokenized": tag(line, to)}, found.texts, found.scores)


def write_tasks(folder: Path, split: str, directions: Iterable[str]) -> list[Path]:
    """Writes the translated test sets of a folder as files of T5X's tasks; returns them.

    m4 registers the tasks as m4.en_gl, ... (`m4.data.tasks`); for dev the name ends with _dev. The
    files are `folder`/t5x/<task>-predict.jsonl-00000-of-00001 and, empty, .COMPLETED.
    """
    made = []
    for direction in directions:
        source, to = split_direction(direction)
        rows = read_jsonl(hypotheses_path(folder, split, direction), _ROW)
        several = any("translations" in row for row in rows)
        mode = "predict_with_aux" if several else "predict"
        # `m4.data.tasks.task_name`, which needs TensorFlow to be imported.
        task = f"m4.{source}_{to}{'' if split == 'test' else f'_{split}'}"
        path = folder / "t5x" / f"{task}-{mode}.jsonl-00000-of-00001"
        with whole(path) as unfinished:
            unfinished.write_text("".join(f"{_row(row, to)}\n" for row in rows), encoding="utf-8")
        with whole(path.with_name(f"{path.name}.COMPLETED")) as unfinished:
            unfinished.touch()
        made.append(path)
    return made


def _row(row: Mapping[str, Any], to: str) -> str:
    inputs = {"inputs_pretokenized": tag(row["source"], to)}
    inputs["targets_pretokenized"] = row["reference"]
    return _line(inputs, row.get("translations", [row["hypothesis"]]), row.get("scores", []))


def _line(inputs: Mapping[str, str], texts: Iterable[str], scores: Iterable[float]) -> str:
    texts, scores = [*texts], [*scores]
    said: dict[str, Any] = {"inputs": dict(inputs), "prediction": texts[0]}
    if len(texts) > 1:  # T5X's order: ascending
        said |= {"prediction": texts[::-1], "aux": {"scores": scores[::-1]}}
    return json.dumps(said)
