"""Lesson 11: why accumulated and recomputed gradients equal plain ones, and where bytes go."""

from broken_claims import Broken

BROKEN = [
    Broken(
        "E01",
        "each part's loss is not divided by k",
        old="y, k, 1 / k))\n    torch",
        new="y, k, 1))\n    torch",
    ),
    Broken(
        "E01",
        "only the last part's gradient is kept",
        old="        loss.backward()\n    return [",
        new="        model.zero_grad()\n        loss.backward()\n    return [",
    ),
    Broken(
        "E02",
        "each loss is still divided by k",
        old="unscaled = gradients_of(model, losses_of(model, x, y, k, 1))",
        new="unscaled = gradients_of(model, losses_of(model, x, y, k, 1 / k))",
    ),
    Broken(
        "E03",
        "zero_grad fills with zeros, as before 2.0",
        old="linear.zero_grad()\nleft_over",
        new="linear.zero_grad(set_to_none=False)\nleft_over",
    ),
    Broken(
        "E03",
        "gradients don't stay until they're zeroed",
        old="once = linear.weight.grad.clone()\n",
        new="once = linear.weight.grad.clone()\nlinear.zero_grad()\n",
    ),
    Broken(
        "E04",
        "BatchNorm uses its running statistics",
        old="norms = nn.BatchNorm1d(32),",
        new="norms = nn.BatchNorm1d(32).eval(),",
    ),
    Broken(
        "E05",
        "nothing is checkpointed",
        old="step_in(4, chain, x), gpus)",
        new="step_in(1, chain, x), gpus)",
    ),
    Broken(
        "E06",
        "each layer is updated as soon as its gradient is ready",
        old='lambda _, name=name: events.append(f"G{name}")',
        new='lambda p, name=name: (events.append(f"G{name}"), p.data.sub_(p.grad)) and None',
    ),
    Broken(
        "E07",
        "a layer saves two tensors",
        expensive=True,
        cell="u-shape",
        old="nn.Linear(width, width), nn.Tanh()) for",
        new="nn.Linear(width, width), nn.Tanh(), nn.Sigmoid()) for",
    ),
    Broken(
        "E07",
        "a residual block saves a single tensor",
        expensive=True,
        cell="root-of-saved",
        old="return x + F.relu(self.linear(self.norm(x)))",
        new="return torch.tanh(self.linear(x))",
    ),
    Broken(
        "E07",
        "the only checkpoint leaves out the last layer",
        cell="one-segment",
        old="checkpoint(chain, x, use_reentrant=False).sum().backward()\n\nchain",
        new="chain[-1](checkpoint(chain[:-1], x, use_reentrant=False)).sum().backward()\n\nchain",
    ),
    Broken(
        "E08",
        "the random state isn't restored for the second forward",
        old="same = dropout_gradients(lambda model: ck(model, x))",
        new="same = dropout_gradients(lambda model: ck(model, x, preserve_rng_state=False))",
    ),
    Broken("E08", "nothing is random", old="nn.Dropout(0.5), nn.Tanh()", new="nn.Tanh()"),
    Broken(
        "E09",
        "the new implementation is the old one",
        old="case(partial(checkpoint, use_reentrant=use_reentrant))",
        new="case(partial(checkpoint, use_reentrant=True))",
    ),
]
