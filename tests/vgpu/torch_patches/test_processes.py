"""Tensors on virtual GPUs sent to other processes with torch.multiprocessing."""

import os
import re
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
from rights import needs_shared_memory
from torch import nn

import vgpu

pytestmark = [pytest.mark.virtual_gpus(2), needs_shared_memory]


def answer(requests, answers, enabled):
    """Run the other process: report what it got, and change the first tensor."""
    lab = vgpu.enable(enabled)
    try:
        tensor, view = requests.get()
        parameter, sparse, module = requests.get()
        tensor[0] = 7
        found = {
            "tensor": (str(tensor.device), tensor.tolist(), view.tolist()),
            "bytes": torch.vgpu.memory_allocated(1),
            "parameter": (type(parameter) is type(tensor), isinstance(parameter, nn.Parameter)),
            "requires_grad": (tensor.requires_grad, parameter.requires_grad),
            "sparse": (sparse.layout, str(sparse.device), sparse.to_dense().tolist()),
            "module": [str(p.device) for p in module.parameters()],
        }
    except Exception as error:
        found = {"error": f"{type(error).__name__}: {error}"}
    answers.put(found)
    lab.disable()


def sent(method, enabled=2):
    """Return what the other process reported, and the tensor that was sent to it."""
    context = torch.multiprocessing.get_context(method)
    requests, answers = context.Queue(), context.Queue()
    process = context.Process(target=answer, args=(requests, answers, enabled), daemon=True)
    process.start()
    tensor = torch.zeros(300, device="vgpu:1")
    parameter = nn.Parameter(torch.ones(2, device="vgpu:0"))
    module = nn.Linear(2, 1).to("vgpu:1")
    requests.put((tensor, tensor[:2]))
    requests.put((parameter, torch.eye(2, device="vgpu:1").to_sparse(), module))
    found = answers.get()
    process.join()
    assert process.exitcode == 0
    return found, tensor


METHODS = ["spawn"] if os.name == "nt" else ["spawn", "forkserver"]


@pytest.mark.parametrize("method", METHODS)
def test_a_tensor_arrives_on_its_device_and_shares_its_memory(method):
    found, tensor = sent(method)
    assert found == {
        "tensor": ("vgpu:1", [7.0] + [0.0] * 299, [7.0, 0.0]),
        # The tensor with its view, the sparse one's indices and values, the module.
        "bytes": 1536 + 2 * 512 + 2 * 512,
        "parameter": (True, True),
        "requires_grad": (False, True),
        "sparse": (torch.sparse_coo, "vgpu:1", [[1.0, 0.0], [0.0, 1.0]]),
        "module": ["vgpu:1", "vgpu:1"],
    }
    assert tensor[0].item() == 7
    assert torch.vgpu.memory_allocated(1) == 1536


def test_a_tensor_on_a_gpu_that_the_other_process_lacks_raises_cudas_error():
    found, _ = sent(METHODS[-1], enabled=1)
    assert found["error"].startswith("AcceleratorError: VGPU error: invalid device ordinal")


def enable_two(worker):
    vgpu.enable(2)


def test_data_loader_workers_can_create_tensors_on_a_virtual_gpu():
    loader = torch.utils.data.DataLoader(
        OnDevice(),
        batch_size=None,  # torch would collate them into a storage on their device
        num_workers=1,
        multiprocessing_context=METHODS[-1],
        worker_init_fn=enable_two,
    )
    samples = list(loader)
    assert {str(sample.device) for sample in samples} == {"vgpu:1"}
    assert torch.stack(samples).tolist() == [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0], [3.0, 3.0]]


class OnDevice(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return torch.full((2,), float(index), device="vgpu:1")


def test_a_tensor_that_cannot_be_sent_is_rejected_before_it_leaves():
    tensor = torch.ones(2, device="vgpu:1", requires_grad=True)
    with pytest.raises(RuntimeError, match="send the tensor itself"):
        ForkingPickler.dumps(tensor.untyped_storage())
    with pytest.raises(RuntimeError, match=re.escape("Cowardly refusing to serialize non-leaf")):
        ForkingPickler.dumps(tensor * 2)
    assert ForkingPickler.dumps(torch.UntypedStorage(4))
