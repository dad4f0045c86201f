import mmap

import numpy as np
import pytest
import torch

from scalesteer.datasets import ImageSet, SplitSpec, distort, load_part, load_split, tensors

SMALL = {"sizes": (130, 10, 20)}


@pytest.fixture
def numbered():
    """Ten images whose pixels all equal their index."""
    images = torch.arange(10, dtype=torch.uint8)[:, None, None].repeat(1, 4, 6)
    return ImageSet(images, torch.arange(10), torch.linspace(0.3, 1, 10))


def test_load_split_gives_the_built_part(filled_cache):
    loaded = load_split("mnist-scale", 2, "val", **SMALL)
    part, meta = load_part(SplitSpec("mnist-scale", 2, **SMALL), "val")
    np.testing.assert_array_equal(loaded.images, part.images)
    np.testing.assert_array_equal(loaded.labels, part.labels)
    np.testing.assert_array_equal(loaded.scales, part.scales)
    assert loaded.images.dtype == torch.uint8
    assert loaded.labels.dtype == torch.int64
    assert loaded.about["digest"] == meta["digest"]
    assert loaded.about["source"]["release"] == "invented"
    assert loaded.about["part"] == "val"


def test_batches_hold_every_image_once_in_order(numbered):
    batches = list(numbered.batches(4))
    assert [tuple(images.shape) for images, _ in batches] == [(4, 1, 4, 6), (4, 1, 4, 6), (2, 1, 4, 6)]
    assert torch.cat([labels for _, labels in batches]).tolist() == list(range(10))
    for images, labels in batches:
        assert images.dtype == torch.float32
        torch.testing.assert_close(images[:, 0, 0, 0] * 255, labels.float())


def test_last_partial_batch_is_dropped_only_on_request(numbered):
    assert [len(labels) for _, labels in numbered.batches(4, drop_last=True)] == [4, 4]
    assert [len(labels) for _, labels in numbered.batches(5, drop_last=True)] == [5, 5]
    assert [len(labels) for _, labels in numbered.batches(64)] == [10]


def test_shuffling_follows_the_generator(numbered):
    def order(seed):
        return [int(y) for _, ys in numbered.batches(3, generator=torch.Generator().manual_seed(seed)) for y in ys]

    assert sorted(order(0)) == list(range(10))
    assert order(0) == order(0) != order(1)
    generator = torch.Generator().manual_seed(0)
    epochs = [[int(y) for _, ys in numbered.batches(3, generator=generator) for y in ys] for _ in range(2)]
    assert epochs[0] != epochs[1]


def test_std_is_that_of_the_pixels_and_batches_divide_by_it(filled_cache):
    loaded = load_split("fmnist-scale", 0, "train", **SMALL)
    assert loaded.std == pytest.approx(float(np.std(loaded.images.numpy() / 255.0)), rel=1e-12)
    ((images, _),) = loaded.batches(len(loaded), std=loaded.std)
    assert float(images.std()) == pytest.approx(1, abs=1e-3)


def test_first_images_are_nested_and_balanced_in_the_paired_set(filled_cache):
    loaded = load_split("mnist-scale-local-2", 0, "train", **SMALL)
    few = loaded.first(100)
    assert torch.bincount(few.labels).tolist() == [10] * 10
    assert torch.equal(few.images, loaded.images[:100])
    assert few.scales.shape == (100, 2)
    with pytest.raises(ValueError, match="`count` must be 1 to 130"):
        loaded.first(131)


def test_works_as_a_torch_dataset(numbered):
    images, labels = next(iter(torch.utils.data.DataLoader(numbered, batch_size=5)))
    assert images.shape == (5, 1, 4, 6)
    assert labels.tolist() == [0, 1, 2, 3, 4]
    torch.testing.assert_close(images[4, 0], torch.full((4, 6), 4 / 255))


def test_distorted_set_keeps_labels_and_deforms_images(filled_cache):
    loaded = load_split("mnist-scale", 0, "test", **SMALL)
    moved = loaded.distorted(20)
    np.testing.assert_array_equal(moved.images, distort(loaded.images.numpy(), 20))
    assert torch.equal(moved.labels, loaded.labels)
    assert torch.equal(loaded.distorted(0).images, loaded.images)


def test_moving_takes_every_tensor_along(numbered):
    moved = numbered.to("meta")
    assert {moved.images.device.type, moved.labels.device.type, moved.scales.device.type} == {"meta"}
    assert moved.device.type == "meta"
    assert numbered.device.type == "cpu"


class Asked:
    """In place of a mapping: what the system is asked to read."""

    def __init__(self):
        self.spans = []

    def madvise(self, how, start, length):
        assert (how, start % mmap.PAGESIZE) == (mmap.MADV_WILLNEED, 0)
        self.spans.append(range(start, start + length))


@pytest.fixture
def on_disk():
    images = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (40, 3, 50, 60), dtype=np.uint8))
    return ImageSet(images, torch.arange(40), torch.ones(40), mapped=Asked())


def test_images_of_a_file_stay_where_they_are_and_batches_are_moved(on_disk):
    moved = on_disk.to("meta")
    assert {tensor.device.type for tensor in (moved.labels, moved.scales, *moved.take(torch.arange(3)))} == {"meta"}
    assert moved.device.type == "meta"
    assert moved.images is on_disk.images
    assert moved.first(7).images.device.type == moved.order(torch.Generator()).device.type == "cpu"
    assert next(moved.batches(8, std=(0.1, 0.2, 0.3)))[0].shape == (8, 3, 50, 60)


