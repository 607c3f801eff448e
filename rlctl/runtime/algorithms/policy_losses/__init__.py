"""Policy losses, in `losses`; `base` has the machinery."""
