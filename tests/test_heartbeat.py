"""Heartbeats: phases add up, torn files are passed over, and a thread writes while the main thread hangs."""

import dataclasses
import json
import time

from jaxscale.heartbeat import Heartbeat, Writer, heartbeat_file, read_heartbeats


def test_the_seconds_of_the_phases_add_up_to_the_uptime():
    times = iter([10.0, 11.0, 13.5, 14.0, 20.0])
    writer = Writer(None, 3, attempt=2, clock=lambda: next(times))
    writer.set("joining")
    writer.set("stepping", 1)
    writer.set("stepping", 2)
    heartbeat = writer.heartbeat()
    assert heartbeat.seconds_by_phase == {"starting": 1.0, "joining": 2.5, "stepping": 6.5}
    assert sum(heartbeat.seconds_by_phase.values()) == heartbeat.uptime == 10.0
    assert (heartbeat.rank, heartbeat.attempt, heartbeat.phase, heartbeat.step) == (3, 2, "stepping", 2)
    assert heartbeat.since == 6.0


def test_a_thread_writes_while_the_main_thread_hangs(tmp_path):
    writer = Writer(tmp_path / "processes", 1)
    writer.set("stepping", 7)
    writer.start()
    time.sleep(1.3)  # a hang of the main thread
    heartbeat = read_heartbeats(tmp_path / "processes")[1]
    assert (heartbeat.phase, heartbeat.step) == ("stepping", 7)
    assert heartbeat.beat >= 2
    assert heartbeat.since > 0.4
    writer.set("finished")
    writer.close()
    assert read_heartbeats(tmp_path / "processes")[1].phase == "finished"


def test_torn_and_foreign_files_are_passed_over(tmp_path):
    text = json.dumps(dataclasses.asdict(Writer(None, 0).heartbeat()))
    assert Heartbeat.parse(text) is not None
    broken_texts = [text[:length] for length in range(len(text))]
    changes = [{"rank": -1}, {"rank": True}, {"phase": "sleeping"}, {"since": "1"}, {"seconds_by_phase": 3}, {"x": 1}]
    changes += [{"since": 10**400}, {"step": 2**64}]
    broken_texts += [json.dumps(json.loads(text) | change) for change in changes]
    broken_texts += ["[]", "null", "[" * 100_000]
    assert [Heartbeat.parse(broken_text) for broken_text in broken_texts] == [None] * len(broken_texts)
    heartbeat_file(tmp_path, 0).write_text(text)
    heartbeat_file(tmp_path, 1).write_bytes(b"\xff\xfe")
    heartbeat_file(tmp_path, 2).mkdir()
    heartbeat_file(tmp_path, 3).write_text(json.dumps(json.loads(text) | {"rank": 10**12}))
    assert list(read_heartbeats(tmp_path)) == [0]


def test_a_writer_without_a_folder_starts_no_thread():
    writer = Writer(None, 0)
    writer.start()
    assert writer._thread is None
    writer.close()
