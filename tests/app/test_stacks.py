"""Files of microscopes: planes as channels, the bits that are used, the size of a pixel; and how large pictures are."""

import csv
import json
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from scalesteer.app import cli, load_model
from scalesteer.app.folder import FolderSpec, load_folder
from scalesteer.app.pictures import PictureError, find_factor, read_picture, read_scaled
from scalesteer.app.predict import predict_files
from scalesteer.app.stacks import find_about
from scalesteer.models import create_model, network_of

tifffile = pytest.importorskip("tifffile", reason="stacks need the extra `microscopy`")
PHOTOMETRIC = {"photometric": "minisblack"}


@pytest.fixture
def planes():
    """Four planes of numbers of 12 bits, 20 high and 30 wide."""
    return np.random.default_rng(0).integers(0, 4096, (4, 20, 30)).astype(np.uint16)


def write(path, values, axes, **told):
    """A stack as OME's or ImageJ's, by its name."""
    options = {"ome": True} if ".ome." in path.name else {"imagej": True}
    if "unit" in told:
        options["resolution"] = (1 / told.pop("across"), 1 / told.pop("down"))
    tifffile.imwrite(path, values, metadata={"axes": axes, **told}, **PHOTOMETRIC, **options)
    return path


def eight(values, low=0, high=4095):
    return ((values.astype(float) - low) * 255 / (high - low)).clip(0, 255).round()


@pytest.mark.parametrize("name", ["a.ome.tif", "a.tif"])
def test_channels_are_red_green_and_blue(tmp_path, planes, name):
    for count in (2, 3):
        path = write(tmp_path / name, planes[:count], "CYX")
        found = read_picture(path, 3, value_range=(0, 4095))
        assert np.abs(found[:count] - eight(planes[:count])).max() <= 1
        assert not found[count:].any()
    chosen = read_picture(write(tmp_path / name, planes, "CYX"), 3, value_range=(0, 4095), planes=(3, 0, 1))
    assert np.abs(chosen - eight(planes[[3, 0, 1]])).max() <= 1
    grey = read_picture(tmp_path / name, 1, value_range=(0, 4095), planes=(2,))
    assert np.abs(grey - eight(planes[2])).max() <= 1


def test_what_is_no_channel_is_refused_by_name(tmp_path, planes):
    named = {"Channel": {"Name": ["DAPI", "GFP", "mCherry", "light"]}}
    for path, said in (
        (write(tmp_path / "c.ome.tif", planes, "CYX", **named), r"4 channels \(DAPI, GFP, mCherry, light\).*--planes"),
        (write(tmp_path / "z.ome.tif", planes, "ZYX"), r"several planes \(4 of depth\)"),
        (write(tmp_path / "t.tif", planes, "TYX"), r"several planes \(4 of time\)"),
        (write(tmp_path / "tc.tif", planes.reshape(2, 2, 20, 30), "TCYX"), r"2 of time, 2 of channel"),
    ):
        with pytest.raises(PictureError, match=said):
            read_picture(path, 3)
    assert (
        np.abs(read_picture(tmp_path / "z.ome.tif", 1, planes=(3,), value_range=(0, 4095)) - eight(planes[3])).max()
        <= 1
    )
    with pytest.raises(PictureError, match="4 planes, counted from 0, and no plane 4"):
        read_picture(tmp_path / "z.ome.tif", 1, planes=(4,))
    with pytest.raises(PictureError, match="2 of time, 2 of channel"):
        read_picture(tmp_path / "tc.tif", 1, planes=(0,))


def test_plain_pages_and_bands_are_chosen_by_number(tmp_path, planes):
    tifffile.imwrite(tmp_path / "pages.tif", planes, **PHOTOMETRIC)
    with pytest.raises(PictureError, match=r"several pages.*--planes"):
        read_picture(tmp_path / "pages.tif", 1)
    found = read_picture(tmp_path / "pages.tif", 1, planes=(1,), value_range=(0, 4095))
    assert np.abs(found - eight(planes[1])).max() <= 1
    colours = eight(planes[:3]).astype(np.uint8)
    Image.fromarray(colours.transpose(1, 2, 0)).save(tmp_path / "a.png")
    assert np.array_equal(read_picture(tmp_path / "a.png", 1, planes=(2,)), colours[2])
    with pytest.raises(PictureError, match="3 planes, counted from 0, and no plane 3"):
        read_picture(tmp_path / "a.png", 1, planes=(3,))


def test_kinds_of_numbers_that_pillow_does_not_know(tmp_path, planes):
    fractions = planes[0].astype(np.float64) / 4095
    tifffile.imwrite(tmp_path / "a.tif", fractions)
    assert np.abs(read_picture(tmp_path / "a.tif", 1, value_range=(0, 1)) - eight(planes[0])).max() <= 1
    with pytest.raises(PictureError, match="fractions and does not say which are black and white"):
        read_picture(tmp_path / "a.tif", 1)
    fractions[0, 0] = np.nan
    tifffile.imwrite(tmp_path / "a.tif", fractions)
    with pytest.raises(PictureError, match="NaN"):
        read_picture(tmp_path / "a.tif", 1, value_range=(0, 1))
    write(tmp_path / "b.ome.tif", np.stack([fractions, fractions]).astype(np.float32).clip(0), "CYX")
    with pytest.raises(PictureError, match="NaN"):
        read_picture(tmp_path / "b.ome.tif", 3, value_range=(0, 1))
    (tmp_path / "broken.tif").write_bytes(b"II*\0" + bytes(40))
    with pytest.raises(PictureError, match=r"broken\.tif cannot be read"):
        read_picture(tmp_path / "broken.tif", 1)


