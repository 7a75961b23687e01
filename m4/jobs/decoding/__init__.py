"""Jobs that translate other text than the test sets, and that look at translation itself."""
