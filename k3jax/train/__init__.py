"""Training: the optimizer, the compiled step, and the loop around it."""
