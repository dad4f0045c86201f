import base64
import io
import os
import re
from dataclasses import replace
from html.parser import HTMLParser
from urllib.parse import unquote_to_bytes, urlsplit

import numpy as np
import pytest
import torch
from PIL import Image

from scalesteer.app import evaluate, make_run
from scalesteer.app.evaluation import answer
from scalesteer.app.report import nice_ticks, wilson_interval, write_report
from scalesteer.datasets import ImageSet
from scalesteer.models import count_parameters, create_model

NAMES = ["cat", "dog <script>alert(1)</script>", 'bird "&" <b>bee</b>', "ящерица", "\x1b[31mfish"]
HISTORY = [
    {"epoch": epoch, "loss": 2 / (epoch + 1), "val_loss": 2.5 / (epoch + 1), "val_error": error, "seconds": epoch}
    for epoch, error in enumerate((0.8, 0.35, 0.4))
]
VOID = {"meta", "img", "line", "circle", "polyline"}


class Page(HTMLParser):
    """Tags with their attributes, texts, tables and pictures of a page; a tag that is not closed is an error."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.tables, self.texts = [], [], [], []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, text):
        self.texts.append(text)
        if "td" in self.open or "th" in self.open:
            self.tables[-1][-1][-1] += text

    @property
    def pictures(self):
        sources = [attributes["src"] for tag, attributes in self.tags if tag == "img"]
        contents = (base64.b64decode(source.removeprefix("data:image/png;base64,")) for source in sources)
        return [np.asarray(Image.open(io.BytesIO(content))) for content in contents]


def make_set(shape=(3, 16, 12), count=60, classes=5, seed=0, **about):
    draw = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, (count, *shape), generator=draw, dtype=torch.uint8)
    labels = torch.randint(0, classes, (count,), generator=draw)
    return ImageSet(images, labels, torch.ones(count), {"classes": NAMES[:classes], **about})


@pytest.fixture
def model():
    """A small network that says all five classes, and several sizes."""
    options = {"channels": (0.5, 1.0), "widths": (4, 4), "kernel_size": 3, "readout": "mean"}
    model = create_model("pooled-cnn", in_chans=3, num_classes=5, image_size=(16, 12), **options).eval()
    images = make_set()
    with torch.no_grad():
        model.net.classifier.fc2.weight *= 40
        for _ in range(30):  # no class is left out
            said = answer(model, images).labels.bincount(minlength=5)
            model.net.classifier.fc2.bias -= 0.2 * (said - 12).sign()
    return model


@pytest.fixture
def test():
    return make_set()


SMALL = {
    "model": "pooled-cnn",
    "dataset": "rescaled-cifar10",
    "channels": (0.5, 1.0),
    "widths": (4, 4),
    "kernel_size": 3,
}
CONFIG = make_run(**SMALL)


def write(folder, model, test, config=CONFIG, history=HISTORY):
    path = write_report(folder, config, count_parameters(model), history, test, answer(model, test))
    assert path == folder / "report.html"
    return Page(path.read_text(encoding="utf-8"))


def test_page_needs_nothing_else_and_runs_nothing(tmp_path, model, test):
    page = write(tmp_path, model, test)
    policies = [a["content"] for tag, a in page.tags if a.get("http-equiv") == "Content-Security-Policy"]
    assert policies == ["default-src 'none'; img-src data:; style-src 'unsafe-inline'"]
    assert not {tag for tag, _ in page.tags} & {"script", "link", "iframe", "object", "b>"}
    for _, attributes in page.tags:
        assert not [name for name in attributes if name.startswith("on") or name in ("href", "srcdoc")]
        assert attributes.get("src", "data:image/png;base64,").startswith("data:image/png;base64,")
    text = (tmp_path / "report.html").read_text()
    assert not re.search(r"url\(|@import|https?://", text)
    assert "\x1b" not in text
    assert page.texts[page.texts.index("ящерица")] == "ящерица"


def test_error_is_that_of_the_evaluation(tmp_path, model, test):
    page, found = write(tmp_path, model, test), evaluate(model, test)
    wrong = round(found["error"] * 60)
    assert 0 < wrong < 60
    text = " ".join("".join(page.texts).split())
    assert (
        f"{100 * found['error']:.1f} % error {wrong} of 60 test pictures of 5 classes are classified wrongly." in text
    )
    assert CONFIG.command in text
    assert "35.0 % at epoch 2 of 3, which chose the weights" in text
    common = test.labels.bincount().max() / 60
    assert f"{100 * (1 - common):.1f} % error of always saying" in text


def test_tables_count_every_picture(tmp_path, model, test):
    page = write(tmp_path, model, test)
    by_class, answered, matrix = page.tables
    with torch.no_grad():
        logits, sizes = model(test.images / 255, return_scales=True)
    said, true = logits.argmax(1), test.labels
    shown = [re.sub(r"[^\x20-\uffff]", "\ufffd", name) for name in NAMES]
    counts = [[str(int(((true == i) & (said == j)).sum()) or "") for j in range(5)] for i in range(5)]
    assert matrix == [["", *shown], *([name, *row] for name, row in zip(shown, counts, strict=True))]
    assert by_class[0] == ["class", "pictures", "error", "most often taken for"]
    errors = {}
    for name, pictures, error, instead in by_class[1:]:
        i = shown.index(name)
        chosen = true == i
        errors[name] = float((said[chosen] != i).double().mean())
        assert (pictures, error) == (str(int(chosen.sum())), f"{100 * errors[name]:.1f} %")
        other = max((j for j in range(5) if j != i), key=lambda j: int(((said == j) & chosen).sum()))
        assert instead.startswith(shown[other]) or not errors[name]
    assert list(errors.values()) == sorted(errors.values(), reverse=True)
    assert answered[0] == ["size relative to training", "pictures", "error"]
    assert sum(int(row[1]) for row in answered[1:]) == 60
    assert len(answered) == 9
    low = float(answered[1][0].split(" to ")[1])
    first = sizes < np.quantile(sizes.numpy(), 1 / 8)
    assert answered[1][2] == f"{100 * float((said != true)[first].double().mean()):.1f} %"
    assert low == pytest.approx(np.quantile(sizes.numpy(), 1 / 8), rel=0.01)


def test_true_sizes_have_a_table_if_they_vary(tmp_path, model, test):
    sizes = torch.tensor([0.5, 1.0, 2.0]).repeat(20)
    page = write(tmp_path, model, ImageSet(test.images, test.labels, sizes, test.about))
    _, by_size, _, _ = page.tables
    missed = (answer(model, test).labels != test.labels).double()
    assert by_size == [
        ["size", "pictures", "error"],
        *([f"{size:g}", "20", f"{100 * float(missed[sizes == size].mean()):.1f} %"] for size in (0.5, 1.0, 2.0)),
    ]


def test_worst_mistakes_are_the_most_certain_ones(tmp_path, model, test):
    page = write(tmp_path, model, test)
    with torch.no_grad():
        shares = model(test.images / 255).softmax(1)
    confidence, said = shares.max(1)
    order = sorted(torch.nonzero(said != test.labels).flatten().tolist(), key=lambda i: -float(confidence[i]))[:24]
    assert len(page.pictures) == len(order) == 24
    for picture, i in zip(page.pictures, order, strict=True):
        np.testing.assert_array_equal(picture, test.images[i].permute(1, 2, 0))
    captions = [text for text in page.texts if text.startswith("said: ")]
    assert captions[0].endswith(f", {100 * float(confidence[order[0]]):.0f} %")


def test_worst_mistakes_are_named_and_lead_to_their_files(tmp_path, model, test):
    odd = ("<b>x & 'y'.png", "javascript:alert(1).png", "100 % #1?.png", os.fsdecode(b"caf\xe9.png"), "ящик.png")
    paths = [tmp_path / "my photos" / str(i) / odd[i % 5] for i in range(60)]
    for path in paths:
        path.parent.mkdir(parents=True)
        path.touch()
    (tmp_path / "runs" / "x").mkdir(parents=True)
    page = write(tmp_path / "runs" / "x", model, replace(test, paths=tuple(map(str, paths))))
    with torch.no_grad():
        confidence, said = model(test.images / 255).softmax(1).max(1)
    order = sorted(torch.nonzero(said != test.labels).flatten().tolist(), key=lambda i: -float(confidence[i]))[:24]
    links = [attributes["href"] for tag, attributes in page.tags if tag == "a"]
    assert len(links) == 24
    for link, i in zip(links, order, strict=True):
        assert urlsplit(link).path == link  # no scheme, no query
        found = os.path.normpath(os.path.join(tmp_path / "runs" / "x", os.fsdecode(unquote_to_bytes(link))))
        assert found == str(paths[i])
    shown = [text for text in page.texts if text.endswith(".png")]
    assert shown == [odd[i % 5].replace("\udce9", "\ufffd") for i in order]


def test_curves_show_every_epoch(tmp_path, model, test):
    page = write(tmp_path, model, test)
    lines = [attributes["points"].split() for tag, attributes in page.tags if tag == "polyline"]
    assert [len(points) for points in lines] == [3, 3, 3]
    error = [float(point.split(",")[1]) for point in lines[2]]
    top, bottom = 30, 230 - 32  # pixels of the highest tick, 80 %, and of zero
    np.testing.assert_allclose([(bottom - y) / (bottom - top) * 80 for y in error], [80, 35, 40], atol=0.1)
    assert write(tmp_path, model, test, history=HISTORY[:1]).texts.count("epoch") == 2
    assert "Learning curves" not in write(tmp_path, model, test, history=[]).texts


def test_grey_pictures_without_channels_or_names(tmp_path):
    model = create_model("plain-cnn", "mnist-scale").eval()
    images = ImageSet(torch.randint(0, 256, (30, 28, 28), dtype=torch.uint8), torch.arange(30) % 10, torch.ones(30), {})
    page = write(tmp_path, model, images, make_run(model="plain-cnn"))
    assert [len(table) for table in page.tables] == [11, 11]  # classes and confusions; one size
    assert page.tables[1][0][1:] == [str(label) for label in range(10)]
    assert page.pictures[0].shape == (28, 28)


def test_sizes_that_are_all_alike_have_no_table(tmp_path, model, test):
    with torch.no_grad():
        model.net.classifier.fc2.weight *= 0.001
    assert len(write(tmp_path, model, test).tables) == 2


def test_no_mistake_is_said(tmp_path, model, test):
    right = ImageSet(test.images, answer(model, test).labels, test.scales, test.about)
    page = write(tmp_path, model, right)
    assert "There are none." in page.texts
    assert not page.pictures


def test_many_classes_leave_the_matrix_readable(tmp_path):
    model = create_model("pooled-cnn", num_classes=150, image_size=8, widths=(8,), kernel_size=3, subsample=()).eval()
    draw = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (300, 8, 8), generator=draw, dtype=torch.uint8)
    labels = torch.arange(300) % 150
    page = write(tmp_path, model, ImageSet(images, labels, torch.ones(300)), make_run(model="pooled-cnn"))
    by_class, matrix = page.tables
    assert len(by_class) == 1 + 100
    assert [len(row) for row in matrix] == [31] * 31
    assert "The 100 worst of 150 classes." in page.texts
    said = answer(model, ImageSet(images, labels, torch.ones(300))).labels
    assert str(int(said[said != labels].mode().values)) in matrix[0]


def test_tuning_is_said_to_be_about_validation_images(tmp_path, model, test):
    text = " ".join("".join(write(tmp_path, model, test, make_run(**SMALL, tuning=True)).texts).split())
    assert "of 60 validation pictures of 5 classes" in text


def test_empty_part_is_refused(tmp_path, model, test):
    none = ImageSet(test.images[:0], test.labels[:0], test.scales[:0])
    with pytest.raises(ValueError, match="the test part has no pictures"):
        write_report(tmp_path, CONFIG, 1, HISTORY, none, answer(model, test))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("top", "last"), [(1.0, 1.0), (0.0013, 0.0015), (4.9, 5.0), (5.0, 5.0), (5.1, 6.0), (1e6, 1e6)]
)
def test_ticks_are_round_and_reach_the_top(top, last):
    ticks = nice_ticks(top)
    assert (ticks[0], ticks[-1]) == (0, pytest.approx(last))
    assert 3 <= len(ticks) <= 7


def test_interval_holds_the_share_as_often_as_it_says():
    draw = np.random.default_rng(0)
    for share, count in [(0.02, 80), (0.5, 30), (0.2, 200)]:
        wrong = draw.binomial(count, share, 2000)
        ends = np.array([wilson_interval(int(k), count) for k in wrong])
        held = ((ends[:, 0] <= share) & (share <= ends[:, 1])).mean()
        assert 0.92 < held < 0.99
