"""Lesson 04: a batch that's split over all GPUs, along one dimension, and joined again."""

from broken_claims import Broken

BROKEN = [
    Broken(
        "B01",
        "the default isn't all GPUs",
        cell="arguments",
        old="default = nn.DataParallel(model)",
        new="default = nn.DataParallel(model, gpus[:2])",
    ),
    Broken(
        "B01",
        "the first dimension is split, whatever dim is",
        cell="dim-proved",
        old="gpus[:2], dim=1)(sequences)",
        new="gpus[:2])(sequences)",
    ),
    Broken(
        "B02",
        "the last batch is dropped",
        old="length=100), batch_size=30)",
        new="length=100), batch_size=30, drop_last=True)",
    ),
    Broken(
        "B03",
        "the second GPU gets nothing",
        old="{count: one_epoch(gpus[:count]) for count in (1, 2, 3)}",
        new="{count: one_epoch(gpus[: 1 if count == 2 else count]) for count in (1, 2, 3)}",
    ),
    Broken(
        "B05",
        "the batch is divided evenly, so all eight run",
        old="runs[8] = one_epoch(gpus)",
        new="evenly = lambda self, inputs, kwargs, ids: (\n"
        "    [(part.to(gpu),) for part, gpu in zip(inputs[0].tensor_split(8), gpus)], [{}] * 8)\n"
        "whole, nn.DataParallel.scatter = nn.DataParallel.scatter, evenly\n"
        "runs[8] = one_epoch(gpus)\n"
        "nn.DataParallel.scatter = whole",
    ),
    Broken(
        "B06",
        "one thread runs the replicas, in order",
        old="others_done.wait(timeout=30)",
        new="others_done.wait(timeout=0.1)",
        before=(
            "patch('torch.nn.DataParallel.parallel_apply', lambda self, replicas, inputs, kwargs:"
            " [r(*i, **k) for r, i, k in zip(replicas, inputs, kwargs)])"
        ),
    ),
    Broken(
        "B04",
        "one GPU does it all",
        old="nn.DataParallel(model, device_ids=gpus)",
        new="nn.DataParallel(model, gpus[:1])",
    ),
    Broken(
        "B07",
        "only the first replica's output comes back",
        before="patch('torch.nn.DataParallel.gather', lambda self, outputs, device: outputs[0])",
    ),
    Broken(
        "B08",
        "the batch size is per GPU",
        old="share_sizes(size, gpus) for size in range",
        new="[size] * len(gpus) for size in range",
    ),
    Broken(
        "B08",
        "nine samples feed eight GPUs",
        old="share_sizes(size, gpus) for size in range",
        new="[len(part) for part in torch.ones(size).tensor_split(8)] for size in range",
    ),
    Broken(
        "B32",
        "DataParallel raises an error without a GPU",
        expensive=True,
        old="print(parallel.device_ids,",
        new="import warnings; warnings.warn('no GPU'); print([],",
    ),
]
