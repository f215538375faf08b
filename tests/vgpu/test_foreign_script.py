"""A two-GPU script that knows nothing about this package, after ``s/cuda/vgpu/`` and one import."""

import re

import programs

from teaching import lessons

SCRIPT = lessons.ROOT / "tests" / "vgpu" / "foreign_two_gpu_script.py"


def test_a_script_for_two_cuda_gpus_trains_on_virtual_ones(tmp_path):
    source = SCRIPT.read_text(encoding="utf-8")
    assert "vgpu" not in source
    script = tmp_path / "script.py"
    script.write_text(f"import vgpu; vgpu.enable(2)\n{source.replace('cuda', 'vgpu')}")
    result = programs.run(script, "--epochs=2", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    said = result.stdout
    first, last = map(float, re.search(r"data parallel: loss (\S+) -> (\S+)", said).groups())
    assert last < first / 2
    for line in (
        "Let's use 2 GPUs!",
        "checkpoint: equal on the other GPU",
        "model parallel: vgpu:0 and vgpu:1",
        "streams: True",
        "MiB: VGPU out of memory",
        "wrong device: Expected all tensors to be on the same device",
        "no such GPU: VGPU error: invalid device ordinal",
    ):
        assert line in said, said
    for gpu in (0, 1):  # both had work
        assert float(re.search(rf"GPU {gpu} .*peak (\S+) MiB", said).group(1)) > 1, said
