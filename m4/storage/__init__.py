"""Files of a run: checkpoints, metrics, locks, object stores."""
