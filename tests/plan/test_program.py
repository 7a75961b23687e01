"""A plan compiles what training compiles, from shapes alone; its memory, and advice."""

import dataclasses
import functools
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from m4.cli.main import split_arguments
from m4.eval.decoding import search
from m4.eval.decoding.inference_checkpoint import placed
from m4.experiment import Experiment
from m4.model.moe import MoeLayer
from m4.model.transformer import Transformer, abstract_variables
from m4.parallel.platform.machines import GIB
from m4.plan.program import (
    PlannedProgram,
    advice,
    bytes_by_kind,
    decode_program,
    given_bytes,
    kept_bytes,
    out_of_memory,
    parameter_counts,
    planned,
    train_program,
)
from m4.train import program
from tests.command_line import TINY, experiment_of, m4
from tests.shared import tiny_run


def planned_experiment(folder: Path, *flags: str) -> Experiment:
    """Returns the experiment of tiny.gin, with flags of the command line."""
    _, bindings = split_arguments(flags)
    return experiment_of(TINY, f"MODEL_DIR = {str(folder)!r}", *bindings)


def assert_counts_are_kept_once(planned: PlannedProgram) -> None:
    """Asserts that choices are kept as one sum, and other metrics for each step of a row."""
    parts, model, experts = planned.parts, planned.parts.model, planned.parts.model.encoder_experts
    assert experts is not None
    layers = (model.encoder_layers + model.decoder_layers) // model.moe_every
    directions = len(parts.directions.names)
    sizes = [leaf.size for leaf in jax.tree.leaves(planned.traced.out_info[1]["expert_loads"])]
    assert sizes == [directions * experts.num_experts] * layers

    def kept(period: int) -> int:
        training = dataclasses.replace(parts.experiment.training, log_period=period)
        logged = dataclasses.replace(parts.experiment, training=training)
        return kept_bytes(planned._replace(parts=dataclasses.replace(parts, experiment=logged)))

    each = kept(2) - kept(1)
    # Three counts of the data by direction; int32 all.
    assert kept(1) - each == (sum(sizes) + 3 * directions) * 4
    assert kept_bytes(planned) == kept(1) + (parts.experiment.training.log_period - 1) * each


def test_what_training_keeps_is_in_the_memory() -> None:
    # 70 bytes of results, of which 64 take the place of arguments.
    stats = SimpleNamespace(
        argument_size_in_bytes=110, output_size_in_bytes=70, alias_size_in_bytes=64,
        temp_size_in_bytes=1000, generated_code_size_in_bytes=5,
    )  # fmt: skip
    given = {"replicated weights": 60, "expert weights": 30, "optimizer state": 10}
    found = bytes_by_kind(given, stats, 444)
    assert found == {
        **given, "batch": 10, "temporaries": 1006, "code": 5, "counts and log rows": 444,
    }  # fmt: skip


class _Seen(Exception):
    """Raised when a command reaches the first call of its program."""


def noting(real: Any, texts: list[str]) -> Any:
    """Returns a `jit` whose programs note their text at the first call, and end the command."""

    def jit(*made_of: Any) -> Any:
        def first_call(*arguments: Any) -> None:
            texts.append(real(*made_of).lower(*arguments).as_text())
            raise _Seen

        return first_call

    return jit


@pytest.mark.slow
def test_planned_step_is_the_one_that_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts, real = list[str](), program.jit_step
    monkeypatch.setattr(program, "jit_step", noting(real, texts))
    mesh = ["--gin.mesh.make_mesh.data=2", "--gin.mesh.make_mesh.expert=4"]
    with pytest.raises(_Seen):
        m4("train", f"--gin_file={TINY}", f"--model_dir={tmp_path / 'trained'}", *mesh)
    monkeypatch.setattr(program, "jit_step", real)
    # As many languages as the corpus of that config has.
    planned = train_program(planned_experiment(tmp_path / "planned", *mesh), jax.devices(), 3)
    assert not (tmp_path / "planned").exists()
    assert planned.lowered.as_text() == texts[0]
    # Experts lie over four devices, all other weights are everywhere.
    given = given_bytes(planned.params, planned.optimizer)
    counts = parameter_counts(planned.params)
    assert given["expert weights"] == counts.pop("experts") * 4 // 4
    assert given["replicated weights"] == sum(counts.values()) * 4
    assert_counts_are_kept_once(planned)


