"""Jobs that translate test sets and other text, score translations and report on them."""
