"""The container files and templates: their versions are the matrix's, and their scripts run."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import yaml
from layout import ROOT, project
from packaging.requirements import Requirement
from resolving import ENVIRONMENTS, ask, pins_of, public, questions_for, versions_of

from engine_trainer.config import RLConfig
from engine_trainer.config.loading import load_config

# The environment of matrix.toml in which each image has its packages.
IMAGES = {
    "cpu": "cpu",
    "cuda-megatron": "h200_megatron",
    "cuda-sglang": "sglang_h200",
    "cuda-vllm": "vllm_h200",
}
EVERY = pytest.mark.parametrize("image", IMAGES)
UBUNTU = {"24.04": "3.12"}
RAYJOB = ROOT / "deploy/kubernetes/rayjob.yaml"
SKY = ROOT / "deploy/skypilot/rl.yaml"
SCRIPTS = sorted((ROOT / "deploy/slurm").iterdir())
FILES = [*sorted((ROOT / "containers").glob("*.Dockerfile")), *SCRIPTS, RAYJOB, SKY]


def text_of(image: str) -> str:
    return (ROOT / "containers" / f"{image}.Dockerfile").read_text()


def installs(text: str) -> list[tuple[list[str], list[str]]]:
    """Return the options and the requirements of every ``uv pip install`` of a file."""
    joined = re.sub(r"\\\n\s*", " ", text)
    found: list[tuple[list[str], list[str]]] = []
    for line in re.findall(r"uv pip install ([^\n;&]+)", joined):
        options: list[str] = []
        wanted: list[str] = []
        words = iter(shlex.split(line))
        for word in words:
            if word in ("-c", "--overrides"):
                options += [word, next(words)]
            elif not word.startswith("--"):
                wanted.append(word)
        found.append((options, wanted))
    return found


def test_every_image_is_of_an_environment() -> None:
    files = {path.name.removesuffix(".Dockerfile") for path in (ROOT / "containers").iterdir()}
    assert files == set(IMAGES)


@EVERY
def test_an_image_installs_the_versions_of_its_environment(image: str) -> None:
    environment = ENVIRONMENTS[IMAGES[image]]
    expected = ["-c", environment["constraints"]]
    if "overrides" in environment:
        expected += ["--overrides", environment["overrides"]]
    assert all(options == expected for options, _ in installs(text_of(image)))
    wanted = [one for _, requirements in installs(text_of(image)) for one in requirements]
    assert not [one for one in wanted if "==" in one], "versions stand in the constraints"
    if image == "cuda-megatron":
        assert "transformer-engine[pytorch,core-cu13]" in wanted


@EVERY
def test_a_base_has_the_python_and_the_cuda_of_the_matrix(image: str) -> None:
    environment = ENVIRONMENTS[IMAGES[image]]
    (base,) = re.findall(r"^ARG BASE=(\S+)$", text_of(image), re.MULTILINE)
    if environment["device"] == "cpu":
        assert re.match(rf"docker\.io/library/python:{environment['python']}\.\d+-slim-", base)
        return
    cuda, ubuntu = re.findall(r"cuda:(\d+\.\d+)\.\d+-devel-ubuntu([\d.]+)$", base)[0]
    assert environment["versions"]["torch"].endswith(f"+cu{cuda.replace('.', '')}")
    assert UBUNTU[ubuntu] == environment["python"]
    assert set(re.findall(r"/python(3\.\d+)/", text_of(image))) <= {environment["python"]}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_uv_is_the_one_of_the_constraints(path: Path) -> None:
    assert set(re.findall(r"\buv==(\S+)", path.read_text())) <= {
        pins_of("constraints/cpu.txt")["uv"]
    }


@EVERY
def test_an_image_has_every_package_that_its_packages_need(
    image: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import environments

    given = [
        Requirement(one.removeprefix("./").replace("/", "-"))
        for _, wanted in installs(text_of(image))
        for one in wanted
        if one.startswith("./")
    ]
    folders = [
        folder
        for folder in environments.packages()
        if folder.replace("/", "-") in {one.name for one in given}
    ]
    assert len(folders) == len(given)
    names = {project(ROOT / folder)["name"] for folder in folders}
    every = {project(ROOT / folder)["name"] for folder in environments.packages()}
    for one in given:
        folder = next(f for f in folders if f.replace("/", "-") == one.name)
        offered = project(ROOT / folder).get("optional-dependencies", {})
        assert one.extras <= set(offered)
        needed = {Requirement(text).name for text in environments.requirements(folder, one.extras)}
        assert needed & every <= names


@pytest.fixture(scope="module")
def answers() -> Mapping[str, list[Future[dict[str, str]]]]:
    """Return what uv would install in every image, and on SkyPilot's machines."""
    texts = {image: text_of(image) for image in IMAGES} | {"skypilot": SKY.read_text()}
    asked = {
        name: [
            question
            for options, wanted in installs(text)
            for question in questions_for(
                [word.replace("--overrides", "--override") for word in options],
                [f"-e {one}" if one.startswith("./") else one for one in wanted],
                {},
            )
        ]
        for name, text in texts.items()
    }
    found = ask(question for one in asked.values() for question in one)
    return {name: [found[question] for question in one] for name, one in asked.items()}


