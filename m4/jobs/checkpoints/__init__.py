"""Jobs on checkpoints: a model begun from another one."""
