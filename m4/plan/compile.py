"""Compiles a program for a machine and collects facts about it; runs in a subprocess.

The environment is `m4.plan.launch`'s. No accelerator is used.
"""

import functools
import math
import resource
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.experimental import topologies

from m4.experiment import Experiment
from m4.model.dispatch.einsum import einsum
from m4.parallel.mesh import split_axes
from m4.plan import flops, hlo, launch, memory
from m4.plan.machines import Cluster, Machine
from m4.plan.program import PlannedProgram, decode_program, train_program
from m4.plan.step_time import BETWEEN, step_time
from m4.settings import InputError, first_line

PROGRAMS = {"train": train_program, "decode": decode_program}


def devices_of(machine: Machine) -> Sequence[Any]:
    """Returns the machine's devices: programs can be compiled for them, not run."""
    if isinstance(machine, Cluster):
        # Slices are the domains of NVLink: nodes. All hosts' devices are in one process here.
        devices = topologies.get_topology_desc(
            machine.chip.name,
            platform="cuda",
            target_config=machine.chip.target_config,
            topology=f"{machine.nodes}x1x{machine.gpus}",
        ).devices
    else:
        chip, setting = machine.chip, dict[str, Any]()
        if chip.core_setting:
            setting["chip_config_name"] = chip.core_setting
        if machine.slices > 1:
            setting["num_slices"] = machine.slices
        if math.prod(machine.sizes) == 1:  # libtpu's own hosts have 2 x 2 chips or more
            setting["chips_per_host_bounds"] = (1, 1, 1)
        try:
            devices = topologies.get_topology_desc(
                machine.slice_name, platform="tpu", **setting
            ).devices
        except (jax.errors.JaxRuntimeError, NotImplementedError) as error:
            said = f"--topology={machine.name}: unknown to libtpu: {first_line(error)}"
            raise InputError(said) from error
    assert len(devices) == machine.devices, (len(devices), machine)
    return devices


def facts(experiment: Experiment, machine: Machine, kind: str, languages: int) -> dict[str, Any]:
    """Compiles a program and returns the facts about it, as JSON.

    Bytes, FLOPs and seconds are of one device and one run: of a training step ("step" alone), or of
    encoding a batch ("encoding") and of a decoding step ("step") in a beam search.

    Args:
        kind: One of `PROGRAMS`.

    Returns:
        The facts; with "refused" where the program does not fit.
    """
    start = _now()
    devices = devices_of(machine)
    program = PROGRAMS[kind](experiment, devices, languages)
    traced = _now()
    given = memory.given(program.parts.model, program.params, program.optimizer)
    found: dict[str, Any] = {
        "format": launch.FORMAT,
        "program": kind,
        "topology": machine.name,
        "devices": machine.devices,
        "versions": launch.versions(machine.platform),
        **_sizes(program),
        "parameters": memory.counts(program.params),
        "given_bytes": given,
        "device_bytes": machine.chip.device_bytes,
        "flops": _flops(program, machine.devices),
    }
    try:
        compiled = program.lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        refused = memory.out_of_memory(str(error), _advice(program, given))
        if refused is None:
            raise InputError(
                f"--program={kind}, --topology={machine.name}: {launch.compiler(machine.platform)} "
                f"does not compile it: {first_line(error)}; {launch.FAULT}"
            ) from error
        return {**found, "refused": refused, "compiler": _cost(start, traced)}
    found["compiler"] = _cost(start, traced)
    by_kind = memory.by_kind(given, compiled.memory_analysis(), memory.kept(program))
    if isinstance(machine, Cluster) and sum(by_kind.values()) > machine.chip.device_bytes:
        # XLA compiles programs for GPUs whether they fit or not.
        refused = memory.too_much(by_kind, machine.chip.device_bytes, _advice(program, given))
        return {**found, "refused": refused}
    found["memory_bytes"] = by_kind
    try:
        text = compiled.as_text()
    except jax.errors.JaxRuntimeError as error:
        # libtpu's printer lacks a case (a check of asynchronous operations, on v5p and v6e).
        return {**found, "no_text": first_line(error)}
    return {**found, **read_text(text, machine, found)}


