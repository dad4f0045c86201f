import io
import os
import struct
import time
import zlib
from contextlib import suppress

import numpy as np
import pytest
from PIL import Image

from scalesteer.app import pictures
from scalesteer.app.pictures import PictureError, find_factor, find_pictures, read_picture, read_scaled
from scalesteer.models.network import FITS


@pytest.fixture
def photo():
    """A smooth picture in colour, 40 high and 60 wide: each corner has another colour, the middle is lighter."""
    rows, columns = np.mgrid[0:40, 0:60]
    middle = 60 * np.sin(np.pi * (rows + 0.5) / 40) * np.sin(np.pi * (columns + 0.5) / 60)
    return np.stack([rows * 4 + middle, columns * 3 + middle, 190 - rows * 3 - columns + middle], 2).astype(np.uint8)


def save(folder, image, name="x.png", **options):
    image = image if isinstance(image, Image.Image) else Image.fromarray(image)
    image.save(folder / name, **options)
    return folder / name


def grey_of(colours):
    """Luma of ITU-R 601 in float64: what one channel of a colour picture must be."""
    return (colours[..., :3].astype(np.float64) @ (0.299, 0.587, 0.114)).round()


@pytest.mark.parametrize(
    ("name", "options", "error"),
    [
        ("a.png", {}, 0),
        ("a.bmp", {}, 0),
        ("a.tif", {}, 0),
        ("packed.tiff", {"compression": "tiff_lzw"}, 0),
        ("a.webp", {"lossless": True}, 0),
        ("lossy.webp", {"quality": 100}, 12),
        ("a.jpg", {"quality": 100, "subsampling": 0}, 3),
        ("progressive.jpeg", {"quality": 100, "subsampling": 0, "progressive": True}, 3),
        ("a.ppm", {}, 0),
    ],
)
def test_every_format_gives_its_pixels(tmp_path, photo, name, options, error):
    path = save(tmp_path, photo, name, **options)
    colour, grey = read_picture(path, 3), read_picture(str(path), 1)
    assert (colour.dtype, grey.dtype) == (np.uint8, np.uint8)
    assert np.abs(colour.transpose(1, 2, 0).astype(int) - photo).max() <= error
    assert np.abs(grey - grey_of(photo)).max() <= error + 1


def test_name_says_nothing_about_the_format(tmp_path, photo):
    path = save(tmp_path, photo, "a.png").rename(tmp_path / "ä photo, with spaces.jpg")
    np.testing.assert_array_equal(read_picture(path, 3).transpose(1, 2, 0), photo)


def test_picture_with_few_colours_or_none(tmp_path, photo):
    gif = read_picture(save(tmp_path, Image.fromarray(photo).quantize(8), "a.gif"), 3)
    np.testing.assert_array_equal(gif.transpose(1, 2, 0), np.asarray(Image.fromarray(photo).quantize(8).convert("RGB")))
    bits = photo[..., 0] > 100
    for name in ("bits.png", "bits.tif", "bits.bmp", "bits.pbm"):
        found = read_picture(save(tmp_path, bits, name), 1)
        np.testing.assert_array_equal(found, bits * np.uint8(255), err_msg=name)
    grey = photo[..., 0]
    np.testing.assert_array_equal(read_picture(save(tmp_path, grey), 3), np.stack([grey] * 3))


def test_cmyk_becomes_red_green_and_blue(tmp_path, photo):
    cmyk = Image.fromarray(photo).convert("CMYK")
    for name in ("a.tif", "a.jpg"):
        found = read_picture(save(tmp_path, cmyk, name, quality=100), 3).transpose(1, 2, 0)
        assert np.abs(found.astype(int) - photo).max() <= 4, name


def test_transparent_parts_are_laid_over_black(tmp_path, photo):
    alpha = np.linspace(0, 255, 60).round().astype(np.uint8)[None].repeat(40, 0)
    expected = (photo * (alpha[..., None] / 255)).round()
    rgba = np.dstack([photo, alpha])
    for name, options in {"a.png": {}, "a.webp": {"lossless": True, "exact": True}, "a.tif": {}}.items():
        path = save(tmp_path, rgba, name, **options)
        assert np.abs(read_picture(path, 3).transpose(1, 2, 0) - expected).max() <= 1, name
        assert np.abs(read_picture(path, 1) - grey_of(expected)).max() <= 1, name
    grey = Image.merge("LA", [Image.fromarray(photo[..., 0]), Image.fromarray(alpha)])
    assert np.abs(read_picture(save(tmp_path, grey), 1) - (photo[..., 0] * (alpha / 255)).round()).max() <= 1


