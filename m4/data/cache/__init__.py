"""The token cache: its text, its arrays, and how both are written."""
