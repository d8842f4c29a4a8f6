"""The doors of `parbank`: train a run, load a model, pack anybody's. The commands are built on them."""
