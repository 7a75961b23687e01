"""Every block of the documents is tested in the way that its mark names."""

import glob
import importlib
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from m4 import config
from m4.cli.main import COMMANDS, DATA_COMMANDS
from tests.documents.blocks import ROOT, WAYS, Block, blocks
from tests.documents.commands import dry_run_all, is_like
from tests.documents.world import World
from tests.shared import demo_run

BLOCKS = blocks()
# Command -> the example of its help.
EXAMPLES = {
    module.replace(".", " "): importlib.import_module(f"m4.jobs.{module}").EXAMPLE
    for module in [*(name for name in COMMANDS if name != "data"),
                   *(f"data.{name}" for name in DATA_COMMANDS)]
}  # fmt: skip
# Needs a compiler for TPUs, a bucket, another corpus, files of translations; README.md runs `demo`.
NOT_HERE = {"plan", "watch", "data remove", "score_files", "demo"}


# Its blocks train ten models, each from what the one before made: CI's alone.
TEN_MODELS = "docs/initial.md"
LONG = (pytest.mark.thorough, pytest.mark.every_part)


def in_the_way(way: str) -> pytest.MarkDecorator:
    """Parametrizes a test over the blocks with this mark."""
    chosen = [b for b in BLOCKS if b.way == way]
    marked = [
        pytest.param(b, id=str(b), marks=LONG if way == "run" and b.page == TEN_MODELS else ())
        for b in chosen
    ]
    return pytest.mark.parametrize("block", marked)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Returns the working folder, after the README's `make demo`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_NUM_CPU_DEVICES", "1")  # for the baselines' processes
        patch.setenv("COLUMNS", "120")
        notes, demo = tmp_path_factory.mktemp("notes"), demo_run(tmp_path_factory)
        made = World(tmp_path_factory.mktemp("world"), notes, demo)
        patch.chdir(made.folder)
        (first,) = [b for b in BLOCKS if b.way == "run" and b.commands.startswith("make demo")]
        assert made.run(first)[0].out == demo[1].out  # it is not run again
        yield made


def test_every_block_has_a_mark() -> None:
    wrong = [f"{block}: mark {block.way!r}" for block in BLOCKS if block.way not in WAYS]
    allowed = "\n".join(f"<!-- test: {way} -->  {what}" for way, what in WAYS.items())
    assert not wrong, "\n".join([*wrong, "the line above a block must be one of", allowed])


@pytest.mark.slow
@in_the_way("run")
def test_block_runs(block: Block, world: World) -> None:
    printed = "".join(said.out + said.err for said in world.run(block))
    # Models of a few steps are, where the reader's are not.
    printed = printed.replace("undertrained", "+0.0 [+0.0, +0.0]")
    for line in block.output:
        like = any(is_like(line, one) for one in printed.splitlines())
        assert like, f"{block}: nothing like {line!r} in {printed}"


@pytest.mark.thorough
@in_the_way("run thorough")
def test_block_runs_in_processes(block: Block, world: World) -> None:
    world.run_in_processes(block)


@in_the_way("dry_run")
def test_block_runs_dry(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    dry_run_all(block.commands, tmp_path)


@pytest.mark.parametrize("example", EXAMPLES.values())
def test_example_of_help_is_read(
    example: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    dry_run_all(f".venv/bin/{example}", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(EXAMPLES.keys() - NOT_HERE))
def test_example_of_help_runs(name: str, world: World) -> None:
    """After `make demo`, as the reader of the help has it, with fewer steps."""
    example = EXAMPLES[name].replace("TRAIN_STEPS=2000", "TRAIN_STEPS=6").replace("=100", "=2")
    _, *words = shlex.split(example)
    words = [path for word in words for path in sorted(glob.glob(word)) or [word]]
    world.m4(*words, *(["--yes"] if name == "new" else []))


@in_the_way("gin")
def test_block_binds(block: Block, tmp_path: Path) -> None:
    # In one file, as a user would append it: imports hold for the file.
    whole = (ROOT / (block.more or "gin_configs/demo.gin")).read_text(encoding="utf-8")
    path = tmp_path / "block.gin"
    path.write_text(f"{whole}\n{block.text}", encoding="utf-8")
    config.load([path]).experiment()