def test_transparent_colours_of_a_palette_are_laid_over_black(tmp_path):
    image = Image.new("P", (4, 2), 1)
    image.putpalette([10, 20, 30, 250, 100, 50, 0, 200, 0])
    image.putpixel((0, 0), 0)
    image.putpixel((1, 0), 2)
    for name, transparency in {"one.gif": 1, "one.png": 1, "shares.png": bytes([255, 0, 128])}.items():
        found = read_picture(save(tmp_path, image, name, transparency=transparency), 3)
        assert tuple(found[:, 0, 0]) == (10, 20, 30), name
        assert tuple(found[:, 1, 1]) == (0, 0, 0), name
        assert found[1, 0, 1] == (100 if name == "shares.png" else 200), name
    grey = save(tmp_path, np.array([[7, 200]], np.uint8), "grey.png", transparency=200)
    assert read_picture(grey, 1).tolist() == [[7, 0]]


def tiff_of_16_bits(values, order, photometric, bits=16):
    """A TIFF file, written by hand: byte order, and what zero means, as Pillow would not write them."""
    flat = values.astype(order + "u2").tobytes()
    if bits == 12:  # two numbers in three bytes
        pairs = values.reshape(-1, 2).tolist()
        flat = b"".join(((a << 12) | b).to_bytes(3, "big") for a, b in pairs)
    return raw_tiff(flat, values.shape, {258: (bits,), 262: (photometric,), 277: (1,)}, order)


def raw_tiff(flat, shape, tags, order="<"):
    """A TIFF file of these bytes and tags, all of them short integers."""
    rows, columns = shape[:2]
    tags = {256: (columns,), 257: (rows,), 259: (1,), 273: (8,), 278: (rows,), 279: (len(flat),)} | tags
    entries, more = b"", b""
    behind = 8 + len(flat) + 2 + 12 * len(tags) + 4
    for tag, numbers in sorted(tags.items()):
        value = struct.pack(f"{order}{len(numbers)}H", *numbers)
        if len(value) > 4:
            value, more = struct.pack(order + "I", behind + len(more)), more + value
        entries += struct.pack(order + "HHI", tag, 3, len(numbers)) + value.ljust(4, b"\0")
    header = (b"II" if order == "<" else b"MM") + struct.pack(order + "HI", 42, 8 + len(flat))
    return header + flat + struct.pack(order + "H", len(tags)) + entries + bytes(4) + more


def test_16_bits_are_scaled_and_not_clipped(tmp_path):
    values = np.array([[0, 128, 129, 257, 5000], [30000, 32896, 65278, 65407, 65535]], np.uint16)
    expected = (values / 257).round()
    for name in ("a.png", "a.tif"):
        np.testing.assert_array_equal(read_picture(save(tmp_path, values, name), 1), expected, err_msg=name)
    big_endian = Image.frombytes("I;16B", (5, 2), values.astype(">u2").tobytes())
    np.testing.assert_array_equal(read_picture(save(tmp_path, big_endian, "b.tif"), 1), expected)
    np.testing.assert_array_equal(read_picture(tmp_path / "b.tif", 3), np.stack([expected] * 3))
    clear = save(tmp_path, Image.fromarray(values), "clear.png", transparency=5000)
    np.testing.assert_array_equal(read_picture(clear, 1), np.where(values == 5000, 0, expected))


def test_tiff_may_have_12_bits_or_call_white_zero(tmp_path):
    values = np.array([[0, 100, 5000, 30000], [40000, 50000, 65000, 65535]], np.uint16)
    for order, photometric in [("<", 0), ("<", 1), (">", 1)]:
        (tmp_path / "a.tif").write_bytes(tiff_of_16_bits(values, order, photometric))
        expected = ((65535 - values if photometric == 0 else values) / 257).round()
        np.testing.assert_array_equal(read_picture(tmp_path / "a.tif", 1), expected, err_msg=f"{order}{photometric}")
    (tmp_path / "a.tif").write_bytes(tiff_of_16_bits(values >> 4, "<", 1, bits=12))
    assert np.abs(read_picture(tmp_path / "a.tif", 1) - (values >> 4) / 4095 * 255).max() <= 0.5


