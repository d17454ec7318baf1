"""Data: sources, the partition, augmentation."""

import dataclasses
import functools
import hashlib
import http.server
import pickle
import threading
import unicodedata

import numpy as np
import pytest
import tcs_lab as lab
import torch
from common import IMAGES, as_folder, as_tar, config, load_images
from tcs_lab.tasks.images import SYNTHETIC_COMPARE


@pytest.fixture(autouse=True)
def _fresh():
    lab.load_dataset.cache_clear()


@pytest.mark.parametrize("mode", ["w", "w:gz", "w:xz", "w:bz2"])
def test_a_tar_is_the_same_as_its_folder(tmp_path, mode):
    from_folder = load_images(as_folder(tmp_path / "images", IMAGES))
    from_tar = load_images(as_tar(tmp_path / "images.tar", IMAGES, mode))
    assert from_tar.fingerprint == from_folder.fingerprint
    assert from_tar.train_images.shape == (8, 8, 8, 3)
    assert from_tar.train_labels.bincount().tolist() == [4, 4]
    blue = from_tar.train_images[:, 0, 0]
    assert (blue[:, 2] == 200).all() and (blue[:, 0] == 30 * from_tar.train_labels).all()


def test_decoded_once_and_checked_by_fingerprint(tmp_path, monkeypatch):
    path = as_tar(tmp_path / "images.tar", IMAGES)
    first = load_images(path)
    monkeypatch.setattr(lab.tasks.images, "_decode_files", lambda *_: pytest.fail("decoded again"))
    monkeypatch.setattr(
        lab.tasks.images, "hold_lock", lambda *_: pytest.fail("waited for another that reads")
    )
    assert load_images(path).fingerprint == first.fingerprint
    monkeypatch.undo()
    monkeypatch.setenv("TCS_CACHE", str(tmp_path / "cache"))
    (cached,) = (tmp_path / "cache" / "datasets").iterdir()
    cached.write_bytes(cached.read_bytes()[:-40])
    assert load_images(path).fingerprint == first.fingerprint


LITTER = {
    "train/.ipynb_checkpoints/0-checkpoint.png": b"no image",
    "train/cat/.ipynb_checkpoints/0.png": b"",
    "train/cat/.DS_Store": b"x" * (1 << 21),
    "train/dog/Thumbs.db": b"x",
    "test/@eaDir/0.png/SYNOPHOTO_THUMB_M.jpg": b"x",
    "__MACOSX/train/cat/._0.png": b"x",
}


@pytest.mark.parametrize("source", [as_tar, as_folder])
def test_what_computers_put_beside_images_is_no_class_and_no_image(tmp_path, source):
    clean = load_images(as_folder(tmp_path / "clean", IMAGES))
    if source is as_tar:  # of a tar every declared size is looked at before anything is read
        files = IMAGES | {name: content[:99] for name, content in LITTER.items()}
    else:
        files = IMAGES | LITTER
    assert load_images(source(tmp_path / "images", files)).fingerprint == clean.fingerprint


@pytest.mark.parametrize("source", [as_tar, as_folder])
def test_one_folder_around_train_and_test_is_looked_into(tmp_path, source):
    """As archives often have it."""
    plain = load_images(as_folder(tmp_path / "plain", IMAGES))
    inside = {f"pets-1.0/{name}": content for name, content in IMAGES.items()}
    others = {"README.txt": b"pets", "pets-1.0/LICENSE": b"free"}
    data = load_images(source(tmp_path / "pets", inside | others))
    assert data.fingerprint == plain.fingerprint and data.label == "pets"


@pytest.mark.parametrize("source", [as_tar, as_folder])
def test_a_class_is_its_name_however_unicode_spells_it(tmp_path, source):
    """A Mac may write an e and an accent where others write one character."""
    plain = load_images(as_folder(tmp_path / "plain", IMAGES))
    named = {}
    for name, content in IMAGES.items():
        form = "NFC" if name.startswith("train/") else "NFD"
        named[unicodedata.normalize(form, name.replace("cat", "café"))] = content
    data = load_images(source(tmp_path / "images", named))
    assert data.fingerprint == plain.fingerprint and data.classes == 2


