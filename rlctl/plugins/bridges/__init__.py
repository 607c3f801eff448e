"""Formats, engines and trackers of other projects: plug-ins that the core does not import."""
