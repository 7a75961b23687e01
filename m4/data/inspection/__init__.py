"""What `m4 data` computes: audit, preview, vocabulary report."""
