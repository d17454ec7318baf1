"""Images: the data sets (synthetic, CIFAR-10, class folders), partitions, and batches on the device."""

from __future__ import annotations

import hashlib
import io
import os
import sys
import tarfile
import unicodedata
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from tcs_lab.support.errors import format_value, one_line, shorten, to_python
from tcs_lab.support.files import cache_folder, hold_lock, write_whole

# Images stay uint8 on the device that trains. Cropping, flipping and normalizing are tensor operations
# on a batch. There are three sources: synthetic (no download), cifar10 (torchvision), folder (or tar).


@dataclass(frozen=True)
class Dataset:
    """Images (n, h, w, 3) uint8 and labels (n,) int64, on the CPU.

    `fingerprint` is the sha256 of all of them, also of those that `first` leaves out; after `resize`
    it is that of the images that were left. `unused_images` and `unused_labels` are training images
    that no client has, where they are kept for the test after the last epoch.
    """

    label: str
    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor
    fingerprint: str
    classes: int = 10
    unused_images: Tensor | None = None
    unused_labels: Tensor | None = None

    def first(self, train: int | None, test: int | None, keep_unused: bool = False) -> Dataset:
        """Return the first samples only. With `keep_unused`, the other training images are kept apart.

        None stands for all samples. Raises ValueError if there are fewer than asked for, or if no
        training images are left to be kept.
        """
        counts = {
            "train_samples": (train, self.train_labels),
            "test_samples": (test, self.test_labels),
        }
        for key, (want, labels) in counts.items():
            if want is not None and want > len(labels):
                most = f"at most {len(labels)}, as many as there are ({self.label})"
                raise ValueError(f"{key}: got {want}, allowed: {most}")
        unused: dict[str, Any] = {}
        if keep_unused:
            if train is None or train == len(self.train_labels):
                raise ValueError(
                    f"test_unused: got True, allowed: False while train_samples takes all "
                    f"{len(self.train_labels)} training images ({self.label})"
                )
            unused = {
                "unused_images": self.train_images[train:],
                "unused_labels": self.train_labels[train:],
            }
        return replace(
            self, train_images=self.train_images[:train], train_labels=self.train_labels[:train],
            test_images=self.test_images[:test], test_labels=self.test_labels[:test], **unused,
        )  # fmt: skip

    def resize(self, size: int | None) -> Dataset:
        """Return images of size x size pixels, each the mean of an area, or the same ones for None.

        Training on smaller images takes less arithmetic. Raises ValueError for more pixels than there
        are.
        """
        size, side = to_python(size), min(self.train_images.shape[1:3])
        if size is None or (size, size) == self.train_images.shape[1:3]:
            return self
        if type(size) is not int or not 1 <= size <= side:
            raise ValueError(
                f"image_size: got {size!r}, allowed: 1 to {side} pixels ({self.label})"
            )
        label = f"{self.label}, {size} x {size}"
        arrays = [_shrink(self.train_images, size), self.train_labels]
        arrays += [_shrink(self.test_images, size), self.test_labels]
        if self.unused_images is not None and self.unused_labels is not None:
            arrays += [_shrink(self.unused_images, size), self.unused_labels]
        return _make_dataset(label, *arrays, classes=self.classes)


def _shrink(images: Tensor, size: int) -> Tensor:
    """Shrink images (n, h, w, 3) to (n, size, size, 3) uint8: each pixel is the mean of an area."""
    pieces = [i.permute(0, 3, 1, 2).float() for i in images.split(1000)]
    means = [F.adaptive_avg_pool2d(piece, size).round().byte() for piece in pieces]
    return torch.cat(means).permute(0, 2, 3, 1).contiguous()


