"""The page without a server: its JavaScript says of pictures what the package says, to a thousandth of a logit."""

import base64
import json
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from docs.page import build
from scalesteer.app.demo import DemoModel, finder
from scalesteer.app.demo.asking import hear
from tests.app.drawings import draw_seven, to_bytes

PAGE = Path(build.__file__).parent
SIZES = (0.5, 1.0, 1.41, 2.83)
NUMBERS = """
import { readFileSync } from "node:fs";
import * as numbers from "./numbers.js";
const listed = ({ data, ...rest }) => ({ ...rest, data: Array.from(data) });
const { pictures, sizes, judged } = JSON.parse(readFileSync(0));
console.log(JSON.stringify(pictures.map(({ rgba, width, height }) => {
  const grey = numbers.toGrey(Uint8Array.from(Buffer.from(rgba, "base64")), width, height);
  const x = numbers.fitDrawing(grey, 28, 28);
  return {
    grey: listed(grey), drawing: listed(x), sizes: sizes.map((size) => listed(numbers.atSize(x, size))),
    judged: listed(numbers.atUsualSize(numbers.readLight(grey), judged)),
  };
})));
"""
ANSWERS = """
import { readFileSync } from "node:fs";
import * as ort from "./ort.wasm.min.mjs";
import { Answers } from "./answers.js";
import { toGrey } from "./numbers.js";
ort.env.wasm.numThreads = 1;
ort.env.wasm.wasmPaths = new URL("./", import.meta.url).href;
const { pictures, sizes, told, curve } = JSON.parse(readFileSync(0)), sessions = {};
const answers = new Answers(async (name, { data, height, width }) => {
  sessions[name] ??= await ort.InferenceSession.create(readFileSync(`${name}.onnx`), { executionProviders: ["wasm"] });
  const found = await sessions[name].run({ images: new ort.Tensor("float32", data, [1, 1, height, width]) });
  return { logits: found.logits.data, sizes: found.sizes?.data, dims: found.logits.dims.slice(1) };
}, told);
if (!told.finder) answers.judge = async () => ({}); // which takes another network
const said = [];
for (const { rgba, width, height } of pictures) {
  const grey = toGrey(Uint8Array.from(Buffer.from(rgba, "base64")), width, height);
  const one = { sizes: [] };
  for (const size of sizes) {
    const { shown, ...rest } = await answers.answer(grey, size);
    one.sizes.push({ ...rest, shown: [shown.height, shown.width] });
  }
  if (curve) one.curve = await answers.curve(grey);
  if (told.finder) one.find = await answers.find(grey);
  said.push(one);
}
console.log(JSON.stringify(said));
"""

ASK = """async () => {
const { answer } = await import("./backend.js"), canvas = document.createElement("canvas");
canvas.width = canvas.height = 28;
const ink = canvas.getContext("2d");
ink.fillStyle = "white";
ink.fillRect(13, 4, 3, 20);
return answer(await new Promise((done) => canvas.toBlob(done)), 2); }"""

pytestmark = pytest.mark.skipif(shutil.which("node") is None, reason="needs node")


def pictures():
    """A drawing, the same light on dark, one with a transparent ground, and an image of the network's own size."""
    seven = draw_seven()
    clear = Image.new("RGBA", seven.size)
    clear.putalpha(Image.fromarray(255 - np.asarray(seven.convert("L"))))
    rng = np.random.default_rng(0)
    own = Image.fromarray((rng.random((28, 28)) * np.hanning(28) * np.hanning(28)[:, None] * 255).astype(np.uint8))
    return [seven, draw_seven("black", "white"), clear, own]


def rgba(image):
    pixels = np.asarray(image.convert("RGBA"))
    return {"rgba": base64.b64encode(pixels.tobytes()).decode(), "width": image.width, "height": image.height}


