"""The example job files are valid, and start commands that exist."""

import math
import subprocess

import pytest
import yaml


def test_the_jobset_runs_train_on_every_host_of_the_slice(root):
    job = yaml.safe_load((root / "configs/launch/train_jobset.yaml").read_text())
    (slice_job,) = job["spec"]["replicatedJobs"]
    work = slice_job["template"]["spec"]
    pod = work["template"]["spec"]
    (container,) = pod["containers"]
    chips = math.prod(map(int, pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"].split("x")))
    assert work["parallelism"] == work["completions"] == chips // container["resources"]["limits"]["google.com/tpu"]
    assert container["command"][:2] == ["python", "train.py"]
    assert (root / container["command"][3]).is_file()
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}


@pytest.mark.parametrize("script", ["train_xpk.sh", "train_hosts.sh"])
def test_scripts_are_valid_and_say_what_they_need(root, script):
    path = root / "configs/launch" / script
    assert subprocess.run(["bash", "-n", str(path)], check=False).returncode == 0
    bare = subprocess.run([str(path)], env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True, check=False)
    assert bare.returncode != 0
    assert "the name of the" in bare.stderr
