"""The metrics file is continued without a line lost or doubled, and becomes a picture."""

import json
import struct

import numpy as np
import pytest
from tensorboardX.proto.event_pb2 import Event

from k3jax.train.metrics import BOARD, CURVE_FILE, METRICS_FILE, MetricsLog, draw_curve, read_metrics


def write(run_dir, steps, tail=""):
    lines = [json.dumps({"step": step, "loss": 5.0 / step}) for step in steps]
    (run_dir / METRICS_FILE).write_text("".join(f"{line}\n" for line in lines) + tail)


@pytest.mark.parametrize("last_step", [0, 3, 5])
def test_records_after_the_checkpoint_are_dropped(tmp_path, last_step):
    write(tmp_path, [1, 2, 3, 4, 5])
    log = MetricsLog(tmp_path, last_step=last_step)
    log.write({"step": last_step + 1, "loss": 0.5})
    log.close()
    assert [record["step"] for record in read_metrics(tmp_path)] == list(range(1, last_step + 2))


def test_a_line_cut_short_by_a_kill_is_dropped(tmp_path):
    write(tmp_path, [1, 2], tail='{"step": 3, "lo')
    MetricsLog(tmp_path, last_step=9).close()
    assert [record["step"] for record in read_metrics(tmp_path)] == [1, 2]


def test_a_record_is_readable_as_soon_as_it_is_written(tmp_path):
    log = MetricsLog(tmp_path, last_step=0)
    log.write({"step": 1, "loss": 2.0, "eval_loss": 2.5})
    assert read_metrics(tmp_path) == [{"step": 1, "loss": 2.0, "eval_loss": 2.5}]
    log.close()


def test_the_curve_is_a_png(tmp_path):
    write(tmp_path, range(1, 30))
    draw_curve(tmp_path)
    assert (tmp_path / CURVE_FILE).read_bytes().startswith(b"\x89PNG")


def events(run_dir):
    """All values in the run's TensorBoard files."""
    for path in sorted((run_dir / BOARD).iterdir()):
        data = path.read_bytes()
        while data:  # a record: length, its checksum, the event, its checksum
            length = struct.unpack("<Q", data[:8])[0]
            event = Event.FromString(data[12 : 12 + length])
            yield from ((event.step, value) for value in event.summary.value)
            data = data[16 + length :]


def test_tensorboard_gets_scalars_and_histograms(tmp_path):
    log = MetricsLog(tmp_path, last_step=0)
    log.write({"step": 3, "loss": 2.5, "grad_norm/muon": 0.5}, {"head_rms": np.arange(5.0)})
    log.close()
    values = {value.tag: (step, value) for step, value in events(tmp_path)}
    assert {tag: step for tag, (step, _) in values.items()} == {"loss": 3, "grad_norm/muon": 3, "head_rms": 3}
    assert values["loss"][1].simple_value == 2.5
    assert (values["head_rms"][1].histo.num, values["head_rms"][1].histo.max) == (5, 4.0)
