// What the package does with pictures before and after its networks, in JavaScript: the same numbers as Python's.
// Images are {data: Float32Array of rows, height, width}, from 0 to 1.

const PARTS = 2 ** 6 * 3 ** 2 * 5 ** 6 * 7; // of a scale, as in scalesteer.resize
const MARGIN = 1 / 7; // of the side around a drawing, as in scalesteer.app.drawings
const LEAST_CONTRAST = 16; // of 255; what differs less from the background is not there

const sum = (values) => values.reduce((total, value) => total + value, 0);
const median = (values) => {
  const sorted = Float64Array.from(values).sort(), middle = sorted.length >> 1;
  return sorted.length % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
};
export const roundHalfEven = (x) => {
  const below = Math.floor(x);
  return x - below === 0.5 ? below + (below % 2) : Math.round(x);
};
export const roundTo = (x, digits) => Number(x.toFixed(digits));

// Pictures

export function toGrey(rgba, width, height) { // as Pillow: on black, or on white if what is seen is dark
  const grey = (r, g, b) => (19595 * r + 38470 * g + 7471 * b + 32768) >> 16;
  let opaque = true, seen = 0, total = 0;
  for (let i = 0; i < rgba.length; i += 4) {
    if (rgba[i + 3] < 255) opaque = false;
    if (rgba[i + 3]) {
      seen += 1;
      total += grey(rgba[i], rgba[i + 1], rgba[i + 2]);
    }
  }
  const ground = !opaque && seen && total / seen < 128 ? 255 : 0;
  const over = (value, alpha) => {
    const mixed = alpha * value + (255 - alpha) * ground + 128;
    return ((mixed >> 8) + mixed) >> 8;
  };
  const data = new Uint8Array(width * height);
  for (let i = 0; i < data.length; i++) {
    const [r, g, b, alpha] = rgba.subarray(4 * i, 4 * i + 4);
    data[i] = grey(over(r, alpha), over(g, alpha), over(b, alpha));
  }
  return { data, height, width };
}

function border({ data, height, width }) { // the pixels along it, corners twice
  const found = [];
  for (let j = 0; j < width; j++) found.push(data[j], data[(height - 1) * width + j]);
  for (let i = 0; i < height; i++) found.push(data[i * width], data[i * width + width - 1]);
  return median(found);
}

function crop({ data, width }, top, left, height, width_) {
  const part = new data.constructor(height * width_);
  for (let i = 0; i < height; i++) {
    for (let j = 0; j < width_; j++) part[i * width_ + j] = data[(top + i) * width + left + j];
  }
  return { data: part, height, width: width_ };
}

function inked(image) { // the box around what is above a quarter
  let [top, left, bottom, right] = [image.height, image.width, -1, -1];
  image.data.forEach((value, at) => {
    if (value <= 0.25) return;
    const row = Math.floor(at / image.width), column = at % image.width;
    [top, bottom] = [Math.min(top, row), Math.max(bottom, row)];
    [left, right] = [Math.min(left, column), Math.max(right, column)];
  });
  return crop(image, top, left, bottom - top + 1, right - left + 1);
}

export function fitDrawing(grey, height, width) { // one light object on black, of a network's size
  let ground = border(grey);
  const inverted = ground > 127;
  const light = inverted ? grey.data.map((value) => 255 - value) : grey.data;
  ground = inverted ? 255 - ground : ground;
  const ink = Float64Array.from(light, (value) => value - ground), most = ink.reduce((a, b) => Math.max(a, b));
  if (most < LEAST_CONTRAST) throw new Error("The picture is blank: nothing in it differs from its background.");
  const canvas = { data: new Uint8Array(height * width), height, width };
  if (grey.height === height && grey.width === width) {
    canvas.data.set(light);
  } else {
    const shares = ink.map((value) => Math.min(1, Math.max(0, value / most)));
    const box = inked({ data: shares, height: grey.height, width: grey.width });
    const margin = MARGIN * Math.min(height, width);
    const factor = Math.min((height - 2 * margin) / box.height, (width - 2 * margin) / box.width);
    const [h, w] = [box.height, box.width].map((length) => Math.max(1, roundHalfEven(length * factor)));
    const small = shrink({ ...box, data: Uint8Array.from(box.data, (value) => 255 * value) }, h, w);
    const [top, left] = [(height - h) >> 1, (width - w) >> 1];
    for (let i = 0; i < h; i++) canvas.data.set(small.data.subarray(i * w, (i + 1) * w), (top + i) * width + left);
  }
  return { data: Float32Array.from(canvas.data, (value) => Math.fround(value) / 255), height, width, inverted };
}

