"""Where tensors are created and moved, and what they report about themselves."""

import copy
import pickle
import threading

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import vgpu

pytestmark = pytest.mark.virtual_gpus(3)


@pytest.mark.parametrize(
    "make",
    [
        lambda d: torch.tensor([1.0, 2.0], device=d),
        lambda d: torch.zeros(2, device=d),
        lambda d: torch.ones(2).to(d),
        lambda d: torch.ones(2).to(device=d, dtype=torch.int32),
        lambda d: torch.ones(2).to(torch.ones(1, device=d)),
        lambda d: torch.ones(2).vgpu(d),
        lambda d: torch.ones(2, device="vgpu:0").to(d),
        lambda d: torch.ones(2, device=d).clone(),
        lambda d: torch.zeros_like(torch.ones(2, device=d)),
        lambda d: torch.zeros_like(torch.ones(2), device=d),
        lambda d: torch.ones(1, device=d).new_zeros(2),
        lambda d: torch.ones(1, device=d).new_tensor([1, 2]),
        lambda d: torch.ones(1, device=d).new_full((2,), 3.0),
        lambda d: torch.as_tensor([1, 2], device=d),
        lambda d: nn.Linear(2, 2).to(d).weight,
        lambda d: nn.Linear(2, 2).vgpu(d).weight,
        lambda d: nn.Linear(2, 2, device=d).bias,
        lambda d: torch.sparse_coo_tensor([[0]], [1.0], (2,), device=d),
        lambda d: torch.eye(2, device=d).to_sparse_csr(),
    ],
)
@pytest.mark.filterwarnings("ignore:Sparse")
def test_tensors_are_on_the_requested_device(make):
    tensor = make(torch.device("vgpu:1"))
    assert tensor.device == torch.device("vgpu:1")
    assert tensor.get_device() == 1
    assert tensor.is_vgpu
    assert not tensor.is_cpu
    assert tensor.cpu().device.type == "cpu"
    assert type(tensor.cpu()) is torch.Tensor or isinstance(tensor, nn.Parameter)


def test_moving_to_the_same_device_returns_the_tensor_itself():
    x = torch.ones(2, device="vgpu:1")
    assert x.to("vgpu:1") is x
    assert x.to(1) is x
    assert x.to(x.device) is x
    assert x.vgpu(1) is x
    assert torch.as_tensor(x, device="vgpu:1") is x
    assert x.to("vgpu:1", copy=True) is not x
    assert x.to("vgpu:2").device.index == 2


def test_a_device_works_as_context_default_and_current_device():
    with torch.device("vgpu:2"):
        assert torch.zeros(1).device.index == 2
    torch.set_default_device("vgpu:1")
    try:
        assert nn.Linear(2, 2).weight.device.index == 1
    finally:
        torch.set_default_device(None)
    with torch.vgpu.device(2), torch.vgpu.device(None):
        assert torch.zeros(1, device="vgpu").device.index == 2
        assert torch.accelerator.current_device_index() == 2
    with torch.accelerator.device_index(1):
        assert torch.ones(1).vgpu().device.index == 1
    with pytest.raises(ZeroDivisionError), torch.vgpu.device(1):
        _ = 1 / 0
    assert torch.vgpu.current_device() == 0
    torch.vgpu.set_device("vgpu:2")
    seen = []
    thread = threading.Thread(target=lambda: seen.append(torch.vgpu.current_device()))
    thread.start()
    thread.join()
    torch.vgpu.set_device(0)
    assert seen == [0]


WITHOUT_INDEX = {
    "to": lambda: torch.ones(1).to("vgpu"),
    "to with dtype": lambda: torch.ones(1).to("vgpu", torch.float64),
    "to from another": lambda: torch.ones(1, device="vgpu:1").to("vgpu"),
    "vgpu": lambda: torch.ones(1).vgpu(),
    "module": lambda: nn.Linear(1, 1).to("vgpu").weight,
    "tensor": lambda: torch.tensor([1.0], device="vgpu"),
    "as_tensor": lambda: torch.as_tensor([1.0], device="vgpu"),
    "asarray": lambda: torch.asarray([1.0], device="vgpu"),
    "new_tensor": lambda: torch.ones(1).new_tensor([1.0], device="vgpu"),
    "zeros": lambda: torch.zeros(1, device="vgpu"),
    "zeros_like": lambda: torch.zeros_like(torch.ones(1), device="vgpu"),
    "sparse": lambda: torch.eye(2).to_sparse().to("vgpu"),
    "sparse, created there": lambda: torch.sparse_coo_tensor([[0]], [1.0], (2,), device="vgpu"),
    "generator": lambda: torch.Generator("vgpu"),
}


