"""The trials: a run killed, damaged and starved of disk, and the verdict on each."""

import ctypes
import dataclasses
import functools
import json
import os
import random
import re
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.chaos.forks import Ended, in_child
from tests.chaos.world import AFTER, World, job, main

# In the order of the table, the worst last: verdict -> its heading.
VERDICTS = {
    "survived": "survived",  # the same command gives the undisturbed result
    "named": "named in one line",  # one line names the damaged file; whole files stay
    "unnamed": "one line, file not named",
    "traceback": "traceback",
    "hang": "hang",
    "lost": "lost",  # finished work is gone, or a process is left behind
    "silent": "silently wrong",  # another result, and no word
}


@dataclasses.dataclass(frozen=True)
class Trial:
    """A disturbance of a run and its outcome.

    Attributes:
        category, kind: The table's row and a part of it.
        detail: Enough to see what was done.
        verdict: One of VERDICTS.
        said: The last line, or the differences.
    """

    category: str
    kind: str
    detail: str
    verdict: str = ""
    said: str = ""

    def ended(self, verdict: str, said: str) -> "Trial":
        return dataclasses.replace(self, verdict=verdict, said=said)


def table(trials: Sequence[Trial]) -> str:
    """Returns the table of all trials in Markdown: a row a category, and their sum."""
    rows = [["", "tried", *VERDICTS.values()], ["---", *["---:"] * (1 + len(VERDICTS))]]
    for category in [*dict.fromkeys(trial.category for trial in trials), None]:
        of_it = [trial for trial in trials if category in (None, trial.category)]
        counts = [sum(trial.verdict == verdict for trial in of_it) for verdict in VERDICTS]
        rows.append([category or "all", *map(str, [len(of_it), *counts])])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def again(world: World, trial: Trial, name: str) -> Trial:
    """Runs the same job again; it must give the undisturbed result."""
    ended = job(name, world.run)
    if (bad := bad_end(ended)) or ended.status != 0:
        return trial.ended(bad or "lost", said(ended))
    other = world.changed(name)
    return trial.ended("silent" if other else "survived", ", ".join(other[:4]))


def bad_end(ended: Ended) -> str | None:
    """Returns the verdict on an end that is wrong whatever the job's result is, or None."""
    if ended.status is None:
        return "hang"
    if ended.orphans:
        return "lost"
    crashed = ended.status < 0
    return "traceback" if crashed or (ended.status != 0 and ended.traceback) else None


def said(ended: Ended) -> str:
    return f"status {ended.status}: {ended.last[:300]}"


# ------------------------------------------------------------------------------- kill -9

# Job -> the states it may begin from. From nothing, training builds its corpus first.
KILLED = {
    "train": ("nothing", "begun", "half"), "baselines": ("finished",), "decode": ("finished",),
    "report": ("compared",), "begin": ("nothing",), **dict.fromkeys(AFTER, ("finished",)),
}  # fmt: skip


def kill(world: World, name: str, draw: random.Random) -> Trial:
    """Kills the job at a random moment of its undisturbed time, runs it again and compares.

    A job that ended before the moment is started over with half the time.
    """
    state = draw.choice(KILLED[name])
    after = draw.random() * world.seconds(state, name)
    for _ in range(4):
        world.begin(state)
        ended = in_child(lambda: main(name, world.run), watch=functools.partial(_kill, after))
        if ended.status == -signal.SIGKILL:
            break
        after /= 2
    trial = Trial("kill -9", name, f"{name} from {state}: after {after:.3f} s")
    if ended.orphans:
        return trial.ended("lost", f"orphans: {ended.orphans}")
    return again(world, trial, name)


def _kill(after: float, child: int, _until: float) -> None:
    time.sleep(after)
    os.kill(child, signal.SIGKILL)  # one that has ended is not waited for yet


# ------------------------------------------------------------------------------- damage

# State -> the job that is run on the damaged folder, and the files that may be damaged.
DAMAGED = {
    "half": ("train", r"(?!baselines/|decodes/)"),
    "finished": (
        "decode",
        r"checkpoints/6|data/\w+/(text/test|[mv])|vocabulary/|run\.json|config\.gin",
    ),
    "compared": (
        "report",
        r"baselines/|decodes/|metrics|run\.json|checkpoints/6/note|data/\w+/text/test",
    ),
    "whole": ("report", r"[^/]+$|decodes/"),
    "score": ("score", r"decodes/logprob|checkpoints/6|data/\w+/(text/test|[mv])|config\.gin"),
    "text": ("text", r"checkpoints/6|vocabulary/|run\.json|config\.gin"),
    "average": ("average", r"mean/|checkpoints/[46]|vocabulary/|run\.json|config\.gin"),
}


