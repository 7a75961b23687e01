"""Tests of the transports: what they have in common is in shared.py."""
