"""Who asks for an operation: a module, a thread, a stream, a backward pass."""
