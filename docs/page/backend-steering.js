// The page's backend where no networks can be run: the first tab alone, whose filters the browser steers by itself.

async function fetchJson(name) {
  const response = await fetch(new URL(name, import.meta.url));
  if (!response.ok) throw new Error(`${name} cannot be loaded (${response.status}).`);
  return response.json();
}

async function refuse() {
  throw new Error("This page has no networks to ask.");
}

export const network = async () => (await fetchJson("networks.json")).network;
export const filters = () => fetchJson("filters.json");
export { refuse as answer, refuse as curve, refuse as find };
