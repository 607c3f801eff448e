"""Advantage estimators outside the core."""
