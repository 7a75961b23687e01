"""Reports on a corpus: its cleaning, a preview of the sampling, its vocabulary."""
