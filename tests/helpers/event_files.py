"""What TensorBoard would read from a folder of event files."""

import struct


def events(folder):
    """(file number, event) of all event files, read record by record as the format has it, oldest file first."""
    from tensorboardX.proto import event_pb2
    from tensorboardX.record_writer import masked_crc32c

    files = sorted(folder.glob("events.out.tfevents.*"), key=lambda file: file.stat().st_mtime_ns)
    for number, file in enumerate(files):
        content = file.read_bytes()
        while content:
            length, checksum = struct.unpack("<QI", content[:12])
            record, rest = content[12 : 12 + length], content[12 + length :]
            assert (checksum, *struct.unpack("<I", rest[:4])) == (masked_crc32c(content[:8]), masked_crc32c(record))
            content = rest[4:]
            yield number, event_pb2.Event.FromString(record)


def scalars(folder):
    """[(tag, step, value)] in the order of writing."""
    return [
        (value.tag, event.step, round(value.simple_value, 4))
        for _, event in events(folder)
        for value in event.summary.value
        if value.HasField("simple_value")
    ]
