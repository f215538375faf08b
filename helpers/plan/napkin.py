"""What can be said of a training with a pencil: parameters, FLOPs, bytes."""

from helpers.models import TransformerSizes


def parameters(sizes: TransformerSizes) -> int:
    """All parameters of ``helpers.models.Transformer`` of these sizes."""
    head = sizes.width // sizes.heads
    attention = 2 * sizes.width**2 + 2 * sizes.width * head * sizes.key_value_heads
    block = attention + 3 * sizes.width * sizes.feed_forward + 2 * sizes.width
    return sizes.layers * block + 2 * sizes.vocabulary * sizes.width + sizes.width


def flop_per_token(sizes: TransformerSizes, sequence: int) -> int:
    """FLOPs of the model for one token, forward and backward; nothing that is computed again.

    Six for each parameter in a matrix product, and attention's 12 · layers · width · sequence,
    which count the whole of a sequence although a causal mask hides half of it (Chowdhery et al.,
    2022, PaLM, appendix B). An embedding is looked up, and a norm's weights are no product.
    """
    norms = (2 * sizes.layers + 1) * sizes.width
    products = parameters(sizes) - sizes.vocabulary * sizes.width - norms
    return 6 * products + 12 * sizes.layers * sizes.width * sequence


def state_bytes(sizes: TransformerSizes, shards: int = 1) -> int:
    """Float32 parameters, gradients and Adam's two states, divided among ``shards`` ranks."""
    return 16 * parameters(sizes) // shards