@pytest.mark.parametrize("name", ["a.png", "a.tif", "a.pgm"])
def test_few_bits_in_16_are_refused_and_not_made_nearly_black(tmp_path, name):
    values = np.arange(0, 16384, 64, np.uint16).reshape(16, 16)  # of a camera of 14 bits
    with pytest.raises(
        PictureError, match=r"16 bits are all in the lowest quarter.*--value-range, as 0 4095., or save it with 8 bits"
    ):
        read_picture(save(tmp_path, values, name), 1)
    for sound in (4 * values, 0 * values):
        found = read_picture(save(tmp_path, sound, name), 1)
        np.testing.assert_array_equal(found, (sound / 257).round())


def test_few_bits_in_16_of_each_colour_are_refused(tmp_path):
    for top, fits in ((4095, False), (16383, False), (65535, True), (0, True)):
        values = np.linspace(0, top, 8 * 8 * 3).round().astype("<u2").reshape(8, 8, 3)
        tags = {258: (16, 16, 16), 262: (2,), 277: (3,)}
        (tmp_path / "a.tif").write_bytes(raw_tiff(values.tobytes(), (8, 8), tags))
        rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
        (tmp_path / "a.png").write_bytes(png(8, 8, 16, 2, rows))
        for name in ("a.tif", "a.png"):
            if fits:
                found = read_picture(tmp_path / name, 3).transpose(1, 2, 0)
                assert np.abs(found - values / 257).max() < 1, name
            else:
                with pytest.raises(PictureError, match="all in the lowest quarter"):
                    read_picture(tmp_path / name, 3)


def test_largest_number_of_a_ppm_is_white(tmp_path):
    for top, kind in ((100, "u1"), (4095, ">u2"), (1000, ">u2")):
        values = np.linspace(0, top, 60).round().astype(kind)
        (tmp_path / "a.pgm").write_bytes(b"P5 # by hand\n10 6 %d\n" % top + values.tobytes())
        expected = (values.astype(float) * 255 / top).reshape(6, 10)
        assert np.abs(read_picture(tmp_path / "a.pgm", 1) - expected).max() <= 0.5
        (tmp_path / "a.ppm").write_bytes(b"P6 10 2 %d\n" % top + values.tobytes())
        assert np.abs(read_picture(tmp_path / "a.ppm", 3).transpose(1, 2, 0).ravel() - expected.ravel()).max() <= 0.5
        (tmp_path / "a.pgm").write_bytes(b"P2 10 6 %d\n" % top + b" ".join(b"%d" % value for value in values))
        assert np.abs(read_picture(tmp_path / "a.pgm", 1) - expected).max() <= 0.5
        (tmp_path / "a.pgm").write_bytes(b"P5 10 6 %d\n" % top + values.tobytes()[:-1])
        with pytest.raises(PictureError, match="cannot be read"):
            read_picture(tmp_path / "a.pgm", 1)


def test_large_ppm_of_any_largest_number_is_read_quickly(tmp_path):
    (tmp_path / "a.pgm").write_bytes(b"P5 2000 2000 254\n" + bytes(4_000_000))
    started = time.process_time()
    read_picture(tmp_path / "a.pgm", 1)
    assert time.process_time() - started < 1  # Pillow's reader takes several


@pytest.mark.parametrize(
    ("dtype", "low", "high", "photometric"),
    [
        (np.uint16, 0, 4095, 1), (np.uint16, 100, 3000, 1), (np.uint16, 0, 4095, 0), (np.int16, -500, 1500, 1),
        (np.int32, -70_000, 70_000, 1), (np.uint32, 0, 4_000_000_000, 1), (np.float32, 0.0, 1.0, 1),
        (np.float32, -2.5, 7.5, 1), (np.float32, -2.5, 7.5, 0), (np.int8, -100, 100, 1),
    ],
)  # fmt: skip
def test_numbers_between_black_and_white_are_scaled_and_the_others_cut_off(tmp_path, dtype, low, high, photometric):
    values = np.linspace(low - (high - low) / 8, high + (high - low) / 8, 97)[:96].reshape(8, 12)
    if np.issubdtype(dtype, np.integer):
        values = values.clip(np.iinfo(dtype).min, np.iinfo(dtype).max).round()
    values = values.astype(dtype)
    kind = {"u": 1, "i": 2, "f": 3}[values.dtype.kind]
    tags = {258: (values.dtype.itemsize * 8,), 262: (photometric,), 277: (1,), 339: (kind,)}
    (tmp_path / "a.tif").write_bytes(raw_tiff(values.tobytes(), values.shape, tags))
    share = ((values.astype(np.float64) - low) / (high - low)).clip(0, 1)
    expected = 255 * (share if photometric else 1 - share)
    assert np.abs(read_picture(tmp_path / "a.tif", 1, value_range=(low, high)) - expected).max() <= 0.5 + 1e-6
    colours = read_picture(tmp_path / "a.tif", 3, value_range=(low, high))
    np.testing.assert_array_equal(colours[0], colours[2])


