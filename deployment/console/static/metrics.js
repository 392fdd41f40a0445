// Prometheus' text, and what can be said of two scrapes.

/** Samples as `{name, labels, value}`. */
export function parse(text) {
  const samples = [];
  for (const line of text.split("\n")) {
    const found = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)/.exec(line);
    if (found === null) continue;
    const labels = {};
    for (const [, name, value] of (found[2] ?? "").matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g)) {
      labels[name] = value.replace(/\\(.)/g, (_, letter) => (letter === "n" ? "\n" : letter));
    }
    samples.push({ name: found[1], labels, value: Number(found[3]) });
  }
  return samples;
}

/** A gauge's or counter's value by one of its labels. */
export function by(samples, name, label) {
  const found = {};
  for (const sample of samples) {
    if (sample.name === name) found[sample.labels[label]] = (found[sample.labels[label]] ?? 0) + sample.value;
  }
  return found;
}

/** How much a counter grew, over all replicas: one that is new, or began again, counts with all it has. */
export function grown(older, newer, name) {
  const before = by(older, name, "replica");
  return Object.entries(by(newer, name, "replica")).reduce((sum, [replica, value]) => {
    const base = before[replica] ?? 0;
    return sum + (value >= base ? value - base : value);
  }, 0);
}

/** Rounds by the tokens that they gave, between two scrapes; of the newer one alone without an older. */
export function acceptance(older, newer) {
  const name = "dflash_acceptance_length_tokens_bucket";
  const before = cumulative(older, name);
  const rounds = new Map();
  for (const [replica, buckets] of cumulative(newer, name)) {
    const base = before.get(replica);
    let below = 0;
    for (const [bound, count] of [...buckets].sort(([a], [b]) => a - b)) {
      const since = count - Math.min(base?.get(bound) ?? 0, count);
      if (Number.isFinite(bound)) rounds.set(bound, (rounds.get(bound) ?? 0) + since - below);
      below = since;
    }
  }
  return rounds;
}

function cumulative(samples, name) {
  const found = new Map();
  for (const { labels, value } of samples.filter((sample) => sample.name === name)) {
    if (!found.has(labels.replica)) found.set(labels.replica, new Map());
    found.get(labels.replica).set(labels.le === "+Inf" ? Infinity : Number(labels.le), value);
  }
  return found;
}
