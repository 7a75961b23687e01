"""A plan as tables, pages and pictures."""
