"""Weights to few bytes: integers and scales, the solver that spends a byte budget, and the coders of the integers."""
