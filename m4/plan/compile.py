"""Compiles a program for a machine and collects facts about it, in a subprocess.

`m4.plan.launch` sets the environment. No accelerator is used.
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
from m4.model import flops
from m4.parallel.mesh import split_axes
from m4.parallel.platform.machines import Chip, Gpu, Machine
from m4.plan import hlo, launch
from m4.plan import program as programs
from m4.settings import InputError, first_line

PROGRAMS = {"train": programs.train_program, "decode": programs.decode_program}


def devices_of(machine: Machine) -> Sequence[Any]:
    """Returns the machine's devices, for which programs can be compiled but not run."""
    chip, name = machine.chip, machine.slice_name
    setting: dict[str, Any] = {"platform": chip.platform}
    if isinstance(chip, Gpu):
        # Slices are nodes, the domains of NVLink. One process has the devices of all hosts.
        name, setting["target_config"] = chip.name, chip.target_config
        setting["topology"] = "x1x".join(map(str, machine.sizes))
    else:
        if chip.core_setting:
            setting["chip_config_name"] = chip.core_setting
        if machine.slices > 1:
            setting["num_slices"] = machine.slices
        if math.prod(machine.sizes) == 1:  # libtpu's own hosts have 2 x 2 chips or more
            setting["chips_per_host_bounds"] = (1, 1, 1)
    try:
        devices = topologies.get_topology_desc(name, **setting).devices
    except (jax.errors.JaxRuntimeError, NotImplementedError) as error:
        said = f"--topology={machine.name}: unknown to the compiler: {first_line(error)}"
        raise InputError(said) from error
    assert len(devices) == machine.devices, (len(devices), machine)
    return devices


def facts(experiment: Experiment, machine: Machine, kind: str, languages: int) -> dict[str, Any]:
    """Compiles a program and returns the facts about it, as JSON.

    Bytes, FLOPs and seconds are per device and run: of a training step ("step"), or, for a beam
    search, of encoding a batch ("encoding") and of a decoding step ("step").

    If the program does not fit, the facts have "refused".
    """
    start, chip = _now(), machine.chip
    devices = devices_of(machine)
    program = PROGRAMS[kind](experiment, devices, languages)
    traced, model = _now(), program.parts.model
    given = programs.given_bytes(program.params, program.optimizer)
    found: dict[str, Any] = {
        "format": launch.FORMAT,
        "program": kind,
        "topology": machine.name,
        "devices": machine.devices,
        "versions": launch.versions(chip.platform),
        "batch": {
            name: getattr(program, name)
            for name in ("rows", "source_length", "target_length", "beams")
        },
        "model": {
            "vocab_size": model.vocab_size,
            "source_vocab_size": model.source_vocab_size,
            "directions": len(program.parts.directions.names),
            "dtype": str(jax.numpy.dtype(model.dtype)),
        },
        "parameters": programs.parameter_counts(program.params),
        "given_bytes": given,
        "device_bytes": chip.device_bytes,
        "flops": _flops(program, machine.devices),
    }
    try:
        compiled = program.lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if (said := programs.out_of_memory(str(error))) is None:
            raise InputError(
                f"--program={kind}, --topology={machine.name}: {launch.compiler(chip.platform)} "
                f"does not compile it: {first_line(error)}; {launch.FAULT}"
            ) from error
        refused = {"message": said, "advice": programs.advice(program, given)}
        return {**found, "refused": refused, "compiler": _cost(start, traced)}
    found["compiler"] = _cost(start, traced)
    stats, kept = compiled.memory_analysis(), programs.kept_bytes(program)
    by_kind = programs.bytes_by_kind(given, stats, kept)
    if isinstance(chip, Gpu) and sum(by_kind.values()) > chip.device_bytes:
        # XLA also compiles GPU programs that do not fit.
        said = programs.too_much(by_kind, chip.device_bytes)
        return {**found, "refused": {"message": said, "advice": programs.advice(program, given)}}
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
        # Kernels of grouped products multiply only existing rows: their FLOPs are by arithmetic.
        count["kernels"] = float(count["experts_executed"]) if work.kernels else 0.0
        seconds[name] = step_time(work, count, found["model"]["dtype"], machine)
    sent = [each for work in parts.values() for each in work.collectives]
    # Bytes to devices of the slice (or other GPUs), and to other slices.
    networks = {
        "ici": hlo.summary(each for each in sent if each.slices == 1),
        "dcn": hlo.summary(each for each in sent if each.slices > 1),
    }
    between = {BETWEEN.format(kind): total for kind, total in networks["dcn"].items()}
    return {
        "flops": counted,
        "collectives": {k: total._asdict() for k, total in {**networks["ici"], **between}.items()},
        "sent_bytes": {
            name: sum(total.sent_bytes for total in by_kind.values())
            for name, by_kind in networks.items()
        },
        "unknown_loops": read.loops,
        "cycles": {name: work.cycles for name, work in parts.items()},
        "uncosted": {name: work.uncosted for name, work in parts.items()},
        # A decoding step on a GPU reads all weights for a few pieces: its FLOPs do not decide its
        # time.
        **({} if decode and isinstance(machine.chip, Gpu) else {"seconds": seconds}),
    }


