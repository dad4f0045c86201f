# %% [markdown]
# # Your own pictures: from a folder to a network to use
#
# What `scalesteer suggest`, `train`, `predict` and `export` do, in Python. The folder here is drawn, so that all of this
# runs anywhere; put the path of your own in its place.

# %%
from pathlib import Path
from tempfile import mkdtemp

import matplotlib.pyplot as plt
import numpy as np
from PIL import Image, ImageDraw

from scalesteer.app import load_model, make_run, train
from scalesteer.app.predict import describe, predict_files
from scalesteer.app.suggest import suggest
from scalesteer.export import export
from scalesteer.models import network_of

place = Path(mkdtemp())
photos = place / "photos"

# %% [markdown]
# ## The folder
# One sub-folder for each class. Shapes lie on noise, 12 to 20 pixels wide in pictures of 48 x 48.


# %%
def draw(shape: str, size: float, rng: np.random.Generator, side: int = 48) -> Image.Image:
    picture = Image.fromarray(rng.integers(0, 60, (side, side, 3), np.uint8))
    (x, y), half = rng.uniform(0.4 * side, 0.6 * side, 2), size / 2
    colour, pen = tuple(rng.integers(150, 256, 3).tolist()), ImageDraw.Draw(picture)
    if shape == "ring":
        pen.ellipse((x - half, y - half, x + half, y + half), outline=colour, width=max(2, round(size / 6)))
    elif shape == "square":
        pen.rectangle((x - half, y - half, x + half, y + half), outline=colour, width=max(2, round(size / 6)))
    else:
        pen.polygon([(x, y - half), (x - half, y + half), (x + half, y + half)], fill=colour)
    return picture


rng = np.random.default_rng(0)
for shape in ("ring", "square", "triangle"):
    (photos / shape).mkdir(parents=True)
    for i in range(80):
        draw(shape, rng.uniform(12, 20), rng).save(photos / shape / f"{i:03d}.png")
print(sorted(path.name for path in photos.iterdir()))

# %% [markdown]
# ## Which sizes?
# A command measures how large the objects are, and says which scale channels to train with.

# %%
print(suggest(photos, model="pooled-cnn").text())

# %% [markdown]
# ## Train
# Settings have the names of the flags of `scalesteer train`. The same settings give the same run, which goes on where it
# was stopped.

# %%
run = make_run(images=str(photos), image_size=(48, 48), model="pooled-cnn", widths=(8, 16, 16), epochs=6, shift=4)
result = train(run, place / "run", device="cpu")
print(f"test error {result['test_error']:.0%}, {result['parameters']:,} parameters")
print(*sorted(path.name for path in (place / "run").iterdir()))

# %% [markdown]
# ## Use it on larger and smaller things
# Training has resized its pictures at random, and the network looks at each of these at five sizes.

# %%
model = load_model(place / "run")
others = []
for shape in ("ring", "square", "triangle"):
    for size in (10, 16, 30):
        others.append(place / f"{shape}-{size}.png")
        draw(shape, size, rng, side=64).save(others[-1])
right = 0
for path, said in predict_files(model, others):
    if isinstance(said, Exception):  # a file that cannot be used
        continue
    record = describe(path, said, network_of(model).task.classes)
    right += path.name.startswith(record["class"])
    print(f"{path.name:<16} {record['class']:<9} {record['confidence']:4.0%}")

# %%
figure, axes = plt.subplots(1, len(others), figsize=(9, 1.2), layout="constrained")
for axis, path in zip(axes, others, strict=True):
    axis.imshow(Image.open(path))
    axis.axis("off")
figure

# %% [markdown]
# ## Take it elsewhere
# A program of torch that runs without this package; `to="onnx"` writes a file for ONNX Runtime. It is checked before it is
# kept.

# %%
done = export(model, place / "shapes.pt2", to="pt2")
print(f"{done.bytes / 1e6:.2f} MB, answers differ by {done.difference:.0e} at most")
