"""GPUs, links and networks: presets, descriptions in files, and what's rejected."""

import re

import pytest

import vgpu
from vgpu.hardware import LINKS, get_network, get_spec


@pytest.mark.parametrize("name", vgpu.PRESETS)
def test_a_preset_names_its_datasheet_and_its_rates_are_in_order(name):
    spec = get_spec(name)
    assert re.search("datasheet|data sheet|specification", spec.source)
    rates = [
        spec.fp32_flop_per_s,
        spec.tf32_flop_per_s,
        spec.tensor_flop_per_s,
        spec.fp8_flop_per_s,
    ]
    known = [rate for rate in rates if rate is not None]
    assert known == sorted(known)
    assert spec.link in LINKS.values() and spec.host_link in LINKS.values() and spec.link.source
    links = spec.link.bandwidth_bytes_per_s, spec.host_link.bandwidth_bytes_per_s
    assert spec.memory_bandwidth_bytes_per_s > links[0] >= links[1]


def test_an_mi300x_sends_to_another_over_one_of_seven_links():
    link = get_spec("MI300X").link
    assert link.among_bytes_per_s(2) == 64e9 and link.among_bytes_per_s(8) == 448e9


def test_a_file_describes_a_gpu_by_its_differences_from_a_preset(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(
        'like = "H100"\nname = "Virtual H100 NVL"\nmemory_bandwidth_bytes_per_s = 3.9e12\n'
        'host_link = "PCIe 4"\n[link]\nname = "bridge"\nbandwidth_bytes_per_s = 300e9\n'
        "latency_s = 5e-6\n"
    )
    spec = get_spec(str(path))
    assert spec.name == "Virtual H100 NVL" and spec.memory_bandwidth_bytes_per_s == 3.9e12
    assert spec.fp8_flop_per_s == vgpu.PRESETS["H100"].fp8_flop_per_s
    assert spec.host_link == LINKS["PCIe 4"] and spec.link.bandwidth_bytes_per_s == 300e9
    assert spec.source == spec.link.source == str(path)
    with vgpu.enable(1, gpu=str(path)):
        pass


def test_a_file_describes_a_network(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('like = "InfiniBand NDR"\nadapters_per_host = 4\n')
    assert get_network(str(path)).bytes_per_s_per_gpu(8) == 25e9


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            'like = "H100"\nmemory = 3',
            "doesn't describe a GPUSpec: got an unexpected field 'memory'",
        ),
        ('name = "mine"', "doesn't describe a GPUSpec: missing 6 fields: 'memory_bytes'"),
        ('like = "Z1"', "no GPU preset 'Z1': use one of K80"),
        ('like = "H100"\nmemory_bytes = "80"', "memory_bytes of .* must be a number above 0"),
        ('like = "H100"\nlink = "wire"', "no link preset 'wire'"),
        ("like: H100", "doesn't describe a GPUSpec: Expected"),
    ],
)
def test_a_file_that_describes_no_gpu_is_rejected(tmp_path, text, message):
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        get_spec(str(path))


def test_the_error_for_a_missing_file_names_it():
    with pytest.raises(ValueError, match=r"nowhere\.toml can't be read: No such file"):
        get_spec("nowhere.toml")
