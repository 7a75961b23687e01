"""Devices and processes: mesh, sharding, host batches, several processes."""
