# %% [markdown]
# # Five minutes: letters at sizes that training did not show
#
# A small network learns ten letters at one size. Alone it fails on smaller and larger ones. The same network, with the
# same weights, in `ScaleChannels` reads them, and says how large they are.

# %%
import matplotlib.pyplot as plt
import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor, nn

from scalesteer import ScaleChannels

LETTERS, SIDE = "ABCDEFGHKR", 56

# %% [markdown]
# The letters are drawn: each at a random place, with noise. `size` is relative to the letters of training.


# %%
def draw(count: int, size: float, seed: int) -> tuple[Tensor, Tensor]:
    rng = np.random.default_rng(seed)
    images, labels = np.zeros((count, 1, SIDE, SIDE), np.float32), rng.integers(0, len(LETTERS), count)
    for image, label in zip(images, labels, strict=True):
        picture = Image.new("L", (SIDE, SIDE))
        place = tuple(SIDE / 2 + rng.uniform(-3, 3, 2))
        font = ImageFont.load_default(22 * size * rng.uniform(0.9, 1.1))
        ImageDraw.Draw(picture).text(place, LETTERS[label], 255, font, anchor="mm")
        image[0] = np.asarray(picture) / 255 + rng.normal(0, 0.1, (SIDE, SIDE))
    return torch.from_numpy(images), torch.from_numpy(labels)


# %% [markdown]
# ## Train at one size
# A plain network: nothing in it knows of sizes.

# %%
torch.manual_seed(0)
net = nn.Sequential(
    *(nn.Conv2d(1, 16, 5, padding=2), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
    *(nn.Conv2d(16, 32, 5, padding=2), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)),
    *(nn.Conv2d(32, 32, 5, padding=2), nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveMaxPool2d(1)),
    *(nn.Flatten(), nn.Linear(32, len(LETTERS))),
)
images, labels = draw(1000, 1.0, seed=0)


def train(model: nn.Module, steps: int, rate: float) -> None:
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=rate)
    for _ in range(steps):
        rows = torch.randint(0, len(images), (32,))
        loss = F.cross_entropy(model(images[rows]), labels[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()


train(net, steps=80, rate=0.01)

# %% [markdown]
# ## Look at several sizes
# `ScaleChannels` shows the network each image at five sizes and joins what it says. A few steps more, still on letters of
# the one size, let each channel learn when a letter is not of its size.

# %%
model = ScaleChannels(net, (0.5, 0.71, 1.0, 1.41, 2.0), border=8)
train(model, steps=40, rate=0.002)

# %%
sizes = (0.5, 0.71, 1.0, 1.41, 2.0)
alone, joined, estimated = [], [], []
with torch.no_grad():
    for size in sizes:
        x, y = draw(200, size, seed=1)
        logits, found = model(x, return_scales=True)
        alone.append(float((net(x).argmax(1) == y).float().mean()))
        joined.append(float((logits.argmax(1) == y).float().mean()))
        estimated.append(float(found.median()))
        print(f"size {size:4.2f}: alone {alone[-1]:4.0%}, in channels {joined[-1]:4.0%}, estimated {estimated[-1]:.2f}")

# %%
figure, axis = plt.subplots(figsize=(4.5, 2.6), layout="constrained")
axis.plot(sizes, alone, "o-", label="the network alone")
axis.plot(sizes, joined, "o-", label="in scale channels")
axis.set(xscale="log", xlabel="size relative to training", ylabel="right", ylim=(0, 1.03))
axis.set_xticks(sizes, [f"{size:g}" for size in sizes])
axis.legend()
figure

# %% [markdown]
# Next: your own pictures, in the second notebook, or masks of cells, in the third.
