"""A backward that does not pass through a collective in silence."""

import warnings

import torch


def run_backward(loss: torch.Tensor, instead: str) -> None:
    """``loss.backward()``, on a rank. Raises ValueError if it goes through a plain collective.

    torch only warns: a collective of c10d has no derivative, and autograd passes gradients through
    it as if it had not been there. instead: what to do, for the message.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loss.backward()
    if any("autograd kernel was not registered" in str(warning.message) for warning in caught):
        raise ValueError(
            "a collective was called with a tensor that requires a gradient, and backward knows "
            f"nothing of collectives: {instead}"
        )
