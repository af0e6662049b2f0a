"use strict";
// Asks for the feed once a second and shows it. No library, nothing from elsewhere.

const EVERY = 1000;
const at = (id) => document.getElementById(id);

const number = (value) => value.toLocaleString("en");
const seconds = (value) =>
  value === undefined ? "–" : value < 1 ? `${(value * 1000).toFixed(value < 0.01 ? 1 : 0)} ms` : `${value.toFixed(1)} s`;
const bytes = (value) => {
  const units = ["B/s", "KB/s", "MB/s", "GB/s", "TB/s"];
  let unit = 0;
  for (; value >= 1000 && unit < units.length - 1; unit += 1) value /= 1000;
  return `${value.toFixed(unit && value < 100 ? 1 : 0)} ${units[unit]}`;
};
const span = (value) => {
  if (value < 120) return `${Math.floor(value)} s`;
  if (value < 7200) return `${Math.floor(value / 60)} min`;
  return `${Math.floor(value / 3600)} h`;
};

// Title, value to sort by, text, and whether it is a number.
const COLUMNS = [
  ["Role", (each) => each.role, (each) => each.role, false],
  ["Address", (each) => each.http, (each) => each.http.replace(/^https?:\/\//, ""), false],
  ["Model", (each) => each.models[0], (each) => each.models.join(", "), false],
  ["State", (each) => each.state, (each) => (each.why ? `${each.state}: ${each.why}` : each.state), false],
  ["In flight", (each) => each.in_flight, (each) => number(each.in_flight), true],
  ["Running", (each) => each.running, (each) => number(each.running), true],
  ["Waiting", (each) => each.waiting, (each) => number(each.waiting), true],
  ["Free blocks", (each) => each.blocks_free, (each) => (each.blocks ? `${number(each.blocks_free)} of ${number(each.blocks)}` : "–"), true],
  ["KV moved", (each) => each.rate, (each) => bytes(each.rate), true],
  ["Loop lag", (each) => each.loop_lag, (each) => seconds(each.loop_lag), true],
  ["Wake-up lag", (each) => each.wakeup_lag, (each) => seconds(each.wakeup_lag), true],
  ["Heard", (each) => each.heard, (each) => `${seconds(each.heard)} ago`, true],
  ["Served", (each) => each.served, (each) => number(each.served), true],
];
const COLOURS = { up: "good", draining: "warn", joining: "warn", suspect: "bad" };

let paused = false;
let sorted = { column: 0, up: true };
let last = null;
let before = null; // answered requests and time of the feed before

function made(tag, text, kind) {
  const element = document.createElement(tag);
  if (text !== undefined) element.textContent = text;
  if (kind) element.className = kind;
  return element;
}

function heads() {
  COLUMNS.forEach(([title, , , numeric], column) => {
    const head = made("th", undefined, numeric ? "n" : "");
    head.scope = "col";
    const button = made("button", title);
    button.type = "button";
    button.addEventListener("click", () => {
      sorted = { column, up: sorted.column === column ? !sorted.up : true };
      if (last) instances(last.instances);
    });
    head.append(button);
    at("heads").append(head);
  });
}

function instances(found) {
  [...at("heads").children].forEach((head, column) => {
    if (column === sorted.column) head.setAttribute("aria-sort", sorted.up ? "ascending" : "descending");
    else head.removeAttribute("aria-sort");
  });
  const by = COLUMNS[sorted.column][1];
  const order = [...found].sort((one, other) => {
    const [a, b] = [by(one), by(other)];
    const way = a < b ? -1 : a > b ? 1 : one.id < other.id ? -1 : 1;
    return sorted.up ? way : -way;
  });
  at("rows").replaceChildren(
    ...order.map((each) => {
      const row = made("tr");
      COLUMNS.forEach(([title, , text, numeric], column) => {
        const cell = made(column === 1 ? "th" : "td", text(each), numeric ? "n" : "");
        if (column === 1) cell.scope = "row";
        if (title === "State") cell.className = COLOURS[each.state] || "";
        row.append(cell);
      });
      return row;
    }),
  );
  at("nobody").hidden = found.length > 0;
  at("instances").hidden = found.length === 0;
}

function tiles(feed) {
  const sum = (pick) => feed.instances.reduce((total, each) => total + pick(each), 0);
  const answered = feed.ended.answered || 0;
  const rate = before && feed.router.uptime > before.uptime ? (answered - before.answered) / (feed.router.uptime - before.uptime) : 0;
  before = { answered, uptime: feed.router.uptime };
  const shown = [
    ["Requests in flight", number(feed.router.running)],
    ["Requests waiting", number(feed.router.waiting)],
    ["Answered a second", rate.toFixed(1)],
    ["KV moved", bytes(sum((each) => each.rate) / 2)],
    ["First token, p50", seconds(feed.latencies.first_token.p50)],
    ["Router's loop lag", seconds(feed.router.loop_lag)],
    ["Up for", span(feed.router.uptime)],
  ];
  at("now").replaceChildren(
    ...shown.map(([title, value]) => {
      const tile = made("div");
      tile.append(made("dt", title), made("dd", value));
      return tile;
    }),
  );
}

function tables(feed) {
  const rows = [["first token", feed.latencies.first_token], ["end of the answer", feed.latencies.request]];
  at("latencies").replaceChildren(
    ...rows.map(([title, found]) => {
      const row = made("tr");
      const head = made("th", title);
      head.scope = "row";
      row.append(head, ...["p50", "p90", "p99"].map((share) => made("td", seconds(found[share]), "n")));
      return row;
    }),
  );
  const counts = [
    ...Object.entries(feed.ended).map(([kind, count]) => ["requests", kind, count]),
    ...Object.entries(feed.failures).map(([kind, count]) => ["attempts that failed", kind, count]),
  ];
  at("failures").replaceChildren(
    ...(counts.length ? counts : [["requests", "none yet", 0]]).map(([what, kind, count]) => {
      const row = made("tr");
      row.append(made("td", what), made("td", kind.replaceAll("_", " ")), made("td", number(count), "n"));
      return row;
    }),
  );
}

function say(text, colour) {
  const health = at("health");
  if (health.textContent !== text) health.textContent = text; // or it would be read out each second
  health.className = `health ${colour}`;
}

function health(feed) {
  const up = (role) => feed.instances.filter((each) => each.role === role && each.state === "up").length;
  const [prefill, decode] = [up("prefill"), up("decode")];
  const counts = `${prefill} prefill and ${decode} decode up`;
  if (prefill && decode) say(`Ready: ${counts}`, "good");
  else say(`Not ready: ${counts}`, "bad");
}

async function look() {
  if (paused) return;
  try {
    const response = await fetch("/feed.json", { cache: "no-store", signal: AbortSignal.timeout(5000) });
    if (!response.ok) throw new Error(`${response.status}`);
    last = await response.json();
  } catch {
    say("The router doesn't answer; the figures are old", "bad");
    return;
  }
  if (paused) return;
  at("start").textContent = `python examples/serve.py --role prefill --router ${last.router.control}`;
  health(last);
  tiles(last);
  instances(last.instances);
  tables(last);
}

at("pause").addEventListener("click", () => {
  paused = !paused;
  at("pause").setAttribute("aria-pressed", String(paused));
  if (paused) say("Paused", "warn");
  else look();
});
heads();
look();
setInterval(look, EVERY);
