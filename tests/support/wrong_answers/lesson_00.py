"""Typical mistakes in the exercises of lesson 00, and what the learner must be told."""

WRONG = {
    "0.1": [
        ("def largest_share(batch_size, gpu_count):\n    return batch_size", "divides evenly"),
        ("def largest_share(b, n):\n    return b // n", "rounded up"),
        ("def largest_share(b, n):\n    return float(-(-b // n))", "return an int"),
        ("def largest_share(b, n):\n    print(-(-b // n))", "without a return"),
        ("def largest_share(b, n):\n    return str(-(-b // n))", "This is a string"),
        ("def largest_share(b, n):\n    return torch.tensor(-(-b // n))", "This is a tensor"),
        ("def largest_share(b, n):\n    return b // m", "name 'm' is not defined"),
    ]
}
