"""Figures of the first lessons: where tensors are, what autograd keeps, how one device trains."""
