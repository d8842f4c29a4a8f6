"""Quantisation: integers and scales, the solver that meets a byte budget, and the coders of the integers."""
