"""Compiles a program for a topology and collects facts about it, in a subprocess.

The environment is `m4.plan.launch`'s. No accelerator is used.
"""

import functools
import math
import resource
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies

from m4.experiment import Experiment
from m4.model.dispatch.einsum import einsum
from m4.plan import flops, launch, memory
from m4.plan.clusters import Cluster
from m4.plan.hlo.collectives import Traffic, measure, measure_by_loop, summary
from m4.plan.machines import Machine
from m4.plan.oom import decoding_advice, out_of_memory, too_much, training_advice
from m4.plan.program import PlannedProgram, decode_program, train_program
from m4.plan.step_time import BETWEEN, step_time
from m4.settings import InputError

_KERNEL = "tpu_custom_call"
PROGRAMS = {"train": train_program, "decode": decode_program}


def devices_of(machine: Machine) -> Sequence[Any]:
    """The topology's devices: programs can be compiled for them, not run.

    Raises:
        ValueError: a topology that the compiler does not know.
    """
    if isinstance(machine, Cluster):
        return _gpus(machine)
    chip = machine.chip
    setting: dict[str, Any] = {"chip_config_name": chip.core_setting} if chip.core_setting else {}
    if machine.slices > 1:
        setting["num_slices"] = machine.slices
    if math.prod(machine.sizes) == 1:  # libtpu's own hosts have 2 x 2 chips or more
        setting["chips_per_host_bounds"] = (1, 1, 1)
    try:
        found = topologies.get_topology_desc(machine.slice_name, platform="tpu", **setting)
    except (jax.errors.JaxRuntimeError, NotImplementedError) as error:
        said = f"--topology={machine.name}: unknown to libtpu: {_first_line(error)}"
        raise InputError(said) from error
    devices = found.devices
    assert len(devices) == machine.devices, (len(devices), machine)
    return devices


def _gpus(machine: Cluster) -> Sequence[Any]:
    # Slices are the domains of NVLink: nodes. All hosts' devices are in one process here.
    found = topologies.get_topology_desc(
        machine.chip.name,
        platform="cuda",
        target_config=machine.chip.target_config,
        topology=f"{machine.nodes}x1x{machine.gpus}",
    )
    assert len(found.devices) == machine.devices, (len(found.devices), machine)
    return found.devices


def facts(experiment: Experiment, machine: Machine, kind: str, languages: int) -> dict[str, Any]:
    """The facts of one compilation, as JSON; "refused" where it does not fit.

    Raises:
        ValueError: mistakes in the config, before anything is compiled; or the compiler fails.
    """
    start = _now()
    devices = devices_of(machine)
    program = PROGRAMS[kind](experiment, devices, languages)
    traced = _now()
    given = memory.given(program)
    found: dict[str, Any] = {
        "format": launch.FORMAT,
        "program": kind,
        "topology": machine.name,
        "devices": machine.devices,
        "device_kind": devices[0].device_kind,
        "versions": launch.versions(machine.platform),
        **_sizes(program),
        "parameters": memory.counts(program),
        "given_bytes": given,
        "device_bytes": machine.device_bytes,
        "flops": _flops(program, machine.devices),
    }
    try:
        compiled = program.lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        refused = out_of_memory(str(error), _advice(program, given))
        if refused is None:
            raise InputError(
                f"--program={kind}, --topology={machine.name}: {launch.compiler(machine.platform)} "
                f"does not compile it: {_first_line(error)}; {launch.FAULT}"
            ) from error
        return {**found, "refused": refused, "compiler": _cost(start, traced)}
    found["compiler"] = _cost(start, traced)
    by_kind = memory.by_kind(given, compiled.memory_analysis(), memory.kept(program))
    if isinstance(machine, Cluster) and sum(by_kind.values()) > machine.device_bytes:
        # XLA compiles programs for GPUs whether they fit or not.
        refused = too_much(by_kind, machine.device_bytes, _advice(program, given))
        return {**found, "refused": refused}
    found["memory_bytes"] = by_kind
    return {**found, **_text(compiled, machine, found)}


def _text(compiled: Any, machine: Machine, found: Mapping[str, Any]) -> dict[str, Any]:
    """What is read from the program's text, or why there is none. found: the facts so far."""
    try:
        text = compiled.as_text()
    except jax.errors.JaxRuntimeError as error:
        # libtpu's printer lacks a case (a check of asynchronous operations, on v5p and v6e).
        return {"no_text": _first_line(error)}
    if found["program"] == "decode":
        return _search(text, machine, found)
    measured = measure(text)
    counted = _counted(measured, found["flops"])
    return {
        "flops": {**found["flops"], **counted},
        **_traffic(measured),
        "loops_unknown": measured.loops_unknown,
        "cycles": measured.cycles,
        "uncosted": measured.uncosted,
        "step_seconds": _seconds(
            measured, found["flops"]["traced"], counted["kernels"], machine, found
        ),
    }


def _first_line(error: Exception) -> str:
    return str(error).split("\n", 1)[0][:300]


