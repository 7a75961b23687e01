"""What is measured and counted in training: losses, loads, data, dev."""
