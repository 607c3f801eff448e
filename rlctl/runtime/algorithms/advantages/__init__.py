"""Advantage estimators, one file per family; `base` has the machinery."""
