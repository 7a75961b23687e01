"""Tables, plots, pages."""
