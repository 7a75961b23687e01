"""The cores that this process may use."""

import os
import sys

from m4.parallel.platform.cpus import available_cpus


def test_linux_reports_the_affinity(monkeypatch):
    def mine(pid):
        return {5, 2} if pid == 0 else set()

    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(os, "sched_getaffinity", mine, raising=False)  # only Linux has it
    assert available_cpus() == [2, 5]


def test_elsewhere_all_cpus_count(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    assert available_cpus() == [0, 1, 2]