def kind_of(name: str) -> str:
    """Returns a file's kind: its name without languages, steps and hashes."""
    name = re.sub(r"\b[0-9a-f]{12,64}\b", "HASH", name)
    name = re.sub(r"^baselines/[^/]+/", "baselines/LANGUAGE/", name)
    name = re.sub(r"(?<=checkpoints/)\d+", "STEP", name)
    name = re.sub(r"(?<=decodes/)(bilingual/|logprob-)?test\.[\w-]+\.", r"\1test.DIRECTION.", name)
    return re.sub(r"(?<=text/)(train|dev|test)\.\w+\.", r"\1.LANGUAGE.", name)


def row_of(name: str) -> str:
    """Returns the table's row of a file: its purpose."""
    for pattern, row in (
        (r"baselines/", "baselines"),
        (r"(mean/)?checkpoints/", "checkpoints"),
        (r"data/|vocabulary/", "corpus, token cache, vocabulary"),
        (r"decodes/", "decodes"),
        (r".*run\.json|.*\.gin$", "run.json, config.gin"),
    ):
        if re.match(pattern, name):
            return row
    return "metrics, heartbeat, scores, report"


def files_of(folder: Path, pattern: str = "") -> list[str]:
    """Returns all files of a run but its locks, by name."""
    names = [str(p.relative_to(folder)) for p in sorted(folder.rglob("*")) if p.is_file()]
    return [name for name in names if "/.lock" not in f"/{name}" and re.match(pattern, name)]


def truncated(folder: Path, name: str, draw: random.Random) -> str:
    """Cuts off the end of a file."""
    size = (folder / name).stat().st_size
    kept = draw.randrange(size) if size else 0
    os.truncate(folder / name, kept)
    return f"to {kept} of {size} bytes"


def emptied(folder: Path, name: str, _draw: random.Random) -> str:
    os.truncate(folder / name, 0)
    return ""


def deleted(folder: Path, name: str, _draw: random.Random) -> str:
    (folder / name).unlink()
    return ""


def swapped(folder: Path, name: str, draw: random.Random) -> str:
    """Exchanges a file with another one of its kind, or of its name, or with any file."""
    whole = (folder / name).read_bytes()
    others = [one for one in files_of(folder) if (folder / one).read_bytes() != whole]
    of_kind = [one for one in others if kind_of(one) == kind_of(name)]
    of_name = [one for one in others if Path(one).name == Path(name).name]
    other = draw.choice(of_kind or of_name or others)
    (folder / name).write_bytes((folder / other).read_bytes())
    (folder / other).write_bytes(whole)
    return f"with {other}"


