// Fills the page with the values of status.json, every few seconds. Names in them come
// from other hosts: they become text nodes, never markup.
"use strict";
(() => {

const pause = 5000; // ms between two questions
const patience = 10000; // ms for an answer
const fewRows = 100; // of a table, until all are asked for: a browser takes long for many
const none = "–"; // a value that is not known
const svgSpace = "http://www.w3.org/2000/svg";

const byId = (id) => document.getElementById(id);

// make returns an element with attributes and children; strings are text.
function make(name, attributes = {}, ...children) {
  const e = document.createElement(name);
  return fill(e, attributes, children);
}

function draw(name, attributes = {}, ...children) {
  return fill(document.createElementNS(svgSpace, name), attributes, children);
}

function fill(e, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) e.setAttribute(key, value);
  e.append(...children);
  return e;
}

// write changes the text of an element, if it is another one.
function write(e, text) {
  if (e.textContent !== text) e.textContent = text;
}

// Units.

function scaled(v, base, units) {
  if (v === null || v === undefined) return none;
  let i = 0;
  while (v >= base && i < units.length - 1) {
    v /= base;
    i++;
  }
  const digits = v >= 100 || Number.isInteger(v) ? 0 : v >= 10 ? 1 : 2;
  return `${v.toFixed(digits)} ${units[i]}`.trim();
}

const bytes = (v) => scaled(v, 1024, ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]);
const byteRate = (v) => v === null ? none : bytes(v) + "/s";
const rate = (v) => scaled(v, 1000, ["", "k", "M"]);
const number = (v) => v === null ? none : String(v);
const duration = (v) => v === null ? none : v === 0 ? "0 s" : scaled(v * 1e9, 1000, ["ns", "µs", "ms", "s"]);
const clock = (ms) => new Date(ms).toLocaleTimeString("en-GB");
const day = (ms) => new Date(ms).toLocaleDateString("en-CA") + " " + clock(ms);

// Tables. A column has the key of a value, its title, and how it is written. The
// order is that of the daemon until a title is pressed. The value of the column that is
// below stands below the others of its row, over the whole width.

const text = (v) => v;
const column = (key, title, show = text, more = {}) => ({ key, title, show, ...more });
const numeric = { number: true };
const name = { name: true };
const below = { below: true };
const reason = { below: true, bad: () => true };
const stateOf = (good) => ({ bad: (row) => row.state !== good });

const tables = {
  devices: {
    empty: "There are no devices.", total: "devices",
    columns: [
      column("name", "Device", text, name), column("state", "State", text, stateOf("open")), column("size", "Size", bytes, numeric),
      column("read", "Read", byteRate, numeric), column("written", "Written", byteRate, numeric),
      column("requests", "Requests/s", rate, numeric), column("p50", "p50", duration, numeric), column("p99", "p99", duration, numeric),
      column("inflight", "In flight", number, numeric), column("failed", "Failed", number, numeric),
      column("hung", "Hung", number, { number: true, bad: (row) => row.hung > 0 }), column("hung_at", "Hangs in", text, name),
      column("session", "Session", text, name), column("path", "Path", text, name),
      column("error", "Reason", text, reason),
    ],
  },
  paths: {
    empty: "There are no paths.", total: "paths",
    columns: [
      column("session", "Session", text, name), column("id", "Path", number, numeric), column("state", "State", text, stateOf("connected")),
      column("fabric", "Fabric"), column("source", "Client", text, name), column("destination", "Server", text, name),
      column("received", "Received", bytes, numeric), column("sent", "Sent", bytes, numeric),
      column("inflight", "In flight", number, numeric), column("heartbeat", "Heartbeat", duration, numeric),
      column("reconnects", "Reconnects", number, numeric), column("failovers", "Fail-overs", number, numeric),
      column("protected", "Protected", (v) => v || "no"),
      column("error", "Last error", text, { ...below, ...stateOf("connected") }),
    ],
  },
  sessions: {
    empty: "There are no sessions.", total: "sessions",
    columns: [
      column("name", "Session", text, name), column("state", "State", text, stateOf("connected")), column("peer", "Peer", text, name), column("policy", "Policy"),
      column("devices", "Devices", number, numeric), column("paths", "Paths", number, numeric),
      column("paths_connected", "Connected", number, { number: true, bad: (row) => row.paths_connected < row.paths }),
      column("retired_chunks", "Retired chunks", number, { number: true, bad: (row) => row.retired_chunks > 0 }),
      column("error", "Reason", text, reason),
    ],
  },
  plugins: {
    empty: "There are no plugins.", total: "plugins",
    columns: [
      column("name", "Plugin"), column("kind", "Kind"), column("state", "State", text, stateOf("running")),
      column("restarts", "Restarts", number, numeric), column("pid", "PID", number, numeric),
      column("error", "Reason", text, reason),
    ],
  },
  events: {
    empty: "Nothing has changed yet.",
    columns: [
      column("number", "Number", number, numeric), column("time", "Time", day), column("kind", "Kind"), column("about", "About", text, name),
      column("from", "From"), column("to", "To"), column("why", "Reason", text, below),
    ],
  },
};

