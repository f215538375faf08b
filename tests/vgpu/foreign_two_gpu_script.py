"""Train a small ResNet on two GPUs. Plain PyTorch, for a machine with CUDA."""

import argparse
import copy
import os
import tempfile

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.cuda.amp import GradScaler
from torch.utils.data import DataLoader, TensorDataset
from torchvision.models.resnet import BasicBlock, ResNet


def resnet10():
    return ResNet(BasicBlock, [1, 1, 1, 1], num_classes=4)


def accuracy(model, loader, device):
    model.eval()
    right = total = 0
    with torch.no_grad():
        for images, labels in loader:
            images = images.cuda(non_blocking=True)
            labels = labels.to(device, non_blocking=True)
            right += (model(images).argmax(1) == labels).sum().item()
            total += labels.numel()
    return right / total


class TwoGPUs(nn.Module):
    """Model parallel: the first half on cuda:0, the second on cuda:1."""

    def __init__(self, net):
        super().__init__()
        self.first = nn.Sequential(
            net.conv1, net.bn1, net.relu, net.maxpool, net.layer1, net.layer2
        ).to("cuda:0")
        self.second = nn.Sequential(net.layer3, net.layer4, net.avgpool, nn.Flatten()).cuda(1)
        self.fc = net.fc.to(torch.device("cuda", 1))

    def forward(self, x):
        return self.fc(self.second(self.first(x.to("cuda:0")).to("cuda:1", non_blocking=True)))


def report(prefix):
    for i in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(i)
        print(
            f"{prefix} GPU {i} {torch.cuda.get_device_name(i)}: "
            f"{torch.cuda.memory_allocated(i) / 2**20:.1f} MiB, "
            f"peak {torch.cuda.max_memory_allocated(i) / 2**20:.1f} MiB, "
            f"{free / total:.0%} free"
        )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    assert torch.cuda.is_available(), "this script needs a GPU"
    n_gpus = torch.cuda.device_count()
    assert n_gpus >= 2, "this script needs two GPUs"
    torch.backends.cudnn.benchmark = True
    torch.manual_seed(args.seed)
    torch.cuda.manual_seed_all(args.seed)
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    torch.cuda.set_device(device)
    torch.cuda.reset_peak_memory_stats()

    # A bright square in one of four corners.
    labels = torch.randint(4, (64,))
    images = 0.3 * torch.randn(64, 3, 32, 32)
    for image, label in zip(images, labels, strict=True):
        y, x = 16 * (label // 2), 16 * (label % 2)
        image[:, y : y + 16, x : x + 16] += 1
    data = TensorDataset(images, labels)
    loader = DataLoader(data, batch_size=16, shuffle=True, pin_memory=True, drop_last=True)

    # 1. Data parallel with mixed precision
    model = resnet10()
    if torch.cuda.device_count() > 1:
        print("Let's use", torch.cuda.device_count(), "GPUs!")
        model = nn.DataParallel(model)
    model.to(device)
    criterion = nn.CrossEntropyLoss().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs * len(loader))
    scaler = GradScaler()
    first = last = None
    for epoch in range(args.epochs):
        model.train()
        for images, labels in loader:
            images, labels = images.to(device, non_blocking=True), labels.cuda(non_blocking=True)
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast(device_type="cuda", dtype=torch.bfloat16):
                outputs = model(images)
                loss = criterion(outputs, labels)
            assert outputs.is_cuda and outputs.device == device
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            first = loss.item() if first is None else first
            last = loss.item()
        print(f"epoch {epoch} loss {last:.3f}")
    print(f"data parallel: loss {first:.3f} -> {last:.3f}")
    print(f"accuracy {accuracy(model, loader, device):.2f}")
    report("after training")

    # 2. Save a checkpoint, and load it onto the other GPU and the CPU
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "checkpoint.pt")
        torch.save(
            {
                "model": model.module.state_dict(),
                "optimizer": optimizer.state_dict(),
                "scaler": scaler.state_dict(),
                "rng": torch.cuda.get_rng_state(),
            },
            path,
        )
        on_one = torch.load(path, map_location="cuda:1", weights_only=True)
        on_cpu = torch.load(path, map_location=lambda storage, loc: storage)
        remapped = torch.load(path, map_location={"cuda:0": "cuda:1"})
    assert on_one["model"]["fc.weight"].get_device() == 1
    assert remapped["model"]["fc.weight"].device == torch.device("cuda:1")
    assert not on_cpu["model"]["fc.weight"].is_cuda
    torch.cuda.set_rng_state(on_cpu["rng"])
    again = resnet10().cuda(1)
    again.load_state_dict(on_one["model"])
    optimizer.load_state_dict(on_cpu["optimizer"])
    again.eval()
    model.eval()
    with torch.no_grad():
        x = torch.randn(4, 3, 32, 32, device="cuda:1")
        torch.testing.assert_close(again(x).cpu(), model.module(x.to(device)).cpu())
    print("checkpoint: equal on the other GPU")

    # 3. Model parallel: a step equals that of the whole model on one GPU
    whole, split = again, TwoGPUs(copy.deepcopy(again).cpu())
    x, y = torch.randn(4, 3, 32, 32), torch.arange(4)
    F.cross_entropy(whole(x.cuda(1)), y.cuda(1)).backward()
    outputs = split(x)
    F.cross_entropy(outputs, y.to(outputs.device)).backward()
    torch.testing.assert_close(split.first[0].weight.grad.cpu(), whole.conv1.weight.grad.cpu())
    print(f"model parallel: {split.first[0].weight.device} and {split.fc.weight.device}")

    # 4. Streams and events
    side = torch.cuda.Stream(device=device)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        batch = torch.randn(256, 256).pin_memory().to(device, non_blocking=True)
        product = batch @ batch
    torch.cuda.current_stream().wait_stream(side)
    product.record_stream(torch.cuda.current_stream())
    end.record()
    torch.cuda.synchronize()
    print(f"streams: {start.elapsed_time(end) >= 0}")

    # 5. Halve the batch until it fits
    free, _ = torch.cuda.mem_get_info(device)
    rows = 2 * free // 2**20
    while True:
        try:
            big = torch.empty(rows, 2**20, dtype=torch.uint8, device=device)
            break
        except torch.cuda.OutOfMemoryError as error:
            print(f"out of memory with {rows} MiB: {str(error).split('.')[0]}")
            torch.cuda.empty_cache()
            rows //= 4
    assert big.numel() == rows * 2**20
    del big

    # 6. What must fail
    try:
        model.module(torch.randn(1, 3, 32, 32, device="cuda:1"))
    except RuntimeError as error:
        print(f"wrong device: {error}")
    try:
        torch.zeros(1).to(f"cuda:{n_gpus}")
    except RuntimeError as error:
        print(f"no such GPU: {str(error).splitlines()[0]}")
    assert last < first / 2, "it does not learn"


if __name__ == "__main__":
    main()
