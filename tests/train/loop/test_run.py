"""The training loop with steps in flight, its profile, its signals, and what a row says of time."""

import functools
import json
import math
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax._src.array import ArrayImpl

from m4.data.cache.cache import Cache
from m4.data.stream.stream import Stream
from m4.settings import SettingError
from m4.storage.metrics_log import read_metrics
from m4.storage.steps import latest_step
from m4.train.bad_steps import BadStep
from m4.train.loop import Trained
from m4.train.measuring.step_clock import Flops, StepClock
from m4.train.run import MOST_IN_FLIGHT, STEP_NAME, StepsInFlight, stop_signals
from tests.shared import model_for
from tests.train.test_step import mesh_of
from tests.train.trainers import timeless_rows, train, training_of

Run = Callable[..., Trained]
FLOPS, PEAK = 3e9, 1e12


@pytest.fixture(scope="module")
def run(corpus: Cache) -> Run:
    stream = Stream(corpus, seed=1, batch_rows=4)
    model = model_for(corpus, directions=4, dropout_rate=0.1)
    return functools.partial(
        train, model=model, stream=stream, mesh=mesh_of(1, 1), total_steps=6, log_period=3,
        checkpoint_period=100, flops=Flops(FLOPS, PEAK),
    )  # fmt: skip


@pytest.fixture(scope="module")
def whole(run: Run, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Trained]:
    """Returns a run as on CPUs, one step after the other, with a trace of two steps."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, run(folder, profile=(2, 3))


@pytest.fixture
def accelerated(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Runs with three steps in flight, as on an accelerator.

    Events are "step" for each that is dispatched, "read" wherever the host reads a device's array.
    """
    events: list[str] = []
    add, value = StepsInFlight.add, ArrayImpl._value

    def noted_add(self: StepsInFlight, *arguments: Any) -> None:
        events.append("step")
        add(self, *arguments)

    def noted_value(self: ArrayImpl) -> Any:
        events.append("read")
        return value.fget(self)

    monkeypatch.setitem(MOST_IN_FLIGHT, "cpu", 3)
    monkeypatch.setattr(StepsInFlight, "add", noted_add)
    monkeypatch.setattr(ArrayImpl, "_value", property(noted_value))
    return events


def test_steps_in_flight_end_as_steps_one_by_one_and_are_read_at_log_steps_alone(
    tmp_path: Path, run: Run, whole: tuple[Path, Trained], accelerated: list[str]
) -> None:
    trained = run(tmp_path)
    first = accelerated.index("step")
    # Neighbours of one kind as one: steps 1 to 3, a row, steps 4 to 6, a row and the checkpoint.
    events = [*accelerated[first:]]
    kinds = [e for i, e in enumerate(events) if i == 0 or e != events[i - 1]]
    assert kinds == ["step", "read", "step", "read"]
    assert events[:4] == ["step", "step", "step", "read"]
    jax.tree.map(np.testing.assert_array_equal, whole[1].params, trained.params)
    assert timeless_rows(tmp_path) == timeless_rows(whole[0])
    saved = [(path / "atlas.train.json").read_bytes() for path in (tmp_path, whole[0])]
    assert saved[0] == saved[1]


def test_a_step_in_flight_that_is_not_finite_is_in_no_checkpoint(
    tmp_path: Path, run: Run, accelerated: list[str]
) -> None:
    """Infinite weights after step 1: step 2 has no loss, and is looked at before it is saved."""
    infinite = optax.sgd(math.inf)
    with pytest.raises(BadStep, match=r"^step 2: loss is nan"):
        run(tmp_path, optimizer=lambda _: infinite, checkpoint_period=4, log_period=100)
    assert latest_step(tmp_path / "checkpoints") is None


def test_processes_agree_to_stop_at_the_flags_of_steps_that_have_ended() -> None:
    steps = StepsInFlight(3, StepClock(None, 0.0, {}))
    seen = []
    for flag in (0, 1, 0, 0):
        steps.add(False, jnp.zeros(()), jnp.asarray(flag, jnp.int32))
        seen.append(steps.stop)
    # Step 2 is waited for when step 4 has been dispatched.
    assert seen == [False, False, False, True]
    one = StepsInFlight(1, StepClock(None, 0.0, {}))
    one.add(False, jnp.zeros(()), jnp.asarray(1, jnp.int32))
    assert one.stop


def test_a_row_has_times_and_shares(whole: tuple[Path, Trained]) -> None:
    folder, trained = whole
    rows = read_metrics(folder)
    assert [row["step"] for row in rows] == [3, 6]
    for row in rows:
        assert 0 <= row["data_wait_seconds"] <= row["step_seconds"]
        assert row["step_seconds_deviation"] >= 0
        assert row["mfu"] == pytest.approx(FLOPS / row["step_seconds"] / PEAK, rel=1e-6)
        assert 0 < row["goodput"] < 1
    # The first of three steps includes compiling, and does not count.
    seconds = 2 * rows[0]["step_seconds"] + 3 * rows[1]["step_seconds"]
    assert trained.note["seconds_in_steps"] == pytest.approx(seconds, rel=1e-6)
    beat = json.loads((folder / "heartbeat.json").read_text(encoding="utf-8"))
    assert (beat["step"], beat["phase"]) == (6, "end")
    assert beat["started"] < beat["time"]


def test_a_trace_has_the_steps_that_were_asked_for(
    whole: tuple[Path, Trained], run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    """The trace is where TensorBoard's plugin looks; a resumed run that is past it says so."""
    folder, _ = whole
    (trace,) = (folder / "profile" / "plugins" / "profile").glob("*/*.xplane.pb")
    assert STEP_NAME.encode() in trace.read_bytes()
    first_start = json.loads((folder / "heartbeat.json").read_text(encoding="utf-8"))["started"]
    resumed = run(folder, total_steps=7, profile=(2, 3))
    said = "profile: none of steps 2 to 3: this run takes steps 7 to 7 (Training.profile)"
    assert said in capsys.readouterr().out.splitlines()
    assert len([*(folder / "profile").glob("**/*.xplane.pb")]) == 1
    # Goodput counts from the first start, and the steps of both runs.
    beat = json.loads((folder / "heartbeat.json").read_text(encoding="utf-8"))
    assert beat["started"] == first_start
    assert resumed.note["seconds_in_steps"] > 0


@pytest.mark.parametrize("steps", [(5, 4), (0, 3), (1, 2, 3), (4,), "12"])
def test_steps_to_profile_are_two_in_order(steps: Any) -> None:
    with pytest.raises(SettingError, match=r"^Training\.profile = "):
        training_of(profile=steps)
    assert training_of(profile=(4, 4)).profile == (4, 4)


Other = tuple[signal.Signals, list[int]]


@pytest.fixture(params=[signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def other(request: pytest.FixtureRequest) -> Iterator[Other]:
    """Yields a signal, and the list in which another handler of it collects calls."""
    others: list[int] = []
    before = signal.signal(request.param, lambda number, _: others.append(number))
    yield request.param, others
    signal.signal(request.param, before)


def test_signals_are_collected_and_handlers_given_back(other: Other) -> None:
    number, others = other
    with stop_signals() as received:
        signal.raise_signal(number)
        assert (received, others) == ([number], [])
        signal.raise_signal(signal.SIGTERM)  # sent again, as managers of machines do
        assert (received, others) == ([number, signal.SIGTERM], [])
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    others.clear()
    signal.raise_signal(number)
    assert others == [number]


def test_signals_end_at_once_what_has_nothing_to_save(other: Other) -> None:
    number, others = other
    with stop_signals(lambda: False) as received:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
        assert (received, others) == ([], [number])
