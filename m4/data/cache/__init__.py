"""The token cache."""
