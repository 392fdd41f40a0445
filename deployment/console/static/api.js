// The public interface of the server, as docs/http.md has it, and nothing else.

const BASE = new URL("../", import.meta.url); // this file is at BASE/console/api.js
const KEPT = "dflash-api-key";
const AGAIN = new Set([429, 502, 503, 504]);

/** A refusal by the server: its status, code and message. */
export class Refusal extends Error {
  constructor(status, error, retryAfter) {
    super(error?.message ?? `the server answered ${status}`);
    this.status = status;
    this.code = error?.code ?? "";
    this.passing = AGAIN.has(status);
    this.retryAfter = retryAfter;
  }
}

export const key = {
  get: () => sessionStorage.getItem(KEPT) ?? "",
  set: (value) => (value ? sessionStorage.setItem(KEPT, value) : sessionStorage.removeItem(KEPT)),
};

/** A path's response. Raises Refusal; TypeError where nobody answers. */
export async function request(method, path, { body, headers = {}, signal } = {}) {
  const sent = { ...headers };
  if (key.get()) sent.authorization = `Bearer ${key.get()}`;
  if (body !== undefined) sent["content-type"] = "application/json";
  const response = await fetch(new URL(path, BASE), {
    method, headers: sent, signal, cache: "no-store", body: body === undefined ? undefined : JSON.stringify(body),
  });
  if (response.ok) return response;
  const said = await response.json().catch(() => null);
  throw new Refusal(response.status, said?.error, Number(response.headers.get("retry-after")) || undefined);
}

const json = async (...asked) => (await request(...asked)).json();
const data = async (path) => (await json("GET", path)).data;
const of = (session, rest = "") => `v1/sessions/${encodeURIComponent(session)}${rest}`;
const named = (name, value) => (value ? { [name]: value } : {});

export const replicas = () => data("v1/replicas");
export const metrics = async () => (await request("GET", "metrics")).text();
export const sessions = () => data("v1/sessions");
export const session = (name) => json("GET", of(name));
export const turns = (name) => data(of(name, "/turns"));
export const checkpoints = (name) => data(of(name, "/checkpoints"));
export const create = (id) => json("POST", "v1/sessions", { body: named("id", id) });
export const checkpoint = (name, as) => json("POST", of(name, "/checkpoints"), { body: named("name", as) });
export const migrate = (name, to) => json("POST", of(name, "/migrate"), { body: named("to", to) });
export const remove = (name) => json("DELETE", of(name));
export const exported = async (name) => (await request("GET", of(name, "/export"))).blob();

/** `at`: nothing, `{turn}` or `{checkpoint}`. */
export const fork = (name, id, at = {}) => json("POST", of(name, "/fork"), { body: { ...named("id", id), ...at } });

export const begin = (name, body, idempotencyKey, signal) =>
  request("POST", of(name, "/turns"), { body, signal, headers: { "idempotency-key": idempotencyKey } });

export const follow = (name, turn, after, signal) =>
  request("GET", of(name, `/turns/${turn}/events`), { signal, headers: after ? { "last-event-id": after } : {} });
