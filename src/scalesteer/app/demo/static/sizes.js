// The second tab: one picture at any size, a rival, and the same network looking once and several times.

import { answer, curve as askCurve, network as load } from "./backend.js";
import { $, calm, element, percent, times } from "./page.js";
import { Pad, blobOf } from "./pad.js";

const WAIT = 60; // milliseconds after the last change before the network is asked
const DEMO = [0, 0.25, 0.5, 0.75, 1, 1.25, 1.5]; // octaves of the first picture's growth
const COLOURS = { rival: "rival", once: "once", several: "several", network: "several", own: "own" };

export let network = null;
let truth; // the class of the picture, null if the user will not say, undefined until it is guessed
let pad = null, blob = null, curve = null, chosen = null, timer = null, example = 0, growing = null;
let pictures = 0, plotted = 0, asked = 0; // what was begun for an earlier picture or size is dropped
let busy = false, again = false;

const size = () => 2 ** Number($("size").value);
const className = (label) => network.classes[label] ?? String(label);

function say(text) {
  $("trouble").textContent = text;
}

function forget() {
  $("answers").replaceChildren();
  $("answers").classList.remove("busy");
  $("verdict").textContent = "";
  $("verdict").hidden = $("view").hidden = $("channels-section").hidden = $("truth-row").hidden = true;
  $("view-size").textContent = "Choose or draw a picture.";
  forgetCurve();
}

function forgetCurve() {
  curve = chosen = null;
  $("curve-section").hidden = true;
}

function take(next, label = undefined) { // another picture, or none; `label` if it is known
  pictures += 1;
  blob = next;
  truth = label;
  forgetCurve();
  if (blob) update(); else { asked += 1; forget(); }
}

function update() {
  clearTimeout(timer);
  asked += 1;
  if (!blob) return;
  $("answers").classList.add("busy");
  timer = setTimeout(work, busy ? WAIT : 0);
}

async function work() { // one question at a time: a slider that moves asks again when the answer is there
  if (!blob) return;
  if (busy) { again = true; return; }
  busy = true;
  const number = asked;
  const ok = await showAnswer();
  busy = false;
  if (again || number !== asked) { again = false; work(); } else if (ok && plotted !== pictures && growing === null) await showCurve();
}

async function showAnswer() { // true if it is shown and is still what is asked for
  const number = asked, at = size();
  let found;
  try { found = await answer(blob, at); } catch (error) {
    if (number === asked) { forget(); say(error.message); }
    return false;
  }
  if (number !== asked && growing === null && !again) return false;
  if (!blob) return false;
  say("");
  const image = new Image();
  image.src = found.picture;
  await image.decode();
  if (number === asked) $("answers").classList.remove("busy");
  if (truth === undefined) truth = guess(found);
  showVerdict(found);
  $("answers").replaceChildren(...found.ways.map((way) => card(way, at)));
  const view = $("view"), room = $("seen"), [width, height] = found.usual;
  const zoom = Math.min(room.clientWidth / width, room.clientHeight / height) / network.sizes.at(-1); // larger looks larger
  view.src = found.picture;
  view.width = image.naturalWidth * zoom;
  view.height = image.naturalHeight * zoom;
  view.hidden = false;
  const note = found.inverted ? " It was dark on light, and is shown to them light on dark." : "";
  $("view-size").textContent = `${image.naturalWidth} x ${image.naturalHeight} pixels.${note}`;
  showChannels(found);
  return number === asked;
}

// What it is, if nobody said so: what all ways agree on where the picture is as it is.
function guess(found) {
  const named = new Set(found.ways.map((way) => way.top[0].label));
  return Math.abs(size() - 1) < 0.2 && named.size === 1 ? [...named][0] : undefined;
}

function showVerdict(found) {
  $("verdict").hidden = found.verdict === "one";
  $("verdict").textContent = found.verdict === "one" ? "" : found.note;
  $("answers").classList.toggle("unknown", found.verdict === "unknown");
  const row = $("truth-row");
  row.hidden = found.verdict === "unknown" || network.classes.length > 30;
  if (!row.hidden) $("truth").value = String(truth ?? "");
  document.body.dataset.verdict = found.verdict;
}