def test_range_leaves_pictures_of_8_bits_alone_and_helps_those_of_16(tmp_path, photo):
    for name in ("a.png", "a.tif", "a.ppm"):
        path = save(tmp_path, photo, name)
        np.testing.assert_array_equal(read_picture(path, 3, value_range=(0, 4095)), read_picture(path, 3))
    values = np.arange(0, 4096, 16, np.uint16).reshape(16, 16)
    for name in ("a.png", "a.tif", "a.pgm"):
        found = read_picture(save(tmp_path, values, name), 1, value_range=(0, 4095))
        assert np.abs(found - values / 4095 * 255).max() <= 0.5
        assert len(np.unique(found)) > 250


@pytest.mark.parametrize("bits", [12, 16])
def test_range_helps_colours_of_16_bits(tmp_path, bits, monkeypatch):
    tifffile, top = pytest.importorskip("tifffile"), 2**bits - 1
    values = np.random.default_rng(0).integers(0, top + 1, (16, 20, 3)).astype(np.uint16)
    tifffile.imwrite(tmp_path / "a.tif", values, photometric="rgb")
    expected = values.transpose(2, 0, 1) / top * 255
    assert np.abs(read_picture(tmp_path / "a.tif", 3, value_range=(0, top)) - expected).max() <= 0.5 + 1e-6
    monkeypatch.setattr(pictures, "find_spec", lambda name: None)  # by Pillow, from the upper 8 bits
    assert np.abs(read_picture(tmp_path / "a.tif", 3, value_range=(0, top)) - expected).max() <= 255 * 256 / top + 1


def test_range_that_is_none_is_named(tmp_path, photo):
    path = save(tmp_path, photo)
    for wrong in ((1, 1), (5, 2), (0,), (0, 1, 2), (0, float("nan")), (0, float("inf"))):
        with pytest.raises(ValueError, match="`value_range"):
            read_picture(path, 1, value_range=wrong)
    with pytest.raises(TypeError, match="`value_range"):
        read_picture(path, 1, value_range=7)
    holes = np.full((4, 4), np.nan, np.float32)
    with pytest.raises(PictureError, match="some of its numbers are infinite or none at all"):
        read_picture(save(tmp_path, holes, "a.tif"), 1, value_range=(0, 1))


def test_numbers_whose_white_is_not_known_are_refused(tmp_path):
    for dtype, what in ((np.int32, "numbers of 32 bits|signed numbers"), (np.float32, "fractions")):
        with pytest.raises(PictureError, match=rf"a\.tif cannot be read: it has ({what}) and does not say which are"):
            read_picture(save(tmp_path, np.ones((4, 4), dtype), "a.tif"), 1)
    save(tmp_path, np.ones((4, 4), np.float32), "a.pfm")
    with pytest.raises(PictureError, match="numbers of 32 bits and does not say"):
        read_picture(tmp_path / "a.pfm", 1)
    for bits, kind in ((8, "i1"), (16, "<i2")):
        values = np.arange(-8, 8).astype(kind).tobytes()
        (tmp_path / "a.tif").write_bytes(raw_tiff(values, (4, 4), {258: (bits,), 262: (1,), 277: (1,), 339: (2,)}))
        with pytest.raises(PictureError, match="it has signed numbers and does not say which are black and white"):
            read_picture(tmp_path / "a.tif", 1)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("name", ["a.jpg", "a.png", "a.webp", "a.tif"])
def test_rotation_noted_by_the_camera_is_done(tmp_path, photo, orientation, name):
    seen = photo[..., 0]
    # What the sensor saw, so that the noted change shows `seen`: 2 is mirrored, 3 turned by a half, ...
    stored = {
        1: seen, 2: seen[:, ::-1], 3: seen[::-1, ::-1], 4: seen[::-1], 5: seen.T,
        6: np.rot90(seen), 7: seen[::-1, ::-1].T, 8: np.rot90(seen, -1),
    }[orientation]  # fmt: skip
    exif = Image.Exif()
    exif[0x0112] = orientation
    colours = np.ascontiguousarray(np.stack([stored] * 3, 2))
    path = save(tmp_path, colours, name, exif=exif, quality=100, lossless=True)
    found = read_picture(path, 1)
    assert found.shape == seen.shape
    assert np.abs(found.astype(int) - seen).max() <= 4


