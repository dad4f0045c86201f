"""The demo's page in a real browser: Debian's chromium, or another that CHROMIUM names, by Playwright.

With SCREENSHOT=FILE.png the page is also drawn there, as README shows it.
"""

import os
import shutil
import threading

import pytest
from PIL import Image

from scalesteer.app.demo import DemoModel, DemoServer
from tests.app.drawings import draw_seven, to_bytes

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, ("chromium", "google-chrome"))), None)
if CHROMIUM is None:
    pytest.skip("there is no chromium here (apt install chromium, or set CHROMIUM)", allow_module_level=True)


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def url():
    with DemoServer(DemoModel("digits")) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield server.url
        server.shutdown()
        thread.join()


@pytest.fixture
def page(browser, url):
    """The page, ready; whatever it says on the console is an error, as is a request to anywhere else."""
    page = browser.new_page(viewport={"width": 1200, "height": 900})
    page.set_default_timeout(300_000)
    problems = []
    page.on("console", lambda message: problems.append(message.text))
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("request", lambda request: request.url.startswith((url, "data:", "blob:")) or problems.append(request.url))
    page.goto(url)
    page.wait_for_selector("text=knows 10 classes")
    page.problems = problems
    yield page
    page.close()
    assert not problems


def answers(page):
    return page.locator("#answers .named").all_inner_texts()


def settled(page):
    """Wait until the page shows the answers and the curve of the present picture at the present size."""
    page.wait_for_selector("#curve-section:not([hidden])")
    page.wait_for_function("() => document.querySelector('#answers .named') && !document.querySelector('.busy')")


def resize(page, octaves):
    page.locator("#size").fill(str(octaves))  # as a hand on the slider: an event of input
    page.wait_for_selector("#answers.busy")
    settled(page)


def test_an_example_is_recognised_at_every_size_only_with_more_sizes(page):
    page.click("#example")
    settled(page)
    assert answers(page) == ["3", "3", "3"]
    assert page.input_value("#label") == "3"
    resize(page, 1.5)
    assert page.inner_text("#size-shown") == "2.83 times its size"
    assert page.inner_text("#view-size") == "What the network gets: 79 x 79 pixels."
    one, _, more = answers(page)
    assert more == "3" != one
    assert page.locator("#channels tbody tr").count() == 8
    assert page.locator("#curve path").count() == 3
    heights = {page.locator("#view").evaluate("image => image.clientHeight")}
    resize(page, 2)
    if "SCREENSHOT" in os.environ:
        resize(page, 1.6)
        area = {"x": 0, "y": 0, "width": 1200, "height": 1220}
        page.screenshot(path=os.environ["SCREENSHOT"], clip=area, full_page=True)
        resize(page, 2)
    heights.add(page.locator("#view").evaluate("image => image.clientHeight"))
    assert len(heights) == 2
    assert max(heights) <= 240


def test_a_drawing_by_hand_is_recognised_and_can_be_wiped(page):
    box = page.locator("#paper").bounding_box()
    points = [(box["x"] + 2.8 * x, box["y"] + 2.8 * y) for x, y in ((26, 24), (74, 24), (58, 52), (46, 84))]
    page.mouse.move(*points[0])
    page.mouse.down()
    for point in points[1:]:
        page.mouse.move(*point, steps=8)
    page.mouse.up()
    settled(page)
    assert answers(page) == ["7", "7", "7"]
    page.click("#clear")
    assert answers(page) == []
    assert page.locator("#curve-section").is_hidden()
    assert page.locator("#channels-section").is_hidden()


def test_a_picture_can_be_opened_and_what_is_none_is_named(page, tmp_path):
    picture, blank, text = tmp_path / "seven.png", tmp_path / "blank.png", tmp_path / "text.txt"
    picture.write_bytes(to_bytes(draw_seven("black", "white")))
    blank.write_bytes(to_bytes(Image.new("L", (100, 100))))
    text.write_text("no picture")
    page.set_input_files("#file", picture)
    settled(page)
    assert answers(page)[-1] == "7"
    assert "dark on light" in page.inner_text("#message")
    assert page.locator("#upload").is_visible()
    page.set_input_files("#file", text)
    assert page.inner_text("#message") == "The picture must be a PNG or JPEG file."
    page.set_input_files("#file", blank)
    page.wait_for_selector("#message:has-text('blank')")
    assert answers(page) == []
    # The browser itself notes each refused request on its console.
    assert all("422" in problem for problem in page.problems)
    page.problems.clear()


def test_another_class_can_be_followed_and_the_page_fits_a_phone(page):
    page.click("#example")
    settled(page)
    resize(page, 2)
    before = page.locator("#curve path").first.get_attribute("d")
    other = next(v for v in page.locator("#label option").evaluate_all("all => all.map(one => one.value)") if v != "3")
    page.select_option("#label", other)
    assert page.locator("#curve path").first.get_attribute("d") != before
    page.set_viewport_size({"width": 360, "height": 740})
    assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")
    assert page.locator("#size").evaluate("slider => slider.matches(':disabled')") is False


@pytest.mark.parametrize("delay", [0, 60, 150, 400])
def test_the_slider_may_move_while_another_picture_is_looked_at(page, delay):
    page.click("#example")
    settled(page)
    page.route("**/curve", lambda route: (page.wait_for_timeout(300), route.continue_()))
    page.click("#example")  # a 7
    page.wait_for_timeout(delay)
    page.locator("#size").fill("1.5")
    page.wait_for_selector("text=79 x 79 pixels")
    settled(page)
    assert answers(page)[-1] == "7"
    assert page.inner_text("#size-shown") == "2.83 times its size"
    assert page.input_value("#label") == "7"


def test_the_plot_of_another_picture_goes_at_once(page):
    page.click("#example")
    settled(page)
    held = []
    page.route("**/curve", lambda route: held.append(route))
    seven = {"name": "seven.png", "mimeType": "image/png", "buffer": to_bytes(draw_seven())}
    page.set_input_files("#file", seven)
    page.wait_for_function("() => document.querySelector('#answers .named')?.textContent === '7'")
    assert page.locator("#curve-section").is_hidden()
    while not held:
        page.wait_for_timeout(50)
    held.pop().continue_()
    settled(page)
    assert page.input_value("#label") == "7"


def test_what_was_cleared_does_not_come_back(page):
    page.evaluate("() => { document.getElementById('example').click(); document.getElementById('clear').click(); }")
    page.wait_for_timeout(800)
    assert answers(page) == []
    assert page.locator("#curve-section").is_hidden()
    assert page.locator("#view").is_hidden()


def test_a_plot_that_fails_leaves_the_answers(page):
    page.route("**/curve", lambda route: route.fulfill(status=503, json={"error": "too many pictures at once."}))
    page.click("#example")
    page.wait_for_selector("#message:has-text('The plot could not be made. too many')")
    assert answers(page) == ["3", "3", "3"]
    assert all("503" in problem for problem in page.problems)
    page.problems.clear()


def test_the_slider_says_its_name_and_its_value(page):
    page.locator("#size").fill("1")
    slider = page.get_by_role("slider", name="2. Its size")
    assert slider.get_attribute("aria-valuetext") == "2.00 times its size"


def test_a_server_that_has_gone_is_named(browser):
    with DemoServer(DemoModel("digits")) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        page = browser.new_page()
        page.goto(server.url)
        page.wait_for_selector("text=knows 10 classes")
        server.shutdown()
        thread.join()
    page.click("#example")
    page.wait_for_selector("#message:has-text('does not answer')")
    assert answers(page) == []
    page.close()
