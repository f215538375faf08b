"""Training on a virtual GPU matches the CPU: optimizers, autocast, checkpointing, and hooks."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.virtual_gpus(2)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def network():
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(36, 10),
    )  # fmt: skip


def assert_same_parameters(virtual, plain):
    for mine, other in zip(virtual.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.cpu(), other)


def test_a_convolutional_network_trains_as_on_the_cpu():
    plain = network()
    virtual = copy.deepcopy(plain).to("vgpu:1")
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (plain, virtual)]
    schedules = [torch.optim.lr_scheduler.StepLR(o, 2, 0.5) for o in optimizers]
    for _ in range(4):
        x, y = torch.randn(16, 1, 8, 8), torch.randint(0, 10, (16,))
        losses = []
        for i, (model, device) in enumerate(((plain, "cpu"), (virtual, "vgpu:1"))):
            optimizers[i].zero_grad()
            loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizers[i].step()
            schedules[i].step()
            losses.append(loss.item())
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert_same_parameters(virtual, plain)


def test_layers_on_two_devices_need_one_copy_between_them():
    plain = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    first, second = copy.deepcopy(plain[:2]).to("vgpu:0"), copy.deepcopy(plain[2:]).to("vgpu:1")
    x = torch.randn(5, 4)
    plain(x).square().sum().backward()
    second(first(x.to("vgpu:0")).to("vgpu:1")).square().sum().backward()
    for mine, other in zip(
        [*first.parameters(), *second.parameters()], plain.parameters(), strict=True
    ):
        assert mine.grad.device == mine.device
        torch.testing.assert_close(mine.grad.cpu(), other.grad)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing_with_dropout_gives_the_same_gradients(use_reentrant):
    block = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Tanh()).to("vgpu:1")
    x = torch.randn(4, 8, device="vgpu:1", requires_grad=True)

    def gradients(call):
        torch.manual_seed(3)
        block.zero_grad()
        x.grad = None
        call().sum().backward()
        return [x.grad, *(p.grad.clone() for p in block.parameters())]

    kept = gradients(lambda: block(x))
    recomputed = gradients(lambda: checkpoint(block, x, use_reentrant=use_reentrant))
    for mine, other in zip(recomputed, kept, strict=True):
        assert torch.equal(mine.cpu(), other.cpu())


def test_autocast_chooses_dtypes_as_on_cuda():
    a = torch.randn(4, 4, device="vgpu:0", requires_grad=True)
    with torch.autocast("vgpu", dtype=torch.bfloat16):
        product = a @ a
        assert product.dtype == torch.bfloat16
        assert nn.functional.linear(a, a).dtype == torch.bfloat16
        assert product.softmax(0).dtype == torch.float32
        assert product.sum().dtype == torch.float32
        assert (product + a).dtype == torch.float32
        assert (a.double() @ a.double()).dtype == torch.float64
        with torch.autocast("vgpu", enabled=False):
            assert (a @ a).dtype == torch.float32
        assert torch.addcmul(product, product, product).dtype == torch.bfloat16
        with pytest.raises(RuntimeError, match="unsafe to autocast"):
            nn.functional.binary_cross_entropy(a.sigmoid(), a.detach().sigmoid())
    assert (a @ a).dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plain = (a.detach().cpu() @ a.detach().cpu()).float()
    torch.testing.assert_close(product.float().detach().cpu(), plain)
    product.float().sum().backward()
    assert a.grad.dtype == torch.float32


def test_a_gradient_scaler_steps_with_unscaled_gradients():
    model = nn.Linear(3, 1).to("vgpu:0")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("vgpu", init_scale=8.0)
    before = model.weight.detach().cpu()
    scaler.scale(model(torch.ones(2, 3, device="vgpu:0")).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    torch.testing.assert_close(model.weight.cpu(), before - 0.2)


def test_hooks_run_with_virtual_tensors():
    seen = []
    layer = nn.Linear(2, 2).to("vgpu:1")
    layer.register_forward_hook(lambda m, args, out: seen.append(out.device.index))
    layer.register_full_backward_hook(lambda m, gi, go: seen.append(go[0].device.index))
    layer.weight.register_hook(lambda grad: grad * 2)
    x = torch.ones(1, 2, device="vgpu:1", requires_grad=True)
    layer(x).sum().backward()
    assert seen == [1, 1]
    assert layer.weight.grad.tolist() == [[2, 2], [2, 2]]


def test_an_lstm_accepts_packed_sequences():
    plain = nn.LSTM(3, 4, batch_first=True)
    virtual = copy.deepcopy(plain).to("vgpu:1")
    x, lengths = torch.randn(3, 5, 3), torch.tensor([5, 2, 3])
    results = []
    for model, data in ((plain, x), (virtual, x.to("vgpu:1"))):
        packed = nn.utils.rnn.pack_padded_sequence(
            data, lengths, batch_first=True, enforce_sorted=False
        )
        out, sizes = nn.utils.rnn.pad_packed_sequence(model(packed)[0], batch_first=True)
        out.sum().backward()
        assert sizes.tolist() == [5, 2, 3]
        results.append(out.cpu())
    torch.testing.assert_close(*results)
    torch.testing.assert_close(virtual.weight_hh_l0.grad.cpu(), plain.weight_hh_l0.grad)


@pytest.mark.filterwarnings("ignore:Sparse")
def test_a_sparse_matmul_with_a_reduction_is_rejected_as_on_cuda():
    matrix = torch.eye(3).to_sparse_csr().to("vgpu:1")
    with pytest.raises(NotImplementedError, match="only on the CPU"):
        torch.sparse.mm(matrix, torch.ones(3, 2, device="vgpu:1"), "sum")


def test_float16_convolutions_accumulate_in_float32():
    x, weight = torch.randn(2, 8, 9, 9).half(), torch.randn(4, 8, 3, 3).half()
    on_gpu = [tensor.to("vgpu:1").requires_grad_() for tensor in (x, weight)]
    wide = [tensor.float().requires_grad_() for tensor in (x, weight)]
    for inputs in (on_gpu, wide):
        nn.functional.conv2d(*inputs, padding=1).float().square().sum().backward()
    for half, full in zip(on_gpu, wide, strict=True):
        assert half.grad.dtype is torch.float16
        torch.testing.assert_close(half.grad.cpu().float(), full.grad, rtol=1e-2, atol=0.5)


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
def test_older_mixed_precision_names_still_work():
    from torch.vgpu.amp import GradScaler, autocast

    x = torch.ones(2, 2, device="vgpu:0")
    with autocast():
        assert (x @ x).dtype is torch.float16
    with autocast(enabled=False):
        assert (x @ x).dtype is torch.float32
    assert GradScaler().scale(x.sum()).item() == 4 * 2.0**16
