"""Signals and announced maintenance stop a run between two steps."""

import http.server
import json
import os
import signal
import socket
import subprocess
import sys
import threading

import pytest

from k3jax.train.stop import StopSignals, watch_maintenance


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_noted_and_handlers_come_back(number):
    before = signal.getsignal(number)
    with StopSignals() as stop:
        assert not stop.wanted(1)
        os.kill(os.getpid(), number)
        assert stop.wanted(1) and stop.wanted(2)
        assert signal.getsignal(number) == before  # a second one acts as usual
    assert signal.getsignal(number) == before


def metadata_server(events):
    """A server that answers each request with the next event."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            assert self.headers["Metadata-Flavor"] == "Google"
            asked.append(self.path)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(events.pop(0).encode())

        def log_message(self, *_):
            pass

    asked = []
    server = http.server.HTTPServer(("localhost", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server, asked


def test_announced_maintenance_is_a_sigterm():
    server, asked = metadata_server(["NONE", "MIGRATE_ON_HOST_MAINTENANCE", "TERMINATE_ON_HOST_MAINTENANCE"])
    with StopSignals() as stop:
        watch_maintenance(f"http://localhost:{server.server_port}/event", wait_s=5).join(20)
        assert stop.wanted(1)
    server.shutdown()
    assert asked == ["/event"] + ["/event?wait_for_change=true&timeout_sec=5"] * 2


def test_without_a_metadata_server_nothing_happens():
    with StopSignals() as stop:
        watch_maintenance("http://localhost:9/event").join(20)
        assert not stop.wanted(1)


PROCESS = """
import json, sys, time
import jax
jax.distributed.initialize(f"localhost:{sys.argv[1]}", 2, int(sys.argv[2]))
from k3jax.data.batch import position_of_run
from k3jax.train.stop import StopSignals
lane = {"corpus": "x", "lanes": {sys.argv[2]: {"next": "long" * int(sys.argv[2])}}}
with StopSignals() as stop:
    print("ready", flush=True)
    step = 1
    while not stop.wanted(step):
        time.sleep(0.02)
        step += 1
print(json.dumps([step, position_of_run(lane)]))
"""


def test_all_processes_stop_after_the_same_step_and_know_all_positions(root):
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = str(probe.getsockname()[1])
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen([sys.executable, "-c", PROCESS, port, str(n)], cwd=root, **pipes) for n in range(2)]
    try:
        assert [process.stdout.readline() for process in processes] == ["ready\n"] * 2
        processes[1].send_signal(signal.SIGTERM)  # one machine is told
        outputs = [process.communicate(timeout=100) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], outputs
    (step, position), other = (json.loads(out.splitlines()[-1]) for out, _ in outputs)
    assert [step, position] == other
    assert position == {"corpus": "x", "lanes": {"0": {"next": ""}, "1": {"next": "long"}}}
