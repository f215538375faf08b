"""Objects that can't be sent between processes are rejected by name, with advice."""

import pytest
import torch
from cells import cell

from vgpu import launch
from vgpu.launch.rank import dumps, dumps_call

THINGS = [
    ("a tensor on vgpu:1", lambda: torch.ones(2, device="vgpu:1")),
    ("a tensor on vgpu:0", lambda: torch.nn.Linear(1, 1).to("vgpu")),
    ("Generator on vgpu:0", lambda: torch.Generator("vgpu")),
    ("the device vgpu:1", lambda: [{"device": torch.device("vgpu:1")}]),
]


@pytest.mark.virtual_gpus(2)
@pytest.mark.parametrize(("what", "make"), THINGS)
def test_run_rejects_virtual_tensors_and_says_what_to_send_instead(what, make):
    names = cell("def main(rank, world_size, *args): return thing", thing=make())
    with pytest.raises(TypeError) as refused:
        launch.run(names["main"], 2)
    message = str(refused.value)
    assert "cannot send main to other processes, because of the variable 'thing'" in message
    assert f"{what} cannot leave its process" in message
    assert "Send CPU tensors (tensor.cpu(), module.cpu())" in message
    with pytest.raises(TypeError, match="because of argument 1 after the number of ranks"):
        launch.run(print, 2, make())


def test_a_result_on_a_virtual_gpu_is_rejected_with_the_same_message():
    names = cell(
        """
        def main(rank, world_size):
            import vgpu
            vgpu.enable(2)
            return torch.ones(1, device="vgpu")
        """
    )
    with pytest.raises(launch.RankRaised) as refused:
        launch.run(names["main"], 1)
    message = str(refused.value)
    assert "rank 0 of 1 returned something that can't be sent back" in message
    assert "a tensor on vgpu:0 cannot leave its process" in message


@pytest.mark.virtual_gpus(1)
def test_cpu_tensors_are_sent_while_virtual_gpus_are_enabled():
    model = torch.nn.Linear(2, 1).to("vgpu").cpu()
    assert b"vgpu" not in dumps(model) and dumps_call(print, (torch.device("cpu"), model))
    [weight] = launch.run(cell("def main(rank, world_size, m): return m.weight")["main"], 1, model)
    torch.testing.assert_close(weight, model.weight)