@pytest.mark.parametrize(
    ("name", "what"), [("a.gif", "frames"), ("a.webp", "frames"), ("a.png", "frames"), ("pages.tif", "pages .planes")]
)
def test_several_frames_or_pages_are_refused(tmp_path, name, what):
    first, *others = (Image.new("RGB", (12, 8), colour) for colour in ("red", "blue", "green"))
    path = save(tmp_path, first, name, save_all=True, append_images=others, lossless=True)
    with pytest.raises(PictureError, match=rf"it has several {what}.*save the one that you mean as a file of its own"):
        read_picture(path, 3)
    path = save(tmp_path, first, name, save_all=True, lossless=True)  # one is no trouble
    assert tuple(read_picture(path, 3)[:, 0, 0]) == (255, 0, 0)


@pytest.mark.parametrize("order", [1, -1])
def test_copies_in_other_sizes_and_masks_are_no_pages(tmp_path, order):
    pages = [Image.new("L", (16, 8), 200), Image.new("L", (8, 4), 10), Image.new("L", (16, 8), 20)]
    for page, kind in zip(pages, (0, 1, 4), strict=True):
        page.encoderinfo = {"tiffinfo": {254: kind}}
    first, *others = pages[::order]
    save(tmp_path, first, "a.tif", save_all=True, append_images=others, tiffinfo={254: 0 if order == 1 else 4})
    with Image.open(tmp_path / "a.tif") as image:
        assert image.n_frames == 3
    assert read_picture(tmp_path / "a.tif", 1).tolist() == [[200] * 16] * 8


def test_many_copies_in_other_sizes_take_no_time(tmp_path):
    tags = {254: 1, 256: 1, 257: 1, 258: 8, 259: 1, 262: 1, 273: 8, 277: 1, 278: 1, 279: 1}
    entries = b"".join(struct.pack("<HHIHH", tag, 3, 1, value, 0) for tag, value in tags.items())
    length = 2 + len(entries) + 4
    pages = [struct.pack("<H", len(tags)) + entries + struct.pack("<I", 16 + (i + 1) * length) for i in range(20_000)]
    (tmp_path / "a.tif").write_bytes(struct.pack("<2sHI8x", b"II", 42, 16) + b"".join(pages)[:-4] + bytes(4))
    started = time.process_time()
    with pytest.raises(PictureError, match="it has several pages"):
        read_picture(tmp_path / "a.tif", 1)
    assert time.process_time() - started < 1


def test_planes_that_do_not_show_as_pages_are_refused(tmp_path):
    described = {270: "ImageJ=1.54f\nimages=5\nslices=5\n"}  # above 4 GB ImageJ writes one page
    with pytest.raises(PictureError, match="it has 5 planes, and a picture has one"):
        read_picture(save(tmp_path, Image.new("L", (4, 4)), "a.tif", tiffinfo=described), 1)
    single = {270: "ImageJ=1.54f\nimages=1\n"}
    assert not read_picture(save(tmp_path, Image.new("L", (4, 4)), "a.tif", tiffinfo=single), 1).any()
    for count, photometric in ((2, 1), (4, 2), (5, 2)):
        extra = (0,) * (count - {1: 1, 2: 3}[photometric])
        tags = {258: (8,) * count, 262: (photometric,), 277: (count,), 338: extra}
        (tmp_path / "a.tif").write_bytes(raw_tiff(bytes(16 * count), (4, 4), tags))
        with pytest.raises(PictureError, match=f"it has {count} planes, and of some it does not say what they show"):
            read_picture(tmp_path / "a.tif", 1)


def progressive(side, repeats=0, **options):
    """A progressive JPEG whose last scan comes so many more times."""
    stream = io.BytesIO()
    Image.new("L", (side, side), 90).save(stream, "JPEG", progressive=True, **options)
    content = stream.getvalue()
    scan, end = content.rindex(b"\xff\xda"), content.rindex(b"\xff\xd9")
    return content[:end] + content[scan:end] * repeats + content[end:]


def test_jpeg_of_many_scans_is_refused_quickly(tmp_path):
    (tmp_path / "bomb.jpg").write_bytes(progressive(4000, 1000))
    started = time.process_time()
    with pytest.raises(PictureError, match=r"it is a JPEG of 1,00\d scans, and the limit is 32: save it anew"):
        read_picture(tmp_path / "bomb.jpg", 3)
    assert time.process_time() - started < 1
    with pytest.raises(PictureError, match=r"^the picture cannot be read: it is a JPEG of"):
        read_picture(io.BytesIO(progressive(16, 100)), 1)


