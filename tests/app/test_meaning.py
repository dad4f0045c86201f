"""What a training means: every run here is compared with a plain loop that follows the words of the settings."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from scalesteer import LogRadialBasis, create_model
from scalesteer.app import augment, evaluate, load, loop, train
from scalesteer.app.augment import resample
from scalesteer.app.config import USUAL, make_run
from scalesteer.app.evaluation import answer
from scalesteer.channels import ScaleChannels
from scalesteer.datasets import ImageSet, load_split
from scalesteer.files import read
from scalesteer.models import DATASETS
from tests.runs import changed, flat

PLAIN = make_run(model="plain-cnn", upsample=1, sizes=(60, 20, 20), batch_size=20, epochs=1)
STEERED = changed(PLAIN, model="ss-cnn")
POOLED = make_run(
    model="pooled-cnn", dataset="stir-mnist", sizes=(20, 10, 10), train_sizes=(30, 32), test_sizes=(20, 31, 50),
    widths=(2, 3), kernel_size=3, batch_size=20, epochs=1,
)  # fmt: skip
CHANNELS = changed(POOLED, channels=(0.5, 1.0))


def seed_of_epoch(seed, epoch):
    return (seed * 1_000_003 + epoch * 7919 + 17) % 2**63


def rate(config, progress):
    """Up for 30 % then down to zero; down to zero; a tenth after a half and after three quarters; or constant."""
    falling = {"one-cycle": (progress - 0.3) / 0.7, "cosine": progress}.get(config["schedule"])
    if config["schedule"] == "one-cycle" and progress < 0.3:
        low = 0.04
        return config["lr"] * (low + (1 - low) * (0.5 - 0.5 * math.cos(math.pi * progress / 0.3)))
    if falling is not None:
        return config["lr"] * (0.5 + 0.5 * math.cos(math.pi * falling))
    tenths = 0 if config["schedule"] == "constant" else (progress >= 0.5) + (progress >= 0.75)
    return config["lr"] / 10**tenths


def pictures(config, part):
    """Pixels from 0 to 1 and labels, as the options say."""
    sized = ("train_sizes", "test_sizes", "sizes")
    chosen = {
        name: config[name] for name in (sized if "stir" in config["dataset"] else ("scale_range", "resampler", "sizes"))
    }
    found = load_split(config["dataset"], config["split"], part, **chosen)
    count = (config["train_images"] if part == "train" else None) or len(found)
    return (found.images.float() / 255)[:count, None], found.labels[:count]


def network(config):
    names = ("upsample", "widths", "kernel_size", "readout", "dropout", "scales")
    options = {name: config[name] for name in names if config[name] is not None}
    if config["basis"] or config["orders"] or config["m"] is not None or config["support"]:
        options["basis"] = LogRadialBasis.preset(config["basis"] or "paper")
        for name in ("orders", "m", "support"):
            if config[name] is not None:
                options["basis"] = replace(options["basis"], **{name: config[name]})
    model = create_model(config["model"], config["dataset"], **options)
    return (
        model
        if config["channels"] is None
        else ScaleChannels(
            model,
            config["channels"],
            config["join"],
            drop=config["drop"] or 0.0,
            border=config["border"],
            multiple=config["multiple"],
        )
    )


def augmented(x, config):
    """Training images, resized, mirrored, turned and moved at random, then changed in colour and smoothed."""
    if not any(config[name] for name in ("resize", "flip", "shift", "rotate", "colour", "blur")):
        return x
    chance = torch.rand(4, len(x), device=x.device)
    low, high = config["resize"] or (1.0, 1.0)
    factors = torch.exp(math.log(low) + (math.log(high) - math.log(low)) * chance[0])
    turns = torch.tensor([-1.0 if config["flip"] and share < 0.5 else 1.0 for share in chance[1].tolist()]).to(x)
    moves = torch.floor((2 * config["shift"] + 1) * chance[2:]) - config["shift"]
    averaged, size = config["resize_resampler"] == "antialias", tuple(x.shape[2:])
    beyond = config["beyond"] or ("mirror" if x.shape[1] > 1 else "black")
    ground = augment.border_colour(x) if beyond == "border" else 0.0
    x = x - ground
    if config["rotate"]:
        angles = math.radians(config["rotate"]) * (2 * torch.rand(len(x), device=x.device) - 1)
        x = augment.rotate(x, angles, beyond == "mirror")
    factors = torch.stack([factors, turns * factors])
    if config["resize"] or config["flip"] or config["shift"] or config["rotate"]:
        x = resample(x, factors, moves, low, config["shift"], beyond == "mirror", averaged, size)
    x = x + ground
    if config["colour"]:
        x = augment.change_colours(x, 1 + config["colour"] * (2 * torch.rand(3, len(x), device=x.device) - 1))
    return augment.blur(x, config["blur"] * torch.rand(len(x), device=x.device)) if config["blur"] else x


def opinion(model, images, labels, half):
    """Error and mean loss, image by image."""
    model.eval()
    losses, wrong = [], []
    with torch.no_grad(), torch.autocast(images.device.type, torch.bfloat16, enabled=half):
        for x, label in zip(images, labels, strict=True):
            logits = model(x[None]).double()[0]
            losses.append(float(logits.logsumexp(0) - logits[label]))
            wrong.append(int(logits.argmax()) != int(label))
    return float(np.mean(wrong)), float(np.mean(losses))


def weights(model):
    return {name.removeprefix("net."): t.detach().cpu().clone() for name, t in model.state_dict().items()}


def plain_training(config, device="cpu"):
    """The history and the weights after each epoch, by a loop without resuming, recording or anything else."""
    config = flat(config)
    half, size, seed = config["precision"] == "bf16", config["batch_size"], config["seed"]
    images, labels = (tensor.to(device) for tensor in pictures(config, "train"))
    val = [tensor.to(device) for tensor in pictures(config, "val")]
    history, after = [], []
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = network(config)
        std = np.std((255 * images.cpu()).round().double().numpy()) / 255
        (model.net if config["channels"] else model).input_std.fill_(std)
        model.to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, weight_decay=config["weight_decay"])
        steps = len(images) // size
        for epoch in range(config["epochs"]):
            order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed_of_epoch(seed, epoch))).to(
                device
            )
            torch.manual_seed(seed_of_epoch(seed + 1, epoch))
            losses = []
            for step in range(steps):
                rows = order[step * size : (step + 1) * size]
                for group in optimizer.param_groups:
                    group["lr"] = rate(config, (epoch * steps + step) / (config["epochs"] * steps))
                model.train()
                x = augmented(images[rows], config)
                with torch.autocast(images.device.type, torch.bfloat16, enabled=half):
                    logits = model(x)
                    smooth = {"label_smoothing": config["label_smoothing"]}
                    loss = F.cross_entropy(logits, labels[rows], **smooth)
                    if config["class_weights"]:  # images of a class of n have N / (K n) each, N / K together
                        of_class = [int((labels == label).sum()) for label in labels[rows]]
                        factors = torch.tensor([len(labels) / (len(labels.unique()) * n) for n in of_class])
                        losses_of_images = F.cross_entropy(logits, labels[rows], **smooth, reduction="none")
                        loss = (factors.to(device) * losses_of_images).mean()
                model.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(float(loss.detach()))
            error, val_loss = opinion(model, *val, half)
            history.append({"epoch": epoch, "loss": np.mean(losses), "val_error": error, "val_loss": val_loss})
            after.append(weights(model))
        best = min(range(len(history)), key=lambda i: (history[i]["val_error"], history[i]["val_loss"], i))
        (model.net if config["channels"] else model).load_state_dict(after[best])
        if config["test_channels"] is not None:
            model = ScaleChannels(model.net if config["channels"] else model, config["test_channels"], config["join"])
        test_error = opinion(model, *(tensor.to(device) for tensor in pictures(config, "test")), half)[0]
    return history, after, best, test_error


def kept_weights(directory):
    tensors = read(directory / "model" / "model.safetensors")[0]
    return {name.removeprefix("net."): tensor for name, tensor in tensors.items()}  # with channels or without


def same(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


# Every option that a run accepts, with what makes a difference to the training.
RESIZED = changed(PLAIN, resize=(0.3, 0.9))
CHANGES = {
    "model": changed(PLAIN, model="spatial-transformer"),
    "dataset": changed(PLAIN, dataset="fmnist-scale"),
    "split": changed(PLAIN, split=1),
    "seed": changed(PLAIN, seed=3),
    "epochs": changed(PLAIN, epochs=4),
    "batch_size": changed(PLAIN, batch_size=25),  # the last ten images of an epoch are left out
    "lr": changed(PLAIN, lr=0.001),
    "weight_decay": changed(PLAIN, weight_decay=0.5),
    "label_smoothing": changed(PLAIN, label_smoothing=0.3),
    "schedule": changed(PLAIN, schedule="step"),
    "precision": changed(PLAIN, precision="bf16"),
    "upsample": changed(PLAIN, upsample=2),
    "basis": changed(STEERED, basis="area"),
    "train_images": changed(PLAIN, train_images=41),
    "scale_range": changed(PLAIN, scale_range=(0.5, 0.75)),
    "sizes": changed(PLAIN, sizes=(80, 10, 30)),
    "resampler": changed(PLAIN, resampler="antialias"),
    "scales": changed(STEERED, scales=(1.0, 2.0)),
    "orders": changed(STEERED, orders=(0.0, 1.0)),
    "m": changed(STEERED, m=0.5),
    "support": changed(STEERED, support="crop"),
    "train_sizes": changed(POOLED, train_sizes=(31, 33)),
    "resize": changed(PLAIN, resize=(0.5, 1.5)),
    "resize_resampler": changed(RESIZED, resize_resampler="bilinear"),
    "flip": changed(PLAIN, flip=True),
    "beyond": changed(RESIZED, beyond="mirror"),
    "rotate": changed(PLAIN, rotate=30.0),
    "colour": changed(PLAIN, colour=0.5),
    "blur": changed(PLAIN, blur=2.0),
    "shift": changed(PLAIN, shift=3),
    "widths": changed(POOLED, widths=(3, 2)),
    "kernel_size": changed(POOLED, kernel_size=5),
    "readout": changed(POOLED, readout="mean"),
    "dropout": changed(POOLED, dropout=0.5),
    "channels": changed(CHANNELS, channels=(0.5, 0.7, 1.0)),
    "join": changed(CHANNELS, join="mean"),
    "drop": changed(CHANNELS, drop=0.5),
    "border": changed(CHANNELS, border=3),
    "multiple": changed(CHANNELS, multiple=24),
    "class_weights": changed(PLAIN, class_weights=True),
}
BASES = (PLAIN, RESIZED, STEERED, POOLED, CHANNELS)


@pytest.fixture(scope="module")
def unchanged(_kept_splits, tmp_path_factory):
    """The weights of the runs without changes."""
    found, folder = {}, tmp_path_factory.mktemp("unchanged")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SCALESTEER_CACHE", str(_kept_splits))
        for config in BASES:
            train(config, folder / config.name, device="cpu")
            found[config] = kept_weights(folder / config.name)
    return found


def test_every_option_of_a_run_is_tried_here():
    tried_elsewhere = {"tuning", "test_sizes", "test_channels"}  # below
    tried_elsewhere |= {"one_size_epochs", "fit_join"}  # test_sizes.py, test_fitted_join.py
    tried_elsewhere |= {"pretrained", "weights"}  # test_own_networks.py
    tried_elsewhere |= {"patience", "accumulate", "clip"}  # test_given.py
    tried_elsewhere |= {"channels_lr"}  # test_sizes.py
    tried_elsewhere |= {
        "images",
        "image_size",
        "fit",
        "grey",
        "value_range",
    }  # on real pictures: test_own_images.py and test_folder.py
    tried_elsewhere |= {"percentiles", "planes", "pixel_size"}  # test_stacks.py
    assert set(USUAL) - tried_elsewhere == set(CHANGES)


@pytest.mark.parametrize("name", CHANGES)
def test_run_is_the_plain_training_of_its_options(cache, unchanged, tmp_path, name):
    config = CHANGES[name]
    result = train(config, tmp_path, device="cpu")
    history, after, best, test_error = plain_training(config)
    assert [entry["epoch"] for entry in result["history"]] == list(range(config.training.epochs))
    for entry, expected in zip(result["history"], history, strict=True):
        assert entry["loss"] == pytest.approx(expected["loss"], rel=1e-6)
        # Where half of the digits are left, one image alone and a batch differ in rounding.
        assert entry["val_loss"] == pytest.approx(expected["val_loss"], rel=1e-5 if name != "precision" else 2e-2)
        assert entry["val_error"] == pytest.approx(expected["val_error"], abs=0 if name != "precision" else 0.1)
    if name != "precision":
        assert (result["best_epoch"], result["test_error"]) == (best, test_error)
    assert same(kept_weights(tmp_path), after[result["best_epoch"]])
    # And the option makes a difference.
    base = next(base for base in BASES if changed(config, **{name: flat(base)[name]}) == base)
    assert not same(kept_weights(tmp_path), unchanged[base])


@pytest.mark.parametrize("change", [{"test_sizes": (20.0, 50.0, 64.0)}, {"test_channels": (0.5, 2.0)}])
@pytest.mark.parametrize("base", [POOLED, CHANNELS])
def test_options_of_the_test_change_nothing_but_the_test(cache, unchanged, tmp_path, base, change):
    config = changed(base, **change)
    result = train(config, tmp_path, device="cpu")
    assert same(kept_weights(tmp_path), unchanged[base])
    assert result["test_error"] == plain_training(config)[3]
    assert [row["from"] for row in result["test_error_by_scale"]] == list(config.data.test_sizes)
    assert ("size_correlation" in result) == bool(config.network.channels or config.network.test_channels)


def test_colour_is_normalised_by_channel_and_mirrored_beyond_the_border():
    pixels = np.random.default_rng(0).integers(0, 256, (20, 3, 16, 16), np.uint8) // np.array([1, 2, 4]).reshape(
        3, 1, 1
    )
    images = ImageSet(torch.from_numpy(pixels.astype(np.uint8)), torch.arange(20) % 10, torch.ones(20))
    options = {"widths": (2, 3), "kernel_size": 3, "batch_size": 20, "resize": (0.4, 0.6), "flip": True, "shift": 2}
    run = make_run(model="pooled-cnn", dataset="rescaled-cifar10", **options)
    state = loop.initial_state(run, DATASETS["rescaled-cifar10"], images)
    found, shown = pixels / 255, []
    np.testing.assert_allclose(state.model.input_mean, found.mean((0, 2, 3)), rtol=1e-6)
    np.testing.assert_allclose(state.model.input_std, found.std((0, 2, 3)), rtol=1e-6)
    state.model.register_forward_pre_hook(lambda model, args: shown.append(args[0]))
    rows = torch.arange(20)
    torch.manual_seed(5)
    loop.make_update(state, run.training, images)(rows, 0.1)
    torch.manual_seed(5)
    expected = augmented(images.images.float() / 255, flat(run))
    assert torch.equal(shown[0], expected)
    assert shown[0].amin() > 0  # no black border


@pytest.mark.parametrize("schedule", ["cosine", "constant"])
def test_other_schedules_are_applied(cache, tmp_path, schedule):
    config = changed(PLAIN, schedule=schedule)
    result = train(config, tmp_path, device="cpu")
    assert same(kept_weights(tmp_path), plain_training(config)[1][result["best_epoch"]])


@pytest.mark.parametrize("tuning", [False, True])
def test_kept_and_tested_is_the_first_of_the_best_on_validation_data(cache, tmp_path, monkeypatch, tuning):
    # Error decides, then loss, then the earlier epoch. The last epoch is worse, though its loss is the lowest.
    told = [(0.5, 1.0), (0.4, 0.9), (0.4, 0.8), (0.4, 0.8), (0.6, 0.7)]
    config, looks = changed(PLAIN, epochs=len(told), tuning=tuning), []

    def scripted(model, images, *args):
        (images,) = [images] if isinstance(images, ImageSet) else images
        looks.append((images.images, weights(model)))
        found = answer(model, images, *args)
        if len(looks) > len(told):
            return found
        error, loss = told[len(looks) - 1]
        wrong = torch.arange(len(images)) < error * len(images)
        return found._replace(labels=(found.true + wrong) % 10, loss=loss)

    monkeypatch.setattr(loop, "answer", scripted)
    result = train(config, tmp_path, device="cpu")
    after = plain_training(config)[1]
    assert (result["best_epoch"], result["val_error"], result["val_loss"]) == (2, 0.4, 0.8)
    assert same(kept_weights(tmp_path), after[2])
    val, test = (load(config, part).images for part in ("val", "test"))
    assert all(torch.equal(seen, val) for seen, _ in looks[: len(told)])
    assert all(same(seen, expected) for (_, seen), expected in zip(looks[: len(told)], after, strict=True))
    if tuning:
        assert len(looks) == len(told)  # the test set is not looked at
        assert "test_error" not in result
    else:
        assert len(looks) == len(told) + 1  # and otherwise once
        assert torch.equal(looks[-1][0], test)
        assert same(looks[-1][1], after[2])


def test_every_image_counts_in_an_evaluation(cache):
    images = load(changed(PLAIN, sizes=(60, 20, 230)), "test")  # two batches on the CPU and a smaller one
    model = create_model("plain-cnn", upsample=1)
    found = evaluate(model, images)
    error, loss = opinion(model, images.images[:, None].float() / 255, images.labels, half=False)
    assert found["error"] == error
    assert found["loss"] == pytest.approx(loss, rel=1e-5)
    for row in found["by_scale"]:
        inside = (images.scales >= row["from"]) & (images.scales < row["to"])
        part = opinion(model, images.images[inside, None].float() / 255, images.labels[inside], half=False)
        assert (row["images"], row["error"]) == (int(inside.sum()), pytest.approx(part[0]))
    assert sum(row["images"] for row in found["by_scale"]) == 230


def test_evaluation_in_half_precision(cache):
    images, model = load(PLAIN, "test"), create_model("plain-cnn", upsample=1)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        logits = model.eval()(images.images[:, None].float() / 255)
    assert logits.dtype == torch.bfloat16
    expected = F.cross_entropy(logits.double(), images.labels)
    assert evaluate(model, images, "bf16")["loss"] == pytest.approx(float(expected), rel=1e-6)
    assert evaluate(model, images, "float32")["loss"] != pytest.approx(float(expected), rel=1e-6)


@pytest.mark.parametrize(("precision", "allowed"), [("float32", False), ("tf32", True), ("bf16", True)])
def test_precision_decides_about_tf32_while_training_and_evaluating(cache, tmp_path, monkeypatch, precision, allowed):
    seen = set()
    real = F.cross_entropy

    def watching(*args, **options):
        flags = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
        seen.add((torch.is_grad_enabled(), *flags))
        return real(*args, **options)

    monkeypatch.setattr(F, "cross_entropy", watching)
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    train(changed(PLAIN, epochs=1, precision=precision), tmp_path, device="cpu")
    assert seen == {(True, allowed, allowed), (False, allowed, allowed)}
    assert (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32) == before


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name", [None, "seed", "batch_size", "lr", "weight_decay", "label_smoothing", "schedule", "channels", "join"]
)
def test_recorded_run_is_the_plain_training_of_its_options(cache, tmp_path, monkeypatch, name):
    # A recorded step draws other random numbers for its dropout: leave it out.
    monkeypatch.setattr(torch.nn.Dropout, "forward", lambda self, x: x)
    # As the run does in float32: Adam's first steps would make much of the rounding of TF32.
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    changes = CHANGES | {None: PLAIN, "weight_decay": changed(PLAIN, weight_decay=20.0)}  # one that shows in two epochs
    config = changed(changes[name], epochs=2)
    result = train(config, tmp_path, device="cuda")
    history = plain_training(config, "cuda")[0]
    # The order of sums differs from run to run on a GPU, and ten steps of Adam make thousandths of it.
    for entry, expected in zip(result["history"], history, strict=True):
        assert entry["loss"] == pytest.approx(expected["loss"], rel=1e-2)
    if name and name != "join":  # which makes thousandths too in two epochs
        base = next(base for base in BASES if changed(changes[name], **{name: flat(base)[name]}) == base)
        unchanged = plain_training(changed(base, epochs=2), "cuda")[0]
        losses = [[entry["loss"] for entry in history] for history in (result["history"], unchanged)]
        assert losses[0] != pytest.approx(losses[1], rel=1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize("model", ["pooled-cnn", "steered-cnn", "pooled-resnet", "steered-resnet"])
def test_every_random_choice_can_be_recorded(cache, tmp_path, model, precision):
    options = {"channels": (0.5, 1.0), "drop": 0.5, "resize": (0.7, 1.4), "shift": 2, "flip": True, "dropout": 0.2}
    config = changed(POOLED, model=model, widths=(4, 4), epochs=3, precision=precision, **options)
    result = train(config, tmp_path, device="cuda")
    assert result["status"] == "finished"
    assert len({entry["loss"] for entry in result["history"]}) == 3
