"""The tree, the commands and the three lists of packages agree with each other."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
TOP = {
    "notebooks", "qwen", "figures", "tests", "environment.yml", "Makefile", "README.md",
    "pyproject.toml", "constraints.txt", "LICENSE", ".gitignore", ".ci", ".github",
}  # fmt: skip
TARGETS = ["lab", "test", "drift", "notebooks", "times", "figures", "bench",
           "browser", "html", "colab", "colabtest", "clean"]  # fmt: skip


def tracked():
    """Every file that is or could be committed."""
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    if listing.returncode:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in listing.stdout.split("\0") if name and (ROOT / name).is_file()]


def project():
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def required():
    """{canonical name: Requirement} over the package and its extras."""
    lines = project()["dependencies"] + sum(project()["optional-dependencies"].values(), [])
    return {canonicalize_name(r.name): r for r in map(Requirement, lines)}


def test_top_level():
    assert {path.relative_to(ROOT).parts[0] for path in tracked()} <= TOP


def test_lower_bounds_only():
    for name, requirement in required().items():
        assert [s.operator for s in requirement.specifier] == [">="], name


def test_environment_names_the_same_packages():
    # But for those of the browser, which only the Makefile starts, in its own environment.
    wanted = {name: str(r.specifier) for name, r in required().items() if name != "playwright"}
    wanted["python"] = project()["requires-python"]
    lines = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    named = [Requirement(line) for line in lines if isinstance(line, str)]
    found = {canonicalize_name(r.name): str(r.specifier) for r in named}
    found["torch"] = found.pop("pytorch")  # conda-forge's name for it
    assert found.pop("pip") == ""  # what installs the package itself
    assert found == wanted
    assert lines[-1] == {"pip": ["--editable ."]}


def test_constraints_pin_every_dependency_within_its_bound():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = {}
    for line in lines:
        if line and not line.startswith("#"):
            name, version = re.fullmatch(r"([\w.-]+)==([\w.]+)", line).groups()
            pins[canonicalize_name(name)] = Version(version)
    for name, requirement in required().items():
        assert name in pins, f"constraints.txt has no line for {name}"
        assert pins[name] in requirement.specifier, f"{name}: {pins[name]} against {requirement}"
    assert pins["torch"] == Version("2.13.0")


def test_make_lists_its_targets():
    printed = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert re.findall(r"^make (\w+)", printed, re.M) == TARGETS
    rules = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.M)
    assert rules == ["help"] + TARGETS


def test_make_names_an_old_python(tmp_path):
    old = tmp_path / "python"
    stub = "import sys; sys.version = '3.10.4 x'; sys.version_info = (3, 10, 4); exec(sys.argv[2])"
    old.write_text(f'#!/bin/sh\nexec "{sys.executable}" -c "{stub}" "$@"\n')
    old.chmod(0o755)
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    run = subprocess.run(
        ["make", "test", f"PYTHON={old}"], cwd=tmp_path, capture_output=True, text=True
    )
    assert run.returncode and "is Python 3.10.4, and 3.11 or newer is needed" in run.stderr
    assert not (tmp_path / ".venv").exists()


def test_import_is_light():
    code = "import qwen, sys; print(*sorted({name.split('.')[0] for name in sys.modules}))"
    printed = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    heavy = {"matplotlib", "ipywidgets", "huggingface_hub", "transformers", "tokenizers", "IPython"}
    assert heavy.isdisjoint(printed)


def test_no_file_names_a_registry_or_a_machine():
    # Written in halves, so that this file does not find itself.
    hosts = ["pypi" + ".org", "python" + "hosted.org", "conda" + ".anaconda.org"]
    pattern = re.compile("|".join(map(re.escape, hosts)) + r"|/(?:root|work|home|Users)" + r"/\w")
    found = []
    for path in tracked():
        if path.suffix != ".safetensors":
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
            for number, line in enumerate(lines, start=1):
                if match := pattern.search(line):
                    found.append(f"{path.relative_to(ROOT)}:{number}: {match[0]}")
    assert not found


def test_the_readmes_python_runs(capsys):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.S)
    assert len(blocks) == 3
    exec("\n".join(blocks), {})
    printed = capsys.readouterr().out
    assert printed.count("The capital of France is Paris.\n2\n") == 2 and "StepRecord(step=0, rows={0: " in printed
