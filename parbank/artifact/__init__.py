"""The packed model: container, contents, packing under a cap, loading, and exchange with other programs.

Nothing is imported here, so that `parbank inspect` does not import a model.
"""
