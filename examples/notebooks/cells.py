# %% [markdown]
# # Cells: masks at magnifications that training did not show
#
# A small U-Net learns from drawn, hollow cells of one size. In scale channels, and after a few more steps in them on the
# same pictures, it fills cells of half to three times that size. `examples/cells.py` draws them and has the U-Net.

# %%
import matplotlib.pyplot as plt
import numpy as np
import torch

from examples.cells import draw_batch, draw_cells, overlap, train, train_on
from scalesteer.instances import find_regions

# %% [markdown]
# ## Train at one size, then a little in channels
# Six sizes of the picture; `multiple=4`, since the U-Net halves its maps twice. These are few steps, so that this takes
# seconds; the page on masks has the numbers of a longer training.

# %%
net = train(steps=120, seed=0, batch=4)
model = train_on(net, steps=20, seed=0, batch=2)
print(model.scales, model.join)

# %% [markdown]
# ## How well do masks overlap?

# %%
found = {}
with torch.no_grad():
    for size in (0.5, 1.0, 2.0, 3.0):
        x, mask = draw_batch(["hollow"] * 3, size, 128, np.random.default_rng(9))
        found[size] = [overlap(one(x).argmax(1) == 1, mask == 1) for one in (net, model)]
        print(f"size {size:g}: IoU {found[size][0]:.2f} alone, {found[size][1]:.2f} in scale channels")

# %% [markdown]
# ## Objects, with their places and sizes
# `scalesteer predict MODEL pictures --masks out` writes these as images of labels and a table. Stacks of OME and ImageJ are
# read, and `--pixel-size` brings pictures of known magnification to one scale before the channels see them.

# %%
rng = np.random.default_rng(5)
parts = [draw_cells(kind, size, 96, rng)[0] for kind, size in (("hollow", 0.6), ("hollow", 1.0), ("hollow", 2.5))]
x = torch.cat(parts, dim=-1)[None]
with torch.no_grad():
    logits, sizes = model(x, return_scales=True)
labels, regions = find_regions(logits[0].argmax(0).numpy(), sizes[0].numpy(), least=20)
for region in regions[:5]:
    print(f"at ({region.row:.0f}, {region.column:.0f}): {region.area} pixels, size {region.size:.2f}")

# %%
figure, (above, below) = plt.subplots(2, 1, figsize=(6, 4), layout="constrained")
above.imshow(x[0, 0].numpy(), cmap="gray")
below.imshow(np.where(labels > 0, sizes[0].numpy(), np.nan), cmap="viridis")
above.set_title("cells of 0.6, 1 and 2.5 times the trained size", fontsize=9)
below.set_title(f"{len(regions)} regions, coloured by their estimated size", fontsize=9)
for axis in (above, below):
    axis.axis("off")
figure
