"""Recipes for clusters cannot be run here: their shell and YAML parse, and the commands in them have these options."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from biascope.cli.app import run as command

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGE = ROOT / "docs" / "howto" / "more-than-one-gpu.md"


def blocks(page: Path, *languages: str) -> list[str]:
    return re.findall(rf"^```(?:{'|'.join(languages)})\n(.*?)^```", page.read_text(encoding="utf-8"), re.S | re.M)


SHELL = [(page, i) for page in PAGES for i in range(len(blocks(page, "bash", "sh", "shell")))]


@pytest.mark.parametrize(("page", "i"), SHELL, ids=[f"{page.stem}-{i}" for page, i in SHELL])
def test_shell_parses(page: Path, i: int) -> None:
    script = blocks(page, "bash", "sh", "shell")[i]
    found = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True, check=False)
    assert found.returncode == 0, found.stderr
    lines = script.splitlines()
    directives = [n for n, line in enumerate(lines) if line.startswith("#SBATCH")]
    assert all(line.startswith("#") for line in lines[: max(directives, default=-1) + 1])  # Slurm reads no further


def test_commands_have_the_options_of_the_recipes(capsys: pytest.CaptureFixture[str]) -> None:
    text = "\n".join([*blocks(PAGE, "bash"), *blocks(PAGE, "yaml")]).replace("\\\n", " ")
    calls = re.findall(r"^[^#\n]*?\bbiascope (\w+) (.*)$", text, re.M)
    assert {name for name, _ in calls} == {"ntk", "run"}
    for name, rest in calls:
        assert command([name, "--help"]) == 0
        known = capsys.readouterr().out
        for option in (word for word in shlex.split(rest, comments=True) if word.startswith("--")):
            assert option in known, (name, option)


def test_the_job_for_kubernetes_has_the_fields_of_a_rayjob() -> None:
    (job,) = [yaml.safe_load(text) for text in blocks(PAGE, "yaml")]
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    spec = job["spec"]
    assert set(spec) == {"entrypoint", "shutdownAfterJobFinishes", "rayClusterSpec"}
    head, (workers,) = spec["rayClusterSpec"]["headGroupSpec"], spec["rayClusterSpec"]["workerGroupSpecs"]
    assert set(head) == {"rayStartParams", "template"}
    assert set(workers) == {"groupName", "replicas", "rayStartParams", "template"}
    assert head["rayStartParams"] == {"num-cpus": "0"}  # a string, as KubeRay asks for
    for group in (head, workers):
        (container,) = group["template"]["spec"]["containers"]
        assert {"name", "image", "resources"} <= set(container)
    mounted = {v["name"] for v in head["template"]["spec"]["containers"][0]["volumeMounts"]}
    assert mounted == {v["name"] for v in head["template"]["spec"]["volumes"]}