def _make_dataset(label: str, *arrays: np.ndarray | Tensor, classes: int = 10) -> Dataset:
    tensors = [torch.as_tensor(a) for a in arrays]
    train, labels, test, test_labels, *unused = tensors
    sha = hashlib.sha256()
    for tensor in tensors:
        sha.update(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
        sha.update(tensor.contiguous().numpy().data)
    return Dataset(label, train, labels, test, test_labels, sha.hexdigest(), classes, *unused)


# Sources ──────────────────────────────────────────────────────────────────────────────────────────


@cache
def load_dataset(name: str, root: str | Path | None = None, label: str | None = None) -> Dataset:
    """Load a data set by name: "synthetic", "synthetic-compare", "cifar10" or "folder".

    `root` is cifar10's download folder (default: the cache folder) or, for "folder", a folder or
    tar of train/<class>/* and test/<class>/*. `label` is the data set's name in tables. A data set is
    loaded once per process. Raises ValueError or FileNotFoundError, which say what is wrong and what
    to do.
    """
    if name == "synthetic":
        return synthetic_dataset()
    if name == "synthetic-compare":
        return synthetic_dataset(**SYNTHETIC_COMPARE)
    if name == "cifar10":
        return _cifar10(user_path(root) if root else cache_folder() / "cifar10", label)
    if name == "folder":
        return _folder_dataset(root, label)
    raise ValueError(
        f"dataset: got {name!r}, allowed: synthetic, synthetic-compare, cifar10, folder"
    )


def user_path(root: str | Path) -> Path:
    """Return a path with ~ replaced by the home folder. Raises ValueError if there is none."""
    try:
        return Path(root).expanduser()
    except RuntimeError as error:
        raise ValueError(
            f"data_root: got {format_value(str(root))} ({error}), allowed: a path"
        ) from error


# The images of the track on which methods are compared (params/compare.yaml).
SYNTHETIC_COMPARE: dict[str, Any] = {
    "train": 48000, "test": 1000, "seed": 2026, "kinds": 20, "other": 0.5, "noise": 1.0,
    "label": "synthetic (compare)",
}  # fmt: skip


def synthetic_dataset(
    train: int = 8000, test: int = 2000, seed: int = 2021, kinds: int = 1, other: float = 0.8,
    noise: float = 1.5, label: str = "synthetic",
) -> Dataset:  # fmt: skip
    """Make ten classes of 32x32 RGB images from a seed.

    A class has several `kinds` of images, and each kind is a smooth pattern. An image is one of the
    patterns of its class, shifted by up to 4 pixels and perhaps mirrored, over a fainter pattern of
    any class, with noise. `other` and `noise` are the strengths of these two relative to the image's
    pattern. With more kinds, a network needs more images of each class to learn it.
    """
    generator = torch.Generator().manual_seed(seed)
    patterns = torch.randn(10 * kinds, 3, 6, 6, generator=generator)
    patterns = F.interpolate(patterns, 32, mode="bicubic", align_corners=False)
    patterns = (patterns / patterns.std((1, 2, 3), keepdim=True)).permute(0, 2, 3, 1)
    which = torch.randint(0, 10 * kinds, (train + test,), generator=generator)
    parts = [_draw_images(patterns, part, generator, other, noise) for part in which.split(1000)]
    images, labels = torch.cat(parts), which // kinds
    return _make_dataset(label, images[:train], labels[:train], images[train:], labels[train:])


def _draw_images(
    patterns: Tensor, which: Tensor, generator: torch.Generator, other: float, noise: float
) -> Tensor:
    """Draw images (n, 32, 32, 3) uint8. `which` (n,) says which of all `patterns` (10 kinds, 32, 32, 3)
    each of them has.
    """
    count = len(which)

    def shift(chosen: Tensor) -> Tensor:
        """Shift patterns by up to 4 pixels, and mirror half of them."""
        offset = torch.randint(-4, 5, (count, 2, 1), generator=generator)
        rows, columns = ((torch.arange(32) + offset) % 32).unbind(1)
        mirror = torch.rand(count, 1, generator=generator) < 0.5
        columns = torch.where(mirror, columns.flip(1), columns)
        pixels = (32 * chosen[:, None, None] + rows[:, :, None]) * 32 + columns[:, None, :]
        return F.embedding(pixels, patterns.reshape(-1, 3))

    others = torch.randint(0, len(patterns), (count,), generator=generator)
    grain = torch.randn(count, 32, 32, 3, generator=generator)
    mixed = shift(which).add_(shift(others).mul_(other))
    mixed.add_(grain.mul_(noise))
    return mixed.mul_(32).add_(128).round_().clamp_(0, 255).byte()


def _cifar10(root: Path, label: str | None) -> Dataset:
    """Load CIFAR-10, which is downloaded if it is not there."""
    from torchvision.datasets import CIFAR10

    try:
        # two downloads into one folder would spoil each other
        with hold_lock(root, f"the download into {root}"):
            parts = [CIFAR10(str(root), train=train, download=True) for train in (True, False)]
    except Exception as error:  # torchvision raises what urllib, tarfile and pickle raise
        raise ValueError(
            f"dataset cifar10: {root} has no complete CIFAR-10, and the download failed ({error}). "
            f"Delete a partial file there and try again with a network; or put "
            f"{CIFAR10.filename} (md5 {CIFAR10.tgz_md5}) there; or use dataset: synthetic"
        ) from error
    arrays = [a for part in parts for a in (part.data, np.asarray(part.targets, np.int64))]
    return _make_dataset(label or "CIFAR-10", *arrays)


MAX_IMAGE_BYTES, MAX_IMAGE_SIDE = 1 << 20, 256  # bytes of one file, and pixels
MAX_DATASET_BYTES = 4 << 30  # of all images when decoded
# No other formats are read, since Pillow starts programs for some of them.
IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "PPM")
PARTS = ("train", "test")
LAYOUT = "train/<class>/<image> and test/<class>/<image>"
# What operating systems put beside images. Names that begin with a dot are ignored, too.
LITTER = {"__MACOSX", "Thumbs.db", "desktop.ini", "Icon\r", "@eaDir"}


