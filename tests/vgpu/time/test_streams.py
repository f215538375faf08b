"""Streams and events: which one is current, what they report, and how a backward pass uses them."""

import threading
import time

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import vgpu

pytestmark = pytest.mark.virtual_gpus(3)


def test_streams_and_events_have_torchs_interface(monkeypatch):
    default = torch.vgpu.current_stream()
    assert default == torch.vgpu.default_stream()
    stream = torch.vgpu.Stream("vgpu:2")
    with torch.vgpu.stream(stream):
        assert torch.vgpu.current_stream() == stream
        assert torch.vgpu.current_device() == 2
    assert torch.vgpu.current_device() == 0
    assert torch.vgpu.current_stream(2) != stream
    start, end = torch.vgpu.Event(enable_timing=True), torch.vgpu.Event(enable_timing=True)
    with pytest.raises(ValueError, match="must be recorded"):
        start.elapsed_time(end)
    monkeypatch.setattr(time, "perf_counter", iter((1.0, 1.25)).__next__)
    start.record()
    stream.record_event(end)
    assert start.elapsed_time(end) == 250  # ms
    monkeypatch.undo()
    with pytest.raises(ValueError, match="enable_timing=True"):
        start.elapsed_time(torch.vgpu.Event())
    torch.ones(2, device="vgpu:2").record_stream(stream)
    generic = torch.Stream("vgpu:1")
    assert generic.device.index == 1
    assert isinstance(generic, torch.vgpu.Stream)
    assert isinstance(generic, torch.Stream)
    assert isinstance(torch.Event(), torch.vgpu.Event)
    with generic:
        assert torch.accelerator.current_stream() == generic
    stream.wait_stream(default)
    assert stream.query()


# Backward passes in a recording


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(weight)
        return x @ weight

    @staticmethod
    def backward(ctx, gradient):
        (weight,) = ctx.saved_tensors
        return gradient @ weight.T, None


PRODUCTS = {
    "operator": torch.matmul,
    "Function": Product.apply,
    "checkpoint": lambda x, w: checkpoint(torch.matmul, x, w, use_reentrant=False),
    "reentrant checkpoint": lambda x, w: checkpoint(torch.matmul, x, w, use_reentrant=True),
}


def matrices(size=64):
    x, weight = torch.ones(2, size, size, device="vgpu")
    return x.requires_grad_(), weight


@pytest.mark.parametrize("name", PRODUCTS)
def test_backward_runs_on_the_stream_of_its_forward(name):
    (x, weight), side = matrices(), torch.Stream("vgpu")
    with vgpu.record() as timeline:
        side.wait_stream(torch.vgpu.current_stream())
        with side:
            y = PRODUCTS[name](x, weight)
        torch.vgpu.current_stream().wait_stream(side)
        y.sum().backward()
    products = [event for event in timeline.events if event.name == "mm"]
    assert {event.stream for event in products} == {side.stream_id}
    assert sum(event.backward for event in products) == 1 + ("reentrant" in name)
    assert timeline.races == []


