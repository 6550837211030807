"""Records of TensorBoard against tensorboardX, which computes each checksum alone."""

import struct

import numpy as np
from tensorboardX.record_writer import masked_crc32c

from jaxscale.records.tensorboard import encode_records, masked_checksums


def test_checksums_are_those_of_tensorboardx():
    random = np.random.default_rng(0)
    records = [random.bytes(length) for length in (0, 1, 7, 8, 9, 64, 255, 1000)]
    assert masked_checksums(records).tolist() == [masked_crc32c(record) for record in records]
    assert masked_checksums([]).tolist() == []


def test_records_have_length_and_checksums():
    events = [b"", b"one", b"another event"]
    expected = b""
    for event in events:
        length = struct.pack("<Q", len(event))
        expected += length + struct.pack("<I", masked_crc32c(length)) + event + struct.pack("<I", masked_crc32c(event))
    assert encode_records(events) == expected
    assert encode_records([]) == b""
