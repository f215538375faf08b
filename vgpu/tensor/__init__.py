"""How an operation reaches a virtual GPU: the tensor, its dispatch, and unsupported features."""
