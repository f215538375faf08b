"""How fast bytes move between hosts: adapters and what they are plugged into.

Rates are a maker's or a standard's, for one direction, before any protocol's own bytes. How much of
it a collective reaches, a cost model must say (``CostModel.network_share``). Latencies are those of
one step of a ring over the network in NCCL's own model (src/graph/tuning.cc, ring, LL128: 4 µs),
and an order of magnitude more for TCP.

Left out: switches with too few uplinks, neighbours, routes that collide. Clusters fall behind their
adapters there: the Ultra-Scale Playbook (2025) measured an all-reduce of 256 MB on H100s at 362, 160
and 33 GB/s a GPU over 2, 4 and 64 hosts, where adapters allow 400.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Network:
    """The adapters of one host, in one direction."""

    name: str
    adapter_bytes_per_s: float
    latency_s: float  # of one step from host to host
    source: str
    adapters_per_host: int | None = None  # None means one for each GPU

    def bytes_per_s_per_gpu(self, gpus_per_host: int) -> float:
        """A GPU's part of its host's adapters, when all GPUs of the host send at once."""
        adapters = gpus_per_host if self.adapters_per_host is None else self.adapters_per_host
        return adapters * self.adapter_bytes_per_s / gpus_per_host


def _gbit(gigabits_per_s: float) -> float:
    return gigabits_per_s * 1e9 / 8


_INFINIBAND = "InfiniBand Trade Association roadmap, four lanes"

NETWORKS: dict[str, Network] = {
    "InfiniBand EDR": Network("InfiniBand EDR", _gbit(100), 4e-6, _INFINIBAND),
    "InfiniBand HDR": Network("InfiniBand HDR", _gbit(200), 4e-6, _INFINIBAND),
    "InfiniBand NDR": Network("InfiniBand NDR", _gbit(400), 4e-6, _INFINIBAND),
    "RoCE 400": Network("RoCE, 400 Gb/s Ethernet", _gbit(400), 4e-6, "IEEE 802.3bs"),
    "EFA p4d": Network(
        "EFA of a p4d.24xlarge", _gbit(100), 15e-6, "AWS EC2 P4d: 400 Gb/s a host", 4
    ),
    "EFA p5": Network(
        "EFA of a p5.48xlarge", _gbit(100), 15e-6, "AWS EC2 P5: 3200 Gb/s a host", 32
    ),
    "Ethernet 25": Network("Ethernet, 25 Gb/s, TCP", _gbit(25), 50e-6, "IEEE 802.3by", 1),
    "Ethernet 100": Network("Ethernet, 100 Gb/s, TCP", _gbit(100), 50e-6, "IEEE 802.3ba", 1),
}


def get_network(network: "str | Network") -> Network:
    """A preset by name, or the given network itself; ValueError names the presets there are."""
    if isinstance(network, Network):
        return network
    if network not in NETWORKS:
        raise ValueError(f"no network preset {network!r}; there are {', '.join(NETWORKS)}")
    return NETWORKS[network]
