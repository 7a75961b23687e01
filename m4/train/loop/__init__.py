"""What a trainer does around its steps: batches, the run, stopping, resuming."""
