// The page's backend without a server: ONNX Runtime Web runs the networks in the visitor's browser. The page calls
// network(), answer(picture, size), curve(picture), find(picture) and filters(); no picture leaves the machine.
import * as ort from "./ort.wasm.min.mjs";
import { Answers } from "./answers.js";
import { toGrey } from "./numbers.js";

const MOST_BYTES = 5 * 2 ** 20, MOST_PIXELS = 2 ** 24; // of a picture, as on the server
ort.env.wasm.numThreads = 1; // several would need headers that a plain site does not send
ort.env.wasm.wasmPaths = new URL("./", import.meta.url).href;

const fetched = new Map(), sessions = new Map(), read = new WeakMap();

async function fetchJson(name) {
  const response = await fetch(new URL(name, import.meta.url));
  if (!response.ok) throw new Error(`${name} cannot be loaded (${response.status}).`);
  return response.json();
}

function once(found, key, make) {
  if (!found.has(key)) {
    const made = make();
    found.set(key, made);
    made.catch(() => found.delete(key)); // a later call tries again
  }
  return found.get(key);
}

async function run(name, { data, height, width }) {
  const session = await once(sessions, name, () =>
    ort.InferenceSession.create(new URL(`${name}.onnx`, import.meta.url).href, { executionProviders: ["wasm"] }));
  const { logits, sizes } = await session.run({ images: new ort.Tensor("float32", data, [1, 1, height, width]) });
  return { logits: logits.data, sizes: sizes?.data, dims: logits.dims.slice(1) };
}

async function decode(picture) { // a blob as grey pixels
  if (picture.size > MOST_BYTES) throw new Error("The picture must have at most 5 MiB.");
  let bitmap;
  try {
    bitmap = await createImageBitmap(picture);
  } catch {
    throw new Error("The picture must be a PNG or JPEG file.");
  }
  const { width, height } = bitmap;
  if (width * height > MOST_PIXELS) throw new Error("The picture must have at most 16 megapixels.");
  const ink = Object.assign(document.createElement("canvas"), { width, height }).getContext("2d");
  ink.drawImage(bitmap, 0, 0);
  bitmap.close();
  return toGrey(ink.getImageData(0, 0, width, height).data, width, height);
}

function toDataUri({ data, height, width }) {
  const canvas = Object.assign(document.createElement("canvas"), { width, height }), ink = canvas.getContext("2d");
  const pixels = ink.createImageData(width, height);
  data.forEach((value, at) => pixels.data.set([255 * value, 255 * value, 255 * value, 255], 4 * at));
  ink.putImageData(pixels, 0, 0);
  return canvas.toDataURL("image/png");
}

const told = () => once(fetched, "networks.json", () => fetchJson("networks.json"));
const grey = (picture) => once(read, picture, () => decode(picture));
const answers = () => once(fetched, "answers", async () => new Answers(run, await told()));

export const filters = () => once(fetched, "filters.json", () => fetchJson("filters.json"));
export const network = async () => (await told()).network;
export const curve = async (picture) => (await answers()).curve(await grey(picture));
export const find = async (picture) => (await answers()).find(await grey(picture));

export async function answer(picture, size) {
  const { shown, ...said } = await (await answers()).answer(await grey(picture), size);
  return { ...said, picture: toDataUri(shown) };
}
