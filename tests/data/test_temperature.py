from __future__ import annotations

import pytest

from m4.data.samplers.temperature import temperature


def test_by_hand() -> None:
    # 32^(1/5) = 2 and 1^(1/5) = 1.
    assert temperature({"a": 32, "b": 1}, 5.0) == pytest.approx({"a": 2 / 3, "b": 1 / 3})
    assert temperature({"a": 3, "b": 1}, 1.0) == pytest.approx({"a": 0.75, "b": 0.25})


def test_scale_then_cap_then_root() -> None:
    # a: min(64 * 2, 100) = 100 -> 10; b: min(8 * 2, 100) = 16 -> 4.
    rates = temperature({"a": 64, "b": 8}, 2.0, scale=2.0, maximum=100)
    assert rates == pytest.approx({"a": 10 / 14, "b": 4 / 14})


def test_infinity_is_uniform_and_order_is_kept() -> None:
    rates = temperature({"z": 1000, "a": 1}, float("inf"))
    assert list(rates.items()) == [("z", 0.5), ("a", 0.5)]


def test_errors() -> None:
    with pytest.raises(ValueError, match=r"temperature is 0\.5: must be at least 1"):
        temperature({"a": 1}, 0.5)
    with pytest.raises(ValueError, match="no examples to sample from in b"):
        temperature({"a": 1, "b": 0})