// withReason adds to a row what of it needs attention: the texts of the conditions of its
// subject.
function withReason(row, subject, kinds, conditions) {
  const found = conditions.filter((c) => c.subject === subject && kinds.test(c.kind)).map((c) => `${c.kind}: ${c.text}`);
  return found.length ? { ...row, error: found.join("\n") } : { error: "", ...row };
}

// rowsOf are the rows of a table.
function rowsOf(id, s) {
  const rows = s[id], conditions = s.conditions ?? [];
  const add = (kinds, subject) => rows.map((r) => withReason(r, subject(r), kinds, conditions));
  switch (id) {
    case "devices": return add(/^(device|requests)-/, (r) => s.daemon === "client" ? r.name : r.path);
    case "sessions": return add(/^(redundancy|server)-/, (r) => r.name);
    case "plugins": return add(/^plugin-/, (r) => r.name);
  }
  return rows;
}

const collator = new Intl.Collator("en", { numeric: true });

function compare(a, b) {
  if (a === b) return 0;
  if (a === null) return -1;
  if (b === null) return 1;
  return typeof a === "number" ? a - b : collator.compare(a, b);
}

// addTable puts a table into its section.
function addTable(id, table) {
  const section = byId(id);
  const title = section.querySelector("h2");
  table.note = make("span", { class: "soft" });
  table.filter = make("input", { type: "search", placeholder: "filter", "aria-label": `filter ${id}` });
  table.more = make("button", { type: "button", hidden: "" }, "show all");
  table.more.addEventListener("click", () => {
    table.whole = !table.whole;
    write(table.more, table.whole ? "show fewer" : "show all");
    showTable(table);
  });
  const head = make("div", { class: "head" });
  section.prepend(head);
  head.append(title, table.note, table.more, table.filter);
  const beside = table.columns.filter((c) => !c.below);
  table.headings = beside.map((c) => {
    const button = make("button", { type: "button" }, c.title);
    button.addEventListener("click", () => {
      table.down = table.sorted === c ? !table.down : Boolean(c.number);
      table.sorted = c;
      showTable(table);
    });
    return make("th", { scope: "col", role: "columnheader", ...(c.number && { class: "number" }) }, button);
  });
  table.body = make("tbody", { role: "rowgroup" });
  // A table whose rows are laid out as grids needs its roles in words.
  const whole = make("table", { role: "table" },
    make("thead", { role: "rowgroup" }, make("tr", { role: "row" }, ...table.headings)), table.body);
  whole.style.setProperty("--columns", String(beside.length));
  section.append(make("div", { class: "scroll", role: "region", "aria-label": id, tabindex: "0" }, whole));
  table.filter.addEventListener("input", () => showTable(table));
  table.rows = [];
}

// showTable brings the rows up to date. Cells are kept where their text is the same, so
// that a selection stays.
function showTable(table) {
  const wanted = table.filter.value.trim().toLowerCase();
  let rows = table.rows;
  if (wanted) rows = rows.filter((r) => table.columns.some((c) => String(c.show(r[c.key])).toLowerCase().includes(wanted)));
  if (table.sorted) {
    const { key } = table.sorted;
    rows = rows.toSorted((a, b) => compare(a[key], b[key]) * (table.down ? -1 : 1));
  }
  table.columns.filter((c) => !c.below).forEach((c, i) => {
    const order = c === table.sorted ? (table.down ? "descending" : "ascending") : "none";
    table.headings[i].setAttribute("aria-sort", order);
  });
  const shown = table.whole ? rows : rows.slice(0, fewRows);
  while (table.body.rows.length > shown.length) table.body.lastChild.remove();
  shown.forEach((r, i) => showRow(table, table.body.rows[i] ?? addRow(table), r));
  table.more.hidden = rows.length <= fewRows;
  const found = wanted ? `${rows.length} of ${table.all}` : `${table.all}`;
  const left = table.all > table.rows.length ? `, of which the page has ${table.rows.length}` : "";
  const first = shown.length < rows.length ? `, the first ${shown.length} are shown` : "";
  write(table.note, table.rows.length === 0 ? table.empty : found + left + first);
}

