"""Reports on a corpus: its cleaning, and a preview of sampling."""