function card(way, at) {
  const [best, ...rest] = way.top, judged = (truth ?? null) === null || document.body.dataset.verdict === "unknown" ? "" : best.label === truth ? "right" : "wrong";
  const box = element("div", "", { class: `way ${judged}`, "data-kind": COLOURS[way.key] });
  box.append(element("h4", way.name, { title: `the picture at ${way.scales.map((scale) => Number(scale.toFixed(2))).join(", ")} times its size` }));
  const mark = { right: " ✓", wrong: " ✗" }[judged] ?? "";
  const named = element("div", className(best.label), { class: "named" });
  if (mark) named.append(element("span", mark, { role: "img", "aria-label": judged }));
  box.append(named);
  const others = rest.slice(0, 1).map((one) => `; or ${className(one.label)}, ${percent(one.probability)}`).join("");
  box.append(element("p", `${percent(best.probability)} sure${best.probability > 0.99 ? "" : others}`));
  if (way.measured !== null && way.measured !== undefined) {
    box.append(element("p", `measures ${way.measured.toFixed(2)} times, you set ${at.toFixed(2)}`, { class: "measured" }));
  }
  return box;
}

function showChannels(found) {
  $("channels-section").hidden = !found.channels.length;
  const most = Math.max(...found.channels.map((channel) => Math.max(...channel.pixels)));
  const strongest = Math.max(...found.channels.map((channel) => channel.share));
  $("channels").replaceChildren(...found.channels.map((channel) => {
    const box = element("figure", "", { class: channel.share === strongest ? "channel best" : "channel" }), room = element("div"), image = element("img", "", { alt: "", src: found.picture });
    const pixels = Math.max(6, 84 * Math.max(...channel.pixels) / most);
    image.width = image.height = pixels;
    image.style.opacity = (0.25 + 0.75 * channel.share / strongest).toFixed(2);
    room.append(image);
    const caption = element("figcaption", `× ${Number(channel.scale.toFixed(2))}: ${className(channel.label)}`);
    caption.append(element("br"), `counts ${percent(channel.share)}`);
    box.append(room, caption);
    return box;
  }));
}

async function showCurve() {
  const number = plotted = pictures;
  let found;
  try { found = await askCurve(blob); } catch (error) {
    if (number === pictures) { say(`The plot could not be made. ${error.message}`); plotted = 0; }
    return;
  }
  if (number !== pictures) return;
  curve = found;
  chosen = (truth ?? null) !== null && truth in found.ways[0].chances ? truth : found.label;
  const labels = Object.keys(found.ways[0].chances).map(Number);
  $("label").replaceChildren(...labels.map((label) => element("option", className(label), { value: label })));
  $("label").value = chosen;
  $("curve-section").hidden = false;
  plot();
}

function part(name, attributes, text = "") {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.textContent = text;
  $("curve").append(made);
}

function plot() { // how sure each is, against the size
  const left = 46, right = 588, top = 14, bottom = 255;
  const across = (factor) => left + (right - left) * (Math.log2(factor) + 2) / 4;
  const down = (share) => bottom - (bottom - top) * share;
  $("curve").replaceChildren();
  for (const share of [0, 0.5, 1]) {
    part("line", { class: "axis", x1: left, x2: right, y1: down(share), y2: down(share) });
    part("text", { x: left - 6, y: down(share) + 4, "text-anchor": "end" }, `${100 * share} %`);
  }
  for (const factor of [0.25, 0.5, 1, 2, 4]) part("text", { x: across(factor), y: bottom + 18, "text-anchor": "middle" }, `${factor}`);
  part("text", { x: (left + right) / 2, y: bottom + 36, "text-anchor": "middle" }, "size of the picture");
  part("line", { class: "marker", x1: across(size()), x2: across(size()), y1: top, y2: bottom });
  for (const way of curve.ways) {
    const points = way.chances[chosen].map((share, i) => `${across(curve.sizes[i]).toFixed(1)} ${down(share).toFixed(1)}`);
    part("path", { "data-kind": COLOURS[way.key], d: `M${points.join("L")}` });
  }
  $("legend").replaceChildren(...curve.ways.map((way) => {
    const item = element("span", way.name, { "data-kind": COLOURS[way.key] });
    item.prepend(element("i"));
    return item;
  }));
  $("gain").textContent = gain();
}