def in_node(folder, program, given):
    """What a program prints as JSON, run beside the page's own files."""
    for file in PAGE.glob("*.js"):
        shutil.copy(file, folder)
    (folder / "package.json").write_text('{"type": "module"}')
    (folder / "main.js").write_text(program)
    done = subprocess.run(["node", "main.js"], cwd=folder, input=json.dumps(given), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def as_array(image):
    return np.array(image["data"], np.float64).reshape(image["height"], image["width"])


@pytest.fixture(scope="module")
def demo():
    return DemoModel("digits")


def test_pictures_become_what_the_networks_get(tmp_path, demo):
    judged = {"height": finder.JUDGED_HEIGHT, "width": finder.JUDGED_WIDTH, "margin": finder.JUDGED_MARGIN}
    found = in_node(tmp_path, NUMBERS, {"pictures": list(map(rgba, pictures())), "sizes": SIZES, "judged": judged})
    for image, one in zip(pictures(), found, strict=True):
        content = to_bytes(image)
        seen = demo.read(content)
        assert one["drawing"]["inverted"] == seen.inverted
        np.testing.assert_array_equal(as_array(one["drawing"]), seen.pixels[0].double().numpy())
        for size, shown in zip(SIZES, one["sizes"], strict=True):
            np.testing.assert_allclose(as_array(shown), demo.at_size(seen, size)[0, 0].numpy(), atol=1e-6)
        usual = finder.at_usual_size(finder.read_light(content, 1 << 20))[0, 0].numpy()
        np.testing.assert_allclose(as_array(one["judged"]), usual, atol=1e-6)


@pytest.fixture(scope="module")
def runtime():
    """ONNX Runtime Web, from a page that was built before or from npm."""
    try:
        return build.fetch_runtime(build.ROOT / "build/npm")
    except OSError as error:
        pytest.skip(str(error))


@pytest.fixture
def folder(tmp_path, runtime):
    """Where the runtime lies."""
    for name in build.FILES:
        (tmp_path / name).symlink_to(runtime / name)
    return tmp_path


def test_networks_say_the_same_in_javascript(folder, demo):
    build.write_looks(demo, folder)
    told = {**build.describe(demo), "finder": None}
    images = pictures()[::3]
    given = {"pictures": list(map(rgba, images)), "sizes": SIZES, "told": told, "curve": True}
    for image, one in zip(images, in_node(folder, ANSWERS, given), strict=True):
        picture = demo.read(to_bytes(image))
        for size, said in zip(SIZES, one["sizes"], strict=True):
            compare_answers(demo, picture, size, said)
        expected = json.loads(json.dumps(demo.curve(picture)))
        assert [way["name"] for way in one["curve"]["ways"]] == [way["name"] for way in expected["ways"]]
        for mine, own in zip(one["curve"].pop("ways"), expected.pop("ways"), strict=True):
            assert (mine["found"] is None) == (own["found"] is None)
            np.testing.assert_allclose(mine["found"] or 0, own["found"] or 0, atol=2e-3)
            assert mine["chances"].keys() == own["chances"].keys()
            for label, chances in mine["chances"].items():
                np.testing.assert_allclose(chances, own["chances"][label], atol=1e-3)
        assert one["curve"].pop("sizes") == pytest.approx(expected.pop("sizes"))
        assert one["curve"] == expected


def compare_answers(demo, picture, size, said):
    """All that one answer has, beside the verdict."""
    expected, x = demo.answer(picture, size), demo.at_size(picture, size)
    assert said["shown"] == list(x.shape[-2:])
    assert said["usual"] == expected["usual"]
    assert said["inverted"] == expected["inverted"]
    for mine, own, way in zip(said["ways"], expected["ways"], demo.ways(28, 28), strict=True):
        with torch.no_grad():
            logits = hear(way.model, x)[0]
        np.testing.assert_allclose(mine["logits"], logits.numpy(), atol=1e-3)
        assert (mine["key"], mine["name"]) == (own["key"], own["name"])
        assert mine["scales"] == pytest.approx(own["scales"])
        assert (mine["found"] is None) == (own["found"] is None)
        for key in ("found", "measured"):
            assert mine[key] == pytest.approx(own[key], abs=3e-3)
        assert mine["top"][0] == {**own["top"][0], "probability": pytest.approx(own["top"][0]["probability"], abs=1e-3)}
    for mine, own in zip(said["channels"], expected["channels"], strict=True):
        assert mine["pixels"] == own["pixels"]
        assert [mine[key] for key in ("probability", "share")] == pytest.approx(
            [own[key] for key in ("probability", "share")], abs=1e-3
        )


@pytest.fixture(scope="module")
def page(tmp_path_factory, runtime):
    """The whole page, as `make page` builds it."""
    folder = tmp_path_factory.mktemp("page")
    build.build(folder, runtime)
    return folder


@pytest.mark.slow
def test_the_whole_page_runs_in_a_browser_without_a_server(page):
    """All three tabs answer, and the policy of the page is not broken."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("needs chromium")
    with served(page) as address, sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        view, troubles = browser.new_page(), []
        view.on("console", lambda message: message.type in ("error", "warning") and troubles.append(message.text))
        view.on("pageerror", lambda error: troubles.append(str(error)))
        view.goto(address)
        view.wait_for_function("() => document.body.dataset.ready", timeout=120_000)
        for tab, proof in (("steering", "#filter-view"), ("sizes", "#answers > *"), ("many", "#objects > *")):
            view.click(f"#tab-{tab}")
            view.wait_for_selector(proof, timeout=120_000, state="attached")
        said = view.evaluate(ASK)
        browser.close()
    assert said["picture"].startswith("data:image/png;base64,")
    assert said["ways"][-1]["top"][0]["label"] == 1
    assert troubles == []


@pytest.mark.slow
def test_digits_are_found_alike_and_verdicts_are_the_same(page, demo):
    images = [*pictures(), scene()]
    given = {"pictures": list(map(rgba, images)), "sizes": [1.0], "told": build.describe(demo), "curve": False}
    verdicts = set()
    for image, one in zip(images, in_node(page, ANSWERS, given), strict=True):
        content = to_bytes(image)
        expected = demo.answer(demo.read(content), 1.0)
        assert [one["sizes"][0][key] for key in ("verdict", "note")] == [expected["verdict"], expected["note"]]
        verdicts.add(expected["verdict"])
        found, own = one["find"], demo.find(content)
        assert len(found["objects"]) == len(own["objects"])
        for mine, other in zip(found["objects"], own["objects"], strict=True):
            assert mine == {key: pytest.approx(value, abs=6e-3) for key, value in other.items()}
        maps, others = found["map"], own["map"]
        for key in ("height", "width", "stride", "offset"):
            assert maps[key] == others[key]
        np.testing.assert_allclose(maps["odds"], others["odds"], atol=2e-3)
        np.testing.assert_allclose(maps["sizes"], others["sizes"], atol=2e-2)
    assert len(verdicts) > 1


def scene():
    """Digits of several sizes in one picture."""
    canvas, seven = Image.new("L", (200, 160)), draw_seven("black", "white").convert("L")
    for side, place in ((90, (5, 5)), (40, (120, 20)), (28, (150, 110))):
        canvas.paste(seven.resize((side, side)), place)
    return canvas


def served(folder):
    """A context with the address of a server of plain files."""
    import contextlib
    import functools
    import http.server
    import threading

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *told):
            pass

    @contextlib.contextmanager
    def serving():
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(folder)))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
            server.server_close()

    return serving()
