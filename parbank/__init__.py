"""parbank: small language models against two hard budgets, minutes and megabytes."""

__version__ = "0.1.0"
