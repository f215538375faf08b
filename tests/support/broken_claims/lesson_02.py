"""Lesson 02: what copies a tensor, what keeps a history and a gradient, and what cuts them off."""

from broken_claims import Broken

EDIT = "y.data.clamp_(-0.2, 0.2)"

BROKEN = [
    Broken("A24", ".data is a copy", old=EDIT, new="y.data.clone().clamp_(-0.2, 0.2)"),
    Broken("A24", "autograd sees the edit", old=EDIT, new="y = y.clamp(-0.2, 0.2)"),
    Broken("A25", "detach copies", old="alias = y.detach()", new="alias = y.detach().clone()"),
    Broken("A25", "detach hides the edit", old="alias = y.detach()", new="alias = y.data"),
    Broken(
        "A26",
        "an intermediate result keeps its gradient",
        old="hidden = layer(image)\nhidden.tanh().sum().backward()",
        new="hidden = layer(image)\nhidden.retain_grad()\nhidden.tanh().sum().backward()",
        cell="leaves",
    ),
    Broken(
        "A26",
        "an intermediate result's gradient is tanh's",
        old="hidden.retain_grad()\nhidden.tanh()",
        new="hidden.retain_grad()\nhidden.sin()",
        cell="retain",
    ),
    Broken(
        "A27",
        "one element of a vector has a dimension",
        old="vector = torch.tensor([1.0, 2.0, 3.0])",
        new="vector = torch.ones(3, 1)",
    ),
    Broken(
        "A28", "item() returns a tensor", before="patch('torch.Tensor.item', lambda self: self)"
    ),
    Broken(
        "A29",
        "a loss has a dimension",
        old="torch.tensor([3, 1, 4, 1]))\nassert",
        new="torch.tensor([3, 1, 4, 1])).reshape(1)\nassert",
    ),
    Broken(
        "A30",
        "a sum of losses keeps no graph",
        old="loss.item() if item else loss\n",
        new="loss.item() if item else loss.detach()\n",
    ),
    Broken(
        "A30",
        "backward frees no saved tensor",
        old="loss.backward()\n            total",
        new="loss.backward(retain_graph=True)\n            total",
    ),
    Broken(
        "A31",
        "eval() turns off recording",
        old="scores = model.eval()(images)",
        new="scores = model.eval()(images).detach()",
        cell="successors",
    ),
    Broken(
        "A31",
        "inference_mode is no_grad",
        old='"inference_mode()": torch.inference_mode',
        new='"inference_mode()": torch.no_grad',
        cell="modes-proved",
    ),
]
