"""Typical mistakes in the exercises of lesson 04, and what the learner must be told."""

WRONG = {
    "4.1": [
        ("def replica_sizes(b, n):\n    return [b // n] * n", "add up to"),
        (
            "def replica_sizes(b, n):\n"
            "    s = -(-b // n)\n"
            "    return [max(0, min(s, b - i * s)) for i in range(n)]",
            "Leave out the GPUs that get no samples",
        ),
        (
            "def replica_sizes(b, n):\n"
            "    return [x for x in (b // n + (i < b % n) for i in range(n)) if x]",
            "doesn't even out the shares",
        ),
        ("def replica_sizes(b, n):\n    return b", "a list of ints"),
        (
            "def replica_sizes(b, n):\n"
            "    s = b // n or 1\n"
            "    return [s] * (min(b, n) - 1) + [b - s * (min(b, n) - 1)]",
            "rounded up",
        ),
    ],
    "4.2": [
        ("def batch_for_all(wanted, n):\n    return wanted", "feeds only"),
        ("def batch_for_all(wanted, n):\n    return n", "are needed"),
        ("def batch_for_all(wanted, n):\n    return float(10**6 * n)", "the batch size, an int"),
        (
            "def batch_for_all(wanted, n):\n"
            "    size = max(wanted, n)\n"
            "    while -(-size // -(-size // n)) < n:\n"
            "        size += 1\n"
            "    return float(size)",
            "The value is right",
        ),
        ("def batch_for_all(wanted, n):\n    return -(-wanted // n) * n", "smaller batch"),
    ],
    "4.3": [
        ("def wrap(lstm, gpus):\n    return lstm.to(gpus[0])", "Use exactly the GPUs"),
        (
            # The lesson has eight GPUs enabled, and three are given.
            "def wrap(lstm, gpus):\n    return nn.DataParallel(lstm.to(gpus[0]), dim=1)",
            "Without device_ids, DataParallel uses every GPU",
        ),
        (
            "def wrap(lstm, gpus):\n    return nn.DataParallel(lstm.to(gpus[0]), gpus)",
            "split dimension 1, not 0",
        ),
        (
            "def wrap(lstm, gpus):\n    return nn.DataParallel(lstm, gpus, dim=1)",
            "must have its parameters",
        ),
        (
            "def wrap(lstm, gpus):\n    return nn.DataParallel(lstm.to(gpus[0]), gpus, dim=2)",
            "the batch dimension must be the one",
        ),
        (
            "def wrap(lstm, gpus):\n"
            "    another = nn.LSTM(lstm.input_size, 4).to(gpus[0])\n"
            "    return nn.DataParallel(another, gpus, dim=1)",
            "the model that was passed in",
        ),
        (
            "def wrap(lstm, gpus):\n    nn.DataParallel(lstm.to(gpus[0]), gpus)",
            "Return the wrapped",
        ),
    ],
}
