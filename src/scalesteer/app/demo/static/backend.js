// Where the numbers come from: the server of `scalesteer demo` on this machine.

async function ask(path, blob = null) {
  let response, found;
  try {
    const sent = blob ? { method: "POST", body: blob, headers: { "Content-Type": blob.type } } : {};
    response = await fetch(path, sent);
    found = await response.json();
  } catch {
    throw new Error("The server does not answer. Is `scalesteer demo` still running?");
  }
  if (!response.ok) throw new Error(found.error);
  return found;
}

export const network = () => ask("api/network");
export const filters = () => ask("api/filters");
export const answer = (blob, size) => ask(`api/answer?size=${size.toFixed(6)}`, blob);
export const curve = (blob) => ask("api/curve", blob);
export const find = (blob) => ask("api/find", blob);
