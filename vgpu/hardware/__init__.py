"""The virtual GPUs themselves: their datasheets, links, memory and random numbers."""
