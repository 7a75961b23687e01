"""Ways of choosing tokens and translations: constraints, sampling, flat beams, MBR."""
