"""Policy losses, one file per method; `base` has the machinery."""
