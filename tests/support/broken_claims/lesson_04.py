"""Lesson 04: a batch that is cut, over all GPUs, along one dimension, and joined again."""

from broken_claims import Broken

BROKEN = [
    Broken(
        "B01",
        "the first dimension is cut, whatever dim says",
        cell="dim-proved",
        edits=[("gpus[:2], dim=1)(sequences)", "gpus[:2])(sequences)")],
    ),
    Broken(
        "B04",
        "one GPU does it all",
        edits=[("nn.DataParallel(model, device_ids=gpus)", "nn.DataParallel(model, gpus[:1])")],
    ),
    Broken(
        "B07",
        "only the first replica's output comes back",
        before="patch('torch.nn.DataParallel.gather', lambda self, outputs, device: outputs[0])",
    ),
    Broken(
        "B32",
        "without a GPU it complains",
        edits=[
            ("print(parallel.device_ids,", "import warnings; warnings.warn('no GPU'); print([],")
        ],
    ),
]
