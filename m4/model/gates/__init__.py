"""Gates, one file each: a plain function named as its file, (tokens, num_experts, capacity) -> Routing."""