function addRow(table) {
  const row = make("tr", { role: "row" });
  for (const c of table.columns) {
    const cell = make("td", { role: "cell", "data-key": c.key, "data-title": c.title });
    for (const kind of ["number", "name", "below"]) if (c[kind]) cell.classList.add(kind);
    row.append(cell);
  }
  table.body.append(row);
  return row;
}

function showRow(table, row, values) {
  table.columns.forEach((c, i) => {
    const cell = row.cells[i];
    write(cell, c.show(values[c.key]));
    cell.classList.toggle("bad", Boolean(c.bad?.(values)));
  });
}

// Totals.

function showTotals(s) {
  const t = s.totals;
  const parts = (some, all) => ({ value: `${some} of ${all}`, bad: some < all });
  const tiles = {
    "devices open": parts(t.devices_open, t.devices),
    "sessions connected": parts(t.sessions_connected, t.sessions),
    "paths connected": parts(t.paths_connected, t.paths),
    "plugins running": parts(t.plugins_running, t.plugins),
    "read": { value: byteRate(t.read) },
    "written": { value: byteRate(t.written) },
    "requests/s": { value: rate(t.requests) },
    "p99": { value: duration(t.p99) },
    "requests that hang": { value: number(t.hung), bad: t.hung > 0 },
    "requests failed": { value: number(t.failed) },
  };
  const list = byId("totals");
  if (!list.firstChild) {
    for (const name of Object.keys(tiles)) list.append(make("div", { "data-key": name }, make("dt", {}, name), make("dd")));
  }
  for (const tile of list.children) {
    const { value, bad } = tiles[tile.dataset.key];
    write(tile.lastChild, value);
    tile.classList.toggle("bad", Boolean(bad));
  }
}

// Plots.

const plots = [
  { title: "Throughput", show: byteRate, series: () => [["read", (p) => p.read], ["written", (p) => p.written]] },
  { title: "Requests per second", show: rate, series: () => [["answered", (p) => p.requests], ["failed", (p) => p.failed]] },
  { title: "Latency", show: duration, series: () => [["p50", (p) => p.p50], ["p99", (p) => p.p99]] },
  { title: "Busiest devices", show: byteRate, series: busiest },
  { title: "Paths connected", show: number, series: () => [["connected", (p) => p.paths]] },
  { title: "Requests that hang", show: number, series: () => [["hang", (p) => p.hung]] },
];

const maxSeries = 5;
const span = 15 * 60 * 1000; // ms

// busiest are the devices that moved most in all intervals together. A device has no
// value in an interval in which it was not among the busiest.
function busiest(history) {
  const sums = new Map();
  for (const p of history) for (const b of p.busiest ?? []) sums.set(b.device, (sums.get(b.device) ?? 0) + b.rate);
  return [...sums].sort((a, b) => b[1] - a[1]).slice(0, maxSeries)
    .map(([device]) => [device, (p) => p.busiest?.find((b) => b.device === device)?.rate ?? null]);
}

function addPlot(plot) {
  plot.caption = make("figcaption");
  plot.svg = draw("svg", { class: "plot", role: "img", "aria-label": plot.title });
  byId("plots").append(make("figure", {}, plot.caption, plot.svg));
  plot.svg.addEventListener("pointermove", (e) => {
    plot.at = e.clientX - plot.svg.getBoundingClientRect().left;
    showPlot(plot);
  });
  plot.svg.addEventListener("pointerleave", () => {
    plot.at = undefined;
    showPlot(plot);
  });
}

