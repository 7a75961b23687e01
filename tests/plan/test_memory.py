"""Messages and advice when a program does not fit."""

import functools

import jax.numpy as jnp
import pytest

from m4.model.moe import MoeLayer
from m4.model.transformer import Transformer
from m4.plan.machines import GIB
from m4.plan.memory import decoding_advice, out_of_memory, training_advice

TEMPORARIES = (
    "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries "
    "(20.31G) exceeds available HBM (15.48G)."
)
USED = (
    "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 24.00G of 15.48G hbm. "
    "Exceeded hbm capacity by 8.52G.\n\nTotal hbm usage >= 24.52G:\n"
)
EXPERTS = functools.partial(MoeLayer, num_experts=4)
LITTLE = {"replicated weights": 0, "expert weights": 0, "optimizer state": 0}


@pytest.mark.parametrize(("message", "needed"), [(TEMPORARIES, 20.31), (USED, 24.0)])
def test_message_is_one_line_with_its_numbers(message: str, needed: float) -> None:
    found = out_of_memory(message, ["a smaller batch"])
    assert found is not None
    assert found["message"].startswith("Ran out of memory")
    assert "\n" not in found["message"]
    assert found["advice"] == ["a smaller batch"]
    assert found["needed_bytes"] / GIB == pytest.approx(needed)
    assert found["available_bytes"] / GIB == pytest.approx(15.48)


def test_unreadable_numbers_and_another_error_are_none() -> None:
    found = out_of_memory("RESOURCE_EXHAUSTED: no", [])
    assert found is not None
    assert found["needed_bytes"] is found["available_bytes"] is None
    assert out_of_memory("INVALID_ARGUMENT: shapes", []) is None


def test_advice_names_only_changes_that_the_config_lacks() -> None:
    weights = {**LITTLE, "replicated weights": 3 * GIB}
    helps = training_advice(Transformer(vocab_size=8, moe=EXPERTS), weights)
    # Weights and their gradients: twice 3 GiB.
    assert "experiment.Training.fsdp_axes" in helps[0]
    assert "6.0 GiB" in helps[0]
    for name in ("remat", "BATCH_SIZE", "group_tokens", "bfloat16", "scan_layers"):
        assert sum(name in line for line in helps) == 1, name
    done = Transformer(vocab_size=8, remat="full", scan_layers=True, dtype=jnp.dtype("bfloat16"))
    (only,) = training_advice(done, LITTLE)
    assert "BATCH_SIZE" in only


def test_advice_for_decoding_names_settings_of_decoding() -> None:
    weights = {**LITTLE, "replicated weights": 3 * GIB}
    helps = decoding_advice(Transformer(vocab_size=8, moe=EXPERTS), weights, 2048, 4)
    # There are no gradients: once 3 GiB.
    assert "experiment.Training.fsdp_axes" in helps[0]
    assert "3.0 GiB" in helps[0]
    names = ("batch_rows, 2048", "max_source_length", "eval_capacity", "decode_capacity")
    for name in (*names, "experiment.Decoding.beams, 4", "bfloat16"):
        assert sum(name in line for line in helps) == 1, name
    # Settings of training only.
    for name in ("remat", "BATCH_SIZE", "gradients", "scan_layers"):
        assert not any(name in line for line in helps), name
    done = Transformer(vocab_size=8, dtype=jnp.dtype("bfloat16"))
    assert len(decoding_advice(done, LITTLE, 64, 1)) == 2  # rows and their length are always named