def _flops(program: programs.PlannedProgram, devices: int) -> dict[str, dict[str, Any]]:
    """Returns part of the program -> FLOPs by arithmetic and in the traced program."""
    model = program.parts.model
    ways = [layer.dispatch for layer in (model.encoder_experts, model.decoder_experts) if layer]
    one_hot = any("einsum" in getattr(way, "__name__", "") for way in ways)
    lengths = program.rows, program.source_length, program.target_length
    apart = {"experts_apart": bool(split_axes(program.parts.mesh, "expert"))}
    if program.optimizer is None:
        parts = flops.search_flops(model, *lengths, program.beams, **apart)
        forwards = dict(zip(("encoding", "step"), parts, strict=True))
        useful = flops.forward_model_flops
        executed = functools.partial(flops.forward_executed_flops, one_hot=one_hot)
    else:
        forwards = {"step": flops.forward_flops(model, *lengths, **apart)}
        useful = flops.model_flops
        executed = functools.partial(flops.executed_flops, model, one_hot=one_hot, **apart)
    found: dict[str, dict[str, Any]] = {
        name: {
            "forward": {kind: count / devices for kind, count in forward.items()},
            "model": useful(forward) / devices,
            "executed": executed(forward) / devices,
            "experts_executed": (executed(forward) - executed({**forward, "experts": 0})) / devices,
        }
        for name, forward in forwards.items()
    }
    if program.optimizer is not None:
        found["step"]["traced"] = flops.traced_flops(program.traced.jaxpr, devices)
    return found


def _now() -> tuple[float, float]:
    """Returns seconds of wall time, and of CPU time of the process in all threads."""
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


# ------------------------------------------------------------------------------- the time model

# The model is arithmetic on a compiled program; nothing is measured. Compute on a TPU is the
# compiler's estimate of cycles, with loops multiplied out, at the chip's clock, plus products in
# kernels at the peak. Without a published clock, and on GPUs, for which XLA estimates no cycles, it
# is the executed FLOPs at the peak, which no program reaches. Communication is each collective's
# bytes over the slowest links that it needs, without overlap, at the links' stated speed, except
# for the all-to-all, whose speed is fitted to the GShard paper's measurements.

# Name of collectives of a kind between slices.
BETWEEN = "{} between slices"
# Share of a torus's bisection, and seconds per message: fitted to GShard (arXiv 2006.16668),
# section 5.2. There the exchange of MoE and Transformer layers takes 16% of their time on 128
# cores, and 3.75 times as long on 2,048. Ours of 36 layers at 2,048 tokens a core compute 0.765 s a
# step on 128 cores and exchange 8 MiB a core 108 times: 1.35 ms each, 5.06 ms on 2,048. Then
# 0.4793 ms / share + 127 messages = 1.3487 ms,    0.9587 ms / share + 2047 messages = 5.0575 ms.
# Not fitted: from 16 to 2,048 cores it makes an exchange of 8 MiB 8.3 times as long; the paper
# measured 9 (section 5.3). On other TPUs both are an assumption.
EXCHANGE_SHARE, MESSAGE_SECONDS = 0.4057, 1.316e-6


