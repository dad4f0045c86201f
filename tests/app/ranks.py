"""What the tests of several processes run in each of them, as torchrun would."""

import gc
import json
import os
import sys
import time
import weakref
from pathlib import Path

import torch
import torch._dynamo  # DistributedDataParallel loads it, for seconds: here once, before processes are forked
import torch.distributed as dist
import torch.nn.functional as F

from scalesteer import files
from scalesteer.app import checkpoint, cli, load, loop, train
from scalesteer.app import evaluation as evaluating
from scalesteer.app.device import arithmetic
from scalesteer.app.distributed import joined
from scalesteer.models import create_model
from tests.app import jobs
from tests.runs import changed


def enter(cache, place, log=None):
    """Be one of several processes: `place` is (rank, count, port)."""
    jobs.prepare(cache, log)
    names = ("RANK", "WORLD_SIZE", "MASTER_PORT")
    os.environ.update({name: str(value) for name, value in zip(names, place, strict=True)})
    os.environ.update(MASTER_ADDR="127.0.0.1", LOCAL_RANK=str(place[0]), LOCAL_WORLD_SIZE=str(place[1]))
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # whoever starts them keeps the store
    checkpoint.STOP_TOGETHER_S = 300  # on a busy machine a step may take long


def gradients_of(networks, images, processes):
    """One step of each network, in double precision: its loss, gradients and buffers."""
    found = {}
    x, labels = images.take(torch.arange(8).chunk(processes.count)[processes.rank])
    for number, (name, options) in enumerate(networks):
        torch.manual_seed(number)
        model = create_model(name, **options).to(x.device, torch.float64).train()
        network = processes.replicate(model)
        loss = F.cross_entropy(network(x.double()), labels)
        loss.backward()
        found[f"{number}.loss"] = processes.mean(loss.detach())
        found |= {f"{number}.{key}": value.grad for key, value in model.named_parameters()}
        found |= {f"{number}.{key}": value for key, value in model.named_buffers()}
    return found


def gradients(cache, place, networks, config, folder, device):
    """Write them, of all processes together, to `folder`."""
    enter(cache, place)
    with joined() as processes:
        found = gradients_of(networks, load(config, "train").to(device), processes)
        (folder / f"{processes.rank}").write_bytes(files.encode(found, {}))


class Noting(torch.nn.Module):
    """A network that notes which images it sees."""

    def __init__(self, model):
        super().__init__()
        self.model, self.seen = model, []

    def forward(self, x):
        self.seen += x.flatten(1).double().sum(1).tolist()
        return self.model(x)


def evaluated(config, processes, batch):
    """What `evaluate` finds, of images in two parts and of a model with channels, and what it saw of the first."""
    evaluating.EVALUATION_BATCH["cpu"], before = batch, evaluating.EVALUATION_BATCH["cpu"]
    torch.manual_seed(0)
    plain, channels = Noting(create_model("plain-cnn", upsample=1)), create_model("pooled-cnn", channels=(0.7, 1.0))
    images, asked = load(config, "test"), []
    parts = [images, images.first(3)]
    about = {
        "plain": evaluating.evaluate(plain, parts, between_batches=lambda: asked.append(1), processes=processes),
        "channels": evaluating.evaluate(channels, images, processes=processes),
    }
    evaluating.EVALUATION_BATCH["cpu"] = before
    return about | {"seen": plain.seen, "asked": len(asked)}


def evaluation(cache, place, config, folder, batch):
    """Write that, of all processes together."""
    enter(cache, place)
    with joined() as processes:
        about = evaluated(config, processes, batch)
        (folder / f"{processes.rank}").write_bytes(files.encode({}, about))


def step_of(config, processes, device):
    """The loss and the gradients of the first step of a run."""
    images = load(config, "train").to(device)
    state = loop.initial_state(config, config.data.open().task, images)
    update = loop.make_update(state, config.training, images, processes)
    batch = torch.arange(config.training.batch_size, device=device).chunk(processes.count)[processes.rank]
    with arithmetic(config.training.precision):
        found = {"loss": processes.mean(update(batch, config.training.lr))}
    return found | {name: parameter.grad for name, parameter in state.model.named_parameters()}


