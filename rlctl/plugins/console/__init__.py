"""Console outside the core: commands and listeners, which the core does not import."""
