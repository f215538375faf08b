"""The memory of each virtual GPU: blocks, the caching allocator, records."""
