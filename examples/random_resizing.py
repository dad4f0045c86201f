"""The rival of scale channels in thirty lines: a network that learns from randomly resized pictures, for a given time.

    python examples/random_resizing.py photos/list.csv 300      # as long as 300 seconds of CPU time

The network, the resizing, the loss and the course of the learning rate are those of `scalesteer train` for one's own
pictures; it looks at a picture once. Prints the error at each size as JSON. `examples/equal_time.py` compares the two.
"""

import json
import math
import sys
import time

import torch
import torch.nn.functional as F

from scalesteer import create_model
from scalesteer.app import evaluate
from scalesteer.app.augment import Augmentation
from scalesteer.app.folder import FolderSpec, load_folder
from scalesteer.app.memory import keep_memory
from scalesteer.models import set_input_statistics


def main(pictures: str, seconds: float, low: float = 0.5, high: float = 2.0, seed: int = 0) -> None:
    keep_memory()
    torch.manual_seed(seed)
    spec = FolderSpec(pictures)
    images, test = load_folder(spec, "train"), load_folder(spec, "test")
    model = create_model(
        "pooled-deep", in_chans=3, num_classes=len(images.about["classes"]), image_size=spec.image_size
    )
    set_input_statistics(model, images.std, images.mean)
    change = Augmentation(resize=(low, high), beyond="border")
    optimizer, start, epochs = torch.optim.AdamW(model.parameters(), weight_decay=0.01), time.process_time(), 0
    while (progress := (time.process_time() - start) / seconds) < 1:
        for rows in torch.randperm(len(images)).split(128)[: len(images) // 128]:
            progress = min(1.0, (time.process_time() - start) / seconds)
            part = progress / 0.3 if progress < 0.3 else 1 + (progress - 0.3) / 0.7  # one cycle: up, then down to zero
            optimizer.param_groups[0]["lr"] = 0.005 * (1 - math.cos(math.pi * part)) / 2
            x, labels = images.take(rows)
            loss = F.cross_entropy(model(change(x)), labels, label_smoothing=0.1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        epochs += 1
    used = time.process_time() - start
    rows = evaluate(model.eval(), test)["by_scale"]
    errors = {f"{row['from']:.3g}": 100 * row["error"] for row in rows}
    print(json.dumps({"errors": errors, "epochs": epochs, "cpu_seconds": used}))


if __name__ == "__main__":
    given = [float(word) for word in sys.argv[2:]]
    seconds, low, high, seed = given + [0.5, 2.0, 0.0][len(given) - 1 :]
    main(sys.argv[1], seconds, low, high, int(seed))
