"""Options by which a process knows that it is one of several."""

from __future__ import annotations

from typing import Any

import pytest

from m4.cli.arguments import parse
from m4.parallel.distributed_options import DistributedOptions

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


def test_other_jobs_have_one_process(capsys: pytest.CaptureFixture[str]) -> None:
    for job in ("train", "baselines", "decode", "eval", "score", "report", "demo"):
        assert joined(*WHOLE, job=job) is not None
    with pytest.raises(SystemExit):
        joined(*WHOLE, "--to=gl", job="translate")
    assert "unrecognized arguments: --coordinator_address" in capsys.readouterr().err
    # On a TPU host as well, unasked.
    assert joined("--to=gl", job="translate", platforms="tpu") is None