def test_scans_of_a_thumbnail_and_what_follows_a_jpeg_do_not_count(tmp_path):
    thumbnail = progressive(16, 40)
    comment = b"\xff\xfe" + (len(thumbnail) + 2).to_bytes(2) + thumbnail
    (tmp_path / "a.jpg").write_bytes(progressive(40)[:2] + comment + progressive(40, 5)[2:] + thumbnail)
    assert np.abs(read_picture(tmp_path / "a.jpg", 1).astype(int) - 90).max() <= 1


def by_hand(picture, size, fit):
    """What a canvas must show of a picture that needs no resizing, pixel by pixel."""
    height, width = picture.shape[:2]
    cut = np.array(picture)
    for axis, room in enumerate(size):
        surplus = cut.shape[axis] - room
        if surplus > 0:
            cut = np.take(cut, range(surplus // 2, surplus // 2 + room), axis)
    height, width = cut.shape[:2]
    edge = [cut[y, x] for y in range(height) for x in range(width) if y in (0, height - 1) or x in (0, width - 1)]
    canvas = np.empty((*size, *picture.shape[2:]))
    canvas[:] = np.mean(edge, axis=0).round()
    top, left = (size[0] - height) // 2, (size[1] - width) // 2
    canvas[top : top + height, left : left + width] = cut
    return canvas


@pytest.mark.parametrize("size", [(40, 60), (64, 64), (41, 75), (41, 60)])
@pytest.mark.parametrize("fit", ["pad", "crop"])
def test_picture_that_fits_keeps_its_pixels_and_is_centred(tmp_path, photo, size, fit):
    path = save(tmp_path, photo)
    np.testing.assert_array_equal(read_picture(path, 3, size, fit).transpose(1, 2, 0), by_hand(photo, size, fit))
    path = save(tmp_path, photo[..., 1])
    np.testing.assert_array_equal(read_picture(path, 1, size, fit), by_hand(photo[..., 1], size, fit))


@pytest.mark.parametrize("size", [(20, 30), (17, 64), (50, 31), (1, 1)])
def test_crop_keeps_the_scale_of_a_larger_picture(tmp_path, photo, size):
    found = read_picture(save(tmp_path, photo), 3, size, "crop")
    np.testing.assert_array_equal(found.transpose(1, 2, 0), by_hand(photo, size, "crop"))


def test_pad_shrinks_a_larger_picture_until_all_of_it_fits(tmp_path):
    fine = (np.indices((400, 800)).sum(0) % 2 * 255).astype(np.uint8)  # a chessboard of pixels: grey from afar
    found = read_picture(save(tmp_path, fine), 1, (64, 64))
    assert np.abs(found[16:48].astype(int) - 127.5).max() < 5  # without anti-aliasing it would be black and white
    bars = np.zeros((400, 800), np.uint8)
    bars[:, 400:] = 200
    found = read_picture(save(tmp_path, bars), 1, (64, 64))
    assert np.abs(found[16:48, :30]).max() <= 2
    assert np.abs(found[16:48, 34:].astype(int) - 200).max() <= 2
    assert len(np.unique(found[:16])) == 1  # one colour above: the border's mean
    assert 90 <= found[0, 0] <= 110


@pytest.mark.parametrize("fit", ["pad", "resize"])
@pytest.mark.parametrize("orientation", [1, 6])
def test_large_photograph_is_decoded_small_and_shows_the_same(tmp_path, fit, orientation):
    noise = np.random.default_rng(0).integers(0, 256, (12, 16, 3), np.uint8)
    large = Image.fromarray(noise).resize((503, 380), Image.Resampling.BICUBIC)
    exif = Image.Exif()
    exif[0x0112] = orientation
    for options in ({}, {"format": "MPO", "save_all": True, "append_images": [large]}):  # as telephones write them
        jpeg = save(tmp_path, large, "a.jpg", quality=95, exif=exif, **options)
        png = save(tmp_path, large, "a.png", exif=exif)
        found, expected = (read_picture(path, 3, (24, 32), fit).astype(int) for path in (jpeg, png))
        assert np.abs(found - expected).max() <= 16  # at the edge: 503 pixels are no multiple of a JPEG's blocks
        assert np.abs(found - expected).mean() < 2


def test_resize_covers_the_canvas_and_cuts_the_centre(tmp_path):
    bars = np.zeros((100, 300), np.uint8)
    bars[:, 100:200] = 200
    found = read_picture(save(tmp_path, bars), 1, (50, 50), "resize")
    assert np.abs(found[:, 1:-1].astype(int) - 200).max() <= 2
    small = np.arange(16, dtype=np.uint8).reshape(4, 4) * 16
    enlarged = read_picture(save(tmp_path, small), 1, (8, 8), "resize")
    assert np.abs(enlarged.reshape(4, 2, 4, 2).mean((1, 3)) - small)[1:-1, 1:-1].max() < 4
    np.testing.assert_array_equal(read_picture(save(tmp_path, small), 1, (4, 4), "resize"), small)


@pytest.mark.parametrize("fit", FITS)
@pytest.mark.parametrize("shape", [(1, 1), (1, 20_000), (20_000, 1), (2, 3), (1, 2)])
def test_pixel_and_thread_fill_a_canvas(tmp_path, shape, fit):
    path = save(tmp_path, np.full(shape, 77, np.uint8), "a.png")
    assert np.abs(read_picture(path, 3, (32, 48), fit).astype(int) - 77).max() == 0
    assert read_picture(path, 1).shape == shape


def png(width, height, bits, colour, rows):
    """A PNG, written by hand."""

    def chunk(kind, content):
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("width", "height", "message"),
    [
        (50_000, 50_000, r"more than 64 megapixels \(2,500 of them\): cut it into pieces"),
        (8_000, 8_001, r"it has 8,000 x 8,001 pixels, and the limit is 64 megapixels"),
        (8_000, 8_000, r"cannot be read: (?!.*limit)"),  # within the limit, but its pixels are missing
    ],
)
def test_number_of_pixels_is_limited_by_the_header(tmp_path, width, height, message):
    (tmp_path / "bomb.png").write_bytes(png(width, height, 8, 2, bytes(100)))
    with pytest.raises(PictureError, match=rf"bomb\.png cannot be read: .*{message}|{message}"):
        read_picture(tmp_path / "bomb.png", 3)


def test_tile_and_file_that_are_too_large_are_refused(tmp_path, photo, monkeypatch):
    tags = {256: 8, 257: 8, 258: 8, 259: 1, 262: 1, 277: 1, 322: 60_000, 323: 60_000, 324: 200, 325: 64}
    entries = b"".join(struct.pack("<HHIHH", tag, 3, 1, value, 0) for tag, value in tags.items())
    tiled = struct.pack("<2sHIH", b"II", 42, 8, len(tags)) + entries + bytes(4)
    (tmp_path / "a.tif").write_bytes(tiled + bytes(1000))
    with pytest.raises(PictureError, match=r"it has 60,000 x 60,000 pixels"):
        read_picture(tmp_path / "a.tif", 1)
    monkeypatch.setattr(pictures, "MOST_BYTES", 100)
    with pytest.raises(PictureError, match=r"bytes, and the limit is 100"):
        read_picture(save(tmp_path, photo), 1)


def encoded(kind, **options):
    stream, noise = io.BytesIO(), np.random.default_rng(0).integers(0, 256, (90, 90, 3), np.uint8)
    Image.fromarray(noise).save(stream, kind, **options)
    return stream.getvalue()


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "TIFF", "WEBP", "GIF", "BMP", "PPM"])
@pytest.mark.parametrize("share", [0.02, 0.3, 0.9])
def test_truncated_file_is_refused(tmp_path, kind, share):
    whole = encoded(kind)
    path = tmp_path / "half.png"
    path.write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(PictureError, match=r"half\.png cannot be read: "):
        read_picture(path, 3, (32, 32))


