"""environment.yml, pyproject.toml and the CI script say the same as each other and the README."""

import tomllib

import yaml

from teaching.lessons import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
CONDA = yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))


def test_conda_and_pip_install_the_same_packages():
    (pip,) = (item["pip"] for item in CONDA["dependencies"] if isinstance(item, dict))
    assert pip == [*PROJECT["dependencies"], "--editable ."]


def test_conda_takes_a_python_that_the_package_allows():
    assert f"python{PROJECT['requires-python']}" in CONDA["dependencies"]


def test_ci_runs_the_readme_s_test_command():
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "make test" in script
    assert "make test" in readme and "make lab" in readme


def test_every_lesson_stands_in_the_readme():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        assert f"notebooks/{path.name}" in readme, f"the README's table lacks {path.name}"
