"""A folder in which the documents' commands run in seconds: every config has a tiny model."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from m4.data.sources.cldr import Cldr
from tests.command_line import Said
from tests.command_line import m4 as command
from tests.documents.blocks import ROOT, Block
from tests.documents.commands import made_by, words_of, write_program
from tests.shared import DEMO

CORPUS = {"es": 150, "gl": 100, "fy": 60}


class World:
    """A folder to run documents' blocks in.

    It has gin_configs/ with tiny.gin's sizes, my_corpus/ of TSV files, a tiny mt5/, benchmarks/,
    and what blocks make. A command that has run is not run again: what it printed is
    remembered.
    """

    def __init__(self, folder: Path, notes: Path, demo: tuple[Path, Said]):
        """Copies `demo`: a folder with gin_configs/ and runs/demo, and its command's output."""
        self.folder, self._notes = folder, notes
        self._said: dict[str, Said] = {}
        made, said = demo
        shutil.copytree(made, folder, dirs_exist_ok=True)
        self._said["\0".join(DEMO)] = said
        write_corpus(folder / "my_corpus")
        (folder / "benchmarks").symlink_to(ROOT / "benchmarks")
        shutil.copytree(ROOT / "tests" / "testdata" / "hf" / "mt5", folder / "mt5")

    def run(self, block: Block) -> list[Said]:
        """Runs a block's commands in this process; the working folder is this one."""
        if block.language == "python":
            exec(compile(python_of(block), str(block), "exec"), {})
            return []
        said = [self._run(words, block) for words in self._words(block.commands)]
        assert said, f"{block}: no commands"
        return said

    def run_in_processes(self, block: Block) -> None:
        """Runs a block unchanged, by bash or Python."""
        programs = self._notes / "programs"
        started = f'exec {sys.executable} "$@"'
        write_program(programs / "python", started)
        write_program(programs / "m4", f'exec {sys.executable} -m m4 "$@" {block.more}')
        environment = {**os.environ, "PATH": f"{programs}:/usr/bin:/bin"}
        del environment["JAX_NUM_CPU_DEVICES"]  # the block says how many
        python = block.language == "python"
        text = python_of(block) if python else "set -euo pipefail\n" + block.commands
        program = [sys.executable] if python else ["/bin/bash"]
        said = subprocess.run(
            [*program, "-c", text.replace(".venv/bin/", "")], cwd=self.folder, env=environment,
            capture_output=True, text=True, check=False, timeout=600,
        )  # fmt: skip
        assert said.returncode == 0, f"{block}: {said.stderr}"

    def _run(self, words: list[str], block: Block) -> Said:
        program, *rest = words
        if program == "make":
            (made,) = self._words(made_by(rest))
            return self._run(made, block)
        assert program == "m4", f"{block}: {program} runs in `run thorough` only, or as a dry run"
        return self.m4(*rest, *block.more.split())

    def m4(self, *words: str) -> Said:
        """Runs `m4 WORDS`, once."""
        key = "\0".join(words)
        if key not in self._said:
            self._said[key] = command(*words)
        said = self._said[key]
        assert said.status == 0, f"m4 {' '.join(words)}: {said.err}"
        return said

    def _words(self, commands: str) -> list[list[str]]:
        assert not re.search(r"^\s*(export )?[A-Z_]+=", commands, re.MULTILINE), (
            "an environment: `run thorough`"
        )
        return words_of(commands, self._notes / str(len(list(self._notes.iterdir()))))


def python_of(block: Block) -> str:
    """Returns the block's Python, in which arguments have the values of its mark."""
    text = block.text
    for word in block.more.split():
        name, _, value = word.partition("=")
        text, times = re.subn(rf"\b{name}=[\w.]+", f"{name}={value}", text)
        assert times, f"{block}: no {name}=..."
    return text


def write_corpus(folder: Path) -> None:
    """Writes my_corpus/gl.train.tsv and so on from the embedded corpus."""
    folder.mkdir()
    source = Cldr(CORPUS, test_pairs=12, dev_pairs=8)
    for language in CORPUS:
        for split in ("train", "dev", "test"):
            lines = [f"{english}\t{other}\n" for english, other in source.pairs(language, split)]
            (folder / f"{language}.{split}.tsv").write_text("".join(lines), encoding="utf-8")
