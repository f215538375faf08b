"""Errors match a GPU's word for word, except for the device name, and leave the device usable."""

import copy
import re

import pytest
import torch
from torch import nn

import vgpu

pytestmark = pytest.mark.virtual_gpus(2)


def on(index, *size):
    return torch.ones(*size, device=f"vgpu:{index}")


SAME = "Expected all tensors to be on the same device, but "
ERRORS = {
    "elementwise": (lambda: on(0, 2) + on(1, 2), SAME + "found at least two devices, vgpu:0 and vgpu:1!"),
    "elementwise, CPU": (lambda: on(0, 2) * torch.ones(2), SAME + "found at least two devices, vgpu:0 and cpu!"),
    "scalar of another GPU": (lambda: on(0, 2) + on(1, 2)[0], SAME + "found at least two devices, vgpu:0 and vgpu:1!"),
    "GPU scalar, CPU vector": (lambda: torch.ones(2) + on(0, 2)[0], SAME + "found at least two devices, vgpu:0 and cpu!"),
    "result in a CPU scalar": (lambda: torch.tensor(1.0).add_(on(1, 1)[0]), SAME + "found at least two devices, vgpu:1 and cpu!"),
    "matmul": (
        lambda: on(0, 2, 2) @ on(1, 2, 2),
        SAME + "got mat2 is on vgpu:1, different from other tensors on vgpu:0 "
        "(when checking argument in method wrapper_VGPU_mm)",
    ),
    "linear, CPU input": (
        lambda: nn.Linear(2, 2).to("vgpu:0")(torch.ones(1, 2)),
        SAME + "got mat1 is on cpu, different from other tensors on vgpu:0 "
        "(when checking argument in method wrapper_VGPU_addmm)",
    ),
    "embedding": (
        lambda: nn.Embedding(3, 2).to("vgpu:1")(torch.tensor([1])),
        SAME + "got index is on cpu, different from other tensors on vgpu:1 "
        "(when checking argument in method wrapper_VGPU__index_select)",
    ),
    "loss, CPU labels": (
        lambda: nn.functional.cross_entropy(on(0, 2, 3), torch.tensor([0, 1])),
        SAME + "got target is on cpu, different from other tensors on vgpu:0 "
        "(when checking argument in method wrapper_VGPU_nll_loss_forward)",
    ),
    "layer norm": (
        lambda: nn.LayerNorm(3)(on(0, 2, 3)),
        SAME + "got weight is on cpu, different from other tensors on vgpu:0 "
        "(when checking argument in method wrapper_VGPU__native_layer_norm)",
    ),
    "convolution, CPU input": (
        lambda: nn.Conv2d(1, 1, 1).to("vgpu:0")(torch.ones(1, 1, 2, 2)),
        "Input type (torch.FloatTensor) and weight type (torch.vgpu.FloatTensor) should be the same "
        "or input should be a MKLDNN tensor and weight is a dense tensor",
    ),
    "convolution, CPU weight": (
        lambda: nn.Conv2d(1, 1, 1)(on(0, 1, 1, 2, 2)),
        "Input type (torch.vgpu.FloatTensor) and weight type (torch.FloatTensor) should be the same",
    ),
    "LSTM": (
        lambda: nn.LSTM(2, 2).to("vgpu:1")(torch.ones(1, 1, 2)),
        "Input and parameter tensors are not at the same device, "
        "found input tensor at cpu and parameter tensor at vgpu:1",
    ),
    "index of another GPU": (
        lambda: on(0, 2)[torch.tensor([0], device="vgpu:1")],
        "indices should be either on cpu or on the same device as the indexed tensor (vgpu:0)",
    ),
    "gradient": (
        lambda: setattr(on(0, 2), "grad", torch.ones(2)),
        "attempting to assign a gradient with device type 'cpu' to a tensor with device type 'vgpu'. "
        "Please ensure that the gradient and the tensor are on the same device",
    ),
    "generator": (
        lambda: torch.randn(2, device="vgpu:0", generator=torch.Generator()),
        "Expected a 'vgpu' device type for generator but found 'cpu'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
def test_operators_reject_tensors_on_different_devices(name):
    call, message = ERRORS[name]
    with pytest.raises(RuntimeError) as caught:
        call()
    assert str(caught.value) == message
    assert on(0, 3).sum().item() == 3


def test_cpu_scalars_and_cpu_indices_can_be_mixed_with_gpu_tensors():
    x = on(1, 3)
    assert (x + torch.tensor(2.0)).tolist() == [3, 3, 3]
    assert (torch.tensor(2.0) * x).device.index == 1
    assert torch.where(x > 0, x, torch.tensor(0.0)).sum().item() == 3
    assert x[torch.tensor([0, 2])].device.index == 1
    x[torch.tensor([0])] = torch.tensor(5.0)
    assert x.tolist() == [5, 1, 1]


@pytest.mark.parametrize("convert", [lambda x: x.numpy(), lambda x: x.__array__()])
def test_numpy_needs_a_cpu_tensor(convert):
    message = (
        "can't convert vgpu:1 device type tensor to numpy. "
        "Use Tensor.cpu() to copy the tensor to host memory first."
    )
    with pytest.raises(TypeError, match=re.escape(message)):
        convert(on(1, 2))
    assert on(1, 2).numpy(force=True).sum() == 2


def test_deepcopy_of_a_non_leaf_raises_torchs_error():
    messages = set()
    for device in ("cpu", "vgpu:0"):
        with pytest.raises(RuntimeError, match="pull/103001") as found:
            copy.deepcopy(torch.ones(1, device=device, requires_grad=True) * 2)
        messages.add(str(found.value))
    assert len(messages) == 1


@pytest.mark.parametrize(
    "use",
    [
        lambda: torch.zeros(1, device="vgpu:2"),
        lambda: torch.zeros(1).to("vgpu:2"),
        lambda: on(0, 1).to("vgpu:2"),
        lambda: nn.Linear(1, 1).to("vgpu:2"),
        lambda: torch.vgpu.set_device(2),
        lambda: torch.vgpu.memory_allocated("vgpu:2"),
        lambda: torch.zeros(1).vgpu(2),
    ],
)
def test_a_nonexistent_device_is_rejected(use):
    assert torch.device("vgpu:2").index == 2
    with pytest.raises(torch.AcceleratorError, match="invalid device ordinal"):
        use()


DEVICE = "vgpu:1"
PARTS = [torch.ones(2), torch.ones(3)]
QUANTIZED = "quantized tensors are not supported on virtual GPUs"
NESTED = "nested tensors are not supported on virtual GPUs"
STORAGE = "a storage alone cannot be created on or moved to a virtual GPU"
REFUSED = {
    "storage": (lambda: torch.UntypedStorage(8, device=DEVICE), STORAGE),
    "typed storage": (lambda: torch.TypedStorage(8, dtype=torch.int8, device=DEVICE), STORAGE),
    "storage moved": (lambda: torch.UntypedStorage(8).to(device=torch.device(DEVICE)), STORAGE),
    "quantize": (lambda: torch.quantize_per_tensor(on(1, 2), 0.1, 0, torch.qint8), QUANTIZED),
    "quantize channels": (
        lambda: torch.quantize_per_channel(on(1, 2, 2), on(1, 2), on(1, 2), 0, torch.qint8),
        QUANTIZED,
    ),
    "quantize dynamic": (lambda: torch.quantize_per_tensor_dynamic(on(1, 2), torch.qint8, False), QUANTIZED),
    "quantized moved": (
        lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8).to(DEVICE),
        QUANTIZED,
    ),
    "nested": (lambda: torch.nested.nested_tensor(PARTS, device=DEVICE), NESTED),
    "nested from virtual tensors": (lambda: torch.nested.as_nested_tensor([on(1, 2), on(1, 3)]), NESTED),
    "nested moved": (lambda: torch.nested.nested_tensor(PARTS).to(DEVICE), NESTED),
    "jagged": (lambda: torch.nested.nested_tensor(PARTS, layout=torch.jagged, device=DEVICE), NESTED),
    "jagged from virtual tensors": (
        lambda: torch.nested.as_nested_tensor([on(1, 2), on(1, 3)], layout=torch.jagged),
        NESTED,
    ),
    "jagged moved": (
        lambda: torch.nested.nested_tensor(PARTS, layout=torch.jagged).to(DEVICE),
        NESTED,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")
def test_unsupported_features_are_rejected_clearly(name):
    call, message = REFUSED[name]
    with pytest.raises(NotImplementedError, match=message):
        call()
    assert torch.UntypedStorage(8, device="cpu").nbytes() == 8
    assert on(1, 3).sum().item() == 3


class Subclass(torch.Tensor):
    pass


def encoded():
    """Encode a padded sequence in eval mode, where TransformerEncoder creates nested tensors."""
    layer = nn.TransformerEncoderLayer(4, 2, 4, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 1).to(DEVICE).eval()
    with torch.no_grad():
        return encoder(on(1, 1, 2, 4), src_key_padding_mask=on(1, 1, 2).cumsum(1) > 1)


INSTEAD = {
    "encoder": (encoded, "enable_nested_tensor=False"),
    "subclass": (
        lambda: torch.ones(2).as_subclass(Subclass).to(DEVICE),
        "Subclass are not supported",
    ),
    "subclass of a virtual tensor": (
        lambda: on(1, 2).as_subclass(Subclass),
        "use plain tensors there",
    ),
    "storage": (lambda: torch.ones(2).untyped_storage().vgpu(1), "a storage alone"),
}


@pytest.mark.parametrize("name", INSTEAD)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_the_error_says_what_to_do_instead(name):
    call, words = INSTEAD[name]
    with pytest.raises(NotImplementedError, match=words):
        call()


@pytest.mark.parametrize(
    ("sparse", "name"), [(False, "torch.vgpu.FloatTensor"), (True, "torch.vgpu.sparse.FloatTensor")]
)
def test_the_error_for_a_modified_tensor_names_its_type_as_on_cuda(sparse, name):
    x = on(1, 2, 2).requires_grad_()
    y = (x * 1).to_sparse() if sparse else x * 1
    z = torch.mm(y, x)
    y.mul_(2)
    with pytest.raises(RuntimeError, match=re.escape(f"operation: [{name} [2, 2]]")):
        z.sum().backward()


@pytest.mark.parametrize(
    "call",
    [
        lambda: torch.ones(1).new(on(1, 2)),
        lambda: on(1, 2).new(torch.ones(1)),
        lambda: on(1, 2).__dlpack__(),
    ],
)
def test_no_error_names_the_cpp_device(call):
    with pytest.raises((TypeError, BufferError)) as caught:
        call()
    assert "vgpu" in str(caught.value)
    assert "lazy" not in str(caught.value)


def test_a_tensor_larger_than_this_machine_raises_out_of_memory():
    with vgpu.enable(2, memory_bytes=2**60):
        x = on(1, 2**20)
        with pytest.raises(
            torch.OutOfMemoryError, match=r"4096\.00 GiB on vgpu:1, whose values are stored"
        ):
            x[:, None] * x
        with pytest.raises(torch.OutOfMemoryError, match=r"shapes_only\(\)"):
            torch.empty(2**45, device="vgpu:1")


def test_existing_tensors_work_after_disable_and_new_ones_are_rejected():
    x = on(1, 2).requires_grad_()
    with vgpu.enable(2) as lab:
        lab.disable()
        (x * 2).sum().backward()
        assert x.grad.cpu().tolist() == [2, 2]
        for make in (lambda: on(1, 2), lambda: torch.ones(1).to(DEVICE), lambda: x.to("vgpu:0")):
            with pytest.raises(RuntimeError, match=r"call vgpu\.enable\(count\) first"):
                make()


def with_dual(use):
    with torch.autograd.forward_ad.dual_level():
        use(torch.autograd.forward_ad.make_dual(torch.ones(()), torch.ones(())))


@pytest.mark.parametrize(
    "call",
    [
        lambda: torch.func.jvp(lambda v: v * 2, (on(0, 2),), (on(0, 2),)),
        lambda: torch.func.jvp(lambda v: v.to("vgpu:0") * 2, (torch.ones(2),), (torch.ones(2),)),
        lambda: torch.func.jacfwd(lambda v: v * 2)(on(0, 2)),
        lambda: with_dual(lambda dual: dual.to("vgpu:0")),
        lambda: with_dual(lambda dual: dual * on(0, 2)),
        lambda: with_dual(lambda dual: on(0, 2).copy_(dual)),
        lambda: with_dual(lambda dual: torch.autograd.forward_ad.make_dual(dual, on(0, 1)[0])),
    ],
)
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit:FutureWarning")
def test_forward_mode_is_rejected_with_a_clear_message(call):
    with pytest.raises(NotImplementedError, match=r"forward-mode .* not supported on virtual GPUs"):
        call()
    with torch.autograd.forward_ad.dual_level():
        assert torch.ones(2).to("vgpu:0").sum().item() == 2
