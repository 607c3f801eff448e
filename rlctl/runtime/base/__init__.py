"""Tensor functions, balancing, micro-batches, metrics and the clock, for the whole runtime."""