def test_damaged_file_gives_pixels_or_a_picture_error(tmp_path):
    draw = np.random.default_rng(0)
    path = tmp_path / "damaged.png"
    for kind in ("PNG", "JPEG", "TIFF", "WEBP", "GIF", "BMP", "PPM"):
        whole = np.frombuffer(encoded(kind), np.uint8)
        for _ in range(40):
            damaged = whole.copy()
            damaged[draw.integers(0, min(len(whole), 400), 3)] = draw.integers(0, 256, 3)
            path.write_bytes(damaged.tobytes())
            with suppress(PictureError):  # any other error fails
                assert read_picture(path, 3, (16, 16)).shape == (3, 16, 16)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"hello",
        b"<svg xmlns='http://www.w3.org/2000/svg' width='9' height='9'/>",
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n",
        b"%PDF-1.4\n",
        b"\x59\xa6\x6a\x95" + bytes(28),  # of another format that Pillow reads: Sun raster
    ],
)
def test_other_files_are_refused_whatever_their_name(tmp_path, content):
    (tmp_path / "x.png").write_bytes(content)
    with pytest.raises(
        PictureError, match=r"x\.png cannot be read: it is not a PNG, JPEG, TIFF, WebP, GIF, BMP or PPM file, or one of"
    ):
        read_picture(tmp_path / "x.png", 3)