function gain() { // in plain words, also where there is nothing to gain
  const mean = (way) => way.chances[chosen].reduce((sum, share) => sum + share, 0) / curve.sizes.length;
  if (curve.ways.length === 1) return "";
  const several = mean(curve.ways.at(-1)), best = Math.max(...curve.ways.slice(0, -1).map(mean));
  if (several < best + 0.01) return "For this picture, looking several times gains nothing.";
  return `In the mean over these sizes, looking several times is ${percent(several)} sure, the best of the others ${percent(best)}.`;
}

function resized() {
  $("size-shown").value = times(size());
  $("size").setAttribute("aria-valuetext", times(size()));
  if (curve) plot();
  update();
}

async function sample(i) {
  const one = network.samples[i];
  if (pad && network.draws) {
    pad.wipe();
    const image = new Image();
    image.src = one.picture;
    await image.decode();
    pad.ink.drawImage(image, 0, 0, pad.canvas.width, pad.canvas.height);
  } else await pad.open(await blobOf(one.picture));
  pad.version += 1;
  take(await blobOf(one.picture), one.label ?? undefined);
}

async function grow() { // the first picture grows once by itself
  growing = 0;
  for (const octaves of DEMO) {
    if (growing === null) return;
    $("size").value = String(octaves);
    resized();
    await new Promise((done) => { setTimeout(done, 450); });
  }
  growing = null;
  update();
}

const interrupt = () => { growing = null; };

export async function start() {
  network = await load();
  pad = new Pad($("pad-sizes"), 22, (next) => { interrupt(); take(next); }, say);
  $("about-network").textContent = describe();
  $("truth").replaceChildren(element("option", "…", { value: "" }), ...network.classes.map((name, label) => element("option", name, { value: label })));
  $("samples").replaceChildren(...network.samples.map((one, i) => {
    const button = element("button", "", { type: "button", "aria-label": one.label === null ? `sample ${i + 1}` : className(one.label) });
    button.append(element("img", "", { src: one.picture, alt: "" }));
    button.addEventListener("click", () => { interrupt(); sample(i); });
    return button;
  }));
  const next = $("pad-sizes").querySelector("[data-do=example]");
  next.hidden = !network.samples.length;
  next.textContent = network.digits ? "Another digit" : "Another picture";
  next.addEventListener("click", () => { interrupt(); example = (example + 1) % network.samples.length; sample(example); });
  if (!network.draws) $("pad-hint").textContent = "Drop a PNG or JPEG, or choose a sample.";
  $("size").addEventListener("input", () => { interrupt(); resized(); });
  $("label").addEventListener("change", () => { chosen = Number($("label").value); plot(); });
  $("truth").addEventListener("change", () => { truth = $("truth").value === "" ? null : Number($("truth").value); interrupt(); update(); });
  forget();
}

let seen = false;

export async function show() { // when the tab is first opened
  if (seen || !network) return;
  seen = true;
  if (!network.samples.length || blob) return;
  example = network.digits ? Math.max(0, network.samples.findIndex((one) => one.label === 3)) : 0;
  await sample(example);
  if (calm()) { $("size").value = "1.5"; resized(); } else await grow();
}

function describe() {
  const known = `It knows ${network.classes.length} classes.`;
  if (network.ways?.some((way) => way.key === "rival")) {
    return `Make the digit larger or smaller, and see who still reads it: a plain network that was trained with random resizing, and ours. Ours has the same weights in both columns.`;
  }
  return `The network “${network.name}”, with the same weights in each column. ${known}`;
}
