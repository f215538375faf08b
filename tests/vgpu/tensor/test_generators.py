"""Random numbers: the CPU's values on every device, independently of other devices."""

import copy
import pickle

import pytest
import torch
from torch import nn

pytestmark = pytest.mark.virtual_gpus(3)


DRAWS = {
    "rand": lambda d: torch.rand(50, device=d),
    "randn": lambda d: torch.randn(50, device=d),
    "randint": lambda d: torch.randint(0, 100, (50,), device=d),
    "randperm": lambda d: torch.randperm(50, device=d),
    "normal_": lambda d: torch.zeros(50, device=d).normal_(2, 3),
    "uniform_": lambda d: torch.zeros(50, device=d).uniform_(2, 3),
    "bernoulli": lambda d: torch.bernoulli(torch.full((50,), 0.5, device=d)),
    "multinomial": lambda d: torch.multinomial(torch.ones(50, device=d), 20),
    "rand_like": lambda d: torch.rand_like(torch.ones(50, device=d)),
    "dropout": lambda d: nn.functional.dropout(torch.ones(50, device=d), 0.3),
    "linear": lambda d: nn.Linear(5, 5, device=d).weight.detach(),
}


@pytest.mark.parametrize("name", DRAWS)
def test_one_seed_draws_the_cpus_values_on_every_device(name):
    draw = DRAWS[name]
    torch.manual_seed(7)
    expected = draw("cpu")
    torch.manual_seed(7)
    for index in range(3):
        assert torch.equal(draw(f"vgpu:{index}").cpu(), expected)


@pytest.mark.parametrize("name", DRAWS)
def test_a_device_draws_from_its_own_generator(name):
    torch.manual_seed(7)
    cpu, other = torch.get_rng_state(), torch.vgpu.get_rng_state(2)
    state = torch.vgpu.get_rng_state(1)
    first = DRAWS[name]("vgpu:1")
    assert torch.equal(torch.get_rng_state(), cpu)
    assert torch.equal(torch.vgpu.get_rng_state("vgpu:2"), other)
    assert not torch.equal(torch.vgpu.get_rng_state(1), state)
    torch.vgpu.set_rng_state(state, 1)
    assert torch.equal(DRAWS[name]("vgpu:1"), first)


def test_a_device_has_its_own_generators():
    generator = torch.Generator(device="vgpu:1").manual_seed(3)
    assert generator.device == torch.device("vgpu:1")
    assert isinstance(generator, torch.Generator)
    assert isinstance(torch.default_generator, torch.Generator)
    assert torch.Generator().device.type == "cpu"
    drawn = torch.randn(4, device="vgpu:1", generator=generator)
    assert torch.equal(drawn.cpu(), torch.randn(4, generator=torch.Generator().manual_seed(3)))


def test_the_state_of_all_generators_is_kept_and_seeded_at_random():
    states = torch.vgpu.get_rng_state_all()
    first = torch.rand(3, device="vgpu:1")
    torch.vgpu.set_rng_state_all(states)
    assert torch.equal(torch.rand(3, device="vgpu:1"), first)
    torch.vgpu.seed_all()
    assert not torch.equal(torch.rand(3, device="vgpu:1"), first)
    torch.vgpu.seed()


def test_a_state_is_on_the_cpu_whatever_the_default_device_is():
    with torch.device("vgpu:1"):
        state = torch.vgpu.get_rng_state(1)
        first = torch.rand(3)
        torch.vgpu.set_rng_state(state, 1)
        assert torch.equal(torch.rand(3), first)
    assert state.device.type == "cpu"


@pytest.mark.parametrize("device", ["cpu", "vgpu:1"])
@pytest.mark.parametrize(
    "copied",
    [
        copy.deepcopy,
        lambda generator: pickle.loads(pickle.dumps(generator)),
        lambda generator: generator.clone_state(),
    ],
    ids=["deepcopy", "pickle", "clone_state"],
)
def test_a_copied_generator_draws_the_same_numbers_independently(device, copied):
    generator = torch.Generator(device).manual_seed(3)
    torch.rand(5, generator=generator, device=device)
    copy = copied(generator)
    assert isinstance(copy, torch.Generator) and copy.device == torch.device(device)
    drawn = [torch.rand(5, generator=each, device=device).cpu() for each in (copy, generator)]
    assert torch.equal(*drawn)
