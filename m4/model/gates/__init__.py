"""Gates: one function per file, of the same name, (tokens, num_experts, capacity) -> Routing."""