def test_no_root_or_a_missing_one():
    with pytest.raises(ValueError, match="data_root: got None"):
        lab.load_dataset("folder")
    with pytest.raises(FileNotFoundError, match="data_root"):
        lab.load_dataset("folder", "/does/not/exist")
    with pytest.raises(ValueError, match="dataset: got 'mnist'"):
        lab.load_dataset("mnist")


def test_images_of_fewer_pixels_are_means_of_areas():
    data = lab.synthetic_dataset(30, 10)
    small = data.resize(16)
    assert small.train_images.shape == (30, 16, 16, 3) and small.test_images.shape[1:3] == (16, 16)
    for n, y, x, colour in ((0, 0, 0, 0), (7, 3, 15, 1), (29, 15, 9, 2)):
        area = data.train_images[n, 2 * y : 2 * y + 2, 2 * x : 2 * x + 2, colour]
        assert abs(int(small.train_images[n, y, x, colour]) - float(area.float().mean())) <= 0.5
    assert torch.equal(small.train_labels, data.train_labels) and small.classes == data.classes
    assert small.label == "synthetic, 16 x 16" and small.fingerprint != data.fingerprint
    assert data.resize(None) is data and data.resize(32) is data


@pytest.mark.parametrize("size", [0, -1, 33, 16.0, "16", True])
def test_a_size_that_is_none_is_named(size):
    with pytest.raises(ValueError, match=f"image_size: got {size!r}, allowed: 1 to 32"):
        lab.synthetic_dataset(4, 4).resize(size)


# cifar10: the real torchvision code against a small archive of the same format ─────────────────────


@pytest.fixture
def small_cifar(tmp_path, monkeypatch):
    """An archive like cifar-10-python.tar.gz with 20 images a batch, served over http."""
    from torchvision.datasets import CIFAR10  # two seconds, of the one process that needs it

    rng = np.random.default_rng(0)
    sums, files = {}, {}
    names = [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]
    for name in names:
        data = rng.integers(0, 256, (20, 3072), dtype=np.uint8)
        files[name] = pickle.dumps({"data": data, "labels": list(range(10)) * 2})
    files["batches.meta"] = pickle.dumps({"label_names": list("abcdefghij")})
    sums = {name: hashlib.md5(content).hexdigest() for name, content in files.items()}
    prefix = "cifar-10-batches-py/"
    path = as_tar(tmp_path / "cifar.tar.gz", {prefix + k: v for k, v in files.items()})
    handler = functools.partial(QuietHandler, directory=str(tmp_path))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(CIFAR10, "url", f"http://127.0.0.1:{server.server_port}/{path.name}")
    monkeypatch.setattr(CIFAR10, "tgz_md5", hashlib.md5(path.read_bytes()).hexdigest())
    monkeypatch.setattr(CIFAR10, "train_list", [[n, sums[n]] for n in names[:5]])
    monkeypatch.setattr(CIFAR10, "test_list", [["test_batch", sums["test_batch"]]])
    meta = {"filename": "batches.meta", "key": "label_names", "md5": sums["batches.meta"]}
    monkeypatch.setattr(CIFAR10, "meta", meta)
    yield path
    server.shutdown()
    server.server_close()


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


def test_cifar10_downloads_and_loads(tmp_path, small_cifar):
    data = lab.load_dataset("cifar10", str(tmp_path / "root"))
    assert data.label == "CIFAR-10"
    assert data.train_images.shape == (100, 32, 32, 3) and data.train_images.dtype == torch.uint8
    assert data.test_labels.tolist() == list(range(10)) * 2
    small_cifar.unlink()
    lab.load_dataset.cache_clear()
    again = lab.load_dataset("cifar10", str(tmp_path / "root"))
    assert again.fingerprint == data.fingerprint