def _folder_dataset(root: str | Path | None, label: str | None) -> Dataset:
    """Load class folders, or a tar of them. They are decoded once, into the cache.

    train/ and test/ may also lie in a single folder inside, as archives often have it.
    """
    if root is None:
        raise ValueError(f"data_root: got None, allowed: a folder or a tar of {LAYOUT}")
    path = user_path(root)
    if not path.exists():
        raise FileNotFoundError(
            f"data_root: {path} does not exist; allowed: a folder or a tar of {LAYOUT}"
        )
    named = path.resolve().name
    if path.is_dir():
        path = _find_parts(path)
        _check_class_folders(path)
    cached = cache_folder() / "datasets" / f"{_hash_source(path)}.npz"
    label = label or named.lstrip(".").split(".")[0]
    if found := _read_cached(cached, label):
        return found
    with hold_lock(cached, f"the images in {path}"):
        if found := _read_cached(cached, label):
            return found
        files = _tar_files(path) if path.is_file() else _folder_files(path)
        dataset = _decode_files(files, path, label)
        arrays: dict[str, Any] = {k: getattr(dataset, k).numpy() for k in _ARRAYS}
        sealed: dict[str, Any] = {"fingerprint": dataset.fingerprint, "classes": dataset.classes}
        write_whole(cached, lambda f: np.savez(f, **arrays, **sealed))
        return dataset


def _find_parts(root: Path) -> Path:
    """Find the folder that has train/ and test/ in it: the root, or the one folder inside that does.

    Raises ValueError, which says what is there instead.
    """
    if any((root / part).is_dir() for part in PARTS):
        return root
    folders = [f for f in sorted(root.iterdir()) if f.is_dir() and not _is_litter(f.name)]
    inside = [folder for folder in folders if (folder / PARTS[0]).is_dir()]
    if len(inside) == 1:
        return inside[0]
    names = format_value([folder.name for folder in inside or folders])
    what = (
        "several folders with a train/ in them" if inside else "no train/ and no test/ in it, but"
    )
    allowed = "the folder above it" if root.resolve().name in PARTS else f"a folder of {LAYOUT}"
    raise ValueError(f"data_root: {root} has {what} {names}; allowed: {allowed}")


