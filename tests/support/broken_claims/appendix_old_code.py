"""The appendix: how a shell and argparse read options, and what old lines of code do."""

from broken_claims import Broken

BROKEN = [
    Broken(
        "A04",
        "the CPU has the ordinal 0",
        before="patch('torch.Tensor.get_device', lambda self: self.device.index or 0)",
    ),
    Broken(
        "A14",
        "the shell receives the line with spaces",
        old='    "CUDA_VISIBLE_DEVICES = 2,3 python show.py",',
        new='    "CUDA_VISIBLE_DEVICES=2,3 python show.py",',
    ),
    Broken(
        "A18",
        "the old call changes nothing",
        old="set_default_tensor_type(torch.DoubleTensor)",
        new="set_default_tensor_type(torch.FloatTensor)",
        cell="default-type",
    ),
    Broken(
        "A19",
        "type=bool parses the word",
        old='add_argument("--cuda", type=bool,',
        new='add_argument("--cuda", type=lambda word: word == "True",',
    ),
    Broken(
        "A20",
        "zeros_like ignores its argument's dtype",
        before="patch('torch.zeros_like', lambda x, **given: torch.zeros(x.shape, **given))",
    ),
    Broken(
        "A21",
        "new_zeros ignores the dtype of its tensor",
        old="five = half.new_zeros(5)",
        new="five = torch.zeros(5)",
    ),
    Broken(
        "A21",
        "requires_grad is copied",
        old="assert not learned.new_zeros(5).requires_grad and",
        new="assert not torch.zeros_like(learned, requires_grad=learned.requires_grad).requires_grad and",
    ),
    Broken(
        "A22",
        "a tensor of doubles has a different class",
        before="patch('torch.Tensor.double', lambda self: nn.Parameter(self))",
    ),
    Broken("A23", "wrapping keeps the history", before="Variable = lambda tensor: tensor"),
    Broken("A23", "wrapping copies", old="Variable(plain)", new="Variable(plain.clone())"),
    Broken(
        "A31",
        "volatile still records nothing",
        old="    images = Variable(images, volatile=True)\nprint",
        new="    images = Variable(images, volatile=True)\nmodel.requires_grad_(False)\nprint",
        cell="volatile-does-nothing",
    ),
]
