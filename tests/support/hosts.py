"""Two hosts for torchrun on one machine: two agents, or two network namespaces joined by a cable."""

import os
import shutil
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import programs
import pytest

TIME_S = 800  # for what takes seconds; a busy machine imports torch slowly


@dataclass
class Host:
    """One host: its address, the network interface with that address, and how to run something there."""

    address: str
    interface: str
    network: str | None = None
    """The name of the namespace that is its network."""

    @property
    def prefix(self):
        """The prefix that runs a command on it."""
        return ["ip", "netns", "exec", self.network] if self.network else []

    def start(self, arguments, said, **environment):
        """A torchrun agent on this host; its output and its ranks' is appended to a file."""
        environment = {"GLOO_SOCKET_IFNAME": self.interface, **environment}
        environment["CUDA_VISIBLE_DEVICES"] = ""  # both hosts would take GPU 0
        return programs.start(
            "torch.distributed.run", *arguments, output=said, network=self.network, **environment
        )


def status_of(agent):
    """Its exit status, once it has exited; None if it takes too long."""
    try:
        return agent.wait(TIME_S)
    except subprocess.TimeoutExpired:
        return None


@contextmanager
def two_agents():
    """Both hosts are this machine: two agents that talk over its loopback."""
    loopback = "lo" if sys.platform == "linux" else "lo0"
    yield [Host("127.0.0.1", loopback), Host("127.0.0.1", loopback)]


@contextmanager
def two_namespaces():
    """Two hosts, each with its own network, and a cable between them."""
    if sys.platform != "linux":
        pytest.skip("two hosts are made from network namespaces, which only Linux has")
    if os.geteuid() != 0:
        pytest.skip("making a network namespace needs root")
    if shutil.which("ip") is None:
        pytest.skip("making a network namespace needs the command ip (package iproute2)")
    names = [f"lesson07-{os.getpid()}-{index}" for index in (0, 1)]
    ends = [f"v{os.getpid()}-{index}" for index in (0, 1)]
    hosts = []
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", ends[0], "netns", names[0], "type", "veth",
           "peer", "name", ends[1], "netns", names[1])  # fmt: skip
        for index, (name, end) in enumerate(zip(names, ends, strict=True)):
            address = f"10.77.0.{index + 1}"
            ip("-n", name, "address", "add", f"{address}/24", "dev", end)
            ip("-n", name, "link", "set", end, "up")
            ip("-n", name, "link", "set", "lo", "up")
            hosts.append(Host(address, end, name))
        yield hosts
    finally:
        # The cable disappears with them.
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


@contextmanager
def two_namespaces_if_possible():
    """Two agents if this machine doesn't allow namespaces."""
    with ExitStack() as stack:
        try:
            hosts = stack.enter_context(two_namespaces())
        except pytest.skip.Exception:
            hosts = stack.enter_context(two_agents())
        yield hosts


def ip(*arguments):
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"this machine refuses `ip {' '.join(arguments)}`: {done.stderr.strip()}")


def stop(agent):
    """End an agent, which ends its ranks; does nothing if it has exited."""
    if agent.poll() is None:
        agent.terminate()
        try:
            agent.wait(60)
        except subprocess.TimeoutExpired:
            agent.kill()
            agent.wait()
