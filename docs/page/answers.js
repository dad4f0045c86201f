// What the networks say of a picture, in the words of the server's answers (docs/guide/demo.md). `run(name, image)`
// runs a network of the page's and gives its outputs by name; `told` is networks.json.
import * as numbers from "./numbers.js";

const MOST_NAMED = 5; // classes
const UNKNOWN = "This is nothing that the network knows.";
const { roundTo } = numbers;

export class Answers {
  constructor(run, told) {
    let last = Promise.resolve();
    this.run = (name, image) => { // one after the other: a network answers one question at a time
      const next = last.then(() => run(name, image));
      last = next.catch(() => {});
      return next;
    };
    this.told = told;
    this.known = new WeakMap(); // what does not depend on the size, by picture: a slider asks again and again
  }

  know(grey) {
    if (!this.known.has(grey)) {
      const x = numbers.fitDrawing(grey, ...this.told.size);
      const found = { x, usual: this.findUsual(x), judged: this.judge(grey) };
      for (const part of [found.usual, found.judged]) part.catch(() => this.known.delete(grey)); // asked anew next time
      this.known.set(grey, found);
    }
    return this.known.get(grey);
  }

  async findUsual(x) { // the size that each way finds in the picture as it was given
    const found = [];
    for (const way of this.told.ways) found.push(way.scales.length > 1 ? (await this.hear(way, x)).size : null);
    return found;
  }

  async hear(way, x) { // joined logits, the size that was found, and what each channel says
    const alone = [];
    for (const scale of way.scales) {
      const [h, w] = [x.height, x.width].map((length) => numbers.canvasSize(length, scale));
      const shown = scale === 1 ? x : numbers.resize(x, h, w);
      alone.push(Array.from((await this.run(way.file, shown)).logits));
    }
    const joined = numbers.join(alone, way.scales);
    return { ...joined, size: way.scales.length > 1 ? joined.size : null, alone };
  }

  async answer(grey, size) {
    const { x, usual, judged } = this.know(grey), shown = numbers.atSize(x, size), before = await usual, ways = [];
    let last = null;
    for (const [w, way] of this.told.ways.entries()) {
      last = await this.hear(way, shown);
      const chances = numbers.softmax(last.logits);
      const top = chances.map((chance, label) => ({ label, probability: roundTo(chance, 4) }));
      top.sort((a, b) => chances[b.label] - chances[a.label]);
      ways.push({
        key: way.key, name: way.name, scales: way.scales, top: top.slice(0, MOST_NAMED),
        found: last.size && roundTo(last.size, 3), measured: last.size && roundTo(last.size / before[w], 3),
        logits: last.logits,
      });
    }
    const way = this.told.ways.at(-1);
    const channels = way.scales.map((scale, c) => {
      const chances = numbers.softmax(last.alone[c]), best = Math.max(...chances);
      return {
        scale, pixels: [shown.width, shown.height].map((length) => numbers.canvasSize(length, scale)),
        label: chances.indexOf(best), probability: roundTo(best, 4), share: roundTo(last.shares[c], 4),
      };
    });
    return { shown, usual: [x.width, x.height], inverted: x.inverted, ways, channels, ...(await judged) };
  }

  async judge(grey) { // one digit, several, or nothing that is one
    const usual = numbers.atUsualSize(numbers.readLight(grey), this.told.finder.judged);
    const { objects } = await this.search(usual);
    const labels = objects.sort((a, b) => a.column - b.column).map(({ label }) => label);
    if (!labels.length) return { verdict: "unknown", note: UNKNOWN };
    if (labels.length === 1) return { verdict: "one", note: "" };
    return { verdict: "several", note: `${labels.slice(0, -1).join(", ")} and ${labels.at(-1)}: see the third tab` };
  }

  async curve(grey) { // how sure each way is of a class at each size
    const { x } = this.know(grey), { sizes } = this.told.network, said = [];
    for (const size of sizes) {
      const shown = numbers.atSize(x, size), heard = [];
      for (const way of this.told.ways) heard.push(await this.hear(way, shown));
      said.push(heard);
    }
    const named = said.flat().map(({ best }) => best), labels = [...new Set(named)].sort((a, b) => a - b);
    const count = (label) => named.filter((other) => other === label).length;
    const chances = said.map((heard) => heard.map(({ logits }) => numbers.softmax(logits)));
    const ways = this.told.ways.map(({ key, name }, w) => ({
      key, name,
      chances: Object.fromEntries(labels.map((label) => [label, chances.map((at) => roundTo(at[w][label], 4))])),
      found: said[0][w].size === null ? null : said.map((heard) => roundTo(heard[w].size, 3)),
    }));
    const label = labels.reduce((most, other) => (count(other) > count(most) ? other : most));
    return { sizes, label, inverted: x.inverted, ways };
  }

  async find(grey) {
    const most = this.told.finder.most_side;
    if (Math.max(grey.height, grey.width) > most) {
      throw new Error(`The picture (${grey.width} x ${grey.height} pixels) must have at most ${most} on each side.`);
    }
    const start = performance.now(), found = await this.search(numbers.readLight(grey));
    return { ...found, seconds: roundTo((performance.now() - start) / 1000, 3) };
  }

  async search(light) { // objects, the clearest first, and the maps that they are read from
    const { extent, stride, offset, threshold } = this.told.finder;
    const { logits, sizes, dims } = await this.run("finder", light), [classes, height, width] = dims;
    const places = height * width;
    const scores = logits.subarray(places); // the first class is "nothing here", with the logit zero
    const grid = { classes: classes - 1, height, width, extent, stride, offset, threshold };
    const chances = (at) => numbers.softmax(Array.from({ length: classes }, (_, label) => logits[label * places + at]));
    const objects = numbers.findCentres(scores, sizes, grid).map(({ label, at, row, column, size }) => ({
      label, row, column, size: roundTo(size, 3), side: roundTo(extent * size, 1),
      probability: roundTo(chances(at)[label + 1], 4),
    }));
    const odds = Array.from({ length: places }, (_, at) => roundTo(1 - chances(at)[0], 3));
    const rounded = Array.from(sizes, (size) => roundTo(size, 2));
    return { objects, map: { height, width, stride, offset, sizes: rounded, odds } };
  }
}
