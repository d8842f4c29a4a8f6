"""Text in, batches out: corpora, tokenizer, token shards, and the stream the trainer reads.

Nothing is imported here: reading a shard must not cost the import of torch or of a downloader.
"""
