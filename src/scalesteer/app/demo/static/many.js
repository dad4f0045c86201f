// The third tab: several things of any sizes in one picture, found, named and measured.

import { find } from "./backend.js";
import { $, element, percent, viridis } from "./page.js";
import { Pad, drawSample } from "./pad.js";

const SIDE = 256, FRAME = 28, SMALLEST = 0.5, LARGEST = 4, TAG = 46; // sizes relative to training, as the colours show them; the width of a label
let pad = null, samples = [], asked = 0, busy = false, waiting = null, begun = false;

const shareOf = (size) => Math.log(size / SMALLEST) / Math.log(LARGEST / SMALLEST);
const colour = (size) => `rgb(${viridis(shareOf(size)).join(" ")})`;

function forget() {
  $("boxes").replaceChildren();
  $("objects").replaceChildren();
  $("found").textContent = "Draw something, or scatter digits.";
  $("map").getContext("2d").clearRect(0, 0, $("map").width, $("map").height);
}

async function take(blob) {
  asked += 1;
  waiting = blob;
  if (!blob) { forget(); return; }
  if (busy) return;
  busy = true;
  while (waiting) { // one question at a time, the latest picture
    const number = asked, now = waiting;
    waiting = null;
    try {
      const found = await find(now);
      if (number === asked) show(found);
      $("trouble").textContent = "";
    } catch (error) {
      if (number === asked) { forget(); $("found").textContent = error.message; }
    }
  }
  busy = false;
}

function part(name, attributes, text = "") {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.textContent = text;
  $("boxes").append(made);
}

function where({ row, column }, height, width) {
  const down = row < height / 3 ? "top" : row > 2 * height / 3 ? "bottom" : "middle";
  const right = column < width / 3 ? "left" : column > 2 * width / 3 ? "right" : "middle";
  return down === right ? "in the middle" : `${down} ${right}`;
}

function show(found) {
  const height = found.map.height * found.map.stride, width = found.map.width * found.map.stride;
  $("boxes").setAttribute("viewBox", `0 0 ${width} ${height}`);
  $("boxes").replaceChildren();
  for (const one of found.objects) {
    const x = one.column - one.side / 2, y = one.row - one.side / 2, dark = shareOf(one.size) > 0.55;
    part("rect", { x, y, width: one.side, height: one.side, stroke: colour(one.size) });
    const tag = Math.max(0, Math.min(x, width - TAG));
    part("rect", { class: "tag", x: tag, y: Math.max(0, y - 13), width: TAG, height: 13, fill: colour(one.size) });
    part("text", { x: tag + 3, y: Math.max(10, y - 3), fill: dark ? "#000" : "#fff" }, `${one.label}  ${one.size.toFixed(1)} ×`);
  }
  const canvas = $("map"), context = canvas.getContext("2d");
  canvas.width = found.map.width;
  canvas.height = found.map.height;
  const image = context.createImageData(found.map.width, found.map.height);
  found.map.sizes.forEach((size, i) => {
    const odds = found.map.odds[i];
    image.data.set([...viridis(shareOf(size)), 255 * odds], 4 * i); // seen where something is likely
  });
  context.putImageData(image, 0, 0);
  const count = found.objects.length;
  $("found").textContent = count ? `${count} ${count === 1 ? "thing" : "things"} found.` : "Nothing that I know.";
  $("objects").replaceChildren(...found.objects.map((one) => {
    const item = element("li", `${one.label}, ${one.size.toFixed(1)} times, ${where(one, height, width)}, ${percent(one.probability)} sure`);
    item.prepend(element("i", "", { class: "dot" }));
    item.firstChild.style.background = colour(one.size);
    return item;
  }));
}

// Digits of random sizes that do not overlap, the largest first.
async function scatter() {
  pad.wipe();
  const placed = [];
  for (const size of [3.2, 1.9, 1.3, 1, 0.8, 0.6].map((base) => base * (0.85 + 0.3 * Math.random()))) {
    const side = FRAME * size;
    for (let attempt = 0; attempt < 300; attempt++) {
      const x = Math.random() * (SIDE - side), y = Math.random() * (SIDE - side);
      if (placed.some((p) => x < p.x + p.side && p.x < x + side && y < p.y + p.side && p.y < y + side)) continue;
      placed.push({ x, y, side });
      await drawSample(pad.ink, samples[Math.floor(Math.random() * samples.length)], x, y, side);
      break;
    }
  }
  pad.take();
}

export function start(digits) { // addresses of pictures of digits, 28 x 28 pixels each
  samples = digits;
  pad = new Pad($("pad-many"), 7, take, (text) => { $("found").textContent = text; });
  $("pen").addEventListener("input", () => { pad.width = Number($("pen").value); });
  const button = $("pad-many").querySelector("[data-do=example]");
  button.hidden = !samples.length;
  button.addEventListener("click", scatter);
  forget();
}

export async function open() {
  if (begun || !samples.length) return;
  begun = true;
  await scatter();
}