def test_the_bits_that_are_used_are_those_of_the_file(tmp_path, planes):
    dim = planes // 8
    for count, axes in ((1, "YX"), (2, "CYX")):
        path = write(tmp_path / "a.ome.tif", dim[:count].squeeze(), axes, SignificantBits=12)
        assert np.abs(read_picture(path, 3)[0] - eight(dim[0])).max() <= 1
    with pytest.raises(PictureError, match="lowest quarter"):
        read_picture(write(tmp_path / "b.ome.tif", dim[:2], "CYX"), 3)


def test_percentiles_are_of_each_picture_and_plane(tmp_path, planes):
    path = write(tmp_path / "a.ome.tif", np.stack([planes[0], 3 * planes[1] + 700]), "CYX")
    found = read_picture(path, 3, percentiles=(5, 95))
    for one, plane in zip(found, planes[:2], strict=False):
        assert np.abs(one - eight(plane, *np.percentile(plane, (5, 95)))).max() <= 1
    whole = read_picture(path, 3, percentiles=(0, 100))
    assert (whole[:2].min(), whole[0].max(), whole[1].max()) == (0, 255, 255)
    grey = (planes[0] // 64 + 90).astype(np.uint8)
    Image.fromarray(grey).save(tmp_path / "a.png")
    assert (
        np.abs(read_picture(tmp_path / "a.png", 1, percentiles=(0, 100)) - eight(grey, grey.min(), grey.max())).max()
        <= 1
    )
    Image.new("L", (5, 5), 77).save(tmp_path / "blank.png")
    assert not read_picture(tmp_path / "blank.png", 1, percentiles=(1, 99)).any()
    with pytest.raises(ValueError, match="exclude each other"):
        FolderSpec("x", percentiles=(1, 99), value_range=(0, 1))
    with pytest.raises(ValueError, match="`percentiles` must be from 0 to 100"):
        read_picture(path, 3, percentiles=(-1, 99))


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("a.ome.tif", {"PhysicalSizeX": 0.5, "PhysicalSizeY": 0.5}),
        ("a.ome.tif", {f"PhysicalSize{k}": v for k, v in {"X": 500, "Y": 500, "XUnit": "nm", "YUnit": "nm"}.items()}),
        ("a.tif", {"unit": "um", "across": 0.5, "down": 0.5}),
        ("a.tif", {"unit": "mm", "across": 0.0005, "down": 0.0005}),
    ],
)
def test_a_picture_is_resized_to_pixels_of_the_wanted_size(tmp_path, planes, name, told):
    path = write(tmp_path / name, planes[0], "YX", **told)
    found = read_scaled(path, 1, value_range=(0, 4095), pixel_size=0.25)
    assert found.pixels.shape == (40, 60)
    assert found.zoom == pytest.approx(2, rel=1e-6)
    plain = Image.fromarray(read_picture(path, 1, value_range=(0, 4095)))
    assert np.array_equal(found.pixels, plain.resize((60, 40), Image.Resampling.BICUBIC))
    assert find_factor(path, (20, 30), "pad", 0.25) == pytest.approx(0.5)
    assert read_scaled(path, 1, value_range=(0, 4095), pixel_size=0.25, own_pixel_size=0.125).pixels.shape == (10, 15)
    assert read_picture(path, 1, value_range=(0, 4095)).shape == (20, 30)


def test_pixels_of_unknown_size_or_no_squares_are_refused_where_it_counts(tmp_path, planes):
    plain = write(tmp_path / "a.ome.tif", planes[0], "YX")
    with pytest.raises(PictureError, match="the size of its pixels is not known"):
        read_picture(plain, 1, pixel_size=0.5, value_range=(0, 4095))
    flat = write(tmp_path / "b.ome.tif", planes[0], "YX", PhysicalSizeX=0.5, PhysicalSizeY=1.5)
    with pytest.raises(PictureError, match=r"no squares \(they are 0.5 x 1.5 micrometres\)"):
        read_picture(flat, 1, pixel_size=0.5, value_range=(0, 4095))
    assert read_picture(flat, 1, value_range=(0, 4095)).shape == (20, 30)
    assert find_factor(flat, (20, 30), "pad", 0.5) is None
    with pytest.raises(PictureError, match=r"600,000 x 400,000 pixels, and the limit is 64 megapixels"):
        read_picture(plain, 1, pixel_size=0.5, own_pixel_size=10_000, value_range=(0, 4095))


@pytest.mark.parametrize("text", ["<OME <", "<OME/>", "<OME xmlns='x'><Pixels PhysicalSizeX='nan'/></OME>", "ImageJ=1"])
def test_words_that_say_nothing_are_passed_over(text):
    assert find_about({270: text}).pixel_size is None