@pytest.mark.slow
def test_planned_search_is_the_one_that_decodes(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = shutil.copytree(tiny_run(tmp_path_factory), tmp_path / "trained")

    def restored(model: Any, folder: Path, step: int, vocabulary: Any, layout: Any) -> Any:
        return placed(abstract_variables(model), layout), step, {}

    texts = list[str]()
    monkeypatch.setattr("m4.jobs.decoding.testsets.whole_step", lambda folder, step, used: 1)
    monkeypatch.setattr("m4.jobs.decoding.testsets.restore_params", restored)
    monkeypatch.setattr(search, "jit_over", noting(search.jit_over, texts))
    search._program.cache_clear()
    bindings = ["--gin.mesh.make_mesh.data=2", "--gin.mesh.make_mesh.expert=4"]
    # The corpus may have no longer sources, but the plan is for the longest.
    bindings.append("--gin.experiment.Decoding.max_source_length=16")
    with pytest.raises(_Seen):
        m4("decode", f"--gin_file={TINY}", f"--model_dir={trained}", *bindings)
    search._program.cache_clear()
    planned = decode_program(planned_experiment(tmp_path / "planned", *bindings), jax.devices(), 3)
    assert planned.lowered.as_text() == texts[0]


def test_sizes_come_from_the_config(tmp_path: Path) -> None:
    experiment = planned_experiment(tmp_path, "--gin.corpus.CorpusSpec.target_vocabulary_size=300")
    parts = planned(experiment, 5)
    model, directions = parts.model, parts.directions.names
    # Rounded up to whole tiles of 128.
    assert (model.source_vocab_size, model.vocab_size) == (512, 384)
    assert len(directions) == 10  # five languages, from English and into it
    with pytest.raises(ValueError, match=r"^--languages=0: must be from 1 to 137$"):
        planned(experiment, 0)
    experiment = planned_experiment(tmp_path, "--gin.corpus.CorpusSpec.languages=['es', 'gl']")
    assert len(planned(experiment, 5).directions.names) == 4  # the config's own


def test_search_has_rows_for_every_device(tmp_path: Path) -> None:
    # 24 sentences a batch; on five devices 25.
    program = decode_program(planned_experiment(tmp_path), jax.devices()[:5], 3)
    assert (program.rows, program.source_length, program.target_length) == (25, 32, 16)
    assert program.optimizer is None
    assert re.search(r"num_partitions = 5", program.lowered.as_text())


# --- Programs that do not fit -----------------------------------------------------

TEMPORARIES = (
    "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries "
    "(20.31G) exceeds available HBM (15.48G)."
)
USED = (
    "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 24.00G of 15.48G hbm. "
    "Exceeded hbm capacity by 8.52G.\n\nTotal hbm usage >= 24.52G:\n"
)
EXPERTS = functools.partial(MoeLayer, num_experts=4)


@pytest.mark.parametrize(("message", "needed"), [(TEMPORARIES, "20.31G"), (USED, "24.00G")])
def test_message_is_one_line_with_its_numbers(message: str, needed: str) -> None:
    found = out_of_memory(message) or ""
    assert found.startswith("Ran out of memory")
    assert needed in found
    assert "15.48G" in found
    assert "\n" not in found
    assert out_of_memory("INVALID_ARGUMENT: shapes") is None


@dataclasses.dataclass
class Program:
    """The part of a program that advice looks at."""

    model: Transformer
    optimizer: Any = None
    rows: int = 2048
    beams: int = 1

    @property
    def parts(self) -> "Program":
        return self


def helps(program: Any, weights: int) -> list[str]:
    return advice(program, {"replicated weights": weights})


def test_advice_names_only_changes_that_the_config_lacks() -> None:
    found = helps(Program(Transformer(vocab_size=8, moe=EXPERTS), "adam"), 3 * GIB)
    # Weights and their gradients: twice 3 GiB.
    assert "6.0 GiB" in found[0]
    for name in ("remat", "BATCH_SIZE", "group_tokens", "bfloat16", "scan_layers"):
        assert sum(name in line for line in found) == 1, name
    done = Transformer(vocab_size=8, remat="full", scan_layers=True, dtype=jnp.dtype("bfloat16"))
    (only,) = helps(Program(done, "adam"), 0)
    assert "BATCH_SIZE" in only


def test_advice_for_decoding_names_settings_of_decoding() -> None:
    found = helps(Program(Transformer(vocab_size=8, moe=EXPERTS), beams=4), 3 * GIB)
    # There are no gradients: once 3 GiB.
    assert "3.0 GiB" in found[0]
    names = ("fsdp_axes", "batch_rows, 2048", "max_source_length", "eval_capacity", "beams: 4")
    for name in (*names, "bfloat16"):
        assert sum(name in line for line in found) == 1, name
    # Settings of training only.
    for name in ("remat", "BATCH_SIZE", "scan_layers"):
        assert not any(name in line for line in found), name
    done = Transformer(vocab_size=8, dtype=jnp.dtype("bfloat16"))
    assert len(helps(Program(done), 0)) == 2  # rows and their length are always named
