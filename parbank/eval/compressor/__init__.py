"""Lossless compression by a model: the size of the file is the model's score."""
