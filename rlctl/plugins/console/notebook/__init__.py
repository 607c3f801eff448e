"""Conveniences of the Python API: arguments, HTML of runs, and progress in one output block."""
