"""A model that a run begins from: of m4, of T5X, or in Hugging Face's layout."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from m4.data.vocabulary.vocabulary import Vocabulary
from m4.model.transformer import Transformer
from m4.parallel.layout import Layout
from m4.train.initial import Old, Plan, Shapes, Use
from m4.train.program import TrainProgram
from m4.train.state import TrainState


class Source:
    """A trained model in a folder."""

    folder: Path
    step: int = 0  # the steps that it was trained for
    shapes: Shapes  # of its parameters, by path among unscanned layers

    def vocabulary(self, role: str) -> Vocabulary:
        """Returns the vocabulary of sources or targets."""
        raise NotImplementedError

    def check_model(self, model: Transformer, left: list[str]) -> None:
        """Checks that a new model, which leaves these parameters behind, computes what it does."""
        raise NotImplementedError

    def params(self, layout: Layout) -> tuple[Old, Use]:
        """Returns what reads a parameter, and how often each expert was chosen, where known."""
        raise NotImplementedError

    def learned(self) -> dict[str, Any]:
        """Returns the part of its last note that a run continues with."""
        return {}

    def last_loss(self) -> str | None:
        """Returns its last dev loss, for people, where it is known."""
        return None

    def with_optimizer(self, program: TrainProgram, plan: Plan) -> tuple[TrainState, str]:
        """Returns the state after its step, and what was kept of the optimizer's."""
        raise NotImplementedError

    def begin(
        self,
        program: TrainProgram,
        plan: Plan,
        init: Callable[..., Any] | None = None,
        *given: Any,
        step: int = 0,
    ) -> TrainState:
        """Returns a state with parameters that are taken over.

        Args:
            init: Makes the optimizer's state from the parameters and `given`. Defaults to the
                program's own.
        """
        there, use = self.params(program.layout)
        like = program.abstract_state().params
        fresh = program.new_params(plan.fresh_paths(like))
        with program.axis_rules():
            params = plan.take_over(there, fresh, use, like)
            placed = program.shardings.optimizer
            optimizer = jax.jit(init or program.optimizer.init, out_shardings=placed)(
                params, *given
            )
        at = jax.device_put(np.asarray(step, np.int32), program.shardings.step)
        return TrainState(at, params, optimizer)