def _counted(measured: Traffic, arithmetic: Mapping[str, Any]) -> dict[str, Any]:
    """Products read from a program's text, and those in the kernels of grouped products, which
    multiply the rows that there are: by arithmetic."""
    unread = dict(measured.unread)
    kernels = float(arithmetic["experts_executed"]) if unread.pop(_KERNEL, 0) else 0.0
    return {"compiled": measured.flops + kernels, "kernels": kernels, "unread": unread}


def _search(text: str, machine: Machine, found: Mapping[str, Any]) -> dict[str, Any]:
    """The same of a beam search: of encoding a batch, and of one decoding step."""
    by_loop = measure_by_loop(text)
    found_parts = {"encoding": by_loop.once, "step": by_loop.iteration}
    counted = {name: _counted(each, found["flops"][name]) for name, each in found_parts.items()}
    parts: dict[str, Any] = {
        "flops": {name: {**found["flops"][name], **counted[name]} for name in found_parts},
        **_traffic(by_loop.once, by_loop.iteration),
        "loops_unknown": by_loop.iteration.loops_unknown,
        "search_loops": by_loop.loops,
        "cycles": {name: measured.cycles for name, measured in found_parts.items()},
        "uncosted": {name: measured.uncosted for name, measured in found_parts.items()},
    }
    if isinstance(machine, Cluster):
        # A decoding step reads all weights for a few pieces: its FLOPs do not decide its time.
        return parts
    seconds = {
        name: _seconds(each, 0.0, counted[name]["kernels"], machine, found)
        for name, each in found_parts.items()
    }
    return {**parts, "search_seconds": seconds}


def _traffic(*measured: Traffic) -> dict[str, Any]:
    """Totals by kind, and what a device sends by the network: inside its slice (or to other GPUs),
    and to other slices."""
    together = [each for one in measured for each in one.collectives]
    inside = summary(each for each in together if each.slices == 1)
    between = summary(each for each in together if each.slices > 1)
    named = {BETWEEN.format(kind): total for kind, total in between.items()}
    return {
        "collectives": {kind: vars(total) for kind, total in {**inside, **named}.items()},
        "sent_bytes": {
            "ici": sum(total.sent_bytes for total in inside.values()),
            "dcn": sum(total.sent_bytes for total in between.values()),
        },
    }


def _seconds(
    measured: Traffic,
    executed: float,
    kernels: float,
    machine: Machine,
    found: Mapping[str, Any],
) -> dict[str, Any]:
    dtype, sent = found["model"]["dtype"], measured.collectives
    time_model = step_time(measured.cycles, executed, dtype, sent, machine, kernels=kernels)
    return {
        "compute": time_model.compute,
        "communication": time_model.by_kind,
        "total": time_model.total,
    }


def _advice(program: PlannedProgram, given: Mapping[str, int]) -> list[str]:
    if program.optimizer is not None:
        return training_advice(program.model, given)
    return decoding_advice(program.model, given, program.rows, program.beams)


def _sizes(program: PlannedProgram) -> dict[str, Any]:
    model = program.model
    experts = model.encoder_experts
    return {
        "batch": {
            "rows": program.rows,
            "source_length": program.source_length,
            "target_length": program.target_length,
            "beams": program.beams,
        },
        "model": {
            "encoder_layers": model.encoder_layers,
            "decoder_layers": model.decoder_layers,
            "experts": experts.num_experts if experts else 0,
            "eval_capacity_factor": experts.eval_capacity_factor if experts else None,
            "vocab_size": model.vocab_size,
            "source_vocab_size": model.source_vocab_size,
            "directions": program.directions,
            "remat": model.remat,
            "dtype": str(jax.numpy.dtype(model.dtype)),
        },
    }


def _flops(program: PlannedProgram, devices: int) -> dict[str, Any]:
    """Of a device and training step; of a search, for encoding and for a decoding step."""
    model = program.model
    ways = [layer.dispatch for layer in (model.encoder_experts, model.decoder_experts) if layer]
    one_hot = any(way is einsum or "einsum" in getattr(way, "__name__", "") for way in ways)
    lengths = program.rows, program.source_length, program.target_length
    apart = {"experts_apart": program.experts_apart}
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
        "forward": {kind: count / devices for kind, count in forward.items()},
        "model": flops.model_flops(forward) / devices,
        "executed": executed(forward) / devices,
        "experts_executed": (executed(forward) - executed({**forward, "experts": 0})) / devices,
        "traced": flops.traced_flops(program.jaxpr, devices),
    }


class _Clock(NamedTuple):
    """Seconds of wall time, and of CPU time of all threads of the process."""

    wall: float
    cpu: float


def _now() -> _Clock:
    return _Clock(time.monotonic(), time.process_time())


def _cost(start: _Clock, traced: _Clock) -> dict[str, float]:
    now, usage = _now(), resource.getrusage(resource.RUSAGE_SELF)
    return {
        "trace_seconds": traced.wall - start.wall,
        "compile_seconds": now.wall - traced.wall,
        "compile_cpu_seconds": now.cpu - traced.cpu,
        "cpu_seconds": now.cpu,
        "host_bytes": usage.ru_maxrss * 1024,
    }