def test_what_is_not_a_regular_file_is_refused_without_waiting(tmp_path):
    os.mkfifo(tmp_path / "pipe.png")
    for path in (tmp_path, tmp_path / "pipe.png", "/dev/zero"):
        with pytest.raises(PictureError, match="it is not a regular file"):
            read_picture(path, 1)
    with pytest.raises(PictureError, match=r"none\.png cannot be read: No such file"):
        read_picture(tmp_path / "none.png", 1)
    with pytest.raises(PictureError, match="null"):
        read_picture("a\0.png", 1)


def test_arguments_are_checked(tmp_path, photo):
    path = save(tmp_path, photo)
    with pytest.raises(ValueError, match=r"`channels` must be 1 \(grey\) or 3 \(colour\) \(got 2\)"):
        read_picture(path, 2)
    with pytest.raises(ValueError, match="`size` must be at least 1"):
        read_picture(path, 1, (0, 4))
    with pytest.raises(ValueError, match=r"`fit` must be .*'pad'.*got 'pat'"):
        read_picture(path, 1, (4, 4), "pat")


def test_pixels_are_the_callers_own(tmp_path, photo):
    for channels in (1, 3):
        found = read_picture(save(tmp_path, photo), channels)
        assert found.flags.writeable
        assert found.flags.c_contiguous


def test_pictures_of_a_folder_are_found_once_and_in_order(tmp_path, caplog):
    names = ["b/1.png", "a/ä 2.JPG", "a/10.tif", "c.webp", "a/deep/x.gif", ".hidden/x.png", "a/._10.tif", "notes.txt"]
    for name in (*names, "a/README", "photo.HEIC"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "a/deep/loop").symlink_to(tmp_path, target_is_directory=True)
    (tmp_path / "z").symlink_to(tmp_path / "b", target_is_directory=True)
    (tmp_path / "broken.png").symlink_to(tmp_path / "none.png")  # is named when it is read
    found = [str(path.relative_to(tmp_path)) for path in find_pictures(tmp_path)]
    assert found == ["a/10.tif", "a/deep/x.gif", "a/ä 2.JPG", "b/1.png", "broken.png", "c.webp"]
    (line,) = caplog.messages
    assert line == f"{tmp_path}: 3 files are left out, which do not end as pictures do (.heic, .txt, README)"
    with pytest.raises(OSError, match="none"):
        find_pictures(tmp_path / "none")


def test_an_open_file_is_read_like_one_with_a_name(tmp_path):
    path = tmp_path / "picture.png"
    Image.effect_noise((30, 20), 60).save(path)
    assert np.array_equal(read_picture(io.BytesIO(path.read_bytes()), 1), read_picture(path, 1))
    with pytest.raises(PictureError, match=r"^the picture cannot be read"):
        read_picture(io.BytesIO(path.read_bytes()[:50]), 1)


@pytest.mark.parametrize("size", [(300, 200), (30, 20), (640, 100)])
def test_the_factor_is_by_how_much_a_picture_was_resized(tmp_path, size):
    path = tmp_path / "x.jpg"
    Image.new("RGB", size, "red").save(path)
    expected = {"pad": min(1, 64 / size[0], 32 / size[1]), "resize": max(64 / size[0], 32 / size[1])}
    for fit in ("pad", "crop", "resize", "keep"):
        pixels, factor, _ = read_scaled(path, 3, (32, 64), fit)
        assert factor == pytest.approx(expected.get(fit, 1.0), rel=0.02)  # a JPEG's draft has whole pixels
        assert find_factor(path, (32, 64), fit) == pytest.approx(expected.get(fit, 1.0))
        assert pixels.shape[1:] == ((max(32, size[1]), max(64, size[0])) if fit == "keep" else (32, 64))
    turned = Image.Exif()
    turned[274] = 6
    Image.new("RGB", size, "red").save(path, exif=turned)
    assert find_factor(path, (32, 64), "pad") == pytest.approx(min(1, 64 / size[1], 32 / size[0]))
    assert read_scaled(path, 3, (32, 64), "pad")[1] == pytest.approx(min(1, 64 / size[1], 32 / size[0]), rel=0.02)
    assert find_factor(tmp_path / "none.png", (32, 64), "pad") is None