def test_of_a_file_what_a_batch_needs_is_asked_for_and_nothing_else(on_disk):
    rows = torch.tensor([39, 0, 7, -2])
    x, labels = on_disk.take(rows)
    assert torch.equal(x, on_disk.images[rows].float() / 255)
    assert labels.tolist() == [39, 0, 7, 38]
    size = 3 * 50 * 60
    for span, row in zip(on_disk.mapped.spans, labels.tolist(), strict=True):
        assert span.start <= row * size < span.start + mmap.PAGESIZE
        assert span.stop == (row + 1) * size


def test_images_of_a_file_are_not_deformed_in_memory():
    images = ImageSet(torch.zeros(2, 4, 4, dtype=torch.uint8), torch.zeros(2), torch.ones(2), mapped=Asked())
    with pytest.raises(ValueError, match=r"read from disk cannot be deformed \(got 2\)"):
        images.distorted(1.0)


def test_pixels_are_counted_some_at_a_time_with_the_same_result(on_disk, monkeypatch):
    mean, std = on_disk.mean, on_disk.std
    counted, bincount = [], torch.bincount
    monkeypatch.setattr(tensors, "_COUNTED_BYTES", 4 * 3 * 50 * 60)
    monkeypatch.setattr(torch, "bincount", lambda x, **more: counted.append(len(x)) or bincount(x, **more))
    again = ImageSet(on_disk.images, on_disk.labels, on_disk.scales)
    assert (again.mean, again.std) == (mean, std)
    assert counted == [4 * 50 * 60] * 3 * 10  # once, for both


@pytest.mark.gpu
def test_batches_on_the_gpu_are_those_of_the_cpu(numbered):
    def batches(images):
        return list(images.batches(3, generator=torch.Generator().manual_seed(0), std=0.3))

    for (x, y), (on_gpu, labels) in zip(batches(numbered), batches(numbered.to("cuda")), strict=True):
        assert on_gpu.is_cuda
        assert torch.equal(y, labels.cpu())
        torch.testing.assert_close(x, on_gpu.cpu())
    assert numbered.to("cuda").std == numbered.std


@pytest.mark.parametrize("size", [0, -1, 1.5, True])
def test_impossible_batch_size_is_refused_at_once(numbered, size):
    with pytest.raises((ValueError, TypeError), match="`size`"):
        numbered.batches(size)


def test_batches_that_could_not_be_are_refused_at_once(numbered):
    with pytest.raises(ValueError, match="`size` must be at most 10"):
        numbered.batches(11, drop_last=True)
    with pytest.raises(ValueError, match="`std` must be positive"):
        numbered.batches(2, std=0.0)
    with pytest.raises(ValueError, match="`std`"):
        numbered.batches(2, std=float("nan"))


def test_wrong_tensors_are_refused():
    labels, scales = torch.zeros(2, dtype=torch.int64), torch.ones(2)
    with pytest.raises(TypeError, match="`images` must be uint8"):
        ImageSet(torch.zeros(2, 4, 4), labels, scales)
    with pytest.raises(ValueError, match=r"one length \(got 3, 2, 2\)"):
        ImageSet(torch.zeros(3, 4, 4, dtype=torch.uint8), labels, scales)


@pytest.fixture
def coloured():
    """Six images in colour, of noise."""
    images = np.random.default_rng(0).integers(0, 256, (6, 3, 4, 5), np.uint8)
    images[:, 1] //= 2
    return ImageSet(torch.from_numpy(images), torch.arange(6), torch.ones(6))


def test_colour_images_keep_their_channels(coloured):
    assert coloured.channels == 3
    batches = list(coloured.batches(4))
    assert [tuple(x.shape) for x, _ in batches] == [(4, 3, 4, 5), (2, 3, 4, 5)]
    assert torch.equal(torch.cat([x for x, _ in batches]), coloured.images.float() / 255)
    image, label = coloured[5]
    assert torch.equal(image, coloured.images[5].float() / 255)
    assert label == 5


def test_statistics_of_colour_images_are_by_channel(coloured, numbered):
    pixels = coloured.images.numpy() / 255.0
    assert coloured.mean == pytest.approx(pixels.mean((0, 2, 3)), rel=1e-12)
    assert coloured.std == pytest.approx(pixels.std((0, 2, 3)), rel=1e-12)
    assert numbered.mean == pytest.approx(numbered.images.numpy().mean() / 255, rel=1e-12)
    ((images, _),) = coloured.batches(6, std=coloured.std)
    torch.testing.assert_close(images.std((0, 2, 3), correction=0), torch.ones(3))


def test_colour_images_refuse_what_is_for_grey_ones(coloured):
    with pytest.raises(ValueError, match="only grey images"):
        coloured.distorted(20)
    with pytest.raises(ValueError, match="`std` must be positive, one number or 3"):
        coloured.batches(2, std=(0.1, 0.2))


@pytest.mark.gpu
def test_statistics_on_the_gpu_are_those_of_the_cpu(coloured):
    assert (coloured.to("cuda").mean, coloured.to("cuda").std) == (coloured.mean, coloured.std)
