"""The command line: its commands, and how their arguments are read.

The chosen command's module alone is imported, and imports nothing heavy: help appears at once.
"""

import argparse
import importlib
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from m4.parallel.distributed_options import distributed_options
from m4.parallel.platform.hardware import package_version
from m4.settings import InputError, pasted

# Command -> help. The command is the module m4.jobs.<command>.
COMMANDS = {
    "new": "look at a folder of sentence pairs, and write a config for it",
    "train": "train the model, from its latest checkpoint where there is one",
    "baselines": "train the bilingual baselines that are missing",
    "decode": "translate the test sets, or files of text, with the trained model",
    "eval": "score the test sets, translating them first if needed; --watch: each checkpoint",
    "score": "log-probability of the test sets' references, or of your own translations",
    "score_files": "scores, intervals and failure rates of anybody's translations; needs no run",
    "report": "scores, ΔBLEU table, plot and report.html from what is decoded; trains nothing",
    "demo": "run all steps: train, baselines, decode, report",
    "average": "make a run folder with the mean of several checkpoints' parameters",
    "translate": "translate the arguments, or standard input line by line",
    "data": "build or inspect the corpus: prepare, preview, vocabulary, batch, cleaning_report, "
    "list, remove",
    "watch": "show a training run from its files: loss, speed, experts, time left, scores",
    "checkpoint": "list, verify, inspect or convert a run's checkpoints; trim a pretrained model",
    "extract": "make a run folder with the experts and pieces of some directions alone",
    "export": "write a run's model for T5X to continue from, or for transformers and CTranslate2",
    "atlas": "which language goes to which expert: tables, atlas.png",
    "plan": "ahead-of-time compile for TPUs or GPUs (none needed): memory, traffic, time, cost",
}
# The commands of `m4 data`: the modules m4.jobs.data.<command>.
DATA_COMMANDS = {
    "prepare": "build the corpus in MODEL_DIR/data, or in experiment.Data.data_dir for several "
    "runs",
    "preview": "how often each language would be seen; data_preview.json",
    "vocabulary": "what the vocabulary makes of each language: pieces a sentence, bytes",
    "batch": "print the sentence pairs of a training step, with their direction, lengths and place",
    "cleaning_report": "report what cleaning drops, changes and flags, and why: data_report.html",
    "list": "list the corpora of folders, and the runs that use them",
    "remove": "remove corpora that no given run uses",
}
_GIN = (
    "Any setting can be given as --gin.NAME=VALUE: --gin.TRAIN_STEPS=2000,\n"
    "--gin.schedules.rsqrt.peak=1e-3, --gin.MODEL_DIR=runs/mine. Flags may be written with - for _."
)

# What T5X's users type, and m4's names for it.
_T5X_COMMANDS = {"infer": "decode", "evaluate": "eval", "finetune": "train", "pretrain": "train"}
_T5X_FLAGS = {
    "--run_mode": "the command is the first word: train, eval or decode",
    "--gin_bindings_file": "give a second --gin_file",
    "--tfds_data_dir": "set tfds.Tfds.data_dir in the config",
}


def parse(given: Sequence[str], environment: Mapping[str, str] = os.environ) -> argparse.Namespace:
    """Reads the words after `m4`; environment variables may name a cluster of processes.

    Returns:
        The command's arguments, `command` as it was typed ("data preview"), `do`, the function that
        runs it, and `processes`: how this process joins others, or None where it is alone.

    Raises:
        InputError: The words are T5X's, or contradict each other.
        SystemExit: argparse has printed help or a mistake.
    """
    others, bindings = split_arguments(given)
    top = argparse.ArgumentParser(
        prog=pasted(),
        description="Train, evaluate and use massively multilingual translation models.",
        epilog=_GIN,
    )
    version = "show the versions of m4 and jax, and the devices that jax computes on"
    top.add_argument("--version", action=_Version, nargs=0, help=version)
    _add_commands(top, COMMANDS, "m4.jobs", others)
    arguments, rest = top.parse_known_args(others)
    if hasattr(arguments, "text") and not any(word.startswith("-") for word in rest):
        arguments.text += rest  # argparse looks for texts before the first flag or behind the last
    elif rest:
        top.error(f"unrecognized arguments: {' '.join(rest)}")
    if hasattr(arguments, "gin_bindings"):
        arguments.gin_bindings += bindings
    elif bindings:
        raise InputError(f"'{bindings[0]}': m4 {arguments.command} reads no config")
    arguments.processes = None
    if hasattr(arguments, "multiprocess"):
        arguments.processes = distributed_options(environment, arguments)
    return arguments


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        import jax

        from m4.parallel.platform.accelerator import check_accelerator

        try:
            check_accelerator()
            place = f"{jax.device_count()} x {jax.devices()[0].device_kind}"
        except InputError as error:
            place = str(error)
        print(f"m4 {package_version('m4')}, jax {jax.__version__}: {place}")
        parser.exit()


def _add_commands(
    parser: argparse.ArgumentParser, helps: Mapping[str, str], package: str, words: Sequence[str]
) -> None:
    """Adds sub-commands; the one that the first word names gets its arguments."""
    commands = parser.add_subparsers(dest="name", required=True, metavar="command")
    for name, text in helps.items():
        if name not in words[:1]:
            commands.add_parser(name, help=text)
            continue
        made = commands.add_parser(
            name,
            help=text,
            description=f"{text[0].upper()}{text[1:]}.",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if name == "data":
            _add_commands(made, DATA_COMMANDS, f"{package}.data", words[1:])
            continue
        module: Any = importlib.import_module(f"{package}.{name}")
        made.add_argument("--debug", action="store_true", help="show where an error was raised")
        module.add_arguments(made)
        has_config = made.get_default("gin_bindings") is not None
        example = f"Example: {pasted()}{module.EXAMPLE.removeprefix('m4')}"
        made.epilog = "\n".join([example, *([_GIN] if has_config else [])])
        typed = f"{package}.{name}".removeprefix("m4.jobs.").replace(".", " ")
        made.set_defaults(command=typed, do=module.run)


def split_arguments(given: Sequence[str]) -> tuple[list[str], list[str]]:
    """Splits off --gin.NAME=VALUE: (other arguments, ["NAME = VALUE", ...]); --a-b becomes --a_b.

    Raises:
        InputError: A flag or command has T5X's name; the message has m4's.
    """
    others: list[str] = []
    bindings = []
    for position, argument in enumerate(given):
        if match := re.match(r"--gin\.([^=]+)=(.*)", argument, re.DOTALL):
            bindings.append(f"{match[1]} = {match[2]}")
            continue
        if argument == "--":
            return [*others, *given[position:]], bindings
        if argument.startswith("--"):
            name, equals, value = argument.partition("=")
            name = "--" + name[2:].replace("-", "_")
            argument = name + equals + value
            if said := _T5X_FLAGS.get(name):
                raise InputError(f"{name}: {said}")
        elif not others and argument in _T5X_COMMANDS:
            raise InputError(f"{argument}: m4's name is `{pasted(_T5X_COMMANDS[argument])}`")
        elif not others:
            argument = argument.replace("-", "_")
        others.append(argument)
    return others, bindings
