"""The packed model, whole: its container, its contents, packing under a cap, loading, and exchange with other programs.

Nothing is imported here: `parbank inspect` must not cost the import of a model.
"""
