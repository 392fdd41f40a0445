// Replicas and what they decode, from /v1/replicas and /metrics.

import { byId, bytes, make, show } from "./dom.js";
import { acceptance, by, grown } from "./metrics.js";

const WINDOW_MS = 60000;

/** Scrapes of the last minute, oldest first. */
export class Scrapes {
  constructor() {
    this.kept = [];
  }

  add(samples) {
    const now = performance.now();
    this.kept.push({ at: now, samples });
    while (this.kept.length > 2 && this.kept[1].at < now - WINDOW_MS) this.kept.shift();
  }

  /** Tokens that were drawn in each second between the last two scrapes. */
  get rate() {
    const [before, last] = this.kept.slice(-2);
    if (last === undefined) return 0;
    return grown(before.samples, last.samples, "dflash_tokens_committed_total") / ((last.at - before.at) / 1000);
  }

  /** Rounds by their tokens: of the last minute if there were any, else since the start. */
  get rounds() {
    const last = this.kept.at(-1)?.samples ?? [];
    const recent = acceptance(this.kept[0]?.samples ?? [], last);
    const some = [...recent.values()].some((count) => count > 0);
    return some ? { recent: true, counts: recent } : { recent: false, counts: acceptance([], last) };
  }
}

export function showReplicas(replicas, samples) {
  const of = (name) => by(samples, name, "replica");
  const [lanes, running] = [of("dflash_lanes"), of("dflash_lanes_running")];
  const [pages, pagesFree] = [of("dflash_device_pages"), of("dflash_device_pages_free")];
  const [images, imagesFree] = [of("dflash_device_images"), of("dflash_device_images_free")];
  const queued = of("dflash_turns_queued");
  const items = replicas.map(({ id, pid, node, model, backend, sessions, engine }) => {
    const size = (count, each) => (Number.isFinite(each) ? `, ${bytes(count * each)}` : "");
    const [used, kept] = [(pages[id] ?? 0) - (pagesFree[id] ?? 0), (images[id] ?? 0) - (imagesFree[id] ?? 0)];
    return make("li", { "data-replica": id },
      make("strong", {}, id),
      make("span", { className: "quiet" }, ` ${model}, ${backend}; ${sessions} sessions; process ${pid} on ${node.slice(0, 8)}`),
      meter("lanes", running[id] ?? 0, lanes[id] ?? 0, queued[id] ? `, ${queued[id]} wait` : ""),
      meter("KV pages", used, pages[id] ?? 0, size(used, engine.page_bytes)),
      meter("images", kept, images[id] ?? 0, size(kept, engine.image_bytes)));
  });
  show(byId("replica-list"), ...(items.length > 0 ? items : [make("li", { className: "quiet" }, "None answers.")]));
  const [size, used] = [by(samples, "dflash_host_store_bytes", "node"), by(samples, "dflash_host_store_used_bytes", "node")];
  const stores = Object.keys(size).map((node) => `${node.slice(0, 8)}: ${bytes(used[node] ?? 0)} of ${bytes(size[node])}`);
  byId("host-stores").textContent = stores.length > 0 ? `Host stores: ${stores.join("; ")}` : "";
}

function meter(name, value, most, more) {
  return make("div", { className: "pair" }, make("span", {}, name),
    make("meter", { min: 0, max: most || 1, value, "aria-label": name }), make("span", {}, `${value} of ${most}${more}`));
}

export function showDecoding(scrapes) {
  byId("rate").textContent = scrapes.rate.toFixed(0);
  const { recent, counts } = scrapes.rounds;
  const rounds = [...counts].sort(([a], [b]) => a - b);
  const total = rounds.reduce((sum, [, count]) => sum + count, 0);
  const tokens = rounds.reduce((sum, [bound, count]) => sum + bound * count, 0);
  byId("acceptance").textContent = total ? (tokens / total).toFixed(2) : "-";
  byId("window").textContent = recent ? "in the last minute" : "since the start";
  const rows = rounds.map(([bound, count]) => {
    const bar = make("div", { className: "bar" });
    bar.style.width = `${total ? (100 * count) / total : 0}%`;
    return make("tr", {}, make("td", {}, String(bound)), make("td", {}, bar), make("td", {}, String(count)));
  });
  show(document.querySelector("#histogram tbody"), ...rows);
}
