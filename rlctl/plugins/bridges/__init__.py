"""Engines and trackers of other projects' servers: plug-ins that the core does not import."""
