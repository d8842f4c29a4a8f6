"""Mixtures of predictions in probability space, with weights that learn from tokens once scored."""
