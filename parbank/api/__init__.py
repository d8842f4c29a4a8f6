"""The functions behind `import parbank`: train a model, load one, pack any. The commands call them."""
