"""Loss, optimizers, state, step, program and the training loop."""
