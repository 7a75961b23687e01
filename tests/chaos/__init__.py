"""`make chaos`: what happens to a run's folder when everything goes wrong (docs/robustness.md)."""