def _check_class_folders(root: Path) -> None:
    """Raise ValueError for a class folder that cannot be read or that has no files: `Path.glob`
    leaves these out in silence, and then the data set would have fewer classes."""
    for part in (root / name for name in PARTS if (root / name).is_dir()):
        for folder in sorted(part.iterdir()):
            if not folder.is_dir() or _is_litter(folder.name):
                continue
            where = f"{root}: the folder {folder.relative_to(root).as_posix()!r}"
            try:
                names = os.listdir(folder)
            except OSError as error:
                raise ValueError(f"{where} cannot be read: {error.strerror}") from None
            if all(map(_is_litter, names)):
                raise ValueError(f"{where} has no images; put some there, or remove it")


def _is_litter(name: str) -> bool:
    """Return whether a file or folder was made by an operating system and is not part of a data set."""
    return name.startswith(".") or name in LITTER


_ARRAYS = ("train_images", "train_labels", "test_images", "test_labels")


def _read_cached(path: Path, label: str) -> Dataset | None:
    """Return the decoded data set, or None if there is no such file or if it has been changed."""
    try:
        with np.load(path, allow_pickle=False) as z:
            dataset = _make_dataset(label, *(z[k] for k in _ARRAYS), classes=int(z["classes"]))
            return dataset if dataset.fingerprint == str(z["fingerprint"]) else None
    except Exception:
        return None


def _hash_source(path: Path) -> str:
    """Hash what changes when the source does: a tar's content, or a folder's names, sizes and times."""
    if path.is_file():
        with path.open("rb") as f:
            return hashlib.file_digest(f, "sha256").hexdigest()[:32]
    sha, inside = hashlib.sha256(), path.resolve()
    # "*/**/*" also lists what is in a class folder that is a link
    for file in dict.fromkeys(_list_files(path, "**/*") + _list_files(path, "*/**/*")):
        if not file.exists() or not file.resolve().is_relative_to(inside):
            where = file.relative_to(path).as_posix()
            raise ValueError(
                f"{path}: {where!r} is a link to nothing, or to a file outside of the folder; put the "
                "file itself there, or give a tar that was made with --dereference"
            )
        status = file.stat()
        sha.update(os.fsencode(file.relative_to(path)))
        sha.update(f" {status.st_size} {status.st_mtime_ns}\n".encode())
    return sha.hexdigest()[:32]


def _list_files(root: Path, pattern: str) -> list[Path]:
    """List what is in train/ and test/, sorted, without what operating systems put there."""
    files = sorted(file for part in PARTS for file in (root / part).glob(pattern))
    return [f for f in files if not any(map(_is_litter, f.relative_to(root).parts))]


def _folder_files(root: Path) -> Iterator[tuple[str, bytes]]:
    for file in _list_files(root, "*/**/*"):
        if file.is_file():
            _check_size(str(file), file.stat().st_size)
            yield file.relative_to(root).as_posix(), file.read_bytes()


class _Member(tarfile.TarInfo):
    """A member whose declared size is checked first, also if it only holds a long name."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Any:
        member = super().frombuf(buf, encoding, errors)
        _check_size(member.name, member.size)
        return member


def _tar_files(path: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the regular files of an archive with any compression. Nothing is unpacked to disk."""
    if zipfile.is_zipfile(path):
        raise ValueError(f"{path}: got a zip archive, allowed: a folder or a tar; unpack it first")
    try:
        with tarfile.open(path, tarinfo=_Member) as archive:
            seen = set()
            for member in archive:
                if member.isdir():
                    continue
                if (name := member.name.removeprefix("./")) in seen:
                    raise ValueError(f"{name!r} is in it twice")
                seen.add(name)
                if not member.isreg() or ".." in Path(member.name).parts or member.name[0] == "/":
                    raise ValueError(
                        f"{member.name!r} is a link, or its path leads out of the archive"
                    )
                _check_size(member.name, member.size)  # the size in an extended header
                file = cast(IO[bytes], archive.extractfile(member))  # it is a regular one
                yield name, file.read()
            archive.fileobj.seek(archive.offset)
            end = archive.fileobj.read(1 << 20)  # reading on to the end checks a compressed stream
            if len(end) < tarfile.BLOCKSIZE or end.strip(b"\0"):
                raise EOFError("no end-of-archive mark")
    except Exception as error:  # tarfile, zlib, lzma and bz2 raise many kinds
        why = shorten(one_line(error))
        raise ValueError(
            f"{path}: got a file that is not a complete tar of images ({why}), allowed: a tar of {LAYOUT}"
        ) from error


