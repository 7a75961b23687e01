"""Measures the cost of guarding a step: CPU time per step with and without, interleaved.

python benchmarks/bad_steps.py
"""

import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from m4.model.transformer import Transformer
from m4.parallel.mesh import make_mesh
from m4.train.bad_steps import RECENT, BadSteps, guarded
from m4.train.optimizer import adamw
from m4.train.program import train_program
from m4.train.training import Training


def main(steps: int = 10, warm: int = 3) -> None:
    model = Transformer(
        vocab_size=1024, width=128, heads=4, head_width=32, mlp_width=512, encoder_layers=1,
        decoder_layers=1, directions=2, dropout_rate=0.0,
    )  # fmt: skip
    training = Training(total_steps=100, batch_size=16, optimizer=adamw)
    program = train_program(training, model, ["en-gl", "gl-en"], make_mesh())
    ids = np.random.default_rng(0).integers(3, 1000, (16, 64), dtype=np.int32)
    batch: dict[str, Any] = {
        "encoder_input_tokens": ids,
        "decoder_input_tokens": np.pad(ids[:, :-1], ((0, 0), (1, 0))),
        "decoder_target_tokens": ids,
        "decoder_loss_weights": np.ones(ids.shape, np.float32),
        "direction_ids": np.zeros_like(ids),
        "encoder_direction_ids": np.zeros_like(ids),
    }
    spikes = BadSteps(spike_threshold=10.0)
    runs: dict[str, tuple[Any, dict[str, Any]]] = {
        "no guard": (program.jit(), {}),
        "skip": (program.jit(guarded(program.step, BadSteps())), {RECENT: jnp.zeros((0, 2))}),
        "skip, spikes": (
            program.jit(guarded(program.step, spikes)),
            {RECENT: jnp.full((spikes.window, 2), jnp.nan)},
        ),
    }
    states = {name: program.new_state() for name in runs}
    times: dict[str, list[float]] = {name: [] for name in runs}
    with program.axis_rules():
        for step in range(warm + steps):
            for name, (run, more) in runs.items():
                start = time.process_time()
                states[name], metrics = run(states[name], {**batch, **more})
                jax.block_until_ready(metrics["loss"])
                jax.block_until_ready(states[name])
                if step >= warm:
                    times[name].append(time.process_time() - start)
    for name, of in times.items():
        print(
            f"{name}: {1e3 * statistics.median(of):.1f} ms of CPU a step, least {1e3 * min(of):.1f}"
        )


if __name__ == "__main__":
    main()