@pytest.mark.parametrize("name", WITHOUT_INDEX)
def test_a_device_without_an_index_is_the_current_one(name):
    make = WITHOUT_INDEX[name]
    torch.vgpu.set_device(2)
    try:
        with torch.inference_mode(name in ("to", "vgpu", "tensor")):
            assert str(make().device) == "vgpu:2"
        assert str(torch.ones(1).to("vgpu:0").device) == "vgpu:0"
        if "sparse" not in name:
            with vgpu.shapes_only():
                assert str(make().device) == "vgpu:2"
    finally:
        torch.vgpu.set_device(0)
    assert str(make().device) == "vgpu:0"


def test_reenabled_gpus_have_no_device_selected():
    vgpu.disable()
    with vgpu.enable(3):
        torch.vgpu.set_stream(torch.vgpu.Stream(1))
        torch.vgpu.set_device(2)
        torch.vgpu.set_per_process_memory_fraction(0.1)
        kept = torch.ones(1, device="vgpu")
        assert torch.vgpu.is_initialized()
    with vgpu.enable(3):
        assert not torch.vgpu.is_initialized()
        assert torch.vgpu.get_per_process_memory_fraction(2) == 1
        assert torch.vgpu.current_stream(1).stream_id == 0
        assert str(torch.ones(1, device="vgpu").device) == "vgpu:0"
        assert torch.vgpu.is_initialized()
    assert str(kept.device) == "vgpu:2"


class Named(TorchDispatchMode):
    """Records the device arguments of operators."""

    def __init__(self):
        super().__init__()
        self.devices = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if device := (kwargs or {}).get("device"):
            self.devices.append(str(device))
        return func(*args, **(kwargs or {}))


def test_dispatch_modes_see_virtual_device_names():
    with vgpu.enable(3), Named() as mode:
        torch.vgpu.set_device(2)
        torch.ones(1, device="cpu").to("vgpu").to("vgpu:1").cpu()
        torch.ones(1, device="vgpu")
        torch.vgpu.set_device(0)
    assert mode.devices == ["cpu", "vgpu:2", "vgpu:1", "cpu", "vgpu:2"]
    with FakeTensorMode():
        assert str(torch.ones(1).to("vgpu:1").device) == "vgpu:1"
        assert str(torch.ones(1).to("vgpu").device) == "vgpu:0"


def test_as_tensor_respects_the_default_device():
    torch.set_default_device("vgpu:1")
    try:
        assert str(torch.as_tensor([1.0]).device) == "vgpu:1"
        assert str(torch.as_tensor(torch.ones(1, device="vgpu:2")).device) == "vgpu:1"
        assert str(torch.as_tensor([1.0], device="cpu").device) == "cpu"
        with torch.device("vgpu:2"):
            assert str(torch.as_tensor([1.0]).device) == "vgpu:2"
    finally:
        torch.set_default_device(None)
    assert str(torch.as_tensor(torch.ones(1, device="vgpu:2")).device) == "vgpu:2"


def test_printed_tensors_look_like_cudas():
    x = torch.arange(3.0, device="vgpu:1", requires_grad=True)
    assert repr(x) == "tensor([0., 1., 2.], device='vgpu:1', requires_grad=True)"
    assert repr(x * 2).startswith("tensor([0., 2., 4.], device='vgpu:1', grad_fn=<MulBackward")
    assert repr(torch.zeros(0, 2, device="vgpu:0")) == "tensor([], device='vgpu:0', size=(0, 2))"
    assert repr(nn.Parameter(x)).startswith("Parameter containing:\ntensor([0., 1., 2.], device=")
    wide = torch.arange(40.0).reshape(2, 20)
    plain, virtual = repr(wide), repr(wide.to("vgpu:0"))
    assert virtual.startswith(plain.removesuffix(")"))
    assert f"{x.sum():.2f}" == "3.00"
    assert x.type() == "torch.vgpu.FloatTensor"
    assert x.double().type() == "torch.vgpu.DoubleTensor"


def test_a_virtual_tensor_gives_python_values():
    x = torch.arange(4, device="vgpu:0")
    assert x.tolist() == [0, 1, 2, 3]
    assert [int(v) for v in x] == [0, 1, 2, 3]
    assert bool(x[1] == 1)
    assert ["a", "b", "c"][x[2]] == "c"
    assert x[[0, 2]].tolist() == [0, 2]
    assert x[torch.tensor([True, False, True, False])].tolist() == [0, 2]


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_conjugation_and_negation_stay_lazy(dtype):
    z = torch.randn(4, dtype=dtype)
    v = z.to("vgpu:1")
    assert v.conj().is_conj()
    assert v.conj().imag.is_neg()
    torch.testing.assert_close(v.conj().resolve_conj().cpu(), z.conj().resolve_conj())
    torch.testing.assert_close(torch.view_as_real(v.conj().resolve_conj()).cpu()[:, 1], -z.imag)
    torch.testing.assert_close((v.conj() @ v).cpu(), z.conj() @ z)


