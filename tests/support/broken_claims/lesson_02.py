"""Lesson 02: what copies a tensor, what keeps a history and a gradient, and what cuts them off."""

from broken_claims import Broken

EDIT = "y.data.clamp_(-0.5, 0.5)"

BROKEN = [
    Broken("A24", "data is a copy", edits=[(EDIT, "y.data.clone().clamp_(-0.5, 0.5)")]),
    Broken("A24", "autograd sees the edit", edits=[(EDIT, "y = y.clamp(-0.5, 0.5)")]),
    Broken("A25", "detach copies", edits=[("alias = y.detach()", "alias = y.detach().clone()")]),
    Broken("A25", "detach hides the edit", edits=[("alias = y.detach()", "alias = y.data")]),
    Broken(
        "A26",
        "a result in between keeps its gradient",
        edits=[
            (
                "hidden = layer(image)\nhidden.tanh().sum().backward()",
                "hidden = layer(image)\nhidden.retain_grad()\nhidden.tanh().sum().backward()",
            )
        ],
        cell="leaves",
    ),
    Broken(
        "A26",
        "the gradient of a result in between is that of tanh",
        edits=[
            (
                "hidden.retain_grad()\nhidden.tanh()",
                "hidden.retain_grad()\nhidden.sin()",
            )
        ],
        cell="retain",
    ),
    Broken(
        "A27",
        "one element of a vector has a dimension",
        edits=[("vector = torch.tensor([1.0, 2.0, 3.0])", "vector = torch.ones(3, 1)")],
    ),
    Broken(
        "A28",
        "item() hands out a tensor",
        before="patch('torch.Tensor.item', lambda self: self)",
    ),
    Broken(
        "A29",
        "a loss has a dimension",
        edits=[
            (
                "torch.tensor([3, 1, 4, 1]))\nassert",
                "torch.tensor([3, 1, 4, 1])).reshape(1)\nassert",
            )
        ],
    ),
    Broken(
        "A30",
        "a sum of losses keeps no graph",
        edits=[("loss.item() if item else loss\n", "loss.item() if item else loss.detach()\n")],
    ),
    Broken(
        "A30",
        "backward frees no saved tensor",
        edits=[
            (
                "loss.backward()\n            total",
                "loss.backward(retain_graph=True)\n            total",
            )
        ],
    ),
    Broken(
        "A31",
        "eval() stops the recording",
        edits=[("scores = model.eval()(images)", "scores = model.eval()(images).detach()")],
        cell="successors",
    ),
    Broken(
        "A31",
        "inference_mode is no_grad",
        edits=[('"inference_mode()": torch.inference_mode', '"inference_mode()": torch.no_grad')],
        cell="modes-proved",
    ),
]