// above returns a round number that is not below v.
function above(v) {
  if (!(v > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(v));
  return [1, 2, 5, 10].find((n) => n * power >= v) * power;
}

// top is the upper end of the axis: a round number in the unit that is shown.
function top(show, v) {
  if (show === byteRate && v >= 1024) {
    const unit = 1024 ** Math.floor(Math.log2(v) / 10);
    return above(v / unit) * unit;
  }
  return Math.max(above(v), show === number ? 1 : 0);
}

function showPlot(plot) {
  const { history, time, interval } = state;
  const width = plot.svg.clientWidth, height = plot.svg.clientHeight;
  if (width === 0) return;
  const left = 66, right = 8, upper = 8, lower = 18;
  const series = plot.series(history);
  const highest = top(plot.show, Math.max(0, ...history.flatMap((p) => series.map(([, of]) => of(p) ?? 0))));
  const x = (t) => left + (width - left - right) * (1 - (time - t) / span);
  const y = (v) => height - lower - (height - lower - upper) * v / highest;
  const parts = [];
  for (const share of [0, 0.5, 1]) {
    const v = highest * share;
    parts.push(draw("line", { class: "grid", x1: left, x2: width - right, y1: y(v), y2: y(v) }));
    if (share !== 0.5 || plot.show !== number || highest % 2 === 0) {
      parts.push(draw("text", { x: left - 6, y: y(v) + 4, "text-anchor": "end" }, plot.show(v)));
    }
  }
  for (const minutes of [15, 10, 5, 0]) {
    const anchor = { 15: "start", 0: "end" }[minutes] ?? "middle";
    parts.push(draw("text", { x: x(time - minutes * 60000), y: height - 3, "text-anchor": anchor }, minutes ? `${minutes} min` : "now"));
  }
  const seen = history.filter((p) => p.time >= time - span);
  series.forEach(([, of], i) => parts.push(draw("path", { class: `series s${i}`, d: line(seen, of, x, y, 2500 * interval) })));
  const chosen = plot.at === undefined ? undefined : nearest(seen, plot.at, x);
  if (chosen) parts.push(draw("line", { class: "cursor", x1: x(chosen.time), x2: x(chosen.time), y1: upper, y2: height - lower }));
  plot.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  plot.svg.replaceChildren(...parts);
  showCaption(plot, series, chosen ?? seen.at(-1), chosen);
}

// line is the path through the values. It is broken where there is none for longer than
// gap.
function line(points, of, x, y, gap) {
  let d = "", before;
  for (const p of points) {
    const v = of(p);
    if (v === null || v === undefined) {
      before = undefined;
      continue;
    }
    const near = before !== undefined && p.time - before <= gap;
    d += `${near ? "L" : "M"}${x(p.time).toFixed(1)} ${y(v).toFixed(1)}${near ? "" : "h0"}`;
    before = p.time;
  }
  return d;
}

function nearest(points, at, x) {
  return points.reduce((best, p) => best === undefined || Math.abs(x(p.time) - at) < Math.abs(x(best.time) - at) ? p : best, undefined);
}

function showCaption(plot, series, point, chosen) {
  const keys = series.map(([name, of], i) => make("span", { class: "key" },
    draw("svg", { class: "mark", viewBox: "0 0 22 10", "aria-hidden": "true" }, draw("path", { class: `series s${i}`, d: "M1 5H21" })),
    make("bdi", {}, name), make("span", {}, point ? plot.show(of(point) ?? null) : none)));
  plot.caption.replaceChildren(make("strong", {}, plot.title), ...keys, make("span", { class: "when" }, chosen ? clock(chosen.time) : ""));
}

// The state, and its arrival.

let state;

function showProblem(why) {
  byId("problem").hidden = !why;
  write(byId("problem"), why);
}

function show(next) {
  const before = state;
  state = next.problem && before ? { ...before, time: next.time, history: next.history, events: next.events } : next;
  byId("verdict").hidden = !state.verdict;
  write(byId("verdict"), state.verdict ?? "");
  showProblem(next.problem ? `The daemon does not answer: ${next.problem}` : (state.config ?? []).map((what) => `Configuration: ${what}`).join("\n"));
  const name = `rnbd ${state.daemon}${state.host && ` on ${state.host}`}`;
  document.title = name;
  write(byId("title"), name);
  write(byId("about"), state.pid ? `version ${state.version}, process ${state.pid}` : "");
  write(byId("time"), `as of ${clock(next.time)}`);
  showTotals(state);
  for (const [id, table] of Object.entries(tables)) {
    table.rows = rowsOf(id, state);
    table.all = state.totals[table.total] ?? state[id].length;
    showTable(table);
  }
  plots.forEach(showPlot);
  if (!before) performance.mark("shown"); // the tests read how long it took
}

// here is an address beside this page. It has no name and password, as that of the page
// may: a request would be refused.
function here(file) {
  const url = new URL(file, location.href);
  url.username = url.password = "";
  return url;
}

async function ask() {
  try {
    const answer = await fetch(here("status.json"), { cache: "no-store", signal: AbortSignal.timeout(patience) });
    if (!answer.ok) throw new Error(answer.status === 401 ? "the token has changed: load the page again" : `status ${answer.status}`);
    show(await answer.json());
  } catch (e) {
    showProblem(`No new values${state ? ` since ${clock(state.time)}` : ""}: ${e.message}`);
  }
}

let asking = false;

// look asks unless nobody looks.
async function look() {
  if (asking || document.hidden) return;
  asking = true;
  await ask();
  asking = false;
}

for (const [id, table] of Object.entries(tables)) addTable(id, table);
plots.forEach(addPlot);
addEventListener("resize", () => state && plots.forEach(showPlot));
document.addEventListener("visibilitychange", look);
setInterval(look, pause);
look();

})();
