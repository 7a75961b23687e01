"""What every room may use and which uses nothing of m4: axes, mesh, checkpoints, reporting."""
