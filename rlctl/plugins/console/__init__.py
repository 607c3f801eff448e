"""Console outside the core: commands around runs, notices and stop rules."""
