"""Shared parts of sources: files of a folder by pattern, lines and records read as pairs."""
