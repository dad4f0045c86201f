"""The third tab: several digits of any sizes are found, named and measured."""

import base64
import io

import pytest
from PIL import Image

from tests.app.drawings import to_bytes


@pytest.fixture
def page(visit, model):
    if not model.describe()["finder"]:
        pytest.skip("the network that finds digits does not come with the package")
    page = visit("many")
    page.wait_for_selector("#objects li")  # it begins with some
    return page


def sample(model, label):
    address = model.describe()["samples"][label]["picture"]
    return Image.open(io.BytesIO(base64.b64decode(address.split(",")[1]))).convert("L")


def opened(page, picture):
    page.click("#pad-many [data-do=clear]")
    assert page.locator("#objects li").count() == 0
    file = {"name": "digits.png", "mimeType": "image/png", "buffer": to_bytes(picture)}
    page.set_input_files("#pad-many input[type=file]", file)


def test_it_begins_with_scattered_digits(page):
    count = page.locator("#objects li").count()
    assert count >= 3
    assert page.inner_text("#found") == f"{count} things found."
    assert page.locator("#boxes rect:not(.tag)").count() == count


def test_digits_of_two_sizes_are_named_placed_and_measured(page, model):
    picture = Image.new("L", (256, 256))
    picture.paste(sample(model, 7).resize((112, 112), Image.Resampling.BICUBIC), (10, 10))
    picture.paste(sample(model, 3), (200, 200))
    opened(page, picture)
    page.wait_for_selector("text=2 things found.")
    said = sorted(page.locator("#objects li").all_inner_texts())
    assert [line.split(",")[0] for line in said] == ["3", "7"]
    sizes = [float(line.split(",")[1].split()[0]) for line in said]
    assert 0.6 < sizes[0] < 1.5
    assert 2.8 < sizes[1] < 5.2
    assert [line.split(",")[2].strip() for line in said] == ["bottom right", "top left"]


def test_what_is_no_digit_is_nothing_that_it_knows(page):
    opened(page, Image.effect_noise((256, 256), 100))
    page.wait_for_selector("#found:has-text('Nothing that I know.')")


def test_a_drawing_is_added_to_what_is_there(page):
    page.click("#pad-many [data-do=clear]")
    page.locator("#pen").fill("6")
    page.focus("#pad-many canvas")
    for key in ["Space", *["ArrowDown"] * 5, "Space"]:  # a 1
        page.keyboard.press(key)
    page.wait_for_selector("#objects li")
    assert page.inner_text("#objects li").startswith("1,")
