"""Lesson 11: what keeps accumulated and recomputed gradients equal to plain ones."""

from broken_claims import Broken

BROKEN = [
    Broken(
        "E01",
        "each part's loss is not divided by k",
        edits=[("k, 1 / k)), whole)", "k, 1)), whole)")],
    ),
    Broken(
        "E01",
        "only the last part's gradient is kept",
        edits=[
            ("        loss.backward()\n", "        model.zero_grad()\n        loss.backward()\n")
        ],
    ),
    Broken(
        "E08",
        "the random state is not kept for the second forward",
        edits=[
            (
                "same = dropout_gradients(lambda model: checkpoint(model, x, use_reentrant=False))",
                "same = dropout_gradients(\n    lambda model: checkpoint(model, x, use_reentrant=False, preserve_rng_state=False)\n)",
            )
        ],
    ),
    Broken("E08", "nothing is random", edits=[("nn.Dropout(0.5), nn.Tanh()", "nn.Tanh()")]),
]
