"""What several test files share."""

import io

from PIL import Image


def numbers(record):
    """All of a record that a rerun, by any number of processes, must repeat bit for bit."""
    rows = [{k: v for k, v in row.items() if k != "seconds"} for row in record["rows"]]
    return record["config"], record["status"], record["reason"], record["dimension"], rows


def image_bytes(colour, size=(8, 8), mode="RGB", form="PNG"):
    buffer = io.BytesIO()
    Image.new(mode, size, colour).save(buffer, form)
    return buffer.getvalue()