def read_text(text: str, machine: Machine, found: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the facts that the compiled program's text adds to those in `found`."""
    read = hlo.read(text)
    decode = found["program"] == "decode"
    parts = {"encoding": read.once, "step": read.iteration} if decode else {"step": read.whole}
    counted = {name: dict(found["flops"][name]) for name in parts}
    seconds = {}
    for name, work in parts.items():
        count = counted[name]
        # Kernels of grouped products multiply the rows that there are: theirs are by arithmetic.
        count["kernels"] = float(count["experts_executed"]) if work.kernels else 0.0
        time_model = step_time(
            work.cycles,
            count.get("traced", 0.0),
            found["model"]["dtype"],
            work.collectives,
            machine,
            kernels=count["kernels"],
        )
        seconds[name] = {
            "compute": time_model.compute,
            "communication": time_model.by_kind,
            "total": time_model.total,
        }
    sent = [each for work in parts.values() for each in work.collectives]
    inside = hlo.summary(each for each in sent if each.slices == 1)
    between = hlo.summary(each for each in sent if each.slices > 1)
    named = {BETWEEN.format(kind): total for kind, total in between.items()}
    return {
        "flops": counted,
        "collectives": {kind: total._asdict() for kind, total in {**inside, **named}.items()},
        # To devices of the slice (or other GPUs), and to other slices.
        "sent_bytes": {
            "ici": sum(total.sent_bytes for total in inside.values()),
            "dcn": sum(total.sent_bytes for total in between.values()),
        },
        "unknown_loops": read.loops,
        "cycles": {name: work.cycles for name, work in parts.items()},
        "uncosted": {name: work.uncosted for name, work in parts.items()},
        # A decoding step on a GPU reads all weights for a few pieces: its FLOPs do not decide its
        # time.
        **({} if decode and isinstance(machine, Cluster) else {"seconds": seconds}),
    }


def _advice(program: PlannedProgram, given: Mapping[str, int]) -> list[str]:
    if program.optimizer is not None:
        return memory.training_advice(program.parts.model, given)
    return memory.decoding_advice(program.parts.model, given, program.rows, program.beams)


def _sizes(program: PlannedProgram) -> dict[str, Any]:
    model = program.parts.model
    return {
        "batch": {
            "rows": program.rows,
            "source_length": program.source_length,
            "target_length": program.target_length,
            "beams": program.beams,
        },
        "model": {
            "vocab_size": model.vocab_size,
            "source_vocab_size": model.source_vocab_size,
            "directions": len(program.parts.directions.names),
            "dtype": str(jax.numpy.dtype(model.dtype)),
        },
    }


def _flops(program: PlannedProgram, devices: int) -> dict[str, dict[str, Any]]:
    """Returns part of the program -> its operations, by arithmetic and in the traced program."""
    model = program.parts.model
    ways = [layer.dispatch for layer in (model.encoder_experts, model.decoder_experts) if layer]
    one_hot = any(way is einsum or "einsum" in getattr(way, "__name__", "") for way in ways)
    lengths = program.rows, program.source_length, program.target_length
    apart = {"experts_apart": bool(split_axes(program.parts.mesh, "expert"))}
    if program.optimizer is None:
        parts = flops.search_flops(model, *lengths, program.beams, **apart)
        return {
            name: {
                "forward": {kind: count / devices for kind, count in forward.items()},
                "model": flops.forward_model_flops(forward) / devices,
                "executed": flops.forward_executed_flops(forward, one_hot=one_hot) / devices,
                "experts_executed": forward["experts"] / devices,
            }
            for name, forward in zip(("encoding", "step"), parts, strict=True)
        }
    forward = flops.forward_flops(model, *lengths, **apart)
    executed = functools.partial(flops.executed_flops, model, one_hot=one_hot, **apart)
    return {
        "step": {
            "forward": {kind: count / devices for kind, count in forward.items()},
            "model": flops.model_flops(forward) / devices,
            "executed": executed(forward) / devices,
            "experts_executed": (executed(forward) - executed({**forward, "experts": 0})) / devices,
            "traced": flops.traced_flops(program.traced.jaxpr, devices),
        }
    }


def _now() -> tuple[float, float]:
    """Seconds of wall time, and of CPU time of all threads of the process."""
    return time.monotonic(), time.process_time()


def _cost(start: tuple[float, float], traced: tuple[float, float]) -> dict[str, float]:
    now, usage = _now(), resource.getrusage(resource.RUSAGE_SELF)
    return {
        "trace_seconds": traced[0] - start[0],
        "compile_seconds": now[0] - traced[0],
        "compile_cpu_seconds": now[1] - traced[1],
        "cpu_seconds": now[1],
        "host_bytes": usage.ru_maxrss * 1024,
    }
