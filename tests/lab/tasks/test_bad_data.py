"""Bad data: folders, archives and caches that are damaged, hostile or of another kind."""

import gzip
import io
import os
import random
import re
import tarfile
import tracemalloc
import zipfile

import pytest
import tcs_lab as lab
import torch
from common import IMAGES, as_folder, as_tar, image_bytes, load_images


def replaced(name, content):
    return IMAGES | {name: content}


BAD = {
    "grey": (replaced("train/cat/0.png", image_bytes(7, mode="L")), "train/cat/0.png.*mode L"),
    "rgba": (replaced("test/dog/1.png", image_bytes((1, 2, 3, 4), mode="RGBA")), "mode RGBA"),
    "cut off": (replaced("train/dog/1.png", image_bytes(9, size=(99, 99))[:60]), "train/dog/1.png"),
    "text": (replaced("train/dog/1.png", b"hello"), "train/dog/1.png"),
    "empty": (replaced("train/dog/1.png", b""), "train/dog/1.png"),
    "other size": (replaced("train/dog/1.png", image_bytes((1, 2, 3), size=(9, 8))), r"\(8, 9, 3\), allowed: \(8, 8, 3\)"),
    "huge side": (replaced("train/dog/1.png", image_bytes((1, 2, 3), size=(5000, 2))), "pixels"),
    "huge file": (replaced("train/dog/1.png", b"\0" * (1 << 21)), "2097152 bytes"),
    "wide": (replaced("train/cat/0.png", image_bytes(1, (9000, 9000), "1")), "9000.* pixels"),
    "PostScript": (replaced("train/cat/0.png", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n"), "train/cat/0.png"),
    "GIF": (replaced("train/cat/0.png", image_bytes(1, mode="P", form="GIF")), "train/cat/0.png"),
    "one class": ({k: v for k, v in IMAGES.items() if "dog" not in k}, "1 classes .*cat.*two or more"),
    "class missing in test": ({k: v for k, v in IMAGES.items() if "test/dog" not in k}, r"train/.*\['dog'\]"),
    "nothing": ({}, "train/<class>|no train/ and no test/"),
    "other layout": ({"a.png": image_bytes((1, 2, 3))}, "train/<class>"),
    "val for test": ({k.replace("test", "val"): v for k, v in IMAGES.items()}, r"train/.*\['cat', 'dog'\]"),
    "two places": ({f"{at}/{k}": v for at in "ab" for k, v in IMAGES.items()}, r"several .*\['a.*'b"),
    "a list beside images": (replaced("train/cat/labels.txt", b"0 cat"), "train/cat/labels.txt: got .*move it"),
    "deeper": (replaced("train/cat/more/9.png", image_bytes((1, 2, 3))), "got train/cat/more/9.png, allowed: train/<class>/<image>"),
}  # fmt: skip


def assert_refused(path, message):
    """One line that names the source and says so, in little memory; nothing is kept."""
    tracemalloc.start()
    with pytest.raises(ValueError, match=message) as raised:
        load_images(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    text = str(raised.value)
    assert str(path) in text and "\n" not in text and len(text) < 1000
    assert peak < 20 << 20 and not list((path.parent / "cache").glob("datasets/*"))


@pytest.mark.parametrize("part", ["train", "test"])
def test_a_class_folder_without_images_is_named(tmp_path, part):
    """Left out in silence, the data set would have fewer classes."""
    folder = as_folder(tmp_path / "images", IMAGES)
    for where in ("train", "test"):
        (folder / where / "emu").mkdir()
    (folder / part / "emu" / ".DS_Store").write_bytes(b"")
    assert_refused(folder, r"the folder 'train/emu' has no images; put some there, or remove it")


@pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX")
def test_a_class_folder_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    folder = as_folder(tmp_path / "images", IMAGES)
    closed, listdir = folder / "test" / "cat", os.listdir

    def refusing(path):  # as for a user without the right to read it; root has it always
        if os.fspath(path) == os.fspath(closed):
            raise PermissionError(13, "Permission denied")
        return listdir(path)

    monkeypatch.setattr(os, "listdir", refusing)
    assert_refused(folder, r"the folder 'test/cat' cannot be read: Permission denied")


@pytest.mark.parametrize("case", BAD)
@pytest.mark.parametrize("source", [as_tar, as_folder])
def test_bad_sources_are_named(tmp_path, case, source):
    files, message = BAD[case]
    (tmp_path / "images").mkdir()
    target = tmp_path / ("images.tar" if source is as_tar else "images")
    assert_refused(source(target, files), message)


@pytest.mark.parametrize("name", ["../evil.png", "/etc/evil.png", "train/cat/../../../x.png"])
def test_members_that_point_outside_are_refused(tmp_path, name):
    path = as_tar(tmp_path / "images.tar", IMAGES | {name: b"x"})
    assert_refused(path, re.escape(name))


def test_a_member_that_stands_there_twice_is_refused(tmp_path):
    path = tmp_path / "images.tar"
    again = [("./" + name, content) for name, content in IMAGES.items()][:1]
    with tarfile.open(path, "w") as archive:
        for name, content in [*IMAGES.items(), *again]:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    assert_refused(path, f"{next(iter(IMAGES))}' is in it twice")


def test_a_folder_may_hold_other_files_of_any_size(tmp_path):
    others = ("train/labels.csv", "tools/build/model.bin")
    as_folder(tmp_path, IMAGES | {name: b"0" * (1 << 21) for name in others})
    (tmp_path / "tools" / "latest").symlink_to("/tmp")
    assert len(load_images(tmp_path).train_labels) == 8


def test_a_link_in_an_archive_is_refused_even_to_an_image(tmp_path):
    path = as_tar(tmp_path / "images.tar", IMAGES, "w")
    with tarfile.open(path, "a") as archive:
        member = tarfile.TarInfo("train/cat/9.png")
        member.type, member.linkname = tarfile.SYMTYPE, "0.png"
        archive.addfile(member)
    assert_refused(path, "is a link, or its path")


@pytest.mark.parametrize("keep", [0.0, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("mode", ["w:gz", "w:xz", "w"])
def test_a_truncated_archive_is_named(tmp_path, mode, keep):
    path = as_tar(tmp_path / "images.tar", IMAGES, mode)
    whole = path.read_bytes().rstrip(b"\0")
    path.write_bytes(whole[: int(keep * len(whole))])
    assert_refused(path, r"images.tar")


def test_an_archive_that_ends_between_two_members_is_named(tmp_path):
    """tarfile takes that for the end; half the images would be missing without a word."""
    path = as_tar(tmp_path / "images.tar", IMAGES, "w")
    with tarfile.open(path) as archive:
        offset = archive.getmembers()[7].offset
    path.write_bytes(path.read_bytes()[:offset])
    assert_refused(path, "images.tar: .*no end-of-archive mark")


@pytest.mark.parametrize("seed", range(15))
@pytest.mark.parametrize("mode", ["w", "w:gz", "w:xz"])
def test_a_damaged_archive_is_named_or_another_data_set(tmp_path, mode, seed):
    """Flipped bytes: an error with the file's name, or data whose fingerprint is another. Plain tar
    has checksums only of its headers, so pixels may change; the record's fingerprint tells."""
    rng, path = random.Random(seed), tmp_path / "images.tar"
    whole = bytearray(as_tar(path, IMAGES, mode).read_bytes())
    expected = load_images(path)
    for _ in range(5):
        damaged = bytearray(whole)
        used = len(bytes(whole).rstrip(b"\0"))
        for _ in range(rng.randint(1, 3)):
            damaged[rng.randrange(used)] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        try:
            found = load_images(path)
        except ValueError as error:
            assert str(path) in str(error)
        else:  # what is not looked at: times, owners, a gzip header
            assert found.train_images.shape[1:] == expected.train_images.shape[1:]
            same = torch.equal(found.train_images, expected.train_images)
            same &= torch.equal(found.train_labels, expected.train_labels)
            same &= torch.equal(found.test_images, expected.test_images)
            assert same == (found.fingerprint == expected.fingerprint)


def long_name_of(size):
    """A GNU long-name member that declares a name of `size` bytes, and a gzip of that many."""
    member = tarfile.TarInfo("././@LongLink")
    member.type, member.size = tarfile.GNUTYPE_LONGNAME, size
    return gzip.compress(member.tobuf() + bytes(min(size, 50 << 20)))


def declared(size, kind=tarfile.REGTYPE):
    member = tarfile.TarInfo("train/cat/0.png")
    member.type, member.size = kind, size
    return gzip.compress(member.tobuf(tarfile.GNU_FORMAT) + bytes(1 << 20))


BOMBS = {
    "a long name of gigabytes": lambda: long_name_of(8 << 30),
    "a long name of 50 MB": lambda: long_name_of(50 << 20),
    "a pax header of gigabytes": lambda: declared(8 << 30, tarfile.XHDTYPE),
    "a file of terabytes": lambda: declared(1 << 40),
    "a sparse file": lambda: declared(1 << 40, tarfile.GNUTYPE_SPARSE),
    "a device": lambda: declared(0, tarfile.CHRTYPE),
    "a fifo": lambda: declared(0, tarfile.FIFOTYPE),
    "a hard link": lambda: declared(0, tarfile.LNKTYPE),
    "zip": lambda: b"PK\3\4" + bytes(2000),
    "zeros": lambda: bytes(20_000),
    "empty gzip": lambda: gzip.compress(b""),
}  # fmt: skip


@pytest.mark.parametrize("case", BOMBS)
def test_a_hostile_archive_is_named_before_it_is_read(tmp_path, case):
    path = tmp_path / "images.tar"
    path.write_bytes(BOMBS[case]())
    assert_refused(path, "images.tar: ")


def test_many_small_files_that_decode_to_gigabytes(tmp_path, monkeypatch):
    monkeypatch.setattr(lab.tasks.images, "MAX_DATASET_BYTES", 1000)
    path = tmp_path / "images.tar"
    as_tar(path, IMAGES, "w")
    with pytest.raises(ValueError, match="1000 bytes"):
        load_images(path)


@pytest.mark.parametrize("target", ["/etc/passwd", "nowhere"])
def test_links_in_a_folder_that_lead_outside_or_nowhere_are_refused(tmp_path, target):
    root = tmp_path / "images"
    as_folder(root, IMAGES)
    (tmp_path / "images" / "train" / "outside.png").write_bytes(b"x")
    assert len(load_images(root).train_labels) == 8
    (root / "train" / "cat" / "9.png").symlink_to(target if target != "../outside.png" else tmp_path / "tiny")  # fmt: skip
    with pytest.raises(ValueError, match=r"9.png' is a link"):
        load_images(root)


def test_images_that_change_in_a_class_folder_that_is_a_link_are_read_again(tmp_path):
    """Otherwise the cache would give the old ones."""
    root = as_folder(tmp_path / "images", IMAGES)
    (root / "store").mkdir()
    (root / "train" / "dog").rename(root / "store" / "dog")
    (root / "train" / "dog").symlink_to(root / "store" / "dog", target_is_directory=True)
    before = load_images(root)
    assert before.fingerprint == load_images(as_tar(tmp_path / "images.tar", IMAGES)).fingerprint
    first = min((root / "store" / "dog").iterdir())
    first.write_bytes(image_bytes((200, 100, 50)))
    assert load_images(root).fingerprint != before.fingerprint


@pytest.mark.parametrize("seed", range(10))
def test_a_damaged_cache_of_decoded_images_is_made_again(tmp_path, seed):
    rng, path = random.Random(seed), tmp_path / "images.tar"
    as_tar(path, IMAGES, "w")
    first = load_images(path)
    (cached,) = (tmp_path / "cache" / "datasets").iterdir()
    content = bytearray(cached.read_bytes())
    if seed % 2:
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    else:
        del content[rng.randrange(len(content)) :]
    cached.write_bytes(content)
    assert load_images(path).fingerprint == first.fingerprint


def test_the_address_of_an_object_is_shown_to_nobody(tmp_path):
    path = as_tar(tmp_path / "images.tar", replaced("train/cat/notes.md", b"# Cats"))
    with pytest.raises(ValueError) as raised:
        load_images(path)
    assert "object at 0x" not in str(raised.value) and "BytesIO" not in str(raised.value)


def test_a_folder_that_has_something_else_says_what(tmp_path):
    as_folder(tmp_path / "images", IMAGES)
    with pytest.raises(ValueError, match=r"\['cat', 'dog'\]; allowed: the folder above it"):
        load_images(tmp_path / "images" / "train")
    as_folder(tmp_path / "more", IMAGES)
    with pytest.raises(ValueError, match=r"several folders .*\['images', 'more'\]"):
        load_images(tmp_path)


def test_a_zip_is_named_as_what_it_is(tmp_path):
    path = tmp_path / "images.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("train/cat/0.png", b"")
    assert_refused(path, "zip archive, allowed: a folder or a tar")
