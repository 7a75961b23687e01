"""The run of all trials: its command, its folders, and its result."""

import dataclasses
import hashlib
import json
import logging
import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.chaos.forks import Ended, computed, in_child
from tests.command_line import TINY

STEPS = 6
BINDINGS = (
    f"TRAIN_STEPS={STEPS}", "cldr.Cldr.sizes={'pt': 100, 'gl': 60}", "cldr.Cldr.test_pairs=6",
    "cldr.Cldr.dev_pairs=4", "corpus.CorpusSpec.vocabulary_size=360",
    "experiment.ResourceLevels.high_resource_from=90", "experiment.Training.log_period=1",
    "experiment.Decoding.batch_rows=8", "experiment.Decoding.max_target_length=8",
    "bilingual/experiment.Training.total_steps=2",
)  # fmt: skip
# Jobs that are a command with other arguments. base: the world's folder.
COMMANDS = {
    "begin": ("train", "--init_from={base}/states/finished"),
    "score": ("score",),
    "text": ("decode", "--input={base}/text.txt", "--to=gl", "--output={base}/run/translated.txt"),
    "average": ("average", "--last=2", "--output={base}/run/mean"),
}
# Results that differ between two equal runs: times in these files.
_JSON = ("data/manifest.json", "result.json", "atlas.train.json")
_JSON += ("metrics.jsonl", "scores.jsonl", "deltas.jsonl")
_WHOLE = ("data/text/", "decodes/", "translated.")
_TIMES = ("second", "goodput", "mfu", "time", "wall")


def job(name: str, folder: Path, *more: str) -> Ended:
    """Runs `m4 NAME` on the run in `folder`, in a fork."""
    return in_child(lambda: main(name, folder, *more))


def arguments(name: str, folder: Path, *more: str) -> list[str]:
    command, *own = COMMANDS.get(name, (name,))
    own = [word.format(base=folder.parent) for word in own]
    bindings = [f"--gin.{binding}" for binding in BINDINGS]
    return [command, f"--gin_file={TINY}", f"--model_dir={folder}", *bindings, *own, *more]


def main(name: str, folder: Path, *more: str) -> int:
    """Runs `m4 NAME`, or one of COMMANDS, in this process.

    Baselines are trained in it too: workers take ten seconds to start.
    """
    from m4.cli.main import main as m4
    from m4.jobs import bilingual as baselines

    baselines.workers_for = lambda *_: 0
    return m4(arguments(name, folder, *more))


Result = dict[str, str]  # name -> digest of a checkpoint's item or a file


def differences(found: Mapping[str, str], wanted: Mapping[str, str]) -> list[str]:
    """Returns the results that differ from those of the undisturbed run, or are missing."""
    return sorted(name for name in wanted if found.get(name) != wanted[name])


def _weights(folder: Path, name: str) -> Result:
    """Digests each item and the note in the last checkpoint of each model that the job makes."""
    from tests.golden_run.reading import of_arrays, tree

    logging.getLogger("absl").setLevel(logging.ERROR)
    found = {}
    made = {"baselines": "baselines/*/", "average": "mean/"}
    for model in sorted(folder.glob(made[name])) if name in made else [folder]:
        steps = [path for path in (model / "checkpoints").glob("*") if path.name.isdecimal()]
        if not steps:
            continue
        step = max(steps, key=lambda path: int(path.name))
        name = f"{model.relative_to(folder)}/checkpoints/{step.name}"
        for item in ("params", "optimizer", "average", "best"):
            if (step / item).is_dir():
                found[f"{name}/{item}"] = of_arrays(tree(step / item))
        note = json.loads((step / "note" / "metadata").read_bytes())
        found[f"{name}/note"] = digest(json.dumps(_timeless(note), sort_keys=True))
    return found


def _files(folder: Path) -> Result:
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_dir() or "/." in f"/{name}":
            continue
        kept = name.removeprefix("baselines/") if name.startswith("baselines/") else name
        kept = kept.split("/", 1)[1] if kept != name else kept
        kept = re.sub(r"^data/\w+/", "data/", kept)
        content = path.read_bytes()
        if kept.startswith(_WHOLE) or path.suffix in (".npy", ".model"):
            found[name] = digest(content)
        elif kept in _JSON:
            found[name] = digest(_without_times(content))
    return found


def _without_times(content: bytes) -> bytes:
    try:
        whole = json.loads(b"[" + b",".join(content.splitlines()) + b"]")
    except ValueError:
        try:
            whole = json.loads(content)
        except ValueError:
            return content  # damaged
    return json.dumps(_timeless(whole)).encode()


