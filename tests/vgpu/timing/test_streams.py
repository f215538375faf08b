"""Streams and events outside a recording: which is current, and what they say."""

import time

import pytest
import torch

pytestmark = pytest.mark.virtual_gpus(3)


def test_streams_and_events_keep_their_books(monkeypatch):
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
