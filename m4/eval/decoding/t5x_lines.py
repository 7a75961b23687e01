"""Translations as T5X's inference writes them: a line of JSON an example.

With one translation an example it is T5X's mode `predict`: {"inputs": {"inputs_pretokenized": ...},
"prediction": text}. With several (`Decoding.n_best`) it is `predict_with_aux` of all decodes: the
prediction is a list, the best one last, and {"aux": {"scores": ...}} follows.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from m4.data.directions import split_direction
from m4.data.preprocess import tag
from m4.eval.decoding.decode import Translations
from m4.eval.decoding.hypotheses import hypotheses_path
from m4.storage.files import read_jsonl, whole
from m4.storage.records import listed, number, record, text

_ROW = record(
    {
        **dict.fromkeys(("source", "reference", "hypothesis"), text),
        "translations?": listed(text),
        "scores?": listed(number),
    }
)


def t5x_line(line: str, found: Translations, to: str) -> str:
    """Returns a line of text, its translations and their language as one of T5X's lines."""
    inputs = {"inputs_pretokenized": tag(line, to)}
    return _line(inputs, found.texts, found.scores)


def write_tasks(folder: Path, split: str, directions: Iterable[str]) -> list[Path]:
    """Writes the translated test sets of a folder as T5X's files of its tasks; returns the files.

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
    inputs = {
        "inputs_pretokenized": tag(row["source"], to),
        "targets_pretokenized": row["reference"],
    }
    return _line(inputs, row.get("translations", [row["hypothesis"]]), row.get("scores", []))


def _line(inputs: Mapping[str, str], texts: Iterable[str], scores: Iterable[float]) -> str:
    texts, scores = [*texts], [*scores]
    said: dict[str, Any] = {"inputs": dict(inputs), "prediction": texts[0]}
    if len(texts) > 1:  # T5X's order: ascending
        said |= {"prediction": texts[::-1], "aux": {"scores": scores[::-1]}}
    return json.dumps(said)
