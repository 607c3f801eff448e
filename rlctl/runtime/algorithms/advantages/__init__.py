"""Advantage estimators, one file per method; `base` has the machinery."""