def test_cifar10_without_network_or_with_a_truncated_archive_says_what_to_do(tmp_path, small_cifar):
    content = small_cifar.read_bytes()
    small_cifar.unlink()
    with pytest.raises(ValueError, match=r"download failed .*Delete a partial file .*synthetic"):
        lab.load_dataset("cifar10", str(tmp_path / "root"))
    small_cifar.write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match="download failed"):
        lab.load_dataset("cifar10", str(tmp_path / "root"))


# Synthetic data, partition, augmentation ──────────────────────────────────────────────────────────


def test_synthetic_is_the_same_every_time():
    one, two = lab.synthetic_dataset(50, 20), lab.synthetic_dataset(50, 20)
    assert one.fingerprint == two.fingerprint
    assert one.train_images.shape == (50, 32, 32, 3) and one.train_images.dtype == torch.uint8
    assert lab.synthetic_dataset(50, 20, seed=1).fingerprint != one.fingerprint


def test_images_of_several_kinds_have_ten_classes():
    sizes = {"train": 400, "test": 20}
    compared = lab.synthetic_dataset(**(SYNTHETIC_COMPARE | sizes))
    assert set(compared.train_labels.tolist()) == set(range(10))
    assert compared.label != "synthetic" and compared.train_images.shape == (400, 32, 32, 3)


def test_first_samples_and_too_many():
    data = lab.synthetic_dataset(50, 20)
    cut = data.first(30, None)
    assert len(cut.train_labels) == 30 and len(cut.test_labels) == 20
    with pytest.raises(ValueError, match="train_samples: got 51, allowed: at most 50"):
        data.first(51, None)


