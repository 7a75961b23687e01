"""Options of one process of several, work of the primary alone, agreement; without the others."""

from typing import Any

import jax
import pytest

from m4.cli.main import parse
from m4.parallel import distributed
from m4.parallel.distributed_options import DistributedOptions
from m4.parallel.platform.hardware import code_digest
from m4.settings import InputError
from m4.storage.locks import Busy


class Service:
    """Stand-in for the service of keys and values that processes share."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.late = 0

    def key_value_set(self, key: str, value: str) -> None:
        assert key not in self.values
        self.values[key] = value

    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str:
        if self.late:
            self.late -= 1
            raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED: GetKeyValue() timed out")
        return self.values[key]


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Service:
    shared = Service()
    monkeypatch.setattr(distributed.distributed.global_state, "client", shared)
    monkeypatch.setattr(distributed.distributed.global_state, "num_processes", 2)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    become(monkeypatch, 0)
    return shared


def become(monkeypatch: pytest.MonkeyPatch, index: int) -> None:
    """Makes the test's process look like a newly started one with this index."""
    monkeypatch.setattr(jax, "process_index", lambda: index)
    monkeypatch.setattr(distributed, "_state", distributed._State())


def never() -> Any:
    raise AssertionError("only the primary does this")


def test_one_process_does_it_itself() -> None:
    marker = object()
    assert distributed.on_primary_then_broadcast("it", lambda: marker) is marker
    assert distributed.is_primary()
    assert not distributed.is_distributed()
    distributed.check_joined()


