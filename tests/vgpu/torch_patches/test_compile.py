"""``torch.compile`` on virtual GPUs: the same values, gradients and states, with fused times."""

import copy
import functools
import types
import warnings

import pytest
import torch
from cells import cell
from torch import nn

import vgpu
from vgpu import launch
from vgpu.torch_patches import compile as compile_patch

pytestmark = [
    pytest.mark.virtual_gpus(2, gpu="H100"),
    pytest.mark.filterwarnings("ignore:torch.compile on virtual GPUs:UserWarning"),
    # Inductor imports a deprecated part of torch.
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
]


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.2), nn.Linear(16, 4))


def compiled_in_place(model):
    model.compile()
    return model


WAYS = {
    "torch.compile(model)": torch.compile,
    "fullgraph and dynamic": lambda model: torch.compile(model, fullgraph=True, dynamic=True),
    "max-autotune": lambda model: torch.compile(model, mode="max-autotune"),
    "eager": lambda model: torch.compile(model, backend="eager"),
    "model.compile()": compiled_in_place,
    "a function around it": lambda model: torch.compile(lambda x: model(x)),
    "its method": lambda model: torch.compile(model.forward),
    "a decorator": lambda model: torch.compile(fullgraph=True)(lambda x: model(x)),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("moves", ["before", "after"])
def test_a_compiled_model_trains_to_the_same_values_as_an_uncompiled_one(way, moves):
    plain, model = network().to("vgpu:1"), network()
    if moves == "before":
        model.to("vgpu:1")
    compiled = WAYS[way](model)
    model.to("vgpu:1")
    losses = []
    for forward, parameters in ((plain, plain), (compiled, model)):
        torch.manual_seed(1)
        optimizer = torch.optim.AdamW(parameters.parameters(), lr=0.1)
        for _ in range(3):
            loss = forward(torch.rand(5, 8, device="vgpu:1")).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert losses[:3] == losses[3:]
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_compiled_module_keeps_its_names_and_its_state():
    compiled = torch.compile(network().to("vgpu"))
    assert type(compiled).__name__ == "OptimizedModule"
    assert {name.partition(".")[0] for name in compiled.state_dict()} == {"_orig_mod"}
    again = copy.deepcopy(compiled).eval()
    x = torch.rand(2, 8, device="vgpu")
    assert torch.equal(again(x), compiled.eval()(x))


def test_a_compiled_function_without_tensor_arguments_finds_its_virtual_gpu():
    model, device = network().to("vgpu:0").eval(), torch.device("vgpu:1")
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model(torch.ones(1, 8, device="vgpu:0")).sum().backward()
    before = model[0].bias.clone()

    def of_a_cpu_batch(batch):
        return model(batch.to("vgpu:0"))

    class Trainer:
        def __init__(self):
            self.inner = types.SimpleNamespace(model=model)

        def step(self, batch):
            return self.inner.model(batch.to("vgpu:0"))

    def on_a_device():
        return torch.ones(2, device=device)

    batch = torch.ones(3, 8)
    expected = model(batch.to("vgpu:0"))
    assert torch.equal(torch.compile(of_a_cpu_batch, fullgraph=True)(batch), expected)
    assert torch.equal(torch.compile(Trainer().step, fullgraph=True)(batch), expected)
    part = functools.partial(lambda model, batch: model(batch.to("vgpu:0")), model)
    assert torch.equal(torch.compile(part, fullgraph=True)(batch), expected)
    assert torch.compile(on_a_device, fullgraph=True)().device == device
    boxed = torch.compile(lambda box: box.x * 2, fullgraph=True)
    assert boxed(types.SimpleNamespace(x=expected)).device == expected.device
    torch.compile(optimizer.step)()
    torch.testing.assert_close(model[0].bias, before - model[0].bias.grad)


def counting(graphs):
    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    return backend


def test_functions_of_cpu_tensors_are_compiled_as_without_virtual_gpus():
    graphs = []
    scale = torch.tensor(3.0)

    @torch.compile(backend=counting(graphs), fullgraph=True)
    def inner(x):
        return x.sin() * scale

    @torch.compile(backend=counting(graphs), fullgraph=True)
    def outer(x):
        return inner(x) + 1

    x = torch.rand(4)
    torch.testing.assert_close(outer(x), x.sin() * 3 + 1)
    assert len(graphs) == 1  # includes the inner function
    model = nn.Linear(4, 2)
    torch.testing.assert_close(torch.compile(model, backend=counting(graphs))(x), model(x))
    assert len(graphs) == 2


def test_shapes_are_not_compiled():
    graphs = []
    with vgpu.shapes_only():
        on_host = torch.empty(2, 8)
        assert torch.compile(network(), backend=counting(graphs))(on_host).shape == (2, 4)
        model = torch.compile(network().to("vgpu"), backend=counting(graphs))
        assert model(on_host.to("vgpu")).shape == (2, 4)
    assert graphs == []


def test_compile_warns_once_but_not_for_backends_that_fuse_nothing(monkeypatch):
    monkeypatch.setattr(compile_patch, "_has_said", False)
    x = torch.ones(2, device="vgpu")

    def double(x):
        return 2 * x

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.compile(double, backend="eager")(x)
    with pytest.warns(UserWarning, match=r"torch\.compile on virtual GPUs: .*double runs uncomp"):
        torch.compile(double)(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.compile(double)(x)


def test_compiled_code_does_not_report_that_it_is_compiling():
    asked = []

    @torch.compile
    def ask(x):
        asked.append((torch.compiler.is_compiling(), torch.compiler.is_dynamo_compiling()))
        return x

    ask(torch.ones(1, device="vgpu"))
    assert asked == [(False, False)]


def events_of(model, x, **costs):
    with vgpu.record(**costs) as timeline:
        model(x).square().mean().backward()
        model.zero_grad()
        torch.vgpu.synchronize()
    return timeline


def block():
    return nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU()).to("vgpu")


def test_forward_and_backward_of_a_compiled_module_count_as_fused():
    x = torch.rand(32, 64, device="vgpu")
    model = block()
    plain, everything = events_of(model, x), events_of(model, x, fuses=True)
    compiled = events_of(torch.compile(model), x)
    names = [event.name for event in compiled.events if event.module]
    assert "gelu" in [event.name for event in plain.events]
    assert "fused" in names and not {"gelu", "gelu_backward"} & set(names)
    assert "mean" in [event.name for event in compiled.events]  # the loss isn't compiled
    assert everything.makespan_s < compiled.makespan_s < plain.makespan_s
    assert {event.module for event in compiled.events} == {"", "0", "2", "3"}


def test_a_fully_compiled_program_takes_as_long_as_with_fuses():
    x = torch.rand(32, 64, device="vgpu")
    model = block()

    def step():
        model(x).square().mean().backward()

    def timed(run, **costs):
        model.zero_grad()
        with vgpu.record(**costs) as timeline:
            run()
            torch.vgpu.synchronize()
        return timeline

    compiled, fused = timed(torch.compile(step)), timed(step, fuses=True)
    assert [(e.name, e.size_bytes) for e in compiled.events] == [
        (e.name, e.size_bytes) for e in fused.events
    ]
    assert compiled.makespan_s == pytest.approx(fused.makespan_s)


def test_operations_between_compiled_calls_are_launched_one_by_one():
    x = torch.rand(32, 64, device="vgpu")
    chain = torch.compile(lambda x: (x * 2 + 1).relu())
    with vgpu.record() as timeline:
        y = x.sin().cos()
        assert torch.vgpu.current_stream().query() is False  # simulates everything so far
        y = chain(y).exp().neg()
        z = chain(y)
    assert [event.name for event in timeline.events] == [
        *("sin", "cos", "fused", "exp", "neg", "fused")
    ]
    assert vgpu.replay(timeline).makespan_s == timeline.makespan_s
    assert z.shape == x.shape


def test_a_compiled_module_in_a_recording_does_not_warn_about_hooks():
    compiled = torch.compile(block())
    with vgpu.record():
        compiled(torch.rand(2, 64, device="vgpu"))  # warnings are errors here


RANKS = """
import copy
import warnings
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

def trained(model, forward, rank):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(3):
        torch.manual_seed(10 * step + rank)
        loss = forward(torch.rand(4, 8, device="vgpu")).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses

def main(rank, world):
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    first = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 2)).to("vgpu")
    models = [copy.deepcopy(first) for _ in range(6)]
    ddp = DDP(models[0])
    found = {"ddp": trained(ddp, ddp, rank)}
    outside = torch.compile(DDP(models[1]))
    found["compiled ddp"] = trained(outside, outside, rank)
    inside = DDP(torch.compile(models[2]))
    found["ddp of compiled"] = trained(inside, inside, rank)
    sharded = models[3]
    fully_shard(sharded[0])
    fully_shard(sharded)
    found["fsdp"] = trained(sharded, sharded, rank)
    blocks = models[4]  # as torchtitan does it
    blocks[0] = torch.compile(blocks[0], fullgraph=True)
    fully_shard(blocks[0])
    fully_shard(blocks)
    found["fsdp of compiled blocks"] = trained(blocks, blocks, rank)
    whole = models[5]
    fully_shard(whole)
    whole.compile()
    found["compiled fsdp"] = trained(whole, whole, rank)
    return found
"""


def test_ddp_and_fsdp2_train_compiled_modules_like_uncompiled_ones():
    for found in launch.run(cell(RANKS)["main"], 2, gpu="V100"):
        assert len({tuple(losses) for losses in found.values()}) == 1, found


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton finds the real GPU")
def test_a_triton_kernel_is_rejected():
    triton = pytest.importorskip("triton")

    @triton.jit
    def kernel(x):
        pass

    with pytest.raises(NotImplementedError, match="Triton kernels need a real GPU"):
        kernel[(1,)](torch.ones(2, device="vgpu"))
    vgpu.disable()
    with pytest.raises(RuntimeError, match="0 active drivers"):
        kernel[(1,)](torch.ones(2))
