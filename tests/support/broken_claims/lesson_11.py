"""Lesson 11: what keeps accumulated and recomputed gradients equal to plain ones, and where bytes go."""

from broken_claims import Broken

BROKEN = [
    Broken(
        "E01",
        "each part's loss is not divided by k",
        edits=[("y, k, 1 / k))\n    torch", "y, k, 1))\n    torch")],
    ),
    Broken(
        "E01",
        "only the last part's gradient is kept",
        edits=[
            (
                "        loss.backward()\n    return [",
                "        model.zero_grad()\n        loss.backward()\n    return [",
            )
        ],
    ),
    Broken(
        "E02",
        "each loss is divided by k after all",
        edits=[
            (
                "unscaled = gradients_of(model, losses_of(model, x, y, k, 1))",
                "unscaled = gradients_of(model, losses_of(model, x, y, k, 1 / k))",
            )
        ],
    ),
    Broken(
        "E03",
        "zero_grad fills with zeros, as before 2.0",
        edits=[("linear.zero_grad()\nleft_over", "linear.zero_grad(set_to_none=False)\nleft_over")],
    ),
    Broken(
        "E03",
        "gradients do not stay until they are zeroed",
        edits=[
            (
                "once = linear.weight.grad.clone()\n",
                "once = linear.weight.grad.clone()\nlinear.zero_grad()\n",
            )
        ],
    ),
    Broken(
        "E04",
        "BatchNorm uses its running statistics",
        edits=[("norms = nn.BatchNorm1d(32),", "norms = nn.BatchNorm1d(32).eval(),")],
    ),
    Broken(
        "E05",
        "nothing is checkpointed",
        edits=[("step_in(4, chain, x), gpus)", "step_in(1, chain, x), gpus)")],
    ),
    Broken(
        "E06",
        "each layer is updated as soon as its gradient is there",
        edits=[
            (
                'lambda _, name=name: events.append(f"G{name}")',
                'lambda p, name=name: (events.append(f"G{name}"), p.data.sub_(p.grad)) and None',
            )
        ],
    ),
    Broken(
        "E07",
        "a layer saves two tensors",
        expensive=True,
        cell="u-shape",
        edits=[
            (
                "nn.Linear(width, width), nn.Tanh()) for",
                "nn.Linear(width, width), nn.Tanh(), nn.Sigmoid()) for",
            )
        ],
    ),
    Broken(
        "E07",
        "a residual block saves a single tensor",
        expensive=True,
        cell="root-of-saved",
        edits=[
            ("return x + F.relu(self.linear(self.norm(x)))", "return torch.tanh(self.linear(x))")
        ],
    ),
    Broken(
        "E07",
        "the one checkpoint leaves the last layer out",
        cell="one-segment",
        edits=[
            (
                "checkpoint(chain, x, use_reentrant=False).sum().backward()\n\nchain",
                "chain[-1](checkpoint(chain[:-1], x, use_reentrant=False)).sum().backward()\n\nchain",
            )
        ],
    ),
    Broken(
        "E08",
        "the random state is not kept for the second forward",
        edits=[
            (
                "same = dropout_gradients(lambda model: ck(model, x))",
                "same = dropout_gradients(lambda model: ck(model, x, preserve_rng_state=False))",
            )
        ],
    ),
    Broken("E08", "nothing is random", edits=[("nn.Dropout(0.5), nn.Tanh()", "nn.Tanh()")]),
    Broken(
        "E09",
        "the new variant is the old one",
        edits=[
            (
                "case(partial(checkpoint, use_reentrant=use_reentrant))",
                "case(partial(checkpoint, use_reentrant=True))",
            )
        ],
    ),
]
