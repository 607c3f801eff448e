"""Policy losses, one file per family; `base` has the machinery."""
