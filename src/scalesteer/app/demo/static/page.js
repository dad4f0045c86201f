// What all tabs use: elements, numbers in words, colours.

export const $ = (id) => document.getElementById(id);
export const calm = () => matchMedia("(prefers-reduced-motion: reduce)").matches;

export function element(name, text = "", attributes = {}) {
  const made = document.createElement(name);
  made.textContent = text;
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

export const percent = (share) => `${(100 * share).toFixed(share > 0.995 || share < 0.1 ? 1 : 0)} %`;

export function times(size) {
  return Math.abs(size - 1) < 0.01 ? "as it is" : `${size.toFixed(2)} times its size`;
}

export function bytes(base64) {
  return Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0));
}

// Blue is negative, white zero, red positive; in between by the square root, so that small values are seen.
const BLUE = [5, 48, 97], LIGHT_BLUE = [103, 169, 207], WHITE = [247, 247, 247], LIGHT_RED = [239, 138, 98], RED = [103, 0, 31];
const mixed = (one, other, share) => one.map((c, i) => c + (other[i] - c) * share);
const SIGNED = Array.from({ length: 511 }, (_, i) => {
  const v = (i - 255) / 255, [middle, end] = v < 0 ? [LIGHT_BLUE, BLUE] : [LIGHT_RED, RED], size = Math.abs(v);
  return size < 0.5 ? mixed(WHITE, middle, 2 * size) : mixed(middle, end, 2 * size - 1);
});

export function paintSigned(canvas, values, largest) {
  const context = canvas.getContext("2d"), image = context.createImageData(canvas.width, canvas.height);
  for (let i = 0; i < values.length; i++) {
    const share = Math.min(1, Math.sqrt(Math.abs(values[i]) / largest)), colour = SIGNED[255 + Math.round(255 * Math.sign(values[i]) * share)];
    image.data.set(colour, 4 * i);
    image.data[4 * i + 3] = 255;
  }
  context.putImageData(image, 0, 0);
  return context;
}

export function paintGrey(canvas, values) { // from 0, black, to 1
  const context = canvas.getContext("2d"), image = context.createImageData(canvas.width, canvas.height);
  for (let i = 0; i < values.length; i++) image.data.set([255 * values[i], 255 * values[i], 255 * values[i], 255], 4 * i);
  context.putImageData(image, 0, 0);
}

// From dark violet to yellow, as in the figures.
const VIRIDIS = [[68, 1, 84], [71, 44, 122], [59, 81, 139], [44, 113, 142], [33, 144, 141], [39, 173, 129], [92, 200, 99], [170, 220, 50], [253, 231, 37]];

export function viridis(share) {
  const at = Math.min(1, Math.max(0, share)) * (VIRIDIS.length - 1), i = Math.min(VIRIDIS.length - 2, Math.floor(at));
  return mixed(VIRIDIS[i], VIRIDIS[i + 1], at - i).map(Math.round);
}

// A row of buttons with pictures on them, one of which is pressed.
export function choices(box, canvases, names, choose) {
  const buttons = canvases.map((canvas, i) => {
    const button = element("button", "", { type: "button", "aria-label": names[i], "aria-pressed": "false", title: names[i] });
    button.append(canvas);
    button.addEventListener("click", () => { press(i); choose(i); });
    return button;
  });
  const press = (chosen) => buttons.forEach((button, i) => button.setAttribute("aria-pressed", String(i === chosen)));
  box.replaceChildren(...buttons);
  return press;
}
