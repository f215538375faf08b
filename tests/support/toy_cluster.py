"""A cluster whose times can be computed by hand.

Within a host, a GPU sends at 1 GB/s, with a latency of 1 µs per step; between hosts, at 0.5 GB/s,
with 10 µs. With ``EXACT`` costs, kernels take no time.
"""

import vgpu

LINK = vgpu.Link("toy link", 1e9, 1e-6, "made for this test")
NETWORK = vgpu.Network("toy network", 0.5e9, 10e-6, "made for this test")
EXACT = {
    "link_share": 1.0,
    "network_share": 1.0,
    "python_launch_s": 0.0,
    "engine_launch_s": 0.0,
    "kernel_s": 0.0,
}


def toy(hosts=2, gpus_per_host=4, **options):
    return vgpu.cluster(hosts, gpus_per_host, gpu="A100", link=LINK, network=NETWORK, **options)


def collectives(timeline):
    return [event for event in timeline.events if event.kind == "collective"]
