"""Rewards outside the core: plug-ins that import it, and that it does not import."""
