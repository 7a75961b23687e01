"""From what is in a corpus and the machine at hand to the sizes of an experiment."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

from m4.eval.scoring.levels import DEFAULT_LEVELS, LEVELS, ResourceLevels
from m4.experiment import Experiment
from m4.jobs.bilingual.baselines import baselines_of
from m4.jobs.bilingual.progress import SHARES, TRAINED, step_flops
from m4.jobs.new.counting import Counted, Lengths
from m4.model.transformer import abstract_variables, count_parameters
from m4.parallel.platform.cpus import available_cpus
from m4.plan.flops import search_flops
from m4.plan.peaks import peak_flops
from m4.plan.program import planned_model

# How often a pair is seen in each direction, where the minutes allow: Muennighoff et al. 2023 found
# up to four repeats of text nearly as good as new text.
EPOCHS = 5
# A larger model is taken where it sees every pair so often.
_LEAST_EPOCHS = 3
MINUTES = 60
# Lengths that are chosen from: of the pairs this share fits.
_LENGTHS, _FITS = (16, 24, 32, 48, 64, 96, 128, 192, 256), 95
# Pieces of a batch, of both sides, a device. Of a packed row the share that is filled.
_BATCH = {"cpu": 3072, "accelerator": 32_768}
_FILLED = 0.9
# Test sentences of a direction: more make intervals little narrower.
_TEST_SENTENCES = 1000
# Pairs in all from which a vocabulary has so many pieces (docs/lab/2026-11-25-tatoeba.md).
_VOCABULARIES = {0: 3000, 50_000: 8000, 250_000: 16_000, 5_000_000: 32_000}
# Steps of a bilingual model at most; its dev chrF ends it earlier, by experience at half of them.
BASELINE_STEPS = 6000
_FEWEST_STEPS = 100
# The share of the peak that training, bilingual models and decoding (of searches to the greatest
# length, which real ones do not reach) have: on CPU cores those of the README's demo, a guess
# elsewhere.
_SHARES = {"cpu": (0.45, 1.0), "accelerator": (0.25, 0.01)}
# Python and its libraries; and what JAX and XLA take in addition to arrays.
_PROCESS_BYTES, _ARRAYS = 1.1 * 2**30, 1.5


class Size(NamedTuple):
    """Sizes of a model."""

    width: int
    layers: int
    experts: int
    dtype: str = "float32"


# The larger first.
_SIZES = {
    "cpu": (Size(256, 4, 8), Size(128, 2, 8)),
    "accelerator": (Size(512, 6, 64, "bfloat16"), Size(512, 6, 8, "bfloat16")),
}


# Bilingual models and their rows of a batch. With twice the width they were no better on up to
# 18,000 pairs a language (docs/lab/2026-11-25-tatoeba.md); accelerators are for larger corpora.
_BILINGUAL = {"cpu": (Size(64, 2, 0), 8), "accelerator": (Size(256, 3, 0), 32)}


@dataclasses.dataclass(frozen=True)
class Machine:
    """What there is to compute with. flops: operations a second, of all devices together."""

    kind: str
    name: str
    devices: int
    memory_bytes: int
    flops: float

    @classmethod
    def here(cls) -> Machine:
        device, cores = jax.devices()[0], len(available_cpus())
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if device.platform == "cpu":
            # What else runs there takes its part: the best of a few.
            flops = max(peak_flops(jax.devices(), "float32") for _ in range(3))
            return cls("cpu", f"{cores} CPU cores", cores, memory, flops)
        devices = jax.devices()
        memory = (device.memory_stats() or {}).get("bytes_limit", memory) * len(devices)
        name = f"{len(devices)} {device.device_kind}"
        flops = peak_flops(devices, "bfloat16")
        return cls("accelerator", name, len(devices), memory, flops)


@dataclasses.dataclass(frozen=True)
class Choice:
    """What the gin file sets."""

    languages: tuple[str, ...]
    size: Size
    vocabulary_size: int
    length: int
    batch_size: int
    steps: int
    dropout_rate: float
    levels: ResourceLevels
    test_sentences: int | None
    bilingual: Size
    bilingual_rows: int


def length_of(lengths: Iterable[Lengths]) -> int:
    """The shortest that nineteen of twenty pairs fit, in nineteen of twenty languages."""
    percentile = np.percentile([one.percentile(_FITS) for one in lengths], _FITS)
    return next((length for length in _LENGTHS if length >= percentile), _LENGTHS[-1])


def vocabulary_size(pairs: int) -> int:
    """Pieces of a vocabulary for so many training pairs."""
    return max(size for least, size in _VOCABULARIES.items() if pairs >= least)


def levels_of(sizes: Iterable[int]) -> ResourceLevels:
    """m4's own thresholds where each level has languages; else such that each has about a third."""
    ordered = sorted(sizes)
    low, high = (_round(ordered[len(ordered) * part // 3]) for part in (1, 2))
    thirds = dataclasses.replace(DEFAULT_LEVELS, high_resource_from=high, low_resource_below=low)
    for levels in (DEFAULT_LEVELS, thirds):
        if {levels.of(size) for size in ordered} == {*LEVELS}:
            return levels
    return DEFAULT_LEVELS


def _round(number: int) -> int:
    """Down to two digits that count."""
    unit = 10 ** max(0, len(str(number)) - 2)
    return number // unit * unit


def candidates(
    languages: Iterable[str], counted: Counted, lengths: Mapping[str, Lengths], machine: Machine
) -> list[Choice]:
    """A choice for every size of a model, the larger first, with the steps of `EPOCHS`."""
    languages = tuple(languages)
    sizes = {code: counted.sizes[code]["train"] for code in languages}
    length = length_of(lengths[code] for code in languages)
    devices = 1 if machine.kind == "cpu" else machine.devices
    rows = max(1, round(_BATCH[machine.kind] / (2 * length * 8))) * 8 * devices
    most = max(counted.sizes[code]["test"] for code in languages)
    bilingual, bilingual_rows = _BILINGUAL[machine.kind]
    made = Choice(
        languages=languages,
        size=_SIZES[machine.kind][0],
        vocabulary_size=vocabulary_size(sum(sizes.values())),
        length=length,
        batch_size=rows,
        steps=0,
        dropout_rate=0.1,
        levels=levels_of(sizes.values()),
        test_sentences=_TEST_SENTENCES if most > _TEST_SENTENCES else None,
        bilingual=bilingual,
        bilingual_rows=bilingual_rows,
    )
    pairs = pairs_a_step(made, sizes, lengths)
    steps = max(_FEWEST_STEPS, math.ceil(2 * EPOCHS * sum(sizes.values()) / pairs))
    made = dataclasses.replace(made, steps=_round(steps))
    return [dataclasses.replace(made, size=size) for size in _SIZES[machine.kind]]


def pairs_a_step(choice: Choice, sizes: Mapping[str, int], lengths: Mapping[str, Lengths]) -> float:
    """Pairs of a batch, each in one direction, of languages in proportion to their sizes."""
    total = sum(sizes.values())
    mean = sum(sizes[code] * lengths[code].mean for code in sizes) / total
    return _FILLED * choice.batch_size * choice.length / mean


def epochs(
    experiment: Experiment,
    choice: Choice,
    sizes: Mapping[str, int],
    lengths: Mapping[str, Lengths],
) -> dict[str, float]:
    """Language -> how often its pairs are seen, in the direction where that is the most."""
    by_direction = {
        direction: sizes[code] for code in sizes for direction in (f"en-{code}", f"{code}-en")
    }
    rates = experiment.data.sampler(by_direction)
    drawn = choice.steps * pairs_a_step(choice, sizes, lengths)
    return {
        code: drawn * max(rates[f"en-{code}"], rates[f"{code}-en"]) / sizes[code] for code in sizes
    }


class Held(NamedTuple):
    """Bytes that training holds, and parameters."""

    bytes_: int
    parameters: int


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Minutes of each job, bytes of memory, and parameters."""

    training: float
    baselines: float
    decoding: float
    memory_bytes: int
    parameters: int


def chosen(
    found: Sequence[Choice],
    made: Callable[[Choice], Experiment],
    minutes: float,
    machine: Machine,
) -> tuple[Choice, Held]:
    """The largest that fits in the memory and whose steps, as many as the minutes allow, see every
    pair often enough; else the smallest, with so many steps."""
    for choice in found:
        experiment = made(choice)
        expected = _training(experiment, machine)
        steps = int(choice.steps * min(1.0, minutes / max(expected, 1e-9)))
        last, enough = choice is found[-1], steps >= choice.steps * _LEAST_EPOCHS / EPOCHS
        if last or enough:
            needed = held(experiment)
            if last or needed.bytes_ < machine.memory_bytes:
                steps = _round(max(steps, _FEWEST_STEPS))
                return dataclasses.replace(choice, steps=steps), needed
    raise AssertionError("no choice")


def estimate(experiment: Experiment, counted: Counted, machine: Machine, needed: Held) -> Estimate:
    """Of a whole `m4 demo`: by arithmetic from FLOPs and sizes. Nothing is compiled."""
    small, (_, decoding) = SHARES[machine.kind], _SHARES[machine.kind]
    processes = 1 + (machine.devices if machine.kind == "cpu" else 0)
    return Estimate(
        training=_training(experiment, machine),
        baselines=_baselines(experiment, counted) / (small * machine.flops) / 60,
        decoding=_decoding(experiment, counted) / (decoding * machine.flops) / 60,
        memory_bytes=max(needed.bytes_, int(processes * _PROCESS_BYTES)),
        parameters=needed.parameters,
    )


def held(experiment: Experiment) -> Held:
    """What training holds: parameters, their gradients, the optimizer's state, activations."""
    model, _ = planned_model(experiment, 1)
    params = abstract_variables(model)["params"]
    optimizer = experiment.training.optimizer(experiment.training.total_steps)
    leaves = jax.tree.leaves([params, params, jax.eval_shape(optimizer.init, params)])
    state = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    tokens = experiment.training.batch_size * sum(experiment.data.corpus.lengths.values())
    # Of each piece: its activations in every layer, and logits three times.
    layers = model.encoder_layers + model.decoder_layers
    activations = 4 * tokens * (layers * 12 * model.width + 3 * model.vocab_size)
    return Held(int(_PROCESS_BYTES + _ARRAYS * (state + activations)), count_parameters(params))


def _training(experiment: Experiment, machine: Machine) -> float:
    """Minutes of the training."""
    seconds = step_flops(experiment) / (_SHARES[machine.kind][0] * machine.flops)
    return experiment.training.total_steps * seconds / 60


def _baselines(experiment: Experiment, counted: Counted) -> float:
    """FLOPs of all bilingual models' training."""
    total = 0.0
    for code in experiment.data.corpus.languages or ():
        level = experiment.data.levels.of(counted.sizes[code]["train"])
        one = baselines_of(experiment).of(level)
        total += TRAINED * one.training.total_steps * step_flops(one)
    return total


def _decoding(experiment: Experiment, counted: Counted) -> float:
    """FLOPs of translating the test sets in both directions."""
    model, _ = planned_model(experiment, 1)
    settings = experiment.decoding
    encoding, step = search_flops(
        model, 1, settings.max_source_length, settings.max_target_length, settings.beams
    )
    one = sum(encoding.values()) + settings.max_target_length * sum(step.values())
    tests = [counted.sizes[code]["test"] for code in experiment.data.corpus.languages or ()]
    most = settings.test_sentences
    return 2.0 * one * sum(tests if most is None else (min(test, most) for test in tests))