def _check_size(name: str, size: int) -> None:
    if size > MAX_IMAGE_BYTES:
        raise ValueError(f"{name}: got {size} bytes, allowed: at most {MAX_IMAGE_BYTES}")


def _decode_files(files: Iterable[tuple[str, bytes]], source: Path, label: str) -> Dataset:
    """Decode the files of train/<class>/ and test/<class>/ into a data set.

    Classes are in alphabetical order. Samples are in a random order that is always the same, so that
    the first n are of all classes.
    """
    entries = list(_decode_all(files, source))
    classes = _list_classes(entries, source)
    arrays: list[np.ndarray] = []
    for part in PARTS:
        in_part = sorted((e for e in entries if e[0] == part), key=lambda entry: entry[1:3])
        order = torch.randperm(len(in_part), generator=torch.Generator().manual_seed(0))
        in_part = [in_part[i] for i in order.tolist()]
        arrays.append(np.stack([pixels for *_, pixels in in_part]))
        arrays.append(np.array([classes.index(c) for _, c, _, _ in in_part], np.int64))
    return _make_dataset(label, *arrays, classes=len(classes))


def _decode_all(
    files: Iterable[tuple[str, bytes]], source: Path
) -> Iterator[tuple[str, str, str, np.ndarray]]:
    """Yield (train or test, class, file name, pixels) for every image. All images have one size.

    Names of classes are normalized, since Unicode has several spellings for accents.
    """
    shape, size, parents, others = None, 0, set[str](), list[str]()
    bar = {"desc": f"decoding {source.name}", "unit": " images", "leave": False}
    for name, content in tqdm(files, **bar, disable=not sys.stderr.isatty()):
        parent, words = _split_path(name)
        if len(words) < 3 or any(map(_is_litter, words)):
            others.append(name)
            continue
        part, kind, *rest = words
        if len(rest) > 1:
            raise ValueError(
                f"{source}: got {name}, allowed: {part}/<class>/<image>, no deeper folder"
            )
        parents.add(parent)
        if len(parents) > 1:
            got = format_value([f"{where}{PARTS[0]}/" for where in sorted(parents)])
            raise ValueError(
                f"{source}: got images in several folders, {got}, allowed: in one of them"
            )
        pixels = _decode_image(f"{source}: {name}", content)
        shape = shape or pixels.shape
        if pixels.shape != shape:
            got = f"got an image of shape {pixels.shape}, allowed: {shape}, that of the first image"
            raise ValueError(f"{source}: {name}: {got}")
        size += pixels.nbytes
        if size > MAX_DATASET_BYTES:
            raise ValueError(
                f"{source}: got too many images, allowed: {MAX_DATASET_BYTES} bytes, decoded"
            )
        yield part, unicodedata.normalize("NFC", kind), rest[0], pixels
    if not parents:
        got = format_value(others) if others else "nothing"
        raise ValueError(f"{source}: got {got} in it, allowed: {LAYOUT}")


def _split_path(name: str) -> tuple[str, list[str]]:
    """Return the folder of train/ and test/, "" or "folder/", and the parts of a file's path from there
    on: none if it is in neither."""
    words = name.split("/")
    if words[0] in PARTS:
        return "", words
    if words[1:] and words[1] in PARTS:
        return f"{words[0]}/", words[1:]
    return "", []


def _list_classes(entries: list[tuple[str, str, str, np.ndarray]], source: Path) -> list[str]:
    """Return the names of the classes. Raises ValueError if train and test have not the same ones."""
    train, test = ({c for p, c, *_ in entries if p == part} for part in PARTS)
    lonely = {"train": train - test, "test": test - train}
    for part, names in lonely.items():
        if names:
            got = f"classes in {part}/ alone: {format_value(sorted(names))}"
            raise ValueError(f"{source}: got {got}; allowed: the same classes in both, as {LAYOUT}")
    if len(train) < 2:
        raise ValueError(
            f"{source}: got images of {len(train)} classes {sorted(train)}, allowed: two or more, "
            f"as {LAYOUT}"
        )
    return sorted(train)


