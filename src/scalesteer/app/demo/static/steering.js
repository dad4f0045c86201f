// The first tab: one learned filter, steered in scale before one's eyes.

import { filters as load } from "./backend.js";
import { $, bytes, calm, choices, element, paintGrey, paintSigned } from "./page.js";
import { PixelFilter, Places, correlation, enlarge, interpolated, prepare, readResponse, respond, squareOf, steeringFactors, windowSize } from "./steer.js";

const LARGEST = 3, LEARNED = 17 / 7; // of the sliders; of the scales that the network has
const WIDTH = 112, ENLARGED = 1.25; // pixels of the picture; what a digit is enlarged by at scale 1
const FINE = 192, THUMB = 44; // points along a drawn filter
const REACH = 18, STEP = 2; // pixels about the centre where responses are compared, and from one to the next
const ROUND = 6000; // milliseconds from the smallest size to the largest and back

let data = null, chosen = 0, digit = 0, preset = "area", pixel = null, fine = null, drawn = 1, unsteered = null;
let picture = null, first = [], strongest = 1, frame = 0, started = null;
const image = new Float32Array(WIDTH * WIDTH), response = new Float32Array(WIDTH * WIDTH);
const offsets = [];
for (let i = -REACH; i <= REACH; i += STEP) for (let j = -REACH; j <= REACH; j += STEP) offsets.push([i, j]);

const scaleOf = (id) => Number($(id).value);
const coefficients = (name, i) => (data.coefficients[name] ?? data.coefficients.paper)[i];

// The size of the drawn values at scale 1, without the centre, where functions without a core are infinite.
function strength(places) {
  const values = places.steer(1);
  let largest = 0;
  for (let i = 0; i < values.length; i++) if (places.radii[i] >= 0.7) largest = Math.max(largest, Math.abs(values[i]));
  return largest || 1;
}

function thumbnail(name, i) {
  const canvas = element("canvas"), places = new Places(prepare(data.presets[name], coefficients(name, i)), data.kernel_size, ...squareOf(THUMB, data.kernel_size + 0.6));
  canvas.width = canvas.height = THUMB;
  paintSigned(canvas, places.steer(1), strength(places));
  return canvas;
}

function chooseFilter(i) {
  chosen = i;
  const basis = data.presets[preset], own = coefficients(preset, i);
  pixel = new PixelFilter(basis, own, data.kernel_size, LARGEST, data.table);
  unsteered = pixel.at(1);
  fine = new Places(prepare(basis, own), data.kernel_size, ...squareOf(FINE, LARGEST * data.kernel_size + 0.6));
  drawn = strength(fine);
  begin();
}

function chooseDigit(i) {
  digit = i;
  picture = Float32Array.from(data.digits[i].pixels, (value) => value / 255);
  begin();
}

// What is seen at scale 1, with which all else is compared.
function begin() {
  enlarge(picture, data.digits[digit].side, ENLARGED, WIDTH, image);
  const whole = respond(image, WIDTH, unsteered);
  first = readResponse(image, WIDTH, unsteered, 1, offsets, whole);
  strongest = whole.reduce((most, value) => Math.max(most, Math.abs(value)), 1e-9);
  $("functions").replaceChildren();
  show();
}

function ring(context, radius) {
  context.strokeStyle = "#7a7a7a";
  context.setLineDash([4, 4]);
  context.beginPath();
  context.arc(FINE / 2, FINE / 2, radius, 0, 2 * Math.PI);
  context.stroke();
}

function show() {
  const scale = scaleOf("filter-slider"), size = scaleOf("image-slider"), points = FINE / (LARGEST * data.kernel_size + 0.6);
  // A filter at scale s has 1 / s^2 of the values: the same colours at the same places of the filter.
  const context = paintSigned($("filter-view"), fine.steer(scale), drawn / scale ** 2);
  ring(context, data.kernel_size / 2 * scale * points);
  enlarge(picture, data.digits[digit].side, ENLARGED * size, WIDTH, image);
  paintGrey($("image-view"), image);
  const filter = pixel.at(scale), basis = data.presets[preset];
  paintSigned($("response-view"), respond(image, WIDTH, filter, response), strongest);
  const kinds = {
    steered: readResponse(image, WIDTH, filter, size, offsets, response),
    resized: readResponse(image, WIDTH, interpolated(unsteered, scale), size, offsets),
    fixed: readResponse(image, WIDTH, unsteered, size, offsets),
  };
  for (const [kind, found] of Object.entries(kinds)) {
    const value = correlation(found, first), row = document.querySelector(`.bar[data-kind=${kind}]`);
    row.querySelector("meter").value = Math.max(0, value);
    row.querySelector("output").value = value.toFixed(3);
  }
  $("filter-scale").value = scale.toFixed(2);
  $("image-scale").value = size.toFixed(2);
  $("filter-slider").setAttribute("aria-valuetext", `${scale.toFixed(2)} times its size`);
  $("image-slider").setAttribute("aria-valuetext", `${size.toFixed(2)} times its size`);
  $("filter-size").value = `${windowSize(data.kernel_size, scale, basis)} pixels wide`;
  $("image-size").value = size === 1 ? "as it is" : `${size.toFixed(2)} times as large`;
  dials(basis, scale);
  $("core-hint").hidden = !basis.core;
  if ($("basis").open) functions();
}

