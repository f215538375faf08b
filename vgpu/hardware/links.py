"""How fast bytes move: between GPUs, between a GPU and its host, and between hosts.

Rates are for one direction, before any protocol's own bytes; both directions work at once. How much
of them a copy or a collective reaches, ``CostModel`` assumes.

Links: PCI-SIG base specifications (5, 8, 16, 32 GT/s a lane, 16 lanes, 8b/10b coding in generation 2
and 128b/130b after it), and NVIDIA's datasheets and whitepapers of P100, V100, A100 and H100 for
NVLink, which print both directions together; here is half of that. All links of one GPU and those
between two GPUs are two figures. Since the A100, NVSwitch lets any pair use all of both GPUs' links.
In a DGX-1 the links are wires: of a P100's four, one leads to each of four neighbors; of a V100's
six, at most two lead to the same GPU, and some pairs have none.

Networks: latencies are those of one step of a ring over the network in NCCL's own model
(src/graph/tuning.cc, ring, LL128: 4 µs), and an order of magnitude more for TCP. Left out: switches
with too few uplinks, neighbors, routes that collide. Clusters fall behind their adapters there: the
Ultra-Scale Playbook (2025) measured an all-reduce of 256 MB on H100s at 362, 160 and 33 GB/s a GPU
over 2, 4 and 64 hosts, where adapters allow 400.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Link:
    """One direction out of a GPU, to other GPUs or to its host."""

    name: str
    bandwidth_bytes_per_s: float  # all links of the GPU together
    latency_s: float
    source: str
    pair_bytes_per_s: float | None = None  # those that lead to one other GPU; None means all

    def among_bytes_per_s(self, count: int) -> float:
        """What one of ``count`` GPUs can send to the others: over all links that lead to them."""
        if self.pair_bytes_per_s is None:
            return self.bandwidth_bytes_per_s
        return min(self.bandwidth_bytes_per_s, (count - 1) * self.pair_bytes_per_s)


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


def _pcie(generation: int, transfers_per_s: float, coding: float) -> Link:
    return Link(
        name=f"PCIe {generation}.0 x16",
        bandwidth_bytes_per_s=16 * transfers_per_s * coding / 8,
        latency_s=10e-6,
        source=f"PCI-SIG, PCI Express base specification {generation}.0",
    )


# A copy's fixed cost of some 10 µs (PCIe) or 5 µs (NVLink) is an order of magnitude that
# p2pBandwidthLatencyTest of NVIDIA's CUDA samples prints on such machines, not a datasheet's.
LINKS: dict[str, Link] = {
    "PCIe 2": _pcie(2, 5e9, 8 / 10),
    "PCIe 3": _pcie(3, 8e9, 128 / 130),
    "PCIe 4": _pcie(4, 16e9, 128 / 130),
    "PCIe 5": _pcie(5, 32e9, 128 / 130),
    # Without peer access a copy goes to the host's memory first, and from there to the other GPU.
    "PCIe 3 via host": Link(
        "PCIe 3.0 x16 via the host", 16 * 8e9 * 128 / 130 / 8 / 2, 20e-6, "as PCIe 3, twice in turn"
    ),
    "NVLink 1": Link(
        "NVLink 1 (4 links)", 80e9, 5e-6, "NVIDIA Tesla P100 whitepaper", pair_bytes_per_s=20e9
    ),
    "NVLink 2": Link(
        "NVLink 2 (6 links)", 150e9, 5e-6, "NVIDIA Tesla V100 whitepaper", pair_bytes_per_s=50e9
    ),
    "NVLink 3": Link("NVLink 3 (12 links)", 300e9, 5e-6, "NVIDIA A100 whitepaper"),
    "NVLink 4": Link("NVLink 4 (18 links)", 450e9, 5e-6, "NVIDIA H100 whitepaper"),
}


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


def get_link(link: "str | Link") -> Link:
    """A preset by name, or the given link itself; ValueError names the presets there are."""
    if isinstance(link, Link):
        return link
    if link not in LINKS:
        raise ValueError(f"no link preset {link!r}; there are {', '.join(LINKS)}")
    return LINKS[link]


def get_network(network: "str | Network") -> Network:
    """A preset by name, or the given network itself; ValueError names the presets there are."""
    if isinstance(network, Network):
        return network
    if network not in NETWORKS:
        raise ValueError(f"no network preset {network!r}; there are {', '.join(NETWORKS)}")
    return NETWORKS[network]