@pytest.mark.parametrize(("name", "environment"), [*IMAGES.items(), ("skypilot", "vllm_h200")])
def test_an_image_can_be_installed(
    name: str, environment: str, answers: Mapping[str, list[Future[dict[str, str]]]]
) -> None:
    found: dict[str, str] = {}
    for answer in answers[name]:
        found |= versions_of(answer)
    for part, version in ENVIRONMENTS[environment]["versions"].items():
        assert public(found[part]) == public(version), part


def commands() -> dict[str, tuple[str, list[str]]]:
    """Return the recipe and the overrides of the run that each file starts."""
    found: dict[str, tuple[str, list[str]]] = {}
    for path in FILES:
        text = re.sub(r"\s*\\\n#?\s*|\n {4,}", " ", path.read_text())
        text = text.replace('"$RECIPE"', "recipes/rl/reasoning_gym.yaml").replace("$HOME", "/root")
        text = text.replace('"$MODEL"', "Qwen/Qwen3-0.6B")
        for recipe, rest in re.findall(
            r"\brl (?:/enginehouse/job/)?recipes/(\S+\.yaml)((?: [\w.]+=\S+)*)", text
        ):
            if rest:
                found[path.name] = (recipe, shlex.split(rest.replace('"', "")))
    return found


@pytest.mark.parametrize("name", [path.name for path in FILES if path.name != "cpu.Dockerfile"])
def test_the_run_that_a_file_starts_is_a_run_of_the_trainer(name: str) -> None:
    recipe, overrides = commands()[name]
    config = load_config(RLConfig, str(ROOT / "recipes" / recipe), overrides)
    assert config.engine.model.path.startswith("Qwen/Qwen3-")


def test_the_cluster_of_kubernetes_fits_its_run() -> None:
    claim, policy, job = yaml.safe_load_all(RAYJOB.read_text())
    spec = job["spec"]["rayClusterSpec"]
    assert spec["rayVersion"] == pins_of("constraints/cuda-vllm.txt")["ray"]
    assert spec["authOptions"] == {"mode": "token"}
    (workers,) = spec["workerGroupSpecs"]
    pods = [spec["headGroupSpec"]["template"], workers["template"]]
    images = set()
    for pod in pods:
        assert pod["metadata"]["labels"] == policy["spec"]["podSelector"]["matchLabels"]
        claims = [
            v["persistentVolumeClaim"] for v in pod["spec"]["volumes"] if "shared" in v["name"]
        ]
        assert claims == [{"claimName": claim["metadata"]["name"]}]
        parts = [*pod["spec"].get("initContainers", ()), *pod["spec"]["containers"]]
        images |= {part["image"] for part in parts}
        volumes = {volume["name"] for volume in pod["spec"]["volumes"]}
        assert {m["name"] for part in parts for m in part["volumeMounts"]} <= volumes
        assert pod["spec"]["securityContext"]["runAsUser"] == 10001
    assert images == {"registry.example.org/enginehouse:cuda-vllm"}
    assert "USER 10001" in text_of("cuda-vllm")
    (container,) = workers["template"]["spec"]["containers"]
    gpus = int(container["resources"]["limits"]["nvidia.com/gpu"])
    assert workers["rayStartParams"]["num-gpus"] == str(gpus)
    assert f"ray.engines={gpus * workers['replicas']}" in job["spec"]["entrypoint"]


def test_the_task_of_skypilot_has_an_environment_for_its_variables() -> None:
    task: dict[str, Any] = yaml.safe_load(SKY.read_text())
    variables = set(re.findall(r"\$\{?([A-Z_]+)", task["run"])) - {"HOME"}
    own = {name for name in variables if not name.startswith("SKYPILOT_")}
    assert own == set(task["envs"])
    assert (ROOT / task["envs"]["RECIPE"]).is_file()
    base = task["resources"]["image_id"].removeprefix("docker:")
    assert f"ARG BASE=docker.io/{base}\n" in text_of("cuda-vllm")


# Slurm on this machine: one node of a job of two, whose commands print their arguments.
FAKES = {
    "scontrol": 'test "$*" = "show hostnames node[1-2]" && printf "node1\\nnode2\\n"',
    "srun": '''for word in "$@"; do case "$word" in
--container-*) echo "$word"; shift;; --*) shift;; *) break;; esac; done; exec "$@"''',
    "torchrun": 'echo torchrun "$@"',
    "ray": 'echo "$RAY_AUTH_MODE ${#RAY_AUTH_TOKEN}"; echo ray "$@"',
}
JOB = {
    "SLURM_JOB_NODELIST": "node[1-2]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_JOB_ID": "40007",
    "SLURM_GPUS_ON_NODE": "8",
}