def step_time(
    work: hlo.Work, flops: Mapping[str, Any], dtype: str, machine: Machine
) -> dict[str, Any]:
    """Returns the model's seconds of one step: "compute", "communication" by kind, and "total".

    Compute and total are None if unknown. Collectives between slices are named by `BETWEEN`.

    Args:
        flops: "traced" for all operations, if known, and "kernels" for those without cycles.
    """
    by_kind: dict[str, float] = {}
    for each in work.collectives:
        seconds = each.times * seconds_of(each, machine)
        kind = each.kind if each.slices == 1 else BETWEEN.format(each.kind)
        by_kind[kind] = by_kind.get(kind, 0.0) + seconds
    clock, traced = machine.chip.clock_hz, flops.get("traced", 0.0)
    peak = machine.chip.device_flops(dtype)
    compute = traced / peak if traced else None
    if clock is not None:
        kernels = flops.get("kernels", 0.0) / peak
        compute = work.cycles / clock + kernels if work.cycles else None
    total = None if compute is None else compute + sum(by_kind.values())
    return {"compute": compute, "communication": by_kind, "total": total}


def seconds_of(each: hlo.Collective, machine: Machine) -> float:
    """Returns the seconds of one run of a collective."""
    chip, devices = machine.chip, len(each.groups[0])
    if isinstance(chip, Gpu):
        return _gpu_seconds(each, chip, machine.sizes[1])
    if each.slices > 1:
        return each.sent_bytes / chip.network_bytes
    if each.kind in ("collective-permute", "collective-broadcast"):
        return each.operand_bytes / chip.link_bytes  # to a neighbour, over one link
    if devices == 1:
        return 0.0
    if each.kind in ("all-to-all", "ragged-all-to-all"):
        fastest = bisection_seconds(each.operand_bytes, devices, machine)
        return fastest / EXCHANGE_SHARE + (devices - 1) * MESSAGE_SECONDS
    # Rings along all dimensions in both directions keep all links of a chip busy. The cores of a
    # chip first reduce among themselves through memory.
    speed = chip.links * chip.link_bytes
    if each.kind == "all-reduce":
        return 2 * each.operand_bytes / speed
    return each.payload_bytes / speed  # all-gather and reduce-scatter take half


def bisection_seconds(payload_bytes: float, devices: int, machine: Machine) -> float:
    """Returns the minimum seconds of an exchange of `payload_bytes` per device among all.

    Half of the devices send half of theirs to the other half: devices * payload / 4 cross the
    middle of the longest side, in one direction. There the links are chips / side, twice that in a
    ring. With c cores a chip and a torus of side X that is c * X * payload / (8 * speed): O(√D) on
    a square (GShard, section 5.3; its figure 9). A group of some of the devices counts as a square
    (or cube) of chips, a torus only where it spans a whole side.
    """
    chip = machine.chip
    assert isinstance(chip, Chip)
    chips = max(1, devices // chip.cores)
    if chips == 1:
        return 0.0
    whole = devices == machine.devices // machine.slices
    side = max(machine.sizes) if whole else chips ** (1 / len(machine.sizes))
    both = 2 if side >= chip.full else 1
    crossing = devices * payload_bytes / 4
    return crossing / (both * math.ceil(chips / side) * chip.link_bytes)


def _gpu_seconds(each: hlo.Collective, gpu: Gpu, node: int) -> float:
    """Returns the seconds of one run of a collective between GPUs, counted node by node."""
    # Within a node everything goes over NVLink. Between nodes every GPU has its own adapter: an
    # all-to-all sends through it what is for other nodes; a ring is as fast as the adapters of all
    # GPUs that a node has in it, but no faster than NVLink.
    if each.kind in ("collective-permute", "collective-broadcast"):
        apart = any(a // node != b // node for a, b in each.groups)
        return each.operand_bytes / (gpu.network_bytes if apart else gpu.nvlink_bytes)
    group = each.groups[0]
    nodes = len({device // node for device in group})
    together = len(group) / nodes  # GPUs within one node
    if each.kind in ("all-to-all", "ragged-all-to-all"):
        beyond = each.operand_bytes * (1 - together / len(group)) / gpu.network_bytes
        within = each.operand_bytes * (together - 1) / len(group) / gpu.nvlink_bytes
        return max(beyond, within)  # both run at once, over different links
    speed = gpu.nvlink_bytes if nodes == 1 else min(gpu.nvlink_bytes, together * gpu.network_bytes)
    return each.sent_bytes / speed
