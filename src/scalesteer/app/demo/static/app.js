// The page: a picture and its size go to the server on this machine, and what the network says comes back.
"use strict";

const $ = (id) => document.getElementById(id);
const paper = $("paper"), ink = paper.getContext("2d");
const INK_WIDTH = 22, WAIT = 120; // pixels of a stroke; milliseconds after the last change before the network is asked
const EXAMPLES = [ // strokes as points of a 100 x 100 square
  [[[28, 30], [38, 18], [58, 18], [68, 32], [60, 46], [46, 50], [62, 54], [72, 68], [62, 84], [40, 86], [26, 74]]],
  [[[26, 24], [74, 24], [58, 52], [46, 84]]],
  [[[30, 32], [42, 18], [62, 22], [66, 40], [48, 62], [28, 82], [74, 82]]],
  [[[70, 18], [38, 18], [34, 46], [56, 44], [70, 58], [62, 80], [32, 82]]],
  [[[56, 16], [28, 60], [76, 60]], [[60, 38], [60, 88]]],
];
let network = null, picture = null, curve = null, chosen = null, timer = null, example = 0;
let pictures = 0; // how many there have been: what was begun for an earlier one is dropped
let plotted = 0; // the picture whose plot is asked for or shown
let asked = 0; // how often the network was asked about a size: older answers are dropped

const percent = (share) => `${(100 * share).toFixed(share > 0.995 || share < 0.1 ? 1 : 0)} %`;
const size = () => 2 ** Number($("size").value);
const className = (label) => network.classes[label];

