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

# JAX's generators of random numbers in training.
RNGS = ("unsafe_rbg", "threefry2x32")
# The settings that name directions, or group them.
BY_DIRECTION = ("loss_weights", "learning_rates", "gradients", "cosines")


@checked
@dataclasses.dataclass(frozen=True)
class Training:
    """Settings of training.

    Attributes:
        total_steps: Steps after which training ends.
        batch_size: Packed rows of a step, over all devices.
        optimizer: Function from the total steps to an optimizer, as `m4.train.optimizer.adamw`.
        seed: Seed of everything that is drawn.
        mesh: Function of no arguments that returns the mesh of the devices.
        label_smoothing, z_loss: Arguments of `m4.train.step.cross_entropy`.
        loss_weights: Factors of the losses of directions: {"en-gl": 2.0}, of languages ("gl") or of
            resource levels ("low"), or a function of their sizes such as a sampler
            (`m4.train.multitask.groups`). They turn the step towards a direction.
        learning_rates: Factors of the learning rate, named in the same way. A row of a parameter
            (all axes but the last one fixed: a piece's embedding) moves by the optimizer's update
            times the mean of the rates, weighted by the norms of the gradients that the directions
            give to the row; by the last such mean where they give none. So they lengthen steps and
            do not turn them (Jean et al. 2019, arXiv 1909.06434, implicit schedules).
        parameter_rates: Factors of the learning rate by group of parameters, {"encoder": 0.1,
            "embeddings": 0}: embeddings, encoder, decoder, and of both stacks experts and router,
            which count before their stack. 0 freezes a group: its gradients are not computed.
        gradients: Alters the gradients of groups of directions to reduce conflicts between
            them, `PCGrad` or `GradientVaccine` of `m4.train.multitask.surgery`. Defaults to none.
        cosines: How often the gradients of groups of directions are compared
            (`m4.train.multitask.cosines`). Defaults to never.
        aux_loss_factor, router_z_loss_factor: Factors of the MoE layers' losses.
        rng: JAX's generator. "unsafe_rbg" is counter-based and far cheaper for dropout's many bits,
            but on TPU every device makes the bits of all devices: 128 GiB for the masks of 2,048
            experts. "threefry2x32" makes them in shards, the same numbers on any mesh.
        grad_accum_steps: Parts in which the rows go through the model, one after the other; the sum
            of their gradients makes one step (T5X: num_microbatches). Loss and gradients are the
            same, in the memory of a part's activations, except for random numbers, which every part
            draws with a separate key, and for MoE layers: their losses are means of the parts' own,
            which differ from the batch's where a part is not a whole number of groups
            (`m4.model.moe`), for a gate whose loss is over all tokens (mixtral, by_direction,
            noisy_topk), and for z-losses of parts with unlike numbers of tokens.
        checkpoint_period: Steps between checkpoints.
        keep_checkpoints: Number of the newest checkpoints that stay. Multiples of keep_period stay
            too, and of those that dev was measured at the keep_best ones of lowest dev/nll.
        fsdp_axes: Mesh axes over which weights and their statistics are sharded further
            (`m4.parallel.mesh.shard_further`).
        extra_axis_rules: Pairs (logical axis, mesh axis or axes) in addition to those of
            `m4.parallel.axes`, for what these leave whole: ("embed", "model"), ("length", "model").
        log_period: Steps between rows of metrics.jsonl.
        tensorboard: Writes TensorBoard files too.
        dev_period: Steps between dev losses, of at most dev_pairs pairs a direction.
        early_stopping: Ends training before total_steps where dev no longer improves, and keeps
            the best parameters.
        initial: The trained model that this one begins from. Defaults to random numbers.
        on_bad_step: What is done about a step whose loss or gradient is not finite or a spike:
            "stop" ends training; "skip" leaves parameters and optimizer as they are.
        bad_steps: Which steps are bad, and how many are too many.
        profile: First and last step of a trace by JAX's profiler in MODEL_DIR/profile. Defaults
            to none.
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
