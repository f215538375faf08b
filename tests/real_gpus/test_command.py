"""make test-gpu without a GPU: what it would do, what's missing, and its exit status."""

import pytest
from real_gpus import __main__ as command

from teaching.lessons import ROOT


def machine(*gpus, cuda="13.2", nccl=True):
    return command.Machine(gpus, "2.15.0", cuda, nccl)


def test_the_command_without_a_gpu_says_what_it_would_do(monkeypatch, capsys):
    monkeypatch.setattr(command.Machine, "here", machine)
    assert command.main() == 2
    said = capsys.readouterr().out
    assert "make test-gpu does three things" in said and "missing: there is no NVIDIA GPU" in said
    assert said.endswith("Nothing was run.\n")


@pytest.mark.parametrize(
    ("found", "sentence"),
    [
        (machine(cuda=None), "is a build without CUDA: make clean, then make venv CUDA=1"),
        (machine("T4"), "GPUs here: 1; tests that need more are skipped"),
        (machine("T4", "T4", "T4", "T4", nccl=False), "has no NCCL"),
    ],
)
def test_the_command_says_what_is_missing(found, sentence):
    assert any(sentence in each for each in found.missing())


def test_nothing_is_missing_with_four_gpus():
    assert machine("H100", "H100", "H100", "H100").missing() == []


def test_the_commands_in_the_description_exist():
    said = command.describe(machine())
    assert "00: 8" in said and "11: 1" in said
    for name in ("tests/real_gpus/observed.py", "tests/real_gpus", "notebooks"):
        assert name in said and (ROOT / name).exists()
    assert "$(BIN)/python -m real_gpus" in (ROOT / "Makefile").read_text(encoding="utf-8")


def test_a_failed_step_fails_the_command(monkeypatch, capsys):
    monkeypatch.setattr(command.Machine, "here", lambda: machine("H100"))
    for compared, passed, status in ((True, True, 0), (False, True, 1), (True, False, 1)):
        monkeypatch.setattr(command, "compare", lambda machine, well=compared: well)
        monkeypatch.setattr(command, "run", lambda *arguments, well=passed: well)
        assert command.main() == status
    assert "ranks: failed or differed" in capsys.readouterr().out


def seen(*gpus, seconds=(1e-3, 1e-5)):
    return {
        "hardware": {"gpus": gpus, "torch": "2.15.0", "CUDA": "13.2"},
        "errors": {"to numpy": "TypeError: can't convert"},
        "peaks": {"MLP": [2**20]},
        "times": dict(zip(("long", "short"), seconds, strict=True)),
    }


@pytest.mark.parametrize(("seconds", "well"), [((2e-3, 1e-3), True), ((1e-3, 2e-3), False)])
def test_a_comparison_is_recorded_whatever_its_result(monkeypatch, tmp_path, seconds, well):
    asked = []

    def observe(*words):
        asked.append(words)
        return seen("Virtual A100") if words else seen("NVIDIA A100", seconds=seconds)

    page = tmp_path / "real_gpus.md"
    page.write_text(command.HEADING + command.NOTHING_YET, "utf-8")
    monkeypatch.setattr(command, "PAGE", page)
    monkeypatch.setattr(command.comparison, "observe", observe)
    assert command.compare(machine("NVIDIA A100", "NVIDIA A100")) == well
    assert asked == [(), tuple(command.comparison.virtual_command(2, "A100"))]
    kept = page.read_text("utf-8")
    assert "1 × NVIDIA A100" in kept and command.NOTHING_YET not in kept
    assert ("No differences." in kept) == well and ("the reverse" in kept) != well


def test_run_returns_pytests_verdict_and_sets_real_gpus(tmp_path):
    asks = "import os\ndef test(): assert os.environ['REAL_GPUS'] == '1' and {}\n"
    for verdict in (True, False):
        path = tmp_path / f"test_{verdict}.py"
        path.write_text(asks.format(verdict), "utf-8")
        assert command.run("-q", "-p", "no:cacheprovider", str(path)) == verdict


def test_the_page_lists_results_newest_first():
    page = command.PAGE.read_text(encoding="utf-8")
    once = command.with_result(page, "### 2027-01-01 · 1 × A\n")
    twice = command.with_result(once, "### 2027-02-01 · 1 × B\n")
    assert command.NOTHING_YET not in once
    assert twice.index("2027-02-01") < twice.index("2027-01-01")
    assert twice.partition(command.HEADING)[0] == page.partition(command.HEADING)[0]


def test_the_page_says_that_nothing_was_measured_until_there_is_a_result():
    measured = command.PAGE.read_text(encoding="utf-8").partition(command.HEADING)[2]
    assert (command.NOTHING_YET in measured) != ("### " in measured)
