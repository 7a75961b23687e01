"""The training stream: (seed, step) -> batch."""
