"""What is kept: how much of it, and that threads may share it."""

import random
import sys
import threading

import pytest
import torch

from scalesteer import ScaleChannels, ScaleSteerableConv2d, create_model, fold
from scalesteer.fast import memory


def test_the_oldest_values_go_first():
    cache = memory.Cache(most=3)
    for key in (1, 2, 3, 1, 4, 5):
        assert cache.get_or_make(key, lambda key=key: -key) == -key
    assert cache.values == {3: -3, 4: -4, 5: -5}


def test_tensors_are_counted_as_they_come_and_go():
    cache = memory.Cache(most=20, most_bytes=4000, least=2)
    for key in range(50):
        floats = random.Random(key).randrange(0, 700)
        cache.add(key, (torch.zeros(floats), [torch.zeros(3), key]))
        assert cache.bytes == sum(value[0].nbytes + value[1][0].nbytes for value in cache.values.values())
        assert cache.bytes <= 4000 or len(cache.values) == 2
        assert list(cache.values)[-1] == key
    cache.add("plain", "no tensor")
    assert len(cache.values) > 2
    cache.add("huge", torch.zeros(10_000))
    assert list(cache.values) == [49, "plain", "huge"]  # what takes no bytes need not go for them


def test_whoever_is_first_decides_what_all_threads_get():
    cache, made, together = memory.Cache(), [], threading.Barrier(8)

    def make():
        together.wait()  # all are at it
        made.append(object())
        return made[-1]

    found = []
    threads = [threading.Thread(target=lambda: found.append(cache.get_or_make("key", make))) for _ in range(8)]
    run(threads)
    assert len(made) == 8
    assert len(found) == 8
    assert len(set(map(id, found))) == 1


def run(threads):
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def pixel_mean():
    return torch.nn.Sequential(torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())


NETWORKS = {  # and how many images each thread shows
    "layer": (lambda: ScaleSteerableConv2d(1, 2, 5, padding=2, scales=(1.0, 1.9), backend="fast"), 25),
    "layer of four channels": (
        lambda: torch.nn.Sequential(
            torch.nn.Conv2d(1, 4, 1), ScaleSteerableConv2d(4, 2, 5, padding=2, scales=(1.0, 1.9), backend="fast")
        ),
        25,
    ),
    "scale channels": (lambda: ScaleChannels(pixel_mean(), (0.5, 0.71, 1.0, 1.41)), 400),
    "pooled-cnn": (lambda: create_model("pooled-cnn", channels=(0.5, 0.71, 1.0, 1.41)), 30),
}


@pytest.mark.parametrize(("build", "count"), NETWORKS.values(), ids=NETWORKS)
def test_eight_threads_with_images_of_every_size_get_the_numbers_of_one(build, count):
    model, errors, found = build().eval(), [], {}

    @torch.no_grad()
    def work(seed):
        chance = random.Random(seed)
        try:
            for _ in range(count):
                size = chance.randrange(20, 90), chance.randrange(20, 90)
                x = torch.rand(1, 1, *size, generator=torch.Generator().manual_seed(seed))
                found[seed, size] = model(x)
        except Exception as error:
            errors.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        run([threading.Thread(target=work, args=(seed,)) for seed in range(8)])
    finally:
        sys.setswitchinterval(interval)
    assert not errors
    together = dict(found)
    for seed in range(8):
        work(seed)
    # A matrix or a buffer of another thread would change every digit; the last bit of a float32 is not promised.
    for key, said in together.items():
        torch.testing.assert_close(found[key], said, rtol=1e-5, atol=1e-6, msg=lambda text, key=key: f"{key}: {text}")


@pytest.mark.parametrize("basis", ["paper", "smooth"])
@pytest.mark.parametrize("channels", [1, 3, 8])
def test_a_folded_layer_gives_the_same_bits_in_every_call(channels, basis):
    layer = fold(ScaleSteerableConv2d(channels, 8, 7, padding=3, basis=basis, backend="fast"))
    one, many = torch.rand(1, channels, 33, 21), torch.rand(5, channels, 33, 21)
    for x in (one, many, one):
        first = layer(x)
        assert all(torch.equal(layer(x), first) for _ in range(2))
