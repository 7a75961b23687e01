"""Loss, optimizers, state, step and the trainer."""