function element(name, text, attributes = {}) {
  const made = document.createElement(name);
  made.textContent = text;
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

function drawn(name, attributes, text = "") { // a part of the plot
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.textContent = text;
  $("curve").append(made);
}

function say(text) {
  $("message").textContent = text;
}

async function ask(path) { // what the server says of the picture; an Error says why it does not
  let response, found;
  try {
    response = await fetch(path, { method: "POST", body: picture, headers: { "Content-Type": picture.type } });
    found = await response.json();
  } catch {
    return new Error("The server does not answer. Is `scalesteer demo` still running?");
  }
  return response.ok ? found : new Error(found.error);
}

function forget() { // nothing on the page may be about another picture
  $("answers").replaceChildren();
  $("answers").classList.remove("busy");
  $("view").hidden = $("channels-section").hidden = true;
  $("view-size").textContent = "What the network gets appears here, pixel by pixel.";
  forgetCurve();
}

function forgetCurve() {
  curve = chosen = null;
  $("curve-section").hidden = true;
}

function update() { // there is another picture, or another size of it
  clearTimeout(timer);
  asked += 1;
  if (!picture) return;
  $("answers").classList.add("busy");
  timer = setTimeout(async () => {
    if (await showAnswer() && plotted !== pictures) await showCurve();
  }, WAIT);
}

function resized() {
  const shown = Math.abs(size() - 1) < 0.01 ? "as it is" : `${size().toFixed(2)} times its size`;
  $("size-shown").value = shown;
  $("size").setAttribute("aria-valuetext", shown);
  if (curve) plot();
  update();
}

async function showAnswer() { // true if it is shown and is still what is asked for
  const number = asked;
  const found = await ask(`/answer?size=${size().toFixed(6)}`);
  if (number !== asked) return false;
  if (found instanceof Error) {
    forget();
    say(found.message);
    return false;
  }
  const image = new Image();
  image.src = found.picture;
  await image.decode().catch(() => {}); // a picture that cannot be drawn has an answer all the same
  if (number !== asked) return false;
  $("answers").classList.remove("busy");
  say(found.inverted ? "It was dark on light, and is shown to the network light on dark." : "");
  $("answers").replaceChildren(...found.ways.map((way) => {
    const box = element("div", "", { class: "way" });
    const [best, ...rest] = way.top;
    const scales = way.scales.map((scale) => Number(scale.toFixed(2))).join(", ");
    const runnersUp = rest.slice(0, 2).map((one) => `${className(one.label)} (${percent(one.probability)})`);
    box.append(element("h3", way.name, { title: `at ${scales} times its size` }));
    box.append(element("div", className(best.label), { class: "named" }));
    const others = runnersUp.length ? `; or else ${runnersUp.join(", ")}` : "";
    box.append(element("p", `${percent(best.probability)} sure${others}`));
    if (way.found !== null) box.append(element("p", `size that answered: ${way.found.toFixed(2)} (1 is usual)`));
    return box;
  }));
  // One zoom for all sizes, so that a larger picture looks larger; the largest just fits.
  const view = $("view"), room = $("seen"), [width, height] = found.usual;
  const zoom = Math.min(room.clientWidth / width, room.clientHeight / height) / network.sizes.at(-1);
  view.src = found.picture;
  view.width = image.naturalWidth * zoom;
  view.height = image.naturalHeight * zoom;
  view.hidden = false;
  $("view-size").textContent = `What the network gets: ${image.naturalWidth} x ${image.naturalHeight} pixels.`;
  $("channels-section").hidden = !found.channels.length;
  $("channels").tBodies[0].replaceChildren(...found.channels.map((channel) => {
    const row = document.createElement("tr"), share = document.createElement("td");
    row.append(element("td", channel.scale.toFixed(2)), element("td", channel.pixels.join(" x ")));
    row.append(element("td", className(channel.label)), element("td", percent(channel.probability)));
    share.append(element("meter", "", { min: 0, max: 1, value: channel.share }), ` ${percent(channel.share)}`);
    row.append(share);
    return row;
  }));
  return true;
}

async function showCurve() {
  const number = plotted = pictures;
  const found = await ask("/curve");
  if (number !== pictures) return;
  if (found instanceof Error) {
    say(`The plot could not be made. ${found.message}`);
    plotted = 0;
    return;
  }
  curve = found;
  chosen = found.label;
  const labels = Object.keys(found.ways[0].chances).map(Number);
  $("label").replaceChildren(...labels.map((label) => element("option", className(label), { value: label })));
  $("label").value = chosen;
  $("same-weights").hidden = found.ways.length === 1;
  $("curve-section").hidden = false;
  plot();
}

function plot() { // how sure the network is, against the size
  const left = 46, right = 545, top = 14, bottom = 262;
  const across = (factor) => left + (right - left) * (Math.log2(factor) + 2) / 4;
  const down = (share) => bottom - (bottom - top) * share;
  $("curve").replaceChildren();
  for (const share of [0, 0.5, 1]) {
    drawn("line", { class: "axis", x1: left, x2: right, y1: down(share), y2: down(share) });
    drawn("text", { x: left - 6, y: down(share) + 4, "text-anchor": "end" }, `${100 * share} %`);
  }
  for (const factor of [0.25, 0.5, 1, 2, 4]) {
    drawn("text", { x: across(factor), y: bottom + 18, "text-anchor": "middle" }, `${factor}`);
  }
  drawn("text", { x: (left + right) / 2, y: bottom + 34, "text-anchor": "middle" }, "size of the object");
  drawn("line", { class: "marker", x1: across(size()), x2: across(size()), y1: top, y2: bottom });
  const single = curve.ways.length === 1;
  const lines = curve.ways.map((way, i) => ({ way, kind: `line-${single ? 2 : i}`, chances: way.chances[chosen] }));
  for (const { kind, chances } of lines) {
    const points = chances.map((share, i) => `${across(curve.sizes[i]).toFixed(1)} ${down(share).toFixed(1)}`);
    drawn("path", { class: kind, d: `M${points.join("L")}` });
  }
  // Names beside the ends of the lines, moved apart where they would cover each other.
  const names = lines.map(({ way, kind, chances }) => ({ text: way.name, kind, y: down(chances.at(-1)) + 4 }));
  names.sort((one, other) => one.y - other.y);
  names.forEach((name, i) => { if (i) name.y = Math.max(name.y, names[i - 1].y + 16); });
  names.reverse().forEach((name, i) => { name.y = Math.min(name.y, i ? names[i - 1].y - 16 : bottom); });
  for (const name of names) {
    drawn("text", { class: name.kind, x: across(curve.sizes.at(-1)) + 8, y: name.y }, name.text);
  }
}

// Drawing and opening pictures

function wipe() {
  ink.fillStyle = "#000";
  ink.fillRect(0, 0, paper.width, paper.height);
  URL.revokeObjectURL($("upload").src);
  $("upload").hidden = true;
  paper.hidden = !network.draws;
  $("invitation").hidden = network.draws;
}

function take(blob) { // another picture, or none
  pictures += 1;
  picture = blob;
  forgetCurve();
  update();
}

function takeDrawing() {
  const number = ++pictures; // an earlier drawing that is still on its way is not taken any more
  paper.toBlob((blob) => { if (number === pictures) take(blob); }, "image/png");
}

function clearAll() {
  take(null);
  wipe();
  forget();
  say("");
}

function stroke(points) {
  ink.strokeStyle = "#fff";
  ink.lineWidth = INK_WIDTH;
  ink.lineCap = ink.lineJoin = "round";
  ink.beginPath();
  ink.moveTo(...points[0]);
  for (const point of points) ink.lineTo(...point);
  ink.stroke();
}

function open(file) {
  if (!file || !network) return;
  if (!["image/png", "image/jpeg"].includes(file.type)) {
    say("The picture must be a PNG or JPEG file.");
    return;
  }
  wipe();
  $("upload").src = URL.createObjectURL(file);
  $("upload").hidden = false;
  paper.hidden = $("invitation").hidden = true;
  take(file);
}

let last = null;
const place = (event) => {
  const box = paper.getBoundingClientRect();
  return [(event.clientX - box.left) * paper.width / box.width, (event.clientY - box.top) * paper.height / box.height];
};
paper.addEventListener("pointerdown", (event) => {
  if (!event.isPrimary || event.button) return;
  paper.setPointerCapture(event.pointerId);
  last = place(event);
  stroke([last]);
});
paper.addEventListener("pointermove", (event) => {
  if (!last || !event.isPrimary) return;
  const next = place(event);
  stroke([last, next]);
  last = next;
});
for (const end of ["pointerup", "pointercancel"]) {
  paper.addEventListener(end, (event) => {
    if (last && event.isPrimary) takeDrawing();
    if (event.isPrimary) last = null;
  });
}
$("example").addEventListener("click", () => {
  clearAll();
  for (const points of EXAMPLES[example]) stroke(points.map(([x, y]) => [2.8 * x, 2.8 * y]));
  example = (example + 1) % EXAMPLES.length;
  takeDrawing();
});
$("clear").addEventListener("click", clearAll);
$("size").addEventListener("input", resized);
$("label").addEventListener("change", () => { chosen = Number($("label").value); plot(); });
$("file").addEventListener("change", () => { open($("file").files[0]); $("file").value = ""; });
$("drop").addEventListener("dragover", (event) => { event.preventDefault(); $("drop").classList.add("over"); });
$("drop").addEventListener("dragleave", () => $("drop").classList.remove("over"));
$("drop").addEventListener("drop", (event) => {
  event.preventDefault();
  $("drop").classList.remove("over");
  open(event.dataTransfer.files[0]);
});

async function start() {
  network = await (await fetch("/network")).json();
  const scales = network.channels.map((scale) => Number(scale.toFixed(2))).join(", ");
  const looks = scales ? ` It looks at images at ${scales} times their size.` : "";
  $("about").textContent = `The network “${network.name}” knows ${network.classes.length} classes.${looks}`;
  $("example").hidden = !network.digits;
  for (const id of ["example", "clear", "file", "size"]) $(id).disabled = false;
  $("hint").textContent = network.draws
    ? "Draw with the mouse or a finger, or drop a PNG or JPEG here."
    : "Drop a PNG or JPEG here. It stays on this machine.";
  wipe();
}
start().catch(() => { $("about").textContent = "The server does not answer. Is `scalesteer demo` still running?"; });
