import pytest

from m4.data.splits import HashSplit


def test_shares_are_those_asked_for() -> None:
    split = HashSplit("B", dev_every=20, test_every=10)
    counts = {"train": 0, "dev": 0, "test": 0}
    for number in range(20_000):
        counts[split(f"sentence {number}")] += 1
    # Binomial: 2,000 of 20,000 with standard deviation 42; 1,000 with 31. Four of them.
    assert abs(counts["test"] - 2000) < 170
    assert abs(counts["dev"] - 1000) < 124


def test_case_width_and_spacing_do_not_matter() -> None:
    split = HashSplit("B", dev_every=4, test_every=4)
    for number in range(50):
        variants = (f"Good Day {number}", f"good  day {number}", f"Ｇood day {number}")
        assert len({split(text) for text in variants}) == 1
    assert {split(f"Good Day {number}") for number in range(50)} == {"train", "dev", "test"}


def test_a_larger_test_share_keeps_the_test_sentences_of_a_smaller_one() -> None:
    few, many = HashSplit("B", 0, 100), HashSplit("B", 0, 10)
    texts = [f"sentence {number}" for number in range(2000)]
    chosen = [text for text in texts if few(text) == "test"]
    assert chosen
    assert all(many(text) == "test" for text in chosen)


def test_bad_shares() -> None:
    with pytest.raises(ValueError, match=r"B\.dev_every = 1: must be 0"):
        HashSplit("B", 1, 5)
    with pytest.raises(ValueError, match=r"B\.test_every = -2"):
        HashSplit("B", 5, -2)
    with pytest.raises(ValueError, match="none is left to train on"):
        HashSplit("B", 2, 2)
    assert not HashSplit("B", 0, 0)