def _timeless(value: Any) -> Any:
    if isinstance(value, dict):
        kept = {k: v for k, v in value.items() if not any(t in k for t in _TIMES)}
        kept.pop("checksum", None)  # covers everything, with times
        if isinstance(kept.get("metrics"), str):  # a digest of rows with times
            del kept["metrics"]
        return {k: _timeless(v) for k, v in kept.items()}
    return [_timeless(one) for one in value] if isinstance(value, list) else value


def digest(content: bytes | str) -> str:
    raw = content.encode() if isinstance(content, str) else content
    return hashlib.sha256(raw).hexdigest()[:16]


# Job -> the beginnings of the names of its results, which are compared after it.
_MAKES = {
    "train": ("./checkpoints/", "metrics.jsonl", "atlas.train.json", "data/", "vocabulary/"),
    "baselines": ("baselines/",), "decode": ("decodes/test.", "decodes/atlas."),
    "report": ("scores.jsonl", "deltas.jsonl", "decodes/test.", "decodes/bilingual/"),
    "score": ("decodes/logprob-",), "text": ("translated.txt",), "average": ("mean/",),
}  # fmt: skip
_MAKES["begin"] = _MAKES["train"]
# Jobs on a trained model that change nothing of another job's.
AFTER = ("score", "text", "average")


@dataclasses.dataclass(frozen=True)
class World:
    """Folders: base/run, where all jobs run, and base/states, its copies from which trials begin.

    Attributes:
        base: The folder.
        result: Job -> its results when nothing happens.
        lasts: (state, job) -> seconds of the undisturbed job, once they are measured.
    """

    base: Path
    result: dict[str, Result]
    lasts: dict[tuple[str, str], float] = dataclasses.field(default_factory=dict)

    @property
    def run(self) -> Path:
        return self.base / "run"

    def state(self, name: str) -> Path:
        """Returns the folder of a state.

        The states are nothing, begun (a corpus, no checkpoint), half (killed after the checkpoint
        of step 4), finished (trained), compared (and its baselines, and decoded), whole (and
        reported); of the jobs of AFTER the name: finished, and that job was run.
        """
        return self.base / "states" / name

    def begin(self, name: str) -> None:
        """Makes the run's folder a copy of a state."""
        shutil.rmtree(self.run, ignore_errors=True)
        if name != "nothing":
            shutil.copytree(self.state(name), self.run)

    def seconds(self, state: str, name: str) -> float:
        """Returns how long the undisturbed job lasts, measured once."""
        if (state, name) not in self.lasts:
            self.begin(state)
            ended = job(name, self.run)
            _must(ended)
            self.lasts[state, name] = ended.seconds
        return self.lasts[state, name]

    def found(self, name: str) -> Result:
        """Digests the job's results in the run's folder."""
        weights = name in ("train", "begin", "baselines", "average")
        found = computed(lambda: _weights(self.run, name)) if weights else {}
        found |= _files(self.run)
        return {k: v for k, v in found.items() if k.startswith(_MAKES[name])}

    def changed(self, name: str) -> list[str]:
        """Returns the job's results that differ from those of the undisturbed run."""
        return differences(self.found(name), self.result[name])


def made(base: Path) -> World:
    """Runs all jobs, undisturbed, and keeps copies of the folder on the way."""
    world, states = World(base, {}), base / "states"
    run = world.run
    shutil.rmtree(base, ignore_errors=True)
    states.mkdir(parents=True)
    (base / "text.txt").write_text("3 weeks ago\n\nlast Monday\n" * 20, encoding="utf-8")

    def keep(name: str) -> None:
        shutil.copytree(run, states / name)

    def make(name: str) -> None:
        _must(job(name, run))
        world.result[name] = world.found(name)

    _killed_when(lambda: any(run.glob("data/*/manifest.json")), run)
    keep("begun")
    _killed_when(lambda: (run / "checkpoints" / "4").is_dir(), run)
    keep("half")
    shutil.rmtree(run)
    make("train")
    keep("finished")
    make("baselines")
    make("decode")
    keep("compared")
    make("report")
    keep("whole")
    for name in AFTER:
        world.begin("finished")
        make(name)
        keep(name)
    world.begin("nothing")
    make("begin")
    return world


def _killed_when(reached: Callable[[], bool], folder: Path) -> None:
    """Trains until `reached` is true, and kills the training."""

    def watch(child: int, until: float) -> None:
        while not reached() and time.monotonic() < until:
            time.sleep(0.002)
        os.kill(child, signal.SIGKILL)

    _must(in_child(lambda: main("train", folder), watch=watch), -signal.SIGKILL)


def _must(ended: Ended, status: int = 0) -> None:
    if ended.status != status:
        raise RuntimeError(f"the undisturbed run: {ended.status}\n{ended.out}\n{ended.err}")
