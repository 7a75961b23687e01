"""Ways of choosing tokens: constraints, sampling, flat beams."""