def test_without_tifffile_it_is_said_what_to_install(tmp_path, planes):
    path = write(tmp_path / "a.ome.tif", planes[:2], "CYX")
    program = (
        "import sys; sys.modules['tifffile'] = None\n"
        "from scalesteer.app.pictures import read_picture\n"
        f"read_picture({str(path)!r}, 3)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "tifffile is needed here and not installed: pip install 'scalesteer[microscopy]'" in done.stderr


def cells(folder, sizes, side=24, count=8, name="list.csv", column=True):
    """Bright discs and rings of one true size, in pictures of several pixel sizes; and their list."""
    rng, rows = np.random.default_rng(1), []
    (folder / "files").mkdir(exist_ok=True)
    for i in range(2 * count):
        own, ring = sizes[i % len(sizes)], i // count
        y, x = np.mgrid[: round(side / own), : round(side / own)] - round(side / own) / 2
        far = np.hypot(y, x) * own
        shape = (far < 7) & ~((far < 4) & bool(ring))
        values = (300 + 2500 * shape + rng.normal(0, 60, shape.shape)).clip(0, 4095).astype(np.uint16)
        place = folder / "files" / f"{i}.ome.tif"
        told = {} if column else {"PhysicalSizeX": own, "PhysicalSizeY": own}
        tifffile.imwrite(place, values, ome=True, metadata={"axes": "YX", **told})
        rows.append(
            {"path": f"files/{i}.ome.tif", "label": ("disc", "ring")[ring]} | ({"pixel_size": own} if column else {})
        )
        rows[-1]["part"] = ("train", "train", "val", "test")[i // len(sizes) % 4]
    with open(folder / name, "w", newline="") as file:
        table = csv.DictWriter(file, rows[0])
        table.writeheader()
        table.writerows(rows)
    return folder / name


@pytest.mark.parametrize("column", [True, False])
def test_pictures_of_a_list_come_to_one_scale(tmp_path, own_cache, column):
    listed = cells(tmp_path, (0.5, 1.0, 2.0), column=column, count=12)
    spec = FolderSpec(str(listed), (24, 24), grey=True, value_range=(0, 4095), pixel_size=None if column else 1.0)
    images = load_folder(spec, "train").images
    areas = (images > 90).flatten(1).sum(1).tolist()
    discs = [area for area in areas if area > 135]
    assert max(discs) < 1.3 * min(discs)  # 16 times without
    task = spec.open().task
    assert task.pixel_size == 1.0
    assert spec.open().usual_scale() == pytest.approx(1.0, abs=0.05)
    plain = FolderSpec(str(listed), (48, 48), grey=True, value_range=(0, 4095))
    if not column:
        areas = (load_folder(plain, "train").images > 90).flatten(1).sum(1).tolist()
        assert max(areas) > 5 * min(areas)


def test_a_network_keeps_how_its_pictures_are_read(tmp_path, own_cache, capsys):
    listed = cells(tmp_path, (0.5, 1.0))
    flags = ["--image-size", "24", "24", "--grey", "--percentiles", "1", "99", "--planes", "0", "--epochs", "1"]
    flags += [
        "--model",
        "pooled-cnn",
        "--widths",
        "4",
        "4",
        "4",
        "--channels",
        "none",
        "--runs",
        str(tmp_path / "runs"),
    ]
    assert cli.main(["train", str(listed), *flags]) == 0
    (run,) = (tmp_path / "runs").iterdir()
    task = load_model(run).task
    assert (task.percentiles, task.planes, task.pixel_size) == ((1.0, 99.0), (0,), 0.75)
    assert "pixel_size" in (run / "split.csv").read_text().splitlines()[0]
    capsys.readouterr()
    assert cli.main(["evaluate", str(run), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["error"] == json.loads((run / "result.json").read_text())["test_error"]
    pictures = [str(tmp_path / "files" / f"{i}.ome.tif") for i in (0, 1)]
    assert cli.main(["predict", str(run), *pictures]) == 2
    assert cli.main(["predict", str(run), *pictures, "--pixel-size", "0.5", "--csv", str(tmp_path / "a.csv")]) == 0
    assert cli.main(["evaluate", str(run), "--images", str(listed)]) == 0
    assert cli.main(["predict", "digits", *pictures, "--pixel-size", "0.5"]) == 2
    assert "for a model that was trained with pixel sizes" in capsys.readouterr().err


def test_the_size_of_an_object_is_in_pixels_of_its_own_picture(tmp_path):
    model = create_model(
        "pooled-cnn", in_chans=1, num_classes=2, channels=(0.5, 1.0), widths=(4, 4, 4), join="max"
    ).eval()
    network = network_of(model)
    told = {"ground": "surroundings", "scale": 1.0, "object_size": 14.0, "pixel_size": 1.0}
    network.task = network.task._replace(**told)
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64), np.uint8)).save(tmp_path / "a.png")
    ((_, said),) = predict_files(model, [tmp_path / "a.png"], own_pixel_size=0.5)
    assert said.pixels == pytest.approx(said.size * 14 / 0.5)
