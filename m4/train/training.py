"""The settings of training."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Annotated

import optax
from jax.sharding import Mesh

from m4.parallel.mesh import Rules, make_mesh
from m4.settings import (
    MUTABLE,
    Between,
    Count,
    Factor,
    OneOf,
    Period,
    Rate,
    SettingError,
    Size,
    Steps,
    checked,
)
from m4.train.bad_steps import ACTIONS, DEFAULT, BadSteps
from m4.train.early_stopping import EarlyStopping
from m4.train.initial import InitialModel
from m4.train.multitask.cosines import GradientCosines
from m4.train.multitask.groups import Factors
from m4.train.multitask.surgery import Surgery
from m4.train.optimizer import ParameterRates

# JAX's random number generators for training.
RNGS = ("unsafe_rbg", "threefry2x32")
# Settings that name directions or sets of them.
BY_DIRECTION = ("loss_weights", "learning_rates", "gradients", "cosines")


@checked
@dataclasses.dataclass(frozen=True)
class Training:
    """Settings of training.

    Attributes:
        total_steps: Number of steps after which training ends.
        batch_size: Number of packed rows per step, over all devices.
        optimizer: Function from the total steps to an optimizer, such as
            `m4.train.optimizer.adamw`.
        seed: Seed of all random numbers.
        mesh: Function without arguments that returns the mesh of the devices.
        label_smoothing, z_loss: Arguments of `m4.train.step.cross_entropy`.
        loss_weights: Factors of the losses of directions, {"en-gl": 2.0}, languages ("gl") or
            resource levels ("low"), or a function of sizes such as a sampler
            (`m4.train.multitask.groups`). They turn the step towards a direction.
        learning_rates: Factors of the learning rate, named in the same way. A row of a parameter
            (all axes but the last one fixed, such as a piece's embedding) moves by the optimizer's
            update times the mean of the rates, weighted by the norms of the directions' gradients
            for the row, or by the last such mean if there are none. Thus they lengthen steps but
            do not turn them (Jean et al. 2019, arXiv 1909.06434, implicit schedules).
        parameter_rates: Factors of the learning rate by part of the model, {"encoder": 0.1,
            "embeddings": 0}: embeddings, encoder, decoder, and experts and router of both stacks,
            which take precedence over their stack. 0 freezes a part without computing gradients.
        gradients: Method that alters the gradients of sets of directions to reduce conflicts:
            `PCGrad` or `GradientVaccine` of `m4.train.multitask.surgery`. Defaults to none.
        cosines: Settings of comparisons between gradients of sets of directions
            (`m4.train.multitask.cosines`). Defaults to none.
        aux_loss_factor, router_z_loss_factor: Factors of the MoE layers' losses.
        rng: JAX's generator. "unsafe_rbg" is counter-based and much cheaper for dropout's many
            bits, but on TPU every device makes the bits of all devices: 128 GiB for the masks of
            2,048 experts. "threefry2x32" makes them in shards, the same numbers on any mesh.
        grad_accum_steps: Number of consecutive parts of the rows whose summed gradients make one
            step (T5X: num_microbatches), in the memory of a part's activations. Loss and gradients
            are the same, except for random numbers, which every part draws with a separate key,
            and for MoE layers. Their losses are means over parts, which differ from the batch's if
            a part is not a whole number of groups (`m4.model.moe`), for a gate whose loss is over
            all tokens (mixtral, by_direction, noisy_topk), and for z-losses of parts with different
            numbers of tokens.
        checkpoint_period: Number of steps between checkpoints.
        keep_checkpoints: Number of newest checkpoints to keep.
        keep_period: Multiples of this step are kept too. Defaults to none.
        keep_best: Number of checkpoints with the lowest dev/nll to keep too.
        fsdp_axes: Mesh axes over which weights and their statistics are sharded further
            (`m4.parallel.mesh.shard_further`).
        extra_axis_rules: Pairs (logical axis, mesh axis or axes) for axes that `m4.parallel.axes`
            does not split: ("embed", "model"), ("length", "model").
        log_period: Number of steps between rows of metrics.jsonl.
        tensorboard: Whether to write TensorBoard files too.
        dev_period: Number of steps between dev losses.
        dev_pairs: Maximum number of dev pairs per direction.
        early_stopping: Rule that ends training when dev no longer improves, and keeps the best
            parameters. Defaults to none.
        initial: Trained model to begin from. Defaults to random parameters.
        on_bad_step: Reaction to a step whose loss or gradient is not finite or a spike: "stop" ends
            training; "skip" leaves parameters and optimizer unchanged.
        bad_steps: Rules on which steps are bad, and how many are too many.
        profile: First and last step of a trace by JAX's profiler in MODEL_DIR/profile. By default
            there is none.
    """

    total_steps: Annotated[Steps, MUTABLE]
    batch_size: Size
    optimizer: Callable[[int], optax.GradientTransformation]
    seed: Count = 0
    mesh: Annotated[Callable[..., Mesh], MUTABLE] = make_mesh
    label_smoothing: Rate = 0.1
    z_loss: Factor = 1e-4
    loss_weights: Factors | None = None
    learning_rates: Factors | None = None
    parameter_rates: ParameterRates | None = None
    gradients: Surgery | None = None
    aux_loss_factor: Factor = 0.01
    router_z_loss_factor: Factor = 0.0
    rng: Annotated[str, OneOf(RNGS)] = "unsafe_rbg"
    grad_accum_steps: Size = 1
    checkpoint_period: Annotated[Period, MUTABLE] = 500
    keep_checkpoints: Annotated[int, Between(1, 10**6), MUTABLE] = 3
    keep_period: Annotated[Period | None, MUTABLE] = None
    keep_best: Annotated[Count, MUTABLE] = 0
    fsdp_axes: Annotated[Sequence[str], MUTABLE] = ("fsdp",)
    extra_axis_rules: Annotated[Rules, MUTABLE] = ()
    log_period: Annotated[Period, MUTABLE] = 25
    tensorboard: Annotated[bool, MUTABLE] = True
    dev_period: Annotated[Period, MUTABLE] = 1000
    dev_pairs: Annotated[Period, MUTABLE] = 200
    early_stopping: EarlyStopping | None = None
    cosines: Annotated[GradientCosines | None, MUTABLE] = None
    initial: InitialModel | None = None
    on_bad_step: Annotated[str, OneOf(ACTIONS), MUTABLE] = "stop"
    bad_steps: Annotated[BadSteps, MUTABLE] = DEFAULT
    profile: Annotated[Sequence[Period] | None, MUTABLE] = None

    def __post_init__(self) -> None:
        if self.profile is not None and (
            len(self.profile) != 2 or self.profile[0] > self.profile[1]
        ):
            allowed = "the first and the last step of a trace, such as (100, 103), or None"
            raise SettingError("Training.profile", self.profile, allowed)
        surgery = self.gradients
        if surgery is not None and (isinstance(surgery, type) or not hasattr(surgery, "weights")):
            allowed = "one that is made, with brackets: @surgery.PCGrad()"
            raise SettingError("Training.gradients", surgery, allowed)
        shorter, longer = sorted((self.checkpoint_period, self.dev_period))
        if self.keep_best and longer % shorter:
            raise SettingError(
                "Training.keep_best",
                self.keep_best,
                f"0 where neither of checkpoint_period = {self.checkpoint_period} and dev_period = "
                f"{self.dev_period} divides the other: dev is measured at few checkpoints",
            )
