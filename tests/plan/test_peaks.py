"""The speeds that MFU divides by."""

from __future__ import annotations

import time

import jax
import pytest

from m4.plan import peaks


@pytest.mark.parametrize(
    ("kind", "dtype", "peak"),
    [
        ("TPU v4", "bfloat16", 275e12),
        ("TPU v3", "float32", 61.5e12),  # half a chip; float32 is rounded to bfloat16
        ("TPU v5 lite", "bfloat16", 197e12),
        ("NVIDIA H200", "bfloat16", 989e12),
        ("NVIDIA H100 80GB HBM3", "float32", 495e12),
        ("NVIDIA A100-SXM4-80GB", "bfloat16", 312e12),
        ("NVIDIA L40S", "bfloat16", None),
        ("NVIDIA L4", "float32", 60e12),
        ("Tesla T4", "float32", 8.1e12),
        ("cpu", "float32", None),
    ],
)
def test_peaks_of_device_kinds(kind: str, dtype: str, peak: float | None) -> None:
    assert peaks.stated_peak(kind, dtype) == peak


def test_every_chip_that_is_planned_for_has_jaxs_name() -> None:
    assert set(peaks._TPUS.values()) == set(peaks.CHIPS)


def test_fake_devices_share_the_measured_peak_of_the_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begin = time.monotonic()
    assert 1e9 < peaks.measured_peak("float32") < 1e15
    assert time.monotonic() - begin < 20
    monkeypatch.setattr(peaks, "measured_peak", lambda dtype: 5.0)
    assert peaks.peak_flops(jax.devices(), "float32") == 5.0
