"""Tests in this folder see eight CPU devices.

JAX fixes the number of devices when it starts, and eight of them slow programs for one. So the tests of a file run in a
child process with that setting, all together when the first of them is due; here each reports what it did there.
"""

import functools
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

import pytest

SETTING = "--xla_force_host_platform_device_count=8"


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if SETTING in os.environ["XLA_FLAGS"]:
        return None  # the child process: run it
    siblings = tuple(item.nodeid for item in pyfuncitem.session.items if item.path == pyfuncitem.path)
    outcomes, log = _run(siblings, pyfuncitem.config.rootpath)
    outcome, text = outcomes.get(pyfuncitem.name, ("failure", log))
    if outcome == "skipped":
        pytest.skip(text)
    if outcome:
        pytest.fail(text, pytrace=False)
    return True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.timeout(900))  # the first of a file waits for all


@functools.cache
def _run(tests: tuple[str, ...], root: Path) -> tuple[dict[str, tuple[str, str]], str]:
    """Each test's outcome ("" where it passed) and report by its name, and what the child process printed."""
    environment = os.environ | {"XLA_FLAGS": f"{os.environ['XLA_FLAGS']} {SETTING}"}
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-n",
            "0",
            "-p",
            "no:cacheprovider",
            "-m",
            "",
            f"--junitxml={report}",
            *tests,
        ]
        child = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
        log = child.stdout + child.stderr
        cases = ElementTree.parse(report).iter("testcase") if report.exists() else []
        return {case.get("name", ""): _outcome(case) for case in cases}, log


def _outcome(case: ElementTree.Element) -> tuple[str, str]:
    for result in case:
        if result.tag in ("failure", "error", "skipped"):
            return result.tag, result.text or result.get("message", "")
    return "", ""
