"""Processes that differ in code, config or devices are refused before they start."""

from pathlib import Path

import pytest

from m4.parallel.consistency_check import agree, check_agreement, config_digest, facts
from m4.parallel.platform.hardware import code_digest

FACTS = {"code": "a" * 64, "config": "b" * 64, "number of devices": "64", "jax": "0.10.2"}


@pytest.mark.parametrize(
    ("every", "words"),
    [
        (
            [FACTS, FACTS, {**FACTS, "jax": "0.10.1"}],
            ["the 3 processes do not agree, so nothing is started: "
             "process 2 (host-2): jax 0.10.1, the other 2: 0.10.2"],
        ),
        (
            [{**FACTS, "config": "d" * 64, "number of devices": "60"}, FACTS, FACTS, FACTS],
            ["process 0 (host-0)", "config dddddddddddd", "number of devices 60, the other 3: 64"],
        ),
        (
            [FACTS, {**FACTS, "jax": ""}, FACTS, FACTS, {**FACTS, "jax": ""}],
            ["process 1 (host-1) and 1 more: jax not set, the other 3: 0.10.2"],
        ),
    ],
)  # fmt: skip
def test_error_has_every_difference(every: list[dict[str, str]], words: list[str]) -> None:
    hosts = [f"host-{index}" for index in range(len(every))]
    agree(hosts, [FACTS] * len(every))
    with pytest.raises(ValueError) as error:
        agree(hosts, every)
    said = str(error.value)
    assert all(word in said for word in words)
    assert ("jax" in said) == any("jax" in word for word in words)
    assert "\n" not in said


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
    check_agreement({"TRAIN_STEPS": "10"})
