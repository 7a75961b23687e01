"""Loss, optimizer, state, step and the loop; bilingual baselines by the same trainer."""
