"""Policy losses outside the core."""
