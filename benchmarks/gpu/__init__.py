"""GPU suite: correctness first, then speed. See `python -m benchmarks.gpu --help`."""