function shrink(image, height, width) { // bytes by Pillow's triangle and its integers, columns first
  const along = (length, count) => Array.from({ length: count }, (_, place) => {
    const scale = length / count, support = Math.max(1, scale), centre = (place + 0.5) * scale;
    const first = Math.max(0, Math.trunc(centre - support + 0.5));
    const last = Math.min(length, Math.trunc(centre + support + 0.5));
    const weights = [];
    for (let i = first; i < last; i++) weights.push(Math.max(0, 1 - Math.abs((i - centre + 0.5) / support)));
    const total = sum(weights);
    return { first, weights: weights.map((weight) => Math.trunc(0.5 + (weight / total) * 2 ** 22)) };
  });
  const mix = (data, taps, at) => {
    const mixed = 2 ** 21 + sum(taps.weights.map((weight, i) => weight * data[at(taps.first + i)]));
    return Math.min(255, Math.max(0, Math.floor(mixed / 2 ** 22)));
  };
  let { data } = image;
  if (width !== image.width) {
    const columns = along(image.width, width), before = data;
    data = Uint8Array.from({ length: image.height * width }, (_, at) => {
      const row = Math.floor(at / width) * image.width;
      return mix(before, columns[at % width], (i) => row + i);
    });
  }
  if (height !== image.height) {
    const rows = along(image.height, height), before = data;
    data = Uint8Array.from({ length: height * width }, (_, at) =>
      mix(before, rows[Math.floor(at / width)], (i) => i * width + (at % width)));
  }
  return { data, height, width };
}

export function readLight(grey) { // light ink on black, from 0 to 1
  const ground = border(grey), sign = ground > 127 ? -1 : 1;
  const ink = Float32Array.from(grey.data, (value) => sign * (value - ground));
  const most = ink.reduce((a, b) => Math.max(a, b));
  if (most < LEAST_CONTRAST) throw new Error("The picture is blank: nothing in it differs from its background.");
  return { ...grey, data: ink.map((value) => Math.min(1, Math.max(0, value / most))) };
}

// Resizing, by a matrix along each axis

function cubic(distance) { // Keys' function, a = -1/2
  const d = Math.abs(distance);
  if (d < 1) return 1 + d * d * (1.5 * d - 2.5);
  return d < 2 ? 2 - 4 * d + 2.5 * d * d - 0.5 * d ** 3 : 0;
}

function matrix(length, count) { // for each pixel of the result the first pixel that it reads, and its weights
  const step = length / count, spread = Math.max(1, step);
  return Array.from({ length: count }, (_, i) => {
    const place = Math.min(length - 0.5, Math.max(-0.5, step / 2 - 0.5 + step * i));
    const first = Math.max(0, Math.ceil(place - 2 * spread));
    const last = Math.min(length - 1, Math.floor(place + 2 * spread));
    const weights = Array.from({ length: last - first + 1 }, (_, j) => cubic((place - first - j) / spread));
    const total = sum(weights);
    return { first, weights: weights.map((weight) => Math.fround(weight / total)) };
  });
}

