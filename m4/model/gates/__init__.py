"""Gates, one file each, a function of its name: (tokens, num_experts, capacity) -> Routing."""