def flipped(folder: Path, name: str, draw: random.Random) -> str:
    """Flips one bit of a file."""
    content = bytearray((folder / name).read_bytes())
    if not content:
        return "nothing in it"
    bit = draw.randrange(8 * len(content))
    content[bit // 8] ^= 1 << bit % 8
    (folder / name).write_bytes(content)
    return f"bit {bit}"


DAMAGES = {one.__name__: one for one in (truncated, emptied, deleted, swapped, flipped)}


def cases(world: World, draw: random.Random) -> list[tuple[str, str, str]]:
    """Returns (state, file, damage) for each kind of file and damage, once a state.

    Their order is drawn, and the table's rows take turns.
    """
    by_row: dict[str, list[tuple[str, str, str]]] = {}
    for state, (_, pattern) in DAMAGED.items():
        by_kind: dict[str, list[str]] = {}
        for name in files_of(world.state(state), pattern):
            by_kind.setdefault(kind_of(name), []).append(name)
        for names in by_kind.values():
            for damage in DAMAGES:
                name = draw.choice(names)
                by_row.setdefault(row_of(name), []).append((state, name, damage))
    for row in by_row.values():
        draw.shuffle(row)
    most = max(map(len, by_row.values()))
    return [row[turn] for turn in range(most) for row in by_row.values() if turn < len(row)]


def damage(world: World, case: tuple[str, str, str], draw: random.Random) -> Trial:
    """Damages one file and runs the job that comes next.

    Where the job is refused, the file is put back, and the same command must give the undisturbed
    result: nothing else was lost.
    """
    state, name, how = case
    job_name = DAMAGED[state][0]
    world.begin(state)
    detail = DAMAGES[how](world.run, name, draw)
    trial = Trial(row_of(name), how, f"{job_name}: {name} {how} {detail}".strip())
    ended = job(job_name, world.run)
    names = [name, *(re.findall(r"with (\S+)$", detail) if how == "swapped" else [])]
    verdict, text = judged(world, job_name, names, ended)
    if verdict in ("named", "unnamed", "traceback") and ended.status != 0:
        for one in names:
            (world.run / one).parent.mkdir(parents=True, exist_ok=True)
            (world.run / one).write_bytes((world.state(state) / one).read_bytes())
        after = again(world, trial, job_name)
        if after.verdict != "survived":
            verdict, text = "lost", f"{text}; put back: {after.verdict}, {after.said}"
    return trial.ended(verdict, text)


def judged(world: World, job_name: str, names: Sequence[str], ended: Ended) -> tuple[str, str]:
    """Returns the verdict on a job in a folder with damaged files, and its words."""
    if (bad := bad_end(ended)) is not None:
        return bad, said(ended)
    named = any(names_it(ended.out + ended.err, name) for name in names)
    if ended.status != 0:
        return ("named" if named else "unnamed"), said(ended)
    try:
        other = world.changed(job_name)
    except RuntimeError as error:  # the files that the job left cannot be read
        other = [str(error).strip().splitlines()[-1]]
    # A file that the job does not read stays as it is; its results must be right.
    other = [one for one in other if one not in names or one.endswith(".jsonl")]
    if not other:
        return "survived", said(ended) if named else ""
    return ("named" if named else "silent"), ", ".join(other[:4])


def names_it(text: str, name: str) -> bool:
    """Tells if a message names a file, or its checkpoint, corpus, model or direction."""
    text = text.replace("\n", "")  # rich breaks long lines
    wholes: list[str] = re.findall(
        r"^(?:.*/)?checkpoints/\d+|^(?:.*/)?data(?=/)|^baselines/[^/]+|^vocabulary(?=/)", name
    )
    if any(one in text for one in [name, *wholes]):
        return True
    direction = re.search(r"decodes/(?:.*/|logprob-)?test\.(\w+-\w+)\.", name)
    return direction is not None and "decodes" in text and direction[1] in text


# ------------------------------------------------------------------------------- disk

_NEW_NAMESPACE, _NEW_USER = 0x00020000, 0x10000000
_READ_ONLY, _REMOUNT, _BIND, _PRIVATE = 1, 32, 4096, (1 << 18) | 16384
STARVED = {"train": "begun", "decode": "finished", "report": "compared"}
STARVED |= dict.fromkeys(AFTER, "finished")


def can_mount() -> bool:
    """Tells if a child may mount: as root, or as any user if user namespaces are allowed."""
    with tempfile.TemporaryDirectory() as folder:

        def mounts() -> int:
            _namespace()
            _mount("tmpfs", Path(folder), "tmpfs", 0, "size=64k")
            return 0

        return in_child(mounts).status == 0


def full(world: World, name: str, draw: random.Random) -> Trial:
    """Fills the disk during the job, then makes room and runs the same command again."""
    state = STARVED[name]
    world.begin(state)
    before = _pages(world.run)
    after = {"train": "finished", **{name: name for name in AFTER}}.get(name, "whole")
    room = draw.randrange(max(_pages(world.state(after)) - before, 1))

    def mounted(target: Path) -> None:
        _mount("tmpfs", target, "tmpfs", 0, f"size={before + room}")
        shutil.copytree(world.state(state), target, dirs_exist_ok=True)

    def freed(target: Path) -> None:
        _mount("", target, "", _REMOUNT, f"size={1 << 30}")

    trial = Trial("disk full", name, f"{name}: room for {room} more bytes")
    return _mounted_trial(world, trial, name, mounted, freed)


def read_only(world: World, name: str) -> Trial:
    """Makes the folder read-only, then writable again, and runs the same command again."""
    world.begin(STARVED[name])

    def mounted(target: Path) -> None:
        _mount(str(target), target, "", _BIND)
        _mount("", target, "", _REMOUNT | _BIND | _READ_ONLY)

    def freed(target: Path) -> None:
        _mount("", target, "", _REMOUNT | _BIND)

    return _mounted_trial(world, Trial("read-only folder", name, name), name, mounted, freed)


Mount = Callable[[Path], None]


def _mounted_trial(world: World, trial: Trial, name: str, mounted: Mount, freed: Mount) -> Trial:
    """Runs a whole trial in a child with its own mounts, which end with the child."""
    with tempfile.NamedTemporaryFile("r") as verdict:

        def work() -> int:
            _namespace()
            mounted(world.run)
            ended = job(name, world.run)
            freed(world.run)
            bad, after = bad_end(ended), again(world, trial, name)
            found = trial.ended(bad or "survived", said(ended))
            if after.verdict != "survived":
                found = trial.ended("lost" if bad else after.verdict, f"{found.said}; {after.said}")
            Path(verdict.name).write_text(json.dumps([found.verdict, found.said]))
            return 0

        ended = in_child(work, most_seconds=600)
        if ended.status != 0:
            raise RuntimeError(ended.err)
        return trial.ended(*json.load(verdict))


def _pages(folder: Path) -> int:
    """Returns the bytes that a folder takes of a tmpfs: whole pages."""
    sizes = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
    return sum(-(-size // 4096) * 4096 for size in sizes)


def _namespace() -> None:
    """Gives this process mounts of its own."""
    user, group = os.getuid(), os.getgid()
    _call("unshare", _NEW_NAMESPACE | (0 if user == 0 else _NEW_USER))
    if user != 0:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    _mount("", Path("/"), "", _PRIVATE)


def _mount(what: str, where: Path, kind: str, flags: int, options: str = "") -> None:
    words = [word.encode() or None for word in (what, str(where), kind)]
    _call("mount", *words, ctypes.c_ulong(flags), options.encode() or None)


def _call(name: str, *arguments: object) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments) != 0:
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")