export function resize(image, height, width) {
  let { data } = image;
  if (width !== image.width) {
    const read = data;
    data = new Float32Array(image.height * width);
    matrix(image.width, width).forEach(({ first, weights }, j) => {
      for (let i = 0; i < image.height; i++) {
        let mixed = 0;
        for (let k = 0; k < weights.length; k++) mixed += weights[k] * read[i * image.width + first + k];
        data[i * width + j] = mixed;
      }
    });
  }
  if (height !== image.height) {
    const read = data;
    data = new Float32Array(height * width);
    matrix(image.height, height).forEach(({ first, weights }, i) => {
      for (let j = 0; j < width; j++) {
        let mixed = 0;
        for (let k = 0; k < weights.length; k++) mixed += weights[k] * read[(first + k) * width + j];
        data[i * width + j] = mixed;
      }
    });
  }
  return { data, height, width };
}

const clamp = (image) => ({ ...image, data: image.data.map((value) => Math.min(1, Math.max(0, value))) });

export function canvasSize(length, scale) { // of an image in a channel: the nearest, halves up
  return Math.floor((2 * length * Math.round(scale * PARTS) + PARTS) / (2 * PARTS));
}

function pad(image, top, left, height, width) { // onto a black canvas
  const data = new Float32Array(height * width);
  for (let i = 0; i < image.height; i++) {
    data.set(image.data.subarray(i * image.width, (i + 1) * image.width), (top + i) * width + left);
  }
  return { data, height, width };
}

export function atSize(image, size) { // a larger picture, or a smaller one on black
  const [h, w] = [image.height, image.width].map((length) => Math.max(1, roundHalfEven(length * size)));
  const x = clamp(resize(image, h, w));
  return size > 1 ? x : pad(x, (image.height - h) >> 1, (image.width - w) >> 1, image.height, image.width);
}

export function atUsualSize(light, { height, width, margin }) { // what is drawn, at a size at which digits are found
  const box = inked(light), factor = Math.min(height / box.height, width / box.width);
  const [h, w] = [box.height, box.width].map((length) => Math.max(1, roundHalfEven(length * factor)));
  return pad(clamp(resize(box, h, w)), margin, margin, h + 2 * margin, w + 2 * margin);
}

// Answers

function logSumExp(values) {
  const peak = Math.max(...values);
  return peak + Math.log(sum(values.map((value) => Math.exp(value - peak))));
}

export function softmax(values) {
  const level = logSumExp(values);
  return values.map((value) => Math.exp(value - level));
}

export function join(answers, scales) { // logits of each channel -> joined logits, the size that answered, shares
  const logits = answers[0].map((_, label) => logSumExp(answers.map((z) => z[label])) - Math.log(answers.length));
  const best = logits.indexOf(Math.max(...logits)), shares = softmax(answers.map((z) => z[best]));
  return { logits, best, shares, size: Math.exp(sum(shares.map((share, c) => -share * Math.log(scales[c])))) };
}

export function findCentres(scores, sizes, { classes, height, width, extent, stride, offset, threshold }) {
  const left = new Float32Array(height * width).fill(-Infinity), labels = new Int32Array(height * width), found = [];
  for (let label = 0; label < classes; label++) {
    for (let at = 0; at < left.length; at++) {
      const score = scores[label * left.length + at];
      if (score > left[at]) [left[at], labels[at]] = [score, label];
    }
  }
  for (;;) {
    const at = left.reduce((best, score, i) => (score > left[best] ? i : best), 0);
    if (!(left[at] > threshold)) return found;
    const i = Math.floor(at / width), j = at % width;
    found.push({ label: labels[at], at, row: offset + i * stride, column: offset + j * stride, size: sizes[at] });
    const reach = Math.max(stride, 0.45 * extent * sizes[at]);
    for (let k = 0; k < left.length; k++) {
      const away = Math.max(Math.abs(Math.floor(k / width) - i), Math.abs((k % width) - j)) * stride;
      if (away <= reach) left[k] = -Infinity;
    }
  }
}
