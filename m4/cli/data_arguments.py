"""The jobs of `m4 data`, each with its own options."""

from collections.abc import Mapping
from typing import Any, NamedTuple


class DataJob(NamedTuple):
    """What `m4 data <name>` does, and its own options: argparse's arguments by name."""

    help: str
    options: Mapping[str, Mapping[str, Any]] = {}


# Each is the function of that name in m4/jobs/data/<name>.py, called with the experiment and these.
DATA_JOBS = {
    "prepare": DataJob(
        "build the corpus in MODEL_DIR/data, or in experiment.Data.data_dir for several runs",
        {
            "rebuild": {
                "action": "store_true",
                "help": "replace a corpus of other settings, for all runs that share it",
            }
        },
    ),
    "preview": DataJob(
        "how often each language would be seen: data_preview.html, .png, .json",
        {
            "temperatures": {
                "default": "1,2,3,5,inf",
                "help": "to compare the sampler with (default: %(default)s)",
            },
            "most_epochs": {
                "type": float,
                "default": 16.0,
                "help": "warn of languages that are repeated more often (default: %(default)s)",
            },
        },
    ),
    "vocabulary": DataJob(
        "what the vocabulary makes of each language: pieces a sentence, bytes",
        {
            "sentences": {"type": int, "default": 2000, "help": "of each language (2000)"},
            "warn_above": {"type": float, "default": 0.01, "help": "share of bytes (0.01)"},
        },
    ),
    "batch": DataJob(
        "print the sentence pairs of a training step, with their direction, lengths and place",
        {"step": {"type": int, "required": True, "help": "the step of training, from 1"}},
    ),
    "audit": DataJob(
        "clean the corpus: what is dropped and why; data_report.html",
        {
            "stages": {
                "choices": ["configured", "all"],
                "default": "configured",
                "help": "the stages that the config names, or all that there are",
            },
            "list": {
                "nargs": "?",
                "const": "",
                "metavar": "REASON",
                "help": "write dropped.jsonl.gz: every dropped pair, or those of a stage or reason",
            },
        },
    ),
}
