"""``shapes_only()``: the same sizes, bytes and times as with values, but no values."""

import copy
import gc

import pytest
import torch
import torchvision
from torch import nn

import vgpu

pytestmark = pytest.mark.virtual_gpus(2, gpu="H100")


def train(model, inputs, optimizer):
    optimizer.zero_grad()
    model(inputs).square().mean().backward()
    optimizer.step()


def small():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(8 * 16, 10),
    )


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_times_and_bytes_match_real_tensors(kind):
    def run():
        model = small().to("vgpu:0")
        optimizer = kind(model.parameters(), lr=0.1)
        inputs = torch.randn(4, 3, 8, 8).to("vgpu:0")
        train(model, inputs, optimizer)
        torch.vgpu.reset_peak_memory_stats(0)
        before = torch.vgpu.memory_allocated(0)
        with vgpu.record() as timeline:
            train(model, inputs, optimizer)
        return before, torch.vgpu.max_memory_allocated(0), timeline

    real = run()
    with vgpu.shapes_only():
        shapes = run()
    assert shapes[:2] == real[:2]
    assert [e[:9] for e in shapes[2].events] == [e[:9] for e in real[2].events]
    assert shapes[2].makespan_s == real[2].makespan_s
    assert shapes[2].flop == real[2].flop


def test_a_model_far_larger_than_this_machine_trains_as_shapes():
    gc.collect()  # what earlier tests left in reference cycles
    with vgpu.enable(1, gpu="H100", memory_bytes=2**50), vgpu.shapes_only():
        before = torch.vgpu.memory_allocated(0)
        model = nn.Sequential(*[nn.Linear(2**17, 2**17, bias=False) for _ in range(4)])
        model.to("vgpu:0")
        assert torch.vgpu.memory_allocated(0) - before == 4 * 2**34 * 4
        model(torch.randn(2, 2**17).to("vgpu:0")).sum().backward()
        assert model[0].weight.grad.shape == (2**17, 2**17)


def test_a_shape_that_does_not_fit_is_rejected():
    with vgpu.enable(1, memory_bytes=2**20), vgpu.shapes_only():
        layer = nn.Linear(2**10, 2**10)
        with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 4\.00 MiB"):
            layer.to("vgpu:0")


@pytest.mark.parametrize("order", [(True, 1, 1.0), (1.0, 1, True)])
def test_a_shapes_dtype_depends_on_the_type_of_an_equal_number(order):
    """True, 1 and 1.0 are equal, and results are looked up by arguments."""
    host = torch.ones(len(order), 7, dtype=torch.bool)  # a size that no other test uses

    def dtypes(device):
        x = host.to(device)
        return [((x + n).dtype, torch.full((7, 3), n, device=device).dtype) for n in order]

    expected = dtypes("cpu")
    with vgpu.shapes_only():
        assert dtypes("vgpu:0") == expected
        assert torch.arange(1, device="vgpu:0").dtype is torch.int64
        assert torch.arange(1.0, device="vgpu:0").dtype is torch.float32


def test_a_shape_and_its_conjugate_are_distinguished():
    def resolved(device):
        """Return whether each is conjugated, and whether resolving it copies nothing."""
        z = torch.empty(3, 5, dtype=torch.complex64, device=device)
        return [(x.is_conj(), x.resolve_conj() is x) for x in (z, z.conj(), z.conj().conj())]

    expected = resolved("cpu")
    with vgpu.shapes_only():
        assert resolved("vgpu:0") == expected


@pytest.mark.parametrize(
    "ask",
    [
        lambda x: x[0, 0].item(),
        lambda x: float(x.sum()),
        lambda x: bool((x > 0).any()),
        lambda x: x.tolist(),
        lambda x: x.cpu().numpy(),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: torch.equal(x, x),
    ],
)
def test_a_shape_refuses_to_return_values_and_says_why(ask):
    with vgpu.shapes_only():
        x = torch.ones(3, 2, device="vgpu:1")
        with pytest.raises(vgpu.NoValueError, match=r"only a shape.*shapes_only"):
            ask(x)


def test_a_tensor_created_or_moved_in_the_block_is_a_shape():
    outside = torch.ones(3)
    on_gpu = torch.ones(3, device="vgpu:0")
    with vgpu.shapes_only():
        made = torch.randn(3)
        moved = outside.to("vgpu:0")
        computed = on_gpu + on_gpu
        listed = torch.tensor([1.0, 2.0])
        still = outside + 1
    assert [vgpu.is_shape(t) for t in (made, moved, computed)] == [True] * 3
    assert [str(t.device) for t in (made, moved, computed)] == ["cpu", "vgpu:0", "vgpu:0"]
    assert listed.tolist() == [1.0, 2.0] and still.tolist() == [2.0] * 3
    assert not vgpu.is_shape(torch.randn(3))
    assert repr(made) == "shape([3], device='cpu', dtype=torch.float32)"


def test_a_shape_stays_a_shape_after_the_block():
    with vgpu.shapes_only():
        model = nn.Linear(4, 2).to("vgpu:0")
        x = torch.ones(3, 4, device="vgpu:0")
    y = model(x)
    assert vgpu.is_shape(y) and y.shape == (3, 2)
    with pytest.raises(vgpu.NoValueError):
        y.sum().item()


def test_values_are_never_overwritten_by_shapes():
    model = nn.Linear(4, 2).to("vgpu:0")
    before = model.weight.detach().cpu()
    with vgpu.shapes_only():
        model(torch.ones(3, 4, device="vgpu:0")).sum().backward()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(RuntimeError, match=r"add_ would change .* that has values"):
            optimizer.step()
    assert torch.equal(model.weight.detach().cpu(), before)