// One dial for each order: the factor s^(m-2) e^(-i k log s) in the complex plane.
function dials(basis, scale) {
  const factors = steeringFactors(basis, scale);
  if ($("dials").children.length !== factors.length) {
    $("dials").replaceChildren(...factors.map(() => {
      const box = element("figure"), canvas = element("canvas", "", { "aria-hidden": "true" });
      canvas.width = canvas.height = 72;
      box.append(canvas, element("figcaption"));
      return box;
    }));
  }
  factors.forEach(([re, im], k) => {
    const box = $("dials").children[k], canvas = box.querySelector("canvas"), context = canvas.getContext("2d"), half = 36, long = 30;
    const style = getComputedStyle(document.documentElement);
    context.clearRect(0, 0, 72, 72);
    context.strokeStyle = style.getPropertyValue("--line");
    context.beginPath();
    context.arc(half, half, long, 0, 2 * Math.PI);
    context.stroke();
    context.strokeStyle = style.getPropertyValue("--several");
    context.lineWidth = 3;
    context.beginPath();
    context.moveTo(half, half);
    context.lineTo(half + long * re, half - long * im);
    context.stroke();
    context.lineWidth = 1;
    box.querySelector("figcaption").textContent = `k = ${basis.orders[k]}: ${re < 0 ? "−" : ""}${Math.abs(re).toFixed(3)} ${im < 0 ? "−" : "+"} ${Math.abs(im).toFixed(3)} i`;
  });
}

function functions() { // the functions of the basis at the present scale, with their weights
  const basis = data.presets[preset], own = coefficients(preset, chosen), scale = scaleOf("filter-slider"), box = $("functions");
  const sizes = own.flat().map(([a, b]) => Math.hypot(a, b)), most = Math.max(...sizes);
  $("basis-hint").textContent = `${sizes.length} functions at s = ${scale.toFixed(2)}, real parts; framed the more, the larger their coefficient. The filter is their weighted sum.`;
  if (!box.children.length) {
    box.replaceChildren(...own.flatMap((row, k) => row.map((_, j) => {
      const one = own.map((others, l) => others.map((_, i) => [Number(l === k && i === j), 0])), canvas = element("canvas");
      canvas.width = canvas.height = THUMB;
      canvas.places = new Places(prepare(basis, one), data.kernel_size, ...squareOf(THUMB, LARGEST * data.kernel_size + 0.6));
      canvas.strength = strength(canvas.places);
      canvas.setAttribute("role", "img");
      canvas.setAttribute("aria-label", `order ${basis.orders[k]}, ${Math.round(basis.orientations[j] * 180 / Math.PI)} degrees`);
      canvas.style.setProperty("--share", (sizes[k * row.length + j] / most).toFixed(3));
      return canvas;
    })));
  }
  for (const canvas of box.children) paintSigned(canvas, canvas.places.steer(scale), canvas.strength / scale ** 2);
}

function redraw() { // at most once for each picture of the screen
  if (!frame) frame = requestAnimationFrame(() => { frame = 0; show(); });
}

function play(now) {
  if (started === null) return;
  if (started === 0) started = now;
  const share = (now - started) / ROUND, wave = share < 1 ? (1 - Math.cos(2 * Math.PI * share)) / 2 : 0;
  $("filter-slider").value = String(1 + (LEARNED - 1) * wave);
  if ($("lock").checked) $("image-slider").value = $("filter-slider").value;
  show();
  if (share >= 1) stop(); else requestAnimationFrame(play);
}

function run() {
  started = 0;
  $("play").textContent = "Pause";
  requestAnimationFrame(play);
}

export function stop() {
  started = null;
  $("play").textContent = "Play";
}

function drawThumbnails() {
  const count = data.coefficients.paper.length, order = [...(data.strongest ?? []), ...Array(count).keys()];
  const shown = [...new Set(order)];
  const press = choices($("filters"), shown.map((i) => thumbnail(preset, i)), shown.map((i) => `filter ${i + 1}`), (place) => chooseFilter(shown[place]));
  press(shown.indexOf(chosen));
}

export async function start() {
  data = await load();
  data.table.values = new Float32Array(bytes(data.table.values).buffer);
  for (const one of data.digits) one.pixels = bytes(one.pixels);
  preset = document.querySelector("input[name=preset]:checked").value;
  chosen = data.strongest?.[0] ?? 0;
  const pictures = data.digits.map((one) => {
    const canvas = element("canvas");
    canvas.width = canvas.height = one.side;
    paintGrey(canvas, Float32Array.from(one.pixels, (value) => value / 255));
    return canvas;
  });
  choices($("digits"), pictures, data.digits.map((one) => `digit ${one.label}`), chooseDigit)(5 % data.digits.length);
  digit = 5 % data.digits.length;
  picture = Float32Array.from(data.digits[digit].pixels, (value) => value / 255);
  drawThumbnails();
  chooseFilter(chosen);
  for (const [one, other] of [["filter-slider", "image-slider"], ["image-slider", "filter-slider"]]) {
    $(one).addEventListener("input", () => {
      stop();
      if ($("lock").checked) $(other).value = $(one).value;
      redraw();
    });
  }
  $("lock").addEventListener("change", () => {
    if ($("lock").checked) $("image-slider").value = $("filter-slider").value;
    redraw();
  });
  $("play").addEventListener("click", () => { if (started === null) run(); else stop(); });
  $("basis").addEventListener("toggle", redraw);
  for (const radio of document.querySelectorAll("input[name=preset]")) {
    radio.addEventListener("change", () => { preset = radio.value; drawThumbnails(); chooseFilter(chosen); });
  }
  if (!calm()) run();
}

export const digits = () => data?.digits ?? []; // for other tabs
