"""Processes that differ in code, config or devices are refused before they start."""

from pathlib import Path

import numpy as np
import pytest

from m4.parallel.consistency_check import (
    agree,
    check_agreement,
    check_device_counts,
    code_digest,
    config_digest,
    facts,
)

FACTS = {"code": "a" * 64, "config": "b" * 64, "number of devices": "64", "jax": "0.10.2"}


class Processes:
    """A gather over processes that are not there: each brings its rows, all get all rows."""

    def __init__(self, of_each: list[dict[str, str]], hosts: list[str] | None = None):
        self.hosts = hosts or [f"host-{index}" for index in range(len(of_each))]
        self.of_each = of_each
        self.rows: list[np.ndarray] = []
        for of_one, host in zip(of_each, self.hosts, strict=True):
            agree(of_one, host=host, gather=self._listen)

    def _listen(self, rows_RB: np.ndarray) -> np.ndarray:
        self.rows.append(rows_RB)
        return rows_RB[None]

    def message(self, process: int) -> str | None:
        """Returns the error of one process, when all are heard."""
        try:
            agree(
                self.of_each[process],
                host=self.hosts[process],
                gather=lambda rows_RB: np.stack(self.rows),
            )
        except ValueError as error:
            return str(error)
        return None


def test_equal_processes_agree() -> None:
    processes = Processes([FACTS] * 4)
    assert [processes.message(index) for index in range(4)] == [None] * 4
    # One shape, whatever the values: a name, and a row a fact.
    assert {rows_RB.shape for rows_RB in processes.rows} == {(1 + len(FACTS), 64)}


def test_error_names_the_process_and_both_values() -> None:
    processes = Processes([FACTS, FACTS, {**FACTS, "jax": "0.10.1"}])
    expected = (
        "the 3 processes do not agree, so nothing is started: "
        "process 2 (host-2): jax 0.10.1, the other 2: 0.10.2"
    )
    assert [processes.message(index) for index in range(3)] == [expected] * 3


@pytest.mark.parametrize(
    ("of_each", "process", "words"),
    [
        (
            [{**FACTS, "config": "d" * 64, "number of devices": "60"}, FACTS, FACTS, FACTS],
            1,  # whichever process asks: process 0 may be the one that differs
            ["process 0 (host-0)", "config dddddddddddd", "number of devices 60, the other 3: 64"],
        ),
        (
            [FACTS, {**FACTS, "jax": ""}, FACTS, FACTS, {**FACTS, "jax": ""}],
            3,
            ["process 1 (host-1) and 1 more: jax not set, the other 3: 0.10.2"],
        ),
        # Equal in their first 64 bytes.
        ([{"flags": "--xla_one=1 " * 10}, {"flags": "--xla_one=1 " * 10 + "x"}], 0, ["flags"]),
    ],
)
def test_error_has_every_difference(of_each: list, process: int, words: list[str]) -> None:
    message = Processes(of_each).message(process)
    assert message is not None
    assert all(word in message for word in words)
    assert ("jax" in message) == ("jax" in words[0])
    assert "\n" not in message


def test_host_names_are_not_compared_and_have_any_length() -> None:
    assert Processes([FACTS, FACTS], hosts=["a" * 200, "ü"]).message(0) is None


def test_unequal_device_counts_are_an_error_without_gathering() -> None:
    check_device_counts([4, 4, 4])
    with pytest.raises(ValueError, match="process 1 has 3 devices, 3 have 4"):
        check_device_counts([4, 3, 4, 4])
    # 2 + 4 + 6 = 3 * 4: counted by process, not by their sum.
    with pytest.raises(ValueError, match="process 1 has 4 devices"):
        check_device_counts([2, 4, 6])


def test_code_digest_changes_with_the_files(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    one, two = tmp_path / "a.py", tmp_path / "train" / "b.py"
    one.write_text("x = 1\n")
    two.write_text("y = 2\n")
    first = code_digest(tmp_path)
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "a.cpython-312.pyc").write_bytes(b"compiled")
    assert code_digest(tmp_path) == first
    two.write_text("y = 3\n")
    changed = code_digest(tmp_path)
    two.write_text("y = 2\n")
    assert code_digest(tmp_path) == first != changed
    two.rename(tmp_path / "b.py")  # the same text elsewhere is other code
    assert code_digest(tmp_path) != first


def test_config_digest_ignores_order() -> None:
    assert config_digest({"A": "1", "B": "2"}) == config_digest({"B": "2", "A": "1"})
    assert config_digest({"A": "1"}) != config_digest({"A": "2"})


def test_facts_describe_this_process() -> None:
    here = facts({"TRAIN_STEPS": "10"})
    assert here["number of devices"] == here["local devices"] == "8"  # tests/conftest.py
    assert here["code"] == code_digest()
    assert here["config"] == config_digest({"TRAIN_STEPS": "10"})
    agree(here)  # by JAX's own gather
    check_agreement({"TRAIN_STEPS": "10"})