def test_parameters_stay_the_same_objects_when_they_move():
    with vgpu.shapes_only():
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        weight = model.weight
        model.to("vgpu:1")
        assert model.weight is weight and isinstance(weight, nn.Parameter)
        assert weight.device == torch.device("vgpu:1")
        model(torch.ones(3, 4, device="vgpu:1")).sum().backward()
        optimizer.step()


def test_views_share_bytes_and_resizing_is_counted():
    with vgpu.shapes_only():
        before = torch.vgpu.memory_allocated(0)
        x = torch.empty(1024, 1024, device="vgpu:0")
        views = [x.t(), x[3:], x.view(-1).split(1000), x.detach()]
        assert torch.vgpu.memory_allocated(0) - before == 4 * 2**20
        assert views[0].stride() == (1, 1024)
        x.resize_(1024, 2048)
        assert x.shape == (1024, 2048)
        assert torch.vgpu.memory_allocated(0) - before == 8 * 2**20
        x.squeeze_().t_()
        assert x.shape == (2048, 1024)
    del x, views
    assert torch.vgpu.memory_allocated(0) == before


def test_data_parallel_runs_on_shapes():
    with vgpu.shapes_only():
        model = nn.DataParallel(torchvision.models.resnet18().to("vgpu:0"), [0, 1])
        out = model(torch.randn(6, 3, 64, 64).to("vgpu:0"))
        out.sum().backward()
        assert out.shape == (6, 1000) and out.device == torch.device("vgpu:0")
        assert all(p.grad.shape == p.shape for p in model.parameters())


def test_shapes_only_refuses_to_start_without_virtual_gpus():
    vgpu.disable()
    with pytest.raises(RuntimeError, match=r"vgpu.enable"), vgpu.shapes_only():
        pass


def test_deep_copies_share_what_their_originals_share():
    with vgpu.shapes_only():
        base = torch.zeros(1000, device="vgpu:1")
        before = torch.vgpu.memory_allocated(1)
        copies = copy.deepcopy([base, base[1:]])
        layer = nn.Linear(2, 2, device="vgpu:1")
        layer(torch.ones(1, 2, device="vgpu:1")).sum().backward()
        assert copy.deepcopy(layer).weight.grad is None
    assert torch.vgpu.memory_allocated(1) - before >= 4096
    assert copies[0]._block is copies[1]._block


def test_shapes_can_be_indexed_by_integers_but_not_by_masks():
    with vgpu.shapes_only():
        x = torch.randn(4, 3, device="vgpu:1", requires_grad=True)
        index = torch.tensor([0, 2, 2], device="vgpu:1")
        assert x[index].shape == x[[0, 2, 2]].shape == (3, 3)
        assert x[:, index[:2]].shape == (4, 2)
        x[index].sum().backward()
        assert x.grad.shape == (4, 3)
        with pytest.raises(vgpu.NoValueError, match="index needs the values"):
            x[x > 0]


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
def test_fused_optimizers_accept_shapes(kind):
    with vgpu.shapes_only(), vgpu.record() as timeline:
        model = nn.Linear(3, 3).to("vgpu:1")
        optimizer = kind(model.parameters(), lr=0.1, fused=True)
        model(torch.ones(2, 3, device="vgpu:1")).sum().backward()
        optimizer.step()
    assert any(event.name.startswith("_fused_") for event in timeline.events)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_attention_of_shapes_keeps_no_scores_and_counts_its_flops(dtype):
    batch, heads, length, width = 2, 8, 1024, 64
    with vgpu.shapes_only():
        parts = [
            torch.empty(batch, heads, length, width, device="vgpu:0", dtype=dtype) for _ in range(3)
        ]
        for part in parts:
            part.requires_grad_()
        before = torch.vgpu.memory_allocated(0)
        with vgpu.record() as timeline:
            output = torch.nn.functional.scaled_dot_product_attention(*parts)
            kept = torch.vgpu.memory_allocated(0) - before
            output.sum().backward()
        assert parts[0].grad.shape == parts[0].shape
    scores = batch * heads * length * length * output.element_size()
    assert kept < scores / 8
    # Two matmuls in forward and five in backward, which recomputes the scores.
    product = 2 * batch * heads * length * length * width
    forward, backward = (e.flop for e in timeline.events if e.flop)
    assert (forward, backward) == (2 * product, 5 * product)


def test_a_shape_whose_storage_is_resized_leaves_others_as_they_are():
    with vgpu.shapes_only():
        a, b = torch.empty(1000, device="vgpu:0"), torch.empty(1000, device="vgpu:0")
        before = torch.vgpu.memory_allocated(0)
        view = a[10:]
        assert view.untyped_storage()._cdata == a.untyped_storage()._cdata
        assert b.untyped_storage()._cdata != a.untyped_storage()._cdata
        a.untyped_storage().resize_(0)
        assert torch.vgpu.memory_allocated(0) == before - 4096
        assert b.untyped_storage().nbytes() == 4096
        c = b + b
        assert torch.vgpu.memory_allocated(0) == before
        a.untyped_storage().resize_(4000)
        assert torch.vgpu.memory_allocated(0) == before + 4096
        assert c.shape == a.shape


def test_a_truncated_normal_distribution_needs_no_values():
    """torch redraws until every value is within bounds."""
    with vgpu.shapes_only():
        assert nn.init.trunc_normal_(torch.empty(4, device="vgpu:0")).shape == (4,)
    assert nn.init.trunc_normal_(torch.empty(1000)).std() > 0.5
