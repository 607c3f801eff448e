"""Commands around runs: board, report, comparison, sizing and new projects; not in the core."""
