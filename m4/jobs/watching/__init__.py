"""Jobs that look at a run from its files, while it trains or later."""
