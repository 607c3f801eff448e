"""Tests that start Ray in their own process.

They come before those of tests/distributed: Ray forks, and forks of a process in which models with
gloo and peft have run may crash.
"""