def test_backward_uses_the_default_stream_of_a_gpu_other_than_its_forwards():
    (x, _), side = matrices(), torch.Stream("vgpu")
    other = torch.ones(8, device="vgpu:1")

    class TwoGPUs(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.neg()

        @staticmethod
        def backward(ctx, gradient):
            other.tanh()
            return gradient.sigmoid()

    with vgpu.record() as timeline:
        side.wait_stream(torch.vgpu.current_stream())
        with side:
            y = TwoGPUs.apply(x)
        torch.vgpu.current_stream().wait_stream(side)
        y.sum().backward()
    places = {event.name: (event.device.index, event.stream) for event in timeline.events}
    assert places["neg"] == places["sigmoid"] == (0, side.stream_id)
    assert places["tanh"] == (1, 0)


def test_a_graph_from_before_the_recording_runs_on_the_default_stream():
    (x, weight), side = matrices(), torch.Stream("vgpu")
    y = x @ weight
    with vgpu.record() as timeline:
        side.wait_stream(torch.vgpu.current_stream())
        with side:
            doubled = weight * 2  # creates no autograd node
        y.backward(weight)
    streams = {event.name: event.stream for event in timeline.events}
    assert streams == {"mul": side.stream_id, "mm": 0}
    assert doubled.device == x.device


class Metric(nn.Module):
    def forward(self, x):
        return x.detach() * 3


class Logged(nn.Module):
    def __init__(self):
        super().__init__()
        self.product, self.metric = nn.Linear(64, 64, bias=False, device="vgpu"), Metric()

    def forward(self, x):
        y = Product.apply(self.product(x), self.product.weight)
        self.metric(y)
        return y


def test_a_module_without_autograd_nodes_names_no_backward_events():
    x, model = torch.ones(64, 64, device="vgpu"), Logged()
    with vgpu.record() as timeline:
        model(x).sum().backward()
    modules = {event.module for event in timeline.events if event.backward}
    assert "product" in modules and "metric" not in modules


def test_only_the_callers_stream_waits_for_gradients():
    (x, weight), (caller, other) = matrices(), (torch.Stream("vgpu"), torch.Stream("vgpu"))
    for stream, races in ((caller, 0), (other, 1)):
        with vgpu.record() as timeline:
            y = x @ weight
            for each in (caller, other):
                each.wait_stream(torch.vgpu.current_stream())
            with caller:
                y.backward(weight)
            with stream:
                x.grad * 2
        assert len(timeline.races) == races, timeline.races
        x.grad = None


HOST_WAITS = {
    "GPU": lambda: torch.vgpu.synchronize(),
    "stream": lambda: torch.vgpu.current_stream().synchronize(),
    "event": lambda: torch.vgpu.current_stream().record_event().synchronize(),
    "spend": lambda: vgpu.spend(1.0),
}


@pytest.mark.parametrize("name", HOST_WAITS)
def test_a_hook_that_waits_delays_the_launches_after_it(name):
    x, weight = matrices(512)
    with vgpu.record() as timeline:
        halved = x * 0.5
        halved.register_hook(lambda gradient: HOST_WAITS[name]())
        (halved @ weight).backward(weight)
    before, after = (event for event in timeline.events if event.backward and event.name != "wait")
    assert (before.name, after.name) == ("mm", "mul")
    waited_until_s = 1.0 if name == "spend" else before.end_s
    assert after.launch_s > waited_until_s


def test_a_nested_backward_pass_keeps_its_hooks_stream():
    (x, weight), side = matrices(), torch.Stream("vgpu")
    inner = weight.clone().requires_grad_()

    def hook(gradient):
        side.wait_stream(torch.vgpu.current_stream())
        with side:
            with torch.enable_grad():
                tripled = inner * 3
            torch.autograd.grad(tripled, inner, weight)
            weight.sigmoid()
        weight.tanh()

    with vgpu.record() as timeline:
        y = x * 2
        y.register_hook(hook)
        y.backward(weight)
    streams = {event.name: event.stream for event in timeline.events}
    assert (streams["sigmoid"], streams["tanh"]) == (side.stream_id, 0)


def test_consecutive_backward_passes_are_distinguished():
    (x, weight), streams = matrices(), (torch.Stream("vgpu"), torch.Stream("vgpu"))
    with vgpu.record() as timeline:
        products = [x @ weight for _ in streams]
        for stream in streams:
            stream.wait_stream(torch.vgpu.current_stream())
        for stream, product in zip(streams, products, strict=True):
            with stream:
                (gradient,) = torch.autograd.grad(product, x, weight)
        with stream:
            gradient * 2
    assert timeline.races == []


def test_an_engine_callback_runs_on_the_callers_stream():
    (x, weight), caller = matrices(), torch.Stream("vgpu")
    seen = []

    def at_the_end():
        seen.append(torch.vgpu.current_stream())
        weight.tanh()

    def hook(gradient):
        torch.autograd.Variable._execution_engine.queue_callback(at_the_end)

    with vgpu.record() as timeline:
        y = x * 2
        y.register_hook(hook)
        caller.wait_stream(torch.vgpu.current_stream())
        with caller:
            y.backward(weight)
    streams = {event.name: event.stream for event in timeline.events}
    assert seen == [caller] and streams["tanh"] == caller.stream_id


def test_another_thread_does_not_end_a_backward_pass():
    def makespan_s(beside):
        x, weight = matrices()

        def hook(gradient):
            thread = threading.Thread(target=beside)
            thread.start()
            thread.join()

        with vgpu.record() as timeline:
            y = x * 2
            y.register_hook(hook)
            for _ in range(20):
                y = y @ weight
            y.backward(weight)
        return timeline.makespan_s

    side = torch.Stream("vgpu")
    assert makespan_s(side.query) >= makespan_s(lambda: None)
