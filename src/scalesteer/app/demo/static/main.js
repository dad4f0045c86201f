// The page: three tabs, of which those are shown for which there is a network.

import { $, element, paintGrey } from "./page.js";
import * as many from "./many.js";
import * as sizes from "./sizes.js";
import * as steering from "./steering.js";

const tabs = [...document.querySelectorAll("[role=tab]")];

function choose(tab, focus = false) {
  for (const one of tabs) {
    const own = one === tab;
    one.setAttribute("aria-selected", String(own));
    one.tabIndex = own ? 0 : -1;
    $(one.getAttribute("aria-controls")).hidden = !own;
  }
  const name = tab.getAttribute("aria-controls");
  if (focus) tab.focus();
  history.replaceState(null, "", `#${name}`);
  if (name !== "steering") steering.stop();
  if (name === "sizes") sizes.show();
  if (name === "many") many.open();
}

for (const tab of tabs) {
  tab.addEventListener("click", () => choose(tab));
  tab.addEventListener("keydown", (event) => {
    const shown = tabs.filter((one) => !one.hidden), at = shown.indexOf(tab);
    const next = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: shown.length - 1 }[event.key];
    if (next === undefined) return;
    event.preventDefault();
    choose(shown[(next + shown.length) % shown.length], true);
  });
}

function pictureOf({ side, pixels }) { // the address of a digit's picture
  const canvas = element("canvas");
  canvas.width = canvas.height = side;
  paintGrey(canvas, Float32Array.from(pixels, (value) => value / 255));
  return canvas.toDataURL("image/png");
}

async function start() {
  await sizes.start();
  const own = { steering: sizes.network.steering, sizes: sizes.network.ways.length > 0, many: sizes.network.finder };
  for (const tab of tabs) tab.hidden = !own[tab.getAttribute("aria-controls")];
  const wanted = tabs.find((tab) => `#${tab.getAttribute("aria-controls")}` === location.hash && !tab.hidden);
  choose(wanted ?? tabs.find((tab) => !tab.hidden));
  if (own.steering) await steering.start();
  if (own.many) many.start(steering.digits().map(pictureOf));
  if (!$("many").hidden) many.open();
  document.body.dataset.ready = "yes";
}

start().catch((error) => { $("trouble").textContent = error.message; });
