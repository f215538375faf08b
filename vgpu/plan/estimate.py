"""Back-of-envelope estimates of a training run: FLOPs and bytes from sizes alone."""

from vgpu.plan.transformer import TransformerSizes


def flop_per_token(sizes: TransformerSizes, sequence: int) -> int:
    """FLOPs of the model for one token, forward and backward; nothing that is computed again.

    Six for each parameter in a matrix product, and attention's 12 · layers · width · sequence,
    which count the whole of a sequence although a causal mask hides half of it (Chowdhery et al.,
    2022, PaLM, appendix B). An embedding is looked up, and a norm's weights are no product.
    """
    products = sizes.layers * sizes.block_products + sizes.vocabulary * sizes.width
    return 6 * products + 12 * sizes.layers * sizes.width * sequence


def kept_bytes(sizes: TransformerSizes, tokens: int, recompute: str = "full") -> int:
    """What a block keeps for its backward pass at least, in bfloat16.

    Its input; with "selective" also queries, values, the gate's products and attention's output;
    with "none" what its norms, its products and attention were given or gave. tokens: of one rank,
    or of all ranks of ``tp``, among which it is then divided.
    """
    narrow = sizes.key_value_width
    numbers = {
        "full": sizes.width,
        "selective": 3 * sizes.width + narrow + sizes.feed_forward,
        "none": 6 * sizes.width + 2 * narrow + 3 * sizes.feed_forward,
    }
    return 2 * tokens * numbers[recompute]


def least_bytes(
    sizes: TransformerSizes,
    tokens: int,
    dp_shard: int = 1,
    tp: int = 1,
    recompute: str = "full",
    gathered_once: bool = False,
) -> int:
    """What a rank holds at least when its backward pass begins.

    Its part of the parameters and of Adam's two states in float32, what each block keeps, divided
    among the ranks of ``tp``, and the logits in float32; with ``gathered_once`` also the blocks'
    parameters in bfloat16. tokens: of all ranks of ``tp``.
    """
    state = 12 * sizes.parameters // dp_shard
    kept = sizes.layers * kept_bytes(sizes, tokens, recompute)
    logits = 4 * tokens * sizes.vocabulary
    gathered = 2 * sizes.layers * sizes.block_parameters if gathered_once else 0
    return (state + kept + logits + gathered) // tp


def state_bytes(sizes: TransformerSizes, dp_shard: int = 1) -> int:
    """Float32 parameters, gradients and Adam's two states, divided among ``dp_shard`` ranks."""
    return 16 * sizes.parameters // dp_shard
