"""What can be said of a training run with a pencil: parameters, FLOPs, bytes."""

from vgpu.plan.transformer import TransformerSizes


def parameters(sizes: TransformerSizes) -> int:
    """All parameters of ``vgpu.plan.transformer.Transformer`` of these sizes."""
    return sizes.parameters


def flop_per_token(sizes: TransformerSizes, sequence: int) -> int:
    """FLOPs of the model for one token, forward and backward; nothing that is computed again.

    Six for each parameter in a matrix product, and attention's 12 · layers · width · sequence,
    which count the whole of a sequence although a causal mask hides half of it (Chowdhery et al.,
    2022, PaLM, appendix B). An embedding is looked up, and a norm's weights are no product.
    """
    products = sizes.layers * sizes.block_products + sizes.vocabulary * sizes.width
    return 6 * products + 12 * sizes.layers * sizes.width * sequence


def kept_bytes(sizes: TransformerSizes, tokens: int, checkpoint: str = "full") -> int:
    """What a block keeps for its backward pass at least, in bfloat16.

    Its input; with "selective" also queries, values, the gate's products and attention's output;
    with "none" what its norms, its products and attention were given or gave. tokens: of one rank,
    or of all ranks that share tensors, among which it is then divided.
    """
    narrow = sizes.key_value_width
    numbers = {
        "full": sizes.width,
        "selective": 3 * sizes.width + narrow + sizes.feed_forward,
        "none": 6 * sizes.width + 2 * narrow + 3 * sizes.feed_forward,
    }
    return 2 * tokens * numbers[checkpoint]


def least_bytes(
    sizes: TransformerSizes,
    tokens: int,
    shards: int = 1,
    tensors: int = 1,
    checkpoint: str = "full",
    gathered_once: bool = False,
) -> int:
    """What a rank holds at least when its backward pass begins.

    Its part of the parameters and of Adam's two states in float32, what each block keeps, divided
    among the ranks that share tensors, and the logits in float32; with ``gathered_once`` also the
    blocks' parameters in bfloat16. tokens: of all ranks that share tensors.
    """
    state = 12 * sizes.parameters // shards
    kept = sizes.layers * kept_bytes(sizes, tokens, checkpoint)
    logits = 4 * tokens * sizes.vocabulary
    gathered = 2 * sizes.layers * sizes.block_parameters if gathered_once else 0
    return (state + kept + logits + gathered) // tensors


def state_bytes(sizes: TransformerSizes, shards: int = 1) -> int:
    """Float32 parameters, gradients and Adam's two states, divided among ``shards`` ranks."""
    return 16 * sizes.parameters // shards