def test_copy_and_deepcopy_behave_as_for_cpu_tensors():
    for device in ("cpu", "vgpu:1"):
        layer = nn.Linear(2, 2).to(device)
        layer.weight.tag = "first"
        layer(torch.ones(1, 2, device=device)).sum().backward()
        deep = copy.deepcopy(layer)
        assert deep.weight.grad is None
        assert isinstance(deep.weight, nn.Parameter)
        leaf = torch.ones(2, device=device, requires_grad=True)
        leaf.sum().backward()
        assert copy.deepcopy(leaf).grad.tolist() == [1, 1]
        shallow = copy.copy(layer.weight)
        assert isinstance(shallow, nn.Parameter)
        assert shallow.tag == "first"
        assert shallow.data_ptr() == layer.weight.data_ptr()
        assert str(shallow.device) == device
        plain = torch.arange(3.0, device=device)
        view = copy.copy(plain[1:])
        plain[1] = 7
        assert view.tolist() == [7, 2]
        assert str(view.device) == device
    before = torch.vgpu.memory_allocated(1)
    copies = copy.copy(layer.weight), copy.copy(plain)
    assert torch.vgpu.memory_allocated(1) == before
    del copies


def test_copies_share_memory_as_their_originals_do():
    layer = nn.Linear(2, 2).to("vgpu:1")
    twin = copy.deepcopy(layer)
    assert twin.weight.device.index == 1
    assert twin.weight.data_ptr() != layer.weight.data_ptr()
    base = torch.arange(4.0, device="vgpu:0")
    base_copy, view_copy = copy.deepcopy([base, base[1:]])
    base_copy[1] = 9
    assert view_copy[0].item() == 9
    assert base[1].item() == 1
    assert torch.equal(pickle.loads(pickle.dumps(base)), base)


def test_pinned_memory_reports_that_it_is_pinned():
    x = torch.arange(4.0)
    assert not x.is_pinned()
    assert x.pin_memory().is_pinned()
    assert torch.equal(x.pin_memory(), x)
    data = torch.utils.data.TensorDataset(x)
    for (batch,) in torch.utils.data.DataLoader(data, batch_size=2, pin_memory=True):
        assert batch.is_pinned()
        assert batch.to("vgpu:1", non_blocking=True).device.index == 1
    with pytest.raises(RuntimeError, match=r"cannot pin 'torch\.vgpu\.FloatTensor'"):
        x.to("vgpu:0").pin_memory()


def test_kernels_that_conjugate_lazily_are_correct():
    z = torch.randn(4, 4, dtype=torch.complex128)
    for call in (torch.linalg.pinv, torch.pinverse, lambda x: torch.linalg.lstsq(x, x)[0]):
        torch.testing.assert_close(call(z.to("vgpu:1")).cpu(), call(z))


class OnTheCurrentDevice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        doubled = grad * torch.full((2,), 2.0, device="vgpu")
        torch.vgpu.set_device(1)
        assert torch.vgpu.current_device() == 1
        return doubled


def test_a_nodes_device_is_current_during_its_backward():
    x = torch.ones(2, device="vgpu:2", requires_grad=True)
    OnTheCurrentDevice.apply(x * 1).sum().backward()
    assert x.grad.tolist() == [2, 2]
    assert torch.vgpu.current_device() == 0


def test_per_channel_observers_are_resized_as_on_the_cpu():
    """The operator resizes them, although its schema doesn't say so."""

    def observed(device):
        x = torch.arange(12.0, device="cpu").reshape(3, 4).to(device)
        on, zero_point = torch.ones(1, dtype=torch.long), torch.zeros(1, dtype=torch.int32)
        state = [torch.empty(0), torch.empty(0), torch.ones(1), zero_point]  # minima first
        on, *state = (one.to(device) for one in (on, *state))
        fake_quant = torch.fused_moving_avg_obs_fake_quant
        return [fake_quant(x, on, on, *state, 0.01, 0, 255, 0, True), *state]

    found, expected = observed("vgpu:0"), observed("cpu")
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        torch.testing.assert_close(one.cpu(), other)


def test_the_legacy_constructor_keeps_the_device():
    x = torch.ones(3, device="vgpu:1")
    for made, shape in ((x.new(2, 4), (2, 4)), (x.new(), (0,)), (x.new([1, 2]), (2,))):
        assert str(made.device) == "vgpu:1"
        assert tuple(made.shape) == shape
    assert x.new(torch.Size((2, 3))).shape == (2, 3)


def test_ctc_loss_takes_lengths_on_either_device():
    torch.manual_seed(0)
    logits, targets = torch.randn(10, 2, 5), torch.tensor([[1, 2], [3, 4]])
    lengths = torch.tensor([10, 9]), torch.tensor([2, 1])
    found = []
    for device, of_lengths in (("cpu", "cpu"), ("vgpu:1", "cpu"), ("vgpu:1", "vgpu:1")):
        x = logits.log_softmax(-1).to(device).requires_grad_()
        on_device = [length.to(of_lengths) for length in lengths]
        nn.functional.ctc_loss(x, targets.to(device), *on_device).backward()
        found.append(x.grad.cpu())
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