@pytest.mark.parametrize("alpha", [None, 100.0, 0.5, 0.01])
@pytest.mark.parametrize("clients", [1, 3, 10])
def test_partition_is_disjoint_and_even(alpha, clients):
    labels = torch.arange(1003) % 10
    parts = lab.partition(labels, clients, alpha, torch.Generator().manual_seed(1))
    assert parts.shape == (clients, 1003 // clients)
    assert len(parts.unique()) == parts.numel()
    assert 0 <= int(parts.min()) <= int(parts.max()) < 1003


def test_a_small_alpha_skews_the_classes():
    labels = torch.arange(5000) % 10

    def largest_share(alpha):
        parts = lab.partition(labels, 10, alpha, torch.Generator().manual_seed(1))
        counts = torch.stack([labels[p].bincount(minlength=10) for p in parts])
        return float((counts.max(1).values / counts.sum(1)).float().mean())

    assert largest_share(None) < 0.15 < 0.3 < largest_share(0.1)


def test_an_epoch_passes_over_a_clients_samples_once():
    samples = torch.arange(100, 140)
    draws = lab.Draws.of(samples, 36, torch.Generator().manual_seed(0))
    assert len(set(draws.samples.tolist())) == 36 and set(draws.samples.tolist()) <= set(
        samples.tolist()
    )


@pytest.mark.parametrize("height, width", [(32, 32), (13, 11)])
def test_crops_and_flips_pixel_by_pixel(height, width):
    data = lab.synthetic_dataset(20, 5)
    data = dataclasses.replace(data, train_images=data.train_images[:, :height, :width].clone())
    batches = lab.Batches(data, torch.device("cpu"))
    draws = lab.Draws.of(torch.arange(20), 12, torch.Generator().manual_seed(0))
    images, labels = batches.augment(draws)
    assert images.shape == (12, 3, height, width) and images.is_contiguous(
        memory_format=torch.channels_last
    )
    assert torch.equal(labels, data.train_labels[draws.samples])
    for i in range(12):
        whole = np.pad(data.train_images[draws.samples[i]].numpy(), ((4, 4), (4, 4), (0, 0)))
        top, left = draws.crops[i].tolist()
        crop = torch.from_numpy(whole[top : top + height, left : left + width].copy())
        crop = crop.flip(1) if draws.flips[i] else crop
        expected = (crop.float() - batches.mean) * batches.scale
        torch.testing.assert_close(images[i], expected.permute(2, 0, 1))


def test_normalization_is_zero_mean_and_unit_deviation():
    data = lab.synthetic_dataset(200, 5)
    batches = lab.Batches(data, torch.device("cpu"))
    pixels = batches.normalize(data.train_images)
    torch.testing.assert_close(pixels.mean((0, 2, 3)), torch.zeros(3), rtol=0, atol=1e-4)
    torch.testing.assert_close(pixels.std((0, 2, 3)), torch.ones(3), rtol=0, atol=1e-4)


def test_images_that_no_client_has_stand_behind_the_test_images():
    data = lab.synthetic_dataset(20, 5)
    unused = {"unused_images": data.train_images[8:], "unused_labels": data.train_labels[8:]}
    batches = lab.Batches(dataclasses.replace(data, **unused), torch.device("cpu"))
    images, labels = batches.test(slice(None))
    expected = torch.cat([data.test_images, data.train_images[8:]])
    assert torch.equal(images, batches.normalize(expected))
    assert torch.equal(labels, torch.cat([data.test_labels, data.train_labels[8:]]))
    assert batches.test_count == 5
    plain = lab.Batches(data, torch.device("cpu"))
    assert len(plain.test(slice(None))[1]) == plain.test_count == 5


@pytest.mark.data
def test_the_whole_of_cifar10_as_jpegs(development_data):
    data = lab.load_dataset("folder", str(development_data), "CIFAR-10 (JPEG copy)")
    known = "7c0e615f4f44bcb08ea9322aee5a21e34ae34aaf163ed3bda154e4a02d77d313"
    assert data.fingerprint == known  # as in the records of the evidence
    assert data.train_labels.bincount().tolist() == [5000] * 10
    assert data.test_labels.bincount().tolist() == [1000] * 10
    means = data.train_images.float().mean((0, 1, 2)) / 255
    torch.testing.assert_close(means, torch.tensor([0.491, 0.482, 0.447]), rtol=0, atol=2e-3)


def test_a_training_with_unequal_classes_has_them():
    def largest_share(alpha):
        wanted = config("TCS", dirichlet_alpha=alpha, clients=5, train_samples=500)
        data = lab.load_data(wanted)
        samples_NM = lab.Training(wanted, data).samples_NM
        return max(int(data.train_labels[row].bincount().max()) / len(row) for row in samples_NM)

    assert largest_share(0.05) > largest_share(None) + 0.2


def test_seeds_epochs_and_clients_draw_different_numbers():
    def crops(training, n, epoch):
        return training.feed.draws(epoch)[n].crops.flatten().tolist()

    zero, one = (
        lab.Training(wanted, lab.load_data(wanted))
        for wanted in (config("TCS", seed=seed, participation=0.4, clients=5) for seed in (0, 1))
    )
    drawn = [crops(zero, 0, 0), crops(zero, 1, 0), crops(zero, 0, 1), crops(one, 0, 0)]
    assert len({tuple(part) for part in drawn}) == 4
    assert not torch.equal(zero.theta_D, one.theta_D)
    assert not torch.equal(zero.samples_NM, one.samples_NM)
    assert len({tuple(zero._participants(epoch, 0)) for epoch in range(20)}) > 1


def test_a_folder_whose_images_change_is_decoded_again(tmp_path):
    before = load_images(as_folder(tmp_path / "images", IMAGES)).fingerprint
    lab.load_dataset.cache_clear()
    (tmp_path / "images" / "train" / "cat" / "0.png").write_bytes(IMAGES["train/dog/1.png"])
    assert load_images(tmp_path / "images").fingerprint != before
