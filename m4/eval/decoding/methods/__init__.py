"""Ways of choosing tokens: constraints, sampling."""
