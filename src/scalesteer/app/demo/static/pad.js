// A square to draw in with mouse, finger or keys, into which pictures can be dropped and opened.

import { element } from "./page.js";

const KEYS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };

export class Pad {
  // `changed(blob)` is told of each new picture, null for none; `trouble(text)` of what cannot be opened.
  constructor(box, width, changed, trouble) {
    Object.assign(this, { box, width, changed, trouble, last: null, version: 0, pen: null, down: false });
    this.canvas = box.querySelector("canvas");
    this.ink = this.canvas.getContext("2d");
    this.shown = element("img", "", { alt: "Your picture", hidden: "" });
    this.cross = element("i", "", { class: "cross", hidden: "" });
    this.drop = box.querySelector(".drop");
    this.drop.append(this.shown, this.cross);
    this.wipe();
    this.listen();
  }

  wipe() {
    this.ink.fillStyle = "#000";
    this.ink.fillRect(0, 0, this.canvas.width, this.canvas.height);
    URL.revokeObjectURL(this.shown.src);
    this.shown.hidden = true;
  }

  clear() {
    this.wipe();
    this.version += 1;
    this.changed(null);
  }

  stroke(points, width = this.width) {
    this.ink.strokeStyle = "#fff";
    this.ink.lineWidth = width;
    this.ink.lineCap = this.ink.lineJoin = "round";
    this.ink.beginPath();
    this.ink.moveTo(...points[0]);
    for (const point of points) this.ink.lineTo(...point);
    this.ink.stroke();
  }

  take() { // what is drawn; an earlier drawing that is still on its way is not taken any more
    const version = ++this.version;
    this.canvas.toBlob((blob) => { if (version === this.version) this.changed(blob); }, "image/png");
  }

  async open(file) {
    if (!file) return;
    if (!["image/png", "image/jpeg"].includes(file.type)) {
      this.trouble("The picture must be a PNG or JPEG file.");
      return;
    }
    this.wipe();
    this.shown.src = URL.createObjectURL(file);
    this.shown.hidden = false;
    this.version += 1;
    this.changed(file);
  }

  place(event) {
    const frame = this.canvas.getBoundingClientRect();
    return [(event.clientX - frame.left) * this.canvas.width / frame.width, (event.clientY - frame.top) * this.canvas.height / frame.height];
  }

  begin() { // to draw on a picture that was opened would change it unseen
    if (!this.shown.hidden) this.wipe();
  }

  listen() {
    const { canvas, drop } = this;
    canvas.addEventListener("pointerdown", (event) => {
      if (!event.isPrimary || event.button) return;
      canvas.setPointerCapture(event.pointerId);
      this.last = this.place(event);
      this.stroke([this.last]);
    });
    canvas.addEventListener("pointermove", (event) => {
      if (!this.last || !event.isPrimary) return;
      const next = this.place(event);
      this.stroke([this.last, next]);
      this.last = next;
    });
    for (const end of ["pointerup", "pointercancel"]) {
      canvas.addEventListener(end, (event) => {
        if (this.last && event.isPrimary) this.take();
        if (event.isPrimary) this.last = null;
      });
    }
    canvas.addEventListener("keydown", (event) => this.key(event));
    canvas.addEventListener("blur", () => { this.cross.hidden = true; this.lift(); });
    drop.addEventListener("dragover", (event) => { event.preventDefault(); drop.classList.add("over"); });
    drop.addEventListener("dragleave", () => drop.classList.remove("over"));
    drop.addEventListener("drop", (event) => {
      event.preventDefault();
      drop.classList.remove("over");
      this.open(event.dataTransfer.files[0]);
    });
    const input = this.box.querySelector("input[type=file]");
    input.addEventListener("change", () => { this.open(input.files[0]); input.value = ""; });
    this.box.querySelector("[data-do=clear]").addEventListener("click", () => this.clear());
  }

  lift() {
    if (this.down) this.take();
    this.down = false;
  }

  key(event) {
    const side = this.canvas.width;
    this.pen ??= [side / 2, side / 2];
    if (event.key in KEYS) {
      const [x, y] = KEYS[event.key], step = side / (event.shiftKey ? 8 : 28);
      const next = [this.pen[0] + x * step, this.pen[1] + y * step].map((v) => Math.min(side, Math.max(0, v)));
      if (this.down) this.stroke([this.pen, next]);
      this.pen = next;
    } else if (event.key === " ") {
      if (this.down) this.lift(); else { this.begin(); this.down = true; this.stroke([this.pen]); }
    } else if (event.key !== "Enter") return;
    if (event.key === "Enter") this.lift();
    event.preventDefault();
    this.cross.hidden = false;
    this.cross.classList.toggle("down", this.down);
    this.cross.style.left = `${100 * this.pen[0] / side}%`;
    this.cross.style.top = `${100 * this.pen[1] / side}%`;
  }
}

// A picture by its address, white on black, in a square of a canvas.
export async function drawSample(context, address, x, y, side) {
  const image = new Image();
  image.src = address;
  await image.decode();
  context.imageSmoothingEnabled = true;
  context.imageSmoothingQuality = "high";
  context.globalCompositeOperation = "lighten";
  context.drawImage(image, x, y, side, side);
  context.globalCompositeOperation = "source-over";
}

export async function blobOf(address) {
  const image = new Image(), canvas = element("canvas");
  image.src = address;
  await image.decode();
  canvas.width = image.naturalWidth;
  canvas.height = image.naturalHeight;
  canvas.getContext("2d").drawImage(image, 0, 0);
  return new Promise((done) => { canvas.toBlob(done, "image/png"); });
}
