"""rlctl: from a parquet file of prompts and a language model to a reinforcement-tuned model, in one command."""

__version__ = "0.1.0"
