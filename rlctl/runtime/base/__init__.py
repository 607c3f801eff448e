"""Roles, the batch, tensor functions, micro-batches, metrics, the clock: for the whole runtime."""
