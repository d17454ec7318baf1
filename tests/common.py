"""What several test files share."""

import io
import json
import tarfile

import tcs_lab as lab
from PIL import Image

# A run of half a second.
TINY = {"model": "resnet8", "width": 2, "batch_size": 4, "clients": 3, "epochs": 3, "train_samples": 120,
        "test_samples": 40, "reference_batch": None, "threads": 1}  # fmt: skip


def config(scheme="TCS-L2-Q5", **changes):
    return lab.RunConfig(scheme, **(TINY | changes))


def tiny_command(folder, **changes):
    """The words of a command that makes TINY runs under `folder`."""
    path = folder / "tiny.yaml"
    path.write_text("".join(f"{k}: {json.dumps(v)}\n" for k, v in (TINY | changes).items()))
    return ["run", "--params", str(path), "--results", str(folder)]


def numbers(record):
    """All of a record that a rerun, by any number of processes, must repeat bit for bit."""
    rows = [{k: v for k, v in row.items() if k != "seconds"} for row in record["rows"]]
    return record["config"], record["status"], record["reason"], record["dimension"], rows


def image_bytes(colour, size=(8, 8), mode="RGB", form="PNG"):
    buffer = io.BytesIO()
    Image.new(mode, size, colour).save(buffer, form)
    return buffer.getvalue()


IMAGES = {
    f"{part}/{name}/{i}.png": image_bytes((30 * c, 10 * i, 200))
    for part, count in (("train", 4), ("test", 2))
    for c, name in enumerate(["cat", "dog"])
    for i in range(count)
}


def as_folder(root, files):
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    return root


def as_tar(path, files, mode="w:gz"):
    with tarfile.open(path, mode) as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def load_images(path):
    """A folder or tar of images, read afresh."""
    lab.load_dataset.cache_clear()
    return lab.load_dataset("folder", str(path))
