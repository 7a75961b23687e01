"""The results that the repository keeps: `python -m scripts.results keep|draw|restore`."""