def _decode_image(name: str, content: bytes) -> np.ndarray:
    """Decode one image to (h, w, 3) uint8. Raises ValueError that names the file."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(content), formats=IMAGE_FORMATS) as image:
            if max(image.size) > MAX_IMAGE_SIDE:
                raise ValueError(f"{image.size} pixels, allowed: at most {MAX_IMAGE_SIDE} per side")
            if image.mode != "RGB":
                raise ValueError(f"mode {image.mode}, allowed: RGB")
            return np.asarray(image, np.uint8)
    except UnidentifiedImageError:  # Pillow's message shows the address of an object
        kinds = ", ".join(IMAGE_FORMATS)
        raise ValueError(
            f"{name}: got a file that is no image, allowed: {kinds}; move it elsewhere"
        ) from None
    except Exception as error:  # Pillow's decoders raise many kinds
        raise ValueError(
            f"{name}: got no readable RGB image ({shorten(one_line(error))})"
        ) from error


# Partition ────────────────────────────────────────────────────────────────────────────────────────


def partition(
    labels: Tensor, clients: int, alpha: float | None, generator: torch.Generator
) -> Tensor:
    """Give every client equally many samples, none of them twice: (N, floor(n / N)) int64.

    If `alpha` is None, they are dealt out at random (IID). Otherwise the shares of the classes are
    drawn for each client from a Dirichlet distribution with that alpha, and followed as far as samples
    of a class are left.
    """
    each = len(labels) // clients
    order = torch.randperm(len(labels), generator=generator)
    if alpha is None:
        return order[: each * clients].view(clients, each)
    seed = int(torch.randint(2**62, (1,), generator=generator))
    rng, shuffled = np.random.default_rng(seed), labels[order].numpy()
    classes = int(labels.max()) + 1
    pools = [order[torch.from_numpy(shuffled == c)] for c in range(classes)]
    used = np.zeros(classes, np.int64)
    sizes = np.array([len(pool) for pool in pools])
    rows = []
    for _ in range(clients):
        share = rng.dirichlet(np.full(classes, alpha))
        counts = _draw_counts(share, sizes - used, each, rng)
        rows.append(torch.cat([p[u : u + c] for p, u, c in zip(pools, used, counts, strict=True)]))
        used += counts
    return torch.stack(rows)


def _draw_counts(
    share: np.ndarray, left: np.ndarray, need: int, rng: np.random.Generator
) -> np.ndarray:
    """Draw how many samples a client has of each class, by its `share` of them. Where a class runs out,
    the missing ones are drawn from the other classes."""
    counts = np.zeros_like(left)
    while (missing := need - counts.sum()) > 0:
        open_share = np.where(left > counts, share + 1e-12, 0.0)
        drawn = rng.multinomial(missing, open_share / open_share.sum())
        counts = np.minimum(counts + drawn, left)
    return counts


# Batches on the device ────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Draws:
    """The samples of a client (M,), in order, each with its crop offset (2,) and its flip. Those of
    several clients are (N, M)."""

    samples: Tensor
    crops: Tensor
    flips: Tensor

    @staticmethod
    def of(samples_M: Tensor, need: int, generator: torch.Generator, padding: int = 4) -> Draws:
        """Draw `need` of a client's samples without replacement."""
        order = torch.randperm(len(samples_M), generator=generator)[:need]
        crops = torch.randint(0, 2 * padding + 1, (need, 2), generator=generator)
        return Draws(samples_M[order], crops, torch.rand(need, generator=generator) < 0.5)

    @staticmethod
    def stack(several: list[Draws]) -> Draws:
        """Stack the draws of several clients, in new memory."""
        parts = zip(*(vars(draws).values() for draws in several), strict=True)
        return Draws(*(torch.stack(part) for part in parts))

    def flatten(self) -> Draws:
        """Return the draws of several clients one after another."""
        return Draws(*(tensor.flatten(0, 1) for tensor in vars(self).values()))

    def __getitem__(self, which: Any) -> Draws:
        return Draws(self.samples[which], self.crops[which], self.flips[which])

    def to(self, device: torch.device) -> Draws:
        return Draws(*(t.to(device) for t in (self.samples, self.crops, self.flips)))


