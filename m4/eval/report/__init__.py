"""Tables, plots and pages of results."""