def one_step(cache, place, config, folder, device):
    """Write them."""
    enter(cache, place)
    with joined() as processes:
        (folder / f"{processes.rank}").write_bytes(files.encode(step_of(config, processes, device), {}))


def messages(cache, place, folder):
    """Pass tensors and an error from the first process to the others."""
    enter(cache, place)

    def fail():
        raise UnicodeError("ärger")

    with joined() as processes:
        content = {"a": torch.arange(3), "b": torch.tensor(2.5), "c": torch.zeros(0, 2)}, {"x": [1, "ü"]}
        tensors, about = processes.first(lambda: content)
        assert processes.first(lambda: None) is None
        try:
            processes.first(fail, json.JSONDecodeError, UnicodeError, ValueError)
        except UnicodeError as error:
            about["error"] = str(error)
        about["largest"] = processes.largest(7 * processes.rank)
        (folder / f"{processes.rank}").write_bytes(files.encode(tensors, about))


def training(cache, place, config, directory, notes, stop_after=0, number=0):
    """Train; note the rows and the seed of each step; after so many steps the last process gets a signal."""
    enter(cache, place, os.devnull)
    make = loop.make_update

    def noting(state, *arguments):
        update = make(state, *arguments)

        def noted_update(rows, rate):
            for name, numbers in (("rows", rows.tolist()), ("seed", [torch.initial_seed()])):
                with Path(notes, f"{name}-{place[0]}").open("a") as noted:
                    print(state.epoch, state.step, *numbers, file=noted)
            if state.epoch * len(state.losses) + state.step + 1 == stop_after and place[0] == place[1] - 1:
                os.kill(os.getpid(), number)
            return update(rows, rate)

        return noted_update

    loop.make_update = noting
    train(config, Path(directory), device="cpu")


def slow_training(cache, place, *arguments):
    """The same; a step takes longer than one process alone may take to stop."""
    checkpoint.STOP_WITHIN_S, forward = 0.1, F.cross_entropy

    def slow(*tensors, **options):
        time.sleep(0.5)
        return forward(*tensors, **options)

    F.cross_entropy = slow
    training(cache, place, *arguments)


def training_from_disk(_, place, cache, config, directory, notes):
    """The same, with pictures that are too many for memory; note the names of the files that are mapped."""
    from scalesteer.app import mapped

    mapped.MOST_BYTES, show = 1000, mapped.PixelFile.images

    def noting(place_of_pictures, count):
        with Path(notes, f"mapped-{place[0]}").open("a") as noted:
            print(place_of_pictures.path, count, file=noted)
        return show(place_of_pictures, count)

    mapped.PixelFile.images = noting
    training(str(cache), place, config, directory, notes)


def leaving(*place):
    """The first process leaves with a message on the way that the others do not answer."""
    enter("", place)
    with joined() as processes:
        processes.largest(0)
        if processes.rank:
            time.sleep(600)
        dist.all_reduce(torch.ones(1000), async_op=True)
        raise SystemExit(143)


def command(cache, place, argv, log):
    """Run a command line."""
    enter(cache, place, f"{log}-{place[0]}")
    sys.exit(cli.main(argv))


def outlived(cache, place, folder):
    """Let the group end before the network does, as an error that holds it would; note if the group still is."""
    enter(cache, place)
    with joined() as processes:
        group = weakref.ref(dist.group.WORLD)
        network = processes.replicate(create_model("plain-cnn"))
    del network
    gc.collect()
    (folder / f"{place[0]}").write_text(str(group() is not None))


def other_images(cache, place, config, directory, log):
    """Train, with images that differ in one process."""
    from scalesteer.app import run

    enter(cache, place)
    if place[0] == 1:
        config_there, original = changed(config, split=1), run.load
        run.load = lambda config, part, **own: original(config_there, part)
    try:
        train(config, Path(directory), device="cpu")
    except (ValueError, OSError) as error:
        Path(f"{log}-{place[0]}").write_text(f"{type(error).__name__}: {error}")
