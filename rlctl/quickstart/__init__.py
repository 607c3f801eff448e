"""The embedded quickstart's model (`model/`), and how it was made (`python -m rlctl.quickstart.make_model`)."""