class Batches:
    """A data set on the device that trains: augmented batches for training, plain ones for the test.

    Training images that no client has, where they are kept, stand behind the test images.
    """

    def __init__(self, data: Dataset, device: torch.device, padding: int = 4):
        pixels = data.train_images.numpy().reshape(-1, 3)
        part = pixels[:: max(1, len(pixels) // 4_000_000)].astype(np.float64)
        self.mean = self._spread_colours(part.mean(0), data, device)
        self.scale = self._spread_colours(1 / np.maximum(part.std(0), 1.0), data, device)
        self.padding = padding
        padded = F.pad(data.train_images.to(device), (0, 0, *[padding] * 4))
        self.padded = padded.contiguous()  # (n, h + 2 padding, w + 2 padding, 3) uint8
        self.train_labels = data.train_labels.to(device)
        tests = [(data.test_images, data.test_labels)]
        if data.unused_images is not None and data.unused_labels is not None:
            tests.append((data.unused_images, data.unused_labels))
        images, labels = zip(*tests, strict=True)
        self.test_count = len(data.test_labels)  # without those that no client has
        self.test_images = torch.cat(images).to(device)
        self.test_labels = torch.cat(labels).to(device)

    @staticmethod
    def _spread_colours(colours: np.ndarray, data: Dataset, device: torch.device) -> Tensor:
        """Repeat a number per colour as (h, w, 3), since broadcasting three numbers takes six times as long."""
        numbers = torch.tensor(colours, dtype=torch.float32, device=device)
        return numbers.expand(data.train_images.shape[1:]).contiguous()

    def normalize(self, pixels: Tensor) -> Tensor:
        """Normalize (B, h, w, 3) uint8 to (B, 3, h, w) float32, with channels last in memory."""
        return pixels.float().sub_(self.mean).mul_(self.scale).permute(0, 3, 1, 2)

    def augment(self, draws: Draws) -> tuple[Tensor, Tensor]:
        """Return cropped and flipped images (B, 3, h, w) float32 and labels (B,) of the draws."""
        count, height, width, colours = self.padded.shape
        border = 2 * self.padding
        lines, pixels = height - border, width - border
        most = ((count - 1) * height + border) * width + border  # the last crop may start there
        crops = self.padded.as_strided(
            (most + 1, lines, pixels * colours), (colours, width * colours, 1)
        )
        starts = (draws.samples * height + draws.crops[:, 0]) * width + draws.crops[:, 1]
        images = crops.index_select(0, starts).view(-1, lines, pixels, colours)
        images = _mirror(images, draws.flips)
        return self.normalize(images), self.train_labels[draws.samples]

    def test(self, part: slice) -> tuple[Tensor, Tensor]:
        return self.normalize(self.test_images[part]), self.test_labels[part]


def _mirror(images: Tensor, flips_B: Tensor) -> Tensor:
    """Mirror those of the images (B, h, w, 3) uint8 that have a flip. Where possible, eight bytes at a
    time are chosen."""
    plain, mirrored = images.flatten(1), images.flip(2).flatten(1)
    word = torch.int64 if plain.shape[1] % 8 == 0 else torch.uint8
    chosen = torch.where(flips_B.view(-1, 1), mirrored.view(word), plain.view(word))
    return chosen.view(torch.uint8).view_as(images)


def generator_for(seed: int, *path: int) -> torch.Generator:
    """Make a CPU generator for one purpose: the same (seed, path) gives the same numbers everywhere."""
    state = np.random.SeedSequence(to_python([seed, *path])).generate_state(1, np.uint64)[0]
    return torch.Generator().manual_seed(int(state >> np.uint64(1)))
