"""From text to batches: sources, tokenizer, token shards, and the stream that the trainer reads.

Nothing is imported here, so that reading a shard does not import torch or a downloader.
"""
