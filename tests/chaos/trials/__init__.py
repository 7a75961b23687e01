"""What happens to a run: one file a kind."""