def test_result_of_the_primary_is_broadcast(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Twice by one name, and within each other: the others take no part in what is inside.
    on_primary = distributed.on_primary_then_broadcast
    assert on_primary("it", lambda: [1, "a"]) == [1, "a"]
    assert on_primary("it", lambda: on_primary("inner", lambda: 2)) == 2
    become(monkeypatch, 1)
    assert on_primary("it", never) == [1, "a"]
    assert on_primary("it", never) == 2
    assert len(service.values) == 2


def test_the_others_report_once_that_they_wait(
    service: Service, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    distributed.on_primary_then_broadcast("the corpus", lambda: None)
    become(monkeypatch, 1)
    service.late = 3
    assert distributed.on_primary_then_broadcast("the corpus", never) is None
    assert capsys.readouterr().err == "process 1 waits for process 0: the corpus\n"


@pytest.mark.parametrize(
    ("error", "of_the_others", "said"),
    [
        (ValueError("x: not empty\nIn call to 'Setup'"), InputError, "x: not empty"),
        # Another exit status than a mistake's: the job may be started again.
        (Busy("x: another m4 job"), distributed.PeerLost, "process 0 failed: x: another m4 job"),
        (AssertionError("it"), distributed.PeerLost, "process 0 failed: it"),
        (KeyboardInterrupt("it"), distributed.PeerLost, "process 0 failed: it"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_errors_of_the_primary_are_known_to_the_others(
    service: Service, monkeypatch: pytest.MonkeyPatch, error: Any, of_the_others: Any, said: str
) -> None:
    def work() -> None:
        raise error

    with pytest.raises(type(error)):
        distributed.on_primary_then_broadcast("MODEL_DIR", work)
    become(monkeypatch, 1)
    with pytest.raises(of_the_others) as caught:
        distributed.on_primary_then_broadcast("MODEL_DIR", never)
    assert str(caught.value) == said
    assert distributed.peer_lost(caught.value) == (None if of_the_others is InputError else said)


def test_connection_errors_are_recognized() -> None:
    gone = jax.errors.JaxRuntimeError(
        "UNKNOWN: Gloo all-reduce failed: Connection closed by peer [127.0.0.1]:5528"
    )
    message = distributed.peer_lost(gone)
    assert message is not None
    assert message.startswith("another process of the job has ended")
    assert "\n" not in message
    other = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 7 bytes")
    assert distributed.peer_lost(other) is None


def test_dead_process_is_noticed_within_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    """The defaults that `m4 train` gives JAX; tests/train/loop/test_processes.py kills one."""
    asked: dict[str, Any] = {}
    monkeypatch.setattr(jax.distributed, "initialize", lambda **given: asked.update(given))
    monkeypatch.setattr(jax.config, "update", lambda *_: None)  # the tests keep their own
    monkeypatch.setattr(distributed, "_state", distributed._State())
    arguments = ["--coordinator_address=host:1", "--process_count=2", "--process_index=1"]
    options = parse(["train", *arguments], {}).processes
    assert options is not None
    distributed.join(options)
    assert asked["coordinator_address"] == "host:1"
    # Heartbeats come at every half of the limit. One that is missed is known after the limit, so
    # half of it later at most; then the first process leaves the others time to say what is wrong.
    longest = 1.5 * asked["heartbeat_timeout_seconds"] + distributed._state.linger_seconds
    assert longest < 60


# --- Options ----------------------------------------------------------------------

WHOLE = ["--coordinator_address=host:1234", "--process_count=4", "--process_index=3"]


def joined(*arguments: str, job: str = "train", platforms: str | None = None) -> Any:
    environment = {} if platforms is None else {"JAX_PLATFORMS": platforms}
    return parse([job, *arguments], environment).processes


def test_default_is_one_process() -> None:
    assert joined() is None
    assert joined(platforms="cpu") is None
    assert joined(platforms="cpu,tpu") is None


def test_coordinator_address_joins() -> None:
    assert joined(*WHOLE) == DistributedOptions("host:1234", 4, 3, 30, 45)
    more = ["--heartbeat_seconds=7", "--join_timeout_s=8"]
    assert joined(*WHOLE, *more, platforms="tpu") == DistributedOptions("host:1234", 4, 3, 7, 8)


def test_cluster_is_asked_on_tpu_hosts_and_on_request() -> None:
    asked = DistributedOptions(None, None, None, 30, 300)
    assert joined(platforms="tpu,cpu") == asked
    assert joined("--multiprocess") == asked
    # A machine with TPUs that is no slice.
    assert joined("--process_count=1", platforms="tpu,cpu") is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (WHOLE[:2], "process_index must be given with coordinator_address, process_count"),
        (WHOLE[2:], "coordinator_address, process_count must be given with process_index"),
        (["--process_count=2"], "must be given with process_count"),
        ([*WHOLE, "--multiprocess"], "multiprocess asks the cluster for coordinator_address"),
        ([*WHOLE, "--process_index=4"], "process_index = 4: must be from 0 to .*, which is 3"),
        ([*WHOLE, "--process_index=-1"], "process_index = -1: must be from 0"),
        ([*WHOLE, "--coordinator_address=host"], "coordinator_address = 'host': must be host:port"),
        ([*WHOLE, "--coordinator_address=:1"], "must be host:port"),
        ([*WHOLE, "--heartbeat_seconds=0"], "heartbeat_seconds = 0: must be at least 1"),
        ([*WHOLE, "--join_timeout_s=0"], "join_timeout_s = 0: must be at least 1"),
    ],
)
def test_invalid_options_are_refused(arguments: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        joined(*arguments)


# --- Agreement --------------------------------------------------------------------

FACTS = {"code": "a" * 12, "config": "b" * 12, "number of devices": "64", "jax": "0.10.2"}


@pytest.mark.parametrize(
    ("every", "words"),
    [
        (
            [FACTS, FACTS, {**FACTS, "jax": "0.10.1"}],
            ["the 3 processes do not agree, so nothing is started: "
             "process 2 (host-2): jax 0.10.1, elsewhere 0.10.2"],
        ),
        (
            [{**FACTS, "config": "d" * 12, "number of devices": "60"}, FACTS, FACTS, FACTS],
            ["process 0 (host-0)", "config dddddddddddd", "number of devices 60, elsewhere 64"],
        ),
        (
            [FACTS, {**FACTS, "jax": ""}, FACTS, FACTS, {**FACTS, "jax": ""}],
            ["process 1 (host-1), 4 (host-4): jax not set, elsewhere 0.10.2"],
        ),
    ],
)  # fmt: skip
def test_error_has_every_difference(every: list[dict[str, str]], words: list[str]) -> None:
    hosts = [f"host-{index}" for index in range(len(every))]
    distributed.agree(hosts, [FACTS] * len(every))
    with pytest.raises(ValueError) as error:
        distributed.agree(hosts, every)
    said = str(error.value)
    assert all(word in said for word in words)
    assert ("jax" in said) == any("jax" in word for word in words)
    assert "\n" not in said


def test_facts_describe_this_process() -> None:
    here, other = distributed.facts({"A": "1", "B": "2"}), distributed.facts({"B": "2", "A": "1"})
    assert here == other != distributed.facts({"A": "1"})
    assert here["number of devices"] == here["local devices"] == "8"  # tests/conftest.py
    assert here["code"] == code_digest()[:12]
    distributed.check_agreement({"TRAIN_STEPS": "10"})
