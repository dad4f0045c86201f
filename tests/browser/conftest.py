"""The demo's page in a real browser: Debian's chromium, or another that CHROMIUM names, by Playwright."""

import pytest

from scalesteer.app.demo import DemoModel
from tests.browser.serving import CHROMIUM, MINUTES, WATCH, Serving

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")


@pytest.fixture(scope="session")
def browser():
    if CHROMIUM is None:
        pytest.skip("there is no chromium here (apt install chromium, or set CHROMIUM)")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def model():
    return DemoModel("digits")


@pytest.fixture(scope="session")
def url(model):
    serving = Serving(model)
    yield serving.url
    serving.stop()


@pytest.fixture
def visit(browser, url):
    """Open a tab of the page, ready; whatever it says on the console is an error, as is a request to elsewhere."""
    opened = []

    def open_page(tab="steering", address=url, **options):
        options = {"viewport": {"width": 1200, "height": 900}, "reduced_motion": "reduce"} | options
        context = browser.new_context(**options)
        context.add_init_script(WATCH)
        page = context.new_page()
        page.set_default_timeout(5 * MINUTES)
        page.problems = []
        page.on("console", lambda message: page.problems.append(message.text))
        page.on("pageerror", lambda error: page.problems.append(str(error)))

        def local(request):
            if not request.url.startswith((address, "data:", "blob:")):
                page.problems.append(request.url)

        page.on("request", local)
        page.goto(f"{address}/#{tab}")
        page.wait_for_function("() => document.body.dataset.ready")
        opened.append((context, page))
        return page

    yield open_page
    for context, page in opened:
        context.close()
        assert page.problems == []
