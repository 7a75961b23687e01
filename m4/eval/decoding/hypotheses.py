"""Files of hypotheses: the test sets of all directions, translated, and what made each."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from m4.data.preprocess import split_direction, tag
from m4.parallel import distributed
from m4.settings import InputError
from m4.storage.files import read_json, write_json, write_jsonl

# In a note: of the file of hypotheses as it was written.
_DIGEST = "hypotheses_sha256"


def hypotheses_path(folder: Path, split: str, direction: str) -> Path:
    """Where the translations of a direction are: FOLDER/<split>.<direction>.jsonl."""
    return Path(folder) / f"{split}.{direction}.jsonl"


def decode_to_files(
    translate: Callable[[list[str]], list[dict[str, Any]]],
    folder: Path | str,
    split: str,
    pairs: Mapping[str, Sequence[tuple[str, str]]],
    settings: Mapping[str, Any],
    *,
    sentences_at_once: int = 1024,
    starting: Callable[[list[str]], None] | None = None,
) -> list[str]:
    """Translates the test sets of directions and writes one file each; returns the directions done.

    A file has a line {"source", "reference", "hypothesis"} a sentence, in order, and appears whole
    or not at all. `<split>.<direction>.json` next to it says what made it, and its SHA-256; a
    direction whose file was made with the same settings from the same sentences, and is as it was
    written, is left as it is.

    With several processes all of them call this; the primary one reads and writes.

    Args:
      translate: tagged sources -> what a line says of each, {"hypothesis": its translation}, or
        more.
      folder: MODEL_DIR/decodes.
      split: "test" or "dev".
      pairs: direction ("en-gl") -> (source, reference), source without a tag.
      settings: JSON; all that decides the result: checkpoint step, beams, alpha, lengths,
        fingerprint of the vocabulary.
      sentences_at_once: directions are decoded together up to this many sentences (fuller
        batches); an interrupted run loses at most these.
      starting: called with the direction of every source before `translate` is.

    Raises:
      ValueError: a damaged note.
    """
    folder = Path(folder)
    waiting = missing(folder, split, pairs, settings)
    group: list[str] = []
    for position, direction in enumerate(waiting):
        group.append(direction)
        size = sum(len(pairs[each]) for each in group)
        if size < sentences_at_once and position + 1 < len(waiting):
            continue
        if starting is not None:
            starting([each for each in group for _ in pairs[each]])
        hypotheses = iter(
            translate(
                [tag(pair[0], split_direction(each)[1]) for each in group for pair in pairs[each]]
            )
        )
        for each in group if distributed.is_primary() else ():
            _write(folder, split, each, pairs[each], hypotheses, settings)
        group = []
    return waiting


def missing(
    folder: Path,
    split: str,
    pairs: Mapping[str, Sequence[tuple[str, str]]],
    settings: Mapping[str, Any],
) -> list[str]:
    """The directions that are not translated yet; arguments: as of `decode_to_files`."""
    return distributed.on_primary_then_broadcast(
        "the translations that are missing",
        lambda: [
            direction
            for direction in pairs
            if not _is_done(folder, split, direction, _made_by(pairs[direction], settings))
        ],
    )


def _made_by(pairs: Sequence[tuple[str, str]], settings: Mapping[str, Any]) -> dict[str, Any]:
    text = json.dumps([list(pair)[:2] for pair in pairs]).encode()
    made_by = {**settings, "sentences": len(pairs), "sha256": hashlib.sha256(text).hexdigest()}
    return json.loads(json.dumps(made_by))  # as it will be read: tuples become lists


def steps_of(folder: Path, split: str) -> dict[str, int]:
    """Direction -> the step of the checkpoint that its translations were made with."""
    notes = {
        path.name.split(".")[1]: _read_note(path.with_suffix(".json"))
        for path in folder.glob(f"{split}.*.jsonl")
    }
    return {direction: note["step"] for direction, note in notes.items() if "step" in note}


def _is_done(folder: Path, split: str, direction: str, made_by: Mapping[str, Any]) -> bool:
    path = hypotheses_path(folder, split, direction)
    about = _read_note(path.with_suffix(".json"))
    if not path.is_file() or {k: v for k, v in about.items() if k != _DIGEST} != made_by:
        return False
    if said := _difference(path):
        print(f"{path}: {said}; it is translated again", file=sys.stderr)
    return said is None


def _read_note(path: Path) -> dict[str, Any]:
    """What made a file of hypotheses; empty: it was not written to its end."""
    try:
        direction = path.name.split(".")[1]
        return read_json(path, remedy=f"remove it, and {direction} is translated again")
    except FileNotFoundError:
        return {}


def _difference(path: Path) -> str | None:
    """How a file of hypotheses is not as it was written; None: it is. Notes of earlier versions of
    m4 have no SHA-256."""
    note = _read_note(path.with_suffix(".json"))
    if note.get(_DIGEST, digest := _digest_of(path)) != digest:
        return "its content is not what was written"
    return None


def _digest_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def check_hypotheses(folder: Path, split: str, directions: Iterable[str], remedy: str) -> None:
    """InputError: translations of a direction are missing, or not as they were written.

    remedy: the command that makes them, for the message.
    """
    paths = {direction: hypotheses_path(folder, split, direction) for direction in directions}
    missing = [direction for direction, path in paths.items() if not path.is_file()]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise InputError(
            f"{folder}: no translations of {', '.join(missing[:3])}{more}; make them with {remedy}"
        )
    for path in paths.values():
        note = path.with_suffix(".json")
        said = "missing" if not note.is_file() else None
        if said or (said := _difference(path)):
            which = note.name if said == "missing" else path.name
            raise InputError(f"{folder}/{which}: {said}; make it again with {remedy}")


def _write(
    folder: Path,
    split: str,
    direction: str,
    pairs: Sequence[tuple[str, str]],
    hypotheses: Iterator[dict[str, Any]],
    settings: Mapping[str, Any],
) -> None:
    path = hypotheses_path(folder, split, direction)
    note = path.with_suffix(".json")
    note.unlink(missing_ok=True)  # never an old note with new translations
    write_jsonl(
        path,
        (
            {"source": source, "reference": reference, **next(hypotheses)}
            for source, reference, *_ in pairs
        ),
    )
    write_json(note, {**_made_by(pairs, settings), _DIGEST: _digest_of(path)}, indent=1)