def submit(folder: Path, script: str, *arguments: str, **variables: str) -> tuple[int, list[str]]:
    """Run a batch script as Slurm would, and return its exit code and its lines."""
    for name, text in FAKES.items():
        (folder / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (folder / name).chmod(0o755)
    done = subprocess.run(
        ["bash", str(ROOT / "deploy/slurm" / script), *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env=os.environ | JOB | variables | {"PATH": f"{folder}:{os.environ['PATH']}"},
    )
    return done.returncode, (done.stdout + done.stderr).splitlines()


def test_slurm_starts_torchrun_on_every_node(tmp_path: Path) -> None:
    code, lines = submit(tmp_path, "torchrun.sbatch", "rl", "a.yaml", "run.note=a b", "x.y=[1, 2]")
    assert code == 0, lines
    assert " ".join(lines) == (
        "torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint node1:20007 "
        "--rdzv-id 40007 -m engine_trainer rl a.yaml run.resume=auto run.note=a b x.y=[1, 2]"
    )


def test_slurm_starts_a_ray_cluster_with_a_token(tmp_path: Path) -> None:
    code, lines = submit(tmp_path, "ray.sbatch", "rl", "a.yaml", "ray.engines=8", "ray.rollouts=8")
    assert code == 0, lines
    assert " ".join(lines) == (
        "token 64 ray symmetric-run --address node1:20007 --min-nodes 2 --num-gpus 8 -- "
        "engine-train rl a.yaml launcher=ray ray.address=auto ray.engines=16 run.resume=auto "
        "ray.engines=8 ray.rollouts=8"
    )


@pytest.mark.parametrize("script", [path.name for path in SCRIPTS])
def test_slurm_takes_an_image_and_refuses_a_job_without_a_run(tmp_path: Path, script: str) -> None:
    code, lines = submit(tmp_path, script, "rl", "a.yaml", IMAGE="registry#house")
    assert code == 0, lines
    mounted = [f"--container-mounts={tmp_path}:{tmp_path}", f"--container-workdir={tmp_path}"]
    assert lines[:3] == ["--container-image=registry#house", *mounted]
    code, lines = submit(tmp_path, script, "rl")
    assert code == 2
    assert re.match(r"expected (TASK|rl) FILE \[KEY=VALUE \.\.\.\], got: rl; as in", lines[0])


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_a_job_that_is_requeued_writes_to_its_log_and_goes_on(path: Path) -> None:
    options = re.findall(r"^#SBATCH (.*)$", path.read_text(), re.MULTILINE)
    assert {"--requeue", "--open-mode=append", "--ntasks-per-node=1"} <= set(options)
    assert "run.resume=auto" in path.read_text()


def build(folder: Path, builders: Mapping[str, str], *arguments: str) -> tuple[int, str]:
    """Run tools/containers.py where only these builders are installed."""
    for name, text in builders.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools/containers.py"), *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PATH": str(folder)},
    )
    return done.returncode, done.stdout + done.stderr


def test_without_a_builder_each_reason_is_given(tmp_path: Path) -> None:
    code, said = build(tmp_path, {"docker": "echo no daemon here >&2; exit 1"})
    assert code == 3
    assert "docker: no daemon here; podman: not installed; buildah: not installed" in said
    assert "install podman or buildah, or start Docker's daemon" in said


def test_the_first_builder_that_works_builds_the_image_and_runs_its_recipe(tmp_path: Path) -> None:
    fakes = {"docker": "exit 1", "podman": 'echo "podman: $*"', "buildah": "exit 1"}
    code, said = build(tmp_path, fakes)
    assert code == 0, said
    ran = [line for line in said.splitlines() if line.startswith("podman: ")]
    assert ran[0] == "podman: build -f containers/cpu.Dockerfile -t enginehouse:cpu ."
    trial = "engine-train recipes copy quickstart && python recipes/quickstart/run.py"
    assert ran[-1].endswith(f"enginehouse:cpu sh -c {trial}")
    # The recipe is the command that the file itself names.
    assert trial in text_of("cpu")


def test_buildah_runs_the_trial_in_a_working_container(tmp_path: Path) -> None:
    fake = {"buildah": 'echo "buildah: $*"'}
    code, said = build(tmp_path, fake, "cuda-vllm", "--", "--build-arg", "BASE=mine")
    assert code == 0, said
    ran = [line.split(": ")[1] for line in said.splitlines() if line.startswith("buildah: ")]
    assert "enginehouse:cuda-vllm --build-arg BASE=mine ." in ran[0]
    assert [line.split()[0] for line in ran[1:]] == ["from", "run", "run", "rm"]


def test_a_build_that_fails_ends_the_trial(tmp_path: Path) -> None:
    fake = {"podman": 'echo "podman: $*"; test "$1" != build'}
    code, said = build(tmp_path, fake)
    assert code == 1
    assert said.count("podman: ") == 1
