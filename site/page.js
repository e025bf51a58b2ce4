// What is compared and counted in the page. Part 1: the answer. Part 2: side by side.
"use strict";

const DATA = JSON.parse(document.getElementById("data").textContent);
const NARROW = matchMedia("(max-width: 719px)"); // there, one script's lines stand above the other's

const $ = (id) => document.getElementById(id);

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

// Text from studies is HTML already: the build escapes it, by analysis/page.py.
function foreign(tag, html, attributes = {}) {
  const made = element(tag, attributes);
  made.innerHTML = html;
  return made;
}

// === The answer ================================================================================
const STEPS = [51200, 102400, 204800, 409600, 819200, 1638400, 3276800, 6553600, 13107200];
const COSTS = [0, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000].map((x) => x * 1e-6); // seconds
const BEFORE_ANYBODY = "nobody"; // a device that no study has

// The one formula. A run is [repeat, iteration, whole training], in seconds; what its iterations
// leave of the whole is spent once: imports, compiling, first iterations that take longer.
const once = (run, cell) => run[2] - cell.iterations * run[1];
const seconds = (run, cell, steps, cost) => once(run, cell) + (steps / cell.batch) * run[1] + steps * cost;

// Geometric mean, and Student's 95% interval of the logarithms; without repeats no interval.
function geometric(values) {
  const logs = values.map(Math.log);
  const mean = logs.reduce((a, b) => a + b, 0) / logs.length;
  const squares = logs.reduce((a, x) => a + (x - mean) ** 2, 0);
  const quantile = logs.length > 1 ? DATA.t[logs.length - 2] : NaN;
  const half = quantile * Math.sqrt(squares / (logs.length - 1) / logs.length);
  return { mean: Math.exp(mean), low: Math.exp(mean - half), high: Math.exp(mean + half) };
}

// Each script of a cell by its seconds, the first one first, with its ratio to that one: runs of
// one repeat are paired.
function count(cell, secondsOf) {
  const rows = cell.modes.map((mode) => {
    const values = new Map(mode.runs.map((run) => [run[0], secondsOf(run)]));
    const fixed = geometric(mode.runs.map((run) => once(run, cell))).mean;
    return { mode, values, time: geometric([...values.values()]), once: fixed };
  });
  rows.sort((a, b) => a.time.mean - b.time.mean);
  const first = rows[0].values;
  for (const row of rows) {
    const pairs = [...row.values].filter(([repeat]) => first.has(repeat));
    row.ratio = geometric(pairs.map(([repeat, x]) => x / first.get(repeat)));
    row.apart = row.ratio.low > 1;
    row.known = Number.isFinite(row.ratio.low);
  }
  rows[0].apart = false;
  return rows;
}

function number(x) {
  if (x >= 100) return Math.round(x).toLocaleString("en");
  return x.toPrecision(3);
}

function duration(s) {
  if (s < 120) return `${number(s)} s`;
  return s < 7200 ? `${number(s / 60)} min` : `${number(s / 3600)} h`;
}

const inWords = (names) => names.join(", ").replace(/, ([^,]*)$/, " or $1");

// JAX, PyTorch, or the library that a script is of.
const LIBRARIES = { sb3: "Stable-Baselines3", sbx: "SBX" };
function familyOf({ name, framework }) {
  if (framework === "torch") return "PyTorch";
  return framework === "other" ? LIBRARIES[name.split(" ")[0]] || name : "JAX";
}

// Says first what JAX and PyTorch take, then which script is first.
function sentenceOf(rows, steps) {
  const families = Map.groupBy(rows, (row) => familyOf(row.mode));
  const parts = [...families].map(([family, own]) => {
    const ends = [...new Set([own[0], own[own.length - 1]].map((x) => duration(x.time.mean)))];
    const color = family === "JAX" ? "linen" : own[0].mode.framework;
    return `<b class="${color}">${family}</b> <b>${ends.join(" to ")}</b>`;
  });
  const name = (row) => `<code>${row.mode.name}</code>`;
  let text = `${steps.toLocaleString("en")} steps: ${parts.join(", ")}.`;
  if (!rows.some((x) => x.known)) return `${text} Each program ran once, so no difference can be claimed.`;
  const alike = rows.filter((x) => !x.apart);
  text += ` <small>${alike.length > 1 ? "First are" : "First is"} ${inWords(alike.map(name))}`;
  if (alike.length > 1) text += ", which cannot be told apart";
  const other = rows.find((x) => familyOf(x.mode) !== familyOf(rows[0].mode));
  if (other && other.apart) text += `; ${familyOf(other.mode)} takes ${timesOf(other)} times as long`;
  return `${text}.</small>`;
}

// "2.32 [2.24, 2.40]", with more digits where rounding would move a number onto 1.
function timesOf({ ratio: { mean, low, high } }) {
  const values = Number.isFinite(low) ? [mean, low, high] : [mean];
  let digits = 2;
  while (digits < 5 && values.some((x) => Number(x.toFixed(digits)) === 1)) digits++;
  const [first, ...ends] = values.map((x) => x.toFixed(digits));
  return ends.length ? `${first} [${ends.join(", ")}]` : first;
}

// A bar for each row; its darker part is what is spent once.
function bars(figure, rows) {
  const longest = Math.max(...rows.map((x) => x.time.high || x.time.mean));
  const percent = (x, of = longest) => `${((100 * x) / of).toFixed(2)}%`;
  figure.replaceChildren();
  for (const row of rows) {
    const { mean, low, high } = row.time;
    const track = element("div", { class: "track", "aria-hidden": "true" });
    const bar = track.appendChild(element("div", { class: `fill ${row.mode.framework}` }));
    bar.style.width = percent(mean);
    bar.style.setProperty("--split", percent(row.once, mean));
    if (Number.isFinite(low)) {
      const whisker = track.appendChild(element("div", { class: "whisker" }));
      whisker.style.left = percent(low);
      whisker.style.width = percent(high - low);
    }
    const line = figure.appendChild(element("div", { class: "row" }));
    line.append(foreign("span", row.mode.name, { class: "name" }), track);
    line.append(element("span", { class: "value" }, duration(mean)));
    line.append(element("span", { class: "verdict" }, verdictOf(row, rows[0])));
  }
}

function verdictOf(row, first) {
  if (row === first) return "first";
  if (!row.known) return `${timesOf(row)} times, no interval`;
  return `${timesOf(row)} times${row.apart ? "" : ": cannot be told apart"}`;
}

function choices(select, pairs) {
  const before = select.value;
  select.replaceChildren(...pairs.map(([value, html]) => foreign("option", html, { value })));
  if (pairs.some(([value]) => value === before)) select.value = before;
}

function showAnswer() {
  const size = new FormData($("controls")).get("size");
  const steps = STEPS[$("steps").value];
  const cost = COSTS[$("cost").value];
  $("steps-text").textContent = steps.toLocaleString("en");
  const micro = Math.round(cost * 1e6);
  $("cost-text").textContent = cost ? `${micro} µs more than the measured one's` : "as the measured one's";
  $("steps").setAttribute("aria-valuetext", $("steps-text").textContent);
  $("cost").setAttribute("aria-valuetext", $("cost-text").textContent);

  const here = DATA.cells.map((x, i) => [i, x]).filter(([, x]) => x.device === $("device").value && x.size === size);
  choices($("cell"), here.map(([i, x]) => [String(i), cellName(x)]));
  $("cell").disabled = !here.length;
  const cell = DATA.cells[$("cell").value];
  const tooFar = cell && steps > DATA.farthest * cell.iterations * cell.batch;
  for (const id of ["computed", "legend", "formula", "measured-box"]) $(id).hidden = !cell || tooFar;
  if (!cell || tooFar) {
    $("sentence").innerHTML = (cell ? `That is more than ${DATA.farthest} times as long as what was measured with
      this network, so nothing is claimed.` : "Nobody has measured this yet.") + ` Measure it, and send it in:
      <code>./benchmark.sh --size ${size} --runs-dir runs/mine && python -m analysis pack runs/mine studies/mine</code>`;
    return;
  }
  const rows = count(cell, (run) => seconds(run, cell, steps, cost));
  $("sentence").innerHTML = sentenceOf(rows, steps);
  bars($("computed"), rows);
  $("legend").textContent = "The darker part of a bar is spent once: imports, compiling, the first iterations. Whiskers and brackets are 95% intervals.";
  $("formula").innerHTML = `<b>seconds = once + steps / ${cell.batch.toLocaleString("en")} &times; iteration
    + steps &times; cost</b>, for each run of <a href="${cell.link}">${cell.study}</a> at commit ${cell.commit}; once is what
    a measured training took beyond its iterations. Shown are geometric means over seeds. A ratio pairs runs of one seed, and
    where its interval holds 1, two scripts cannot be told apart.`;
  showMeasured(cell);
}

function showMeasured(cell) {
  const steps = (cell.iterations * cell.batch).toLocaleString("en");
  bars($("measured"), count(cell, (run) => run[2]));
  $("measured-text").innerHTML = `Whole trainings of ${steps} steps in ${cell.env}, from ${cell.study}: the formula gives
    the same at that length and cost.`;
}

function cellName(cell) {
  const repeats = Math.max(...cell.modes.map((x) => x.runs.length));
  const seeds = repeats > 1 ? `${repeats} seeds` : "1 seed";
  return `${cell.env}: ${cell.modes.length} programs, ${seeds} of ${cell.iterations} iterations (${cell.study})`;
}

function startAnswer() {
  const devices = [...new Map(DATA.cells.map((x) => [x.device, x.device]))];
  if (!DATA.cells.some((x) => x.on_gpu)) devices.push([BEFORE_ANYBODY, "an NVIDIA GPU: not measured yet"]);
  choices($("device"), devices);
  $("controls").addEventListener("input", showAnswer);
  showAnswer();
}

// === Side by side: what is the same ============================================================
const textOf = DATA.lines.map((line) => line.split("¦").map((x) => x.slice(1)).join(""));
const wordsOf = textOf.map((text) => text.match(/\w+|\s+|[^\w\s]/g) || []);

// Longest common subsequence of weights: pairs [i, j] in order; what has no partner has null.
function align(a, b, weigh) {
  const width = b.length + 1;
  const best = new Float32Array((a.length + 1) * width);
  for (let i = a.length - 1; i >= 0; i--) {
    for (let j = b.length - 1; j >= 0; j--) {
      const skip = Math.max(best[(i + 1) * width + j], best[i * width + j + 1]);
      best[i * width + j] = Math.max(skip, weigh(a[i], b[j]) + best[(i + 1) * width + j + 1]);
    }
  }
  const pairs = [];
  let [i, j] = [0, 0];
  while (i < a.length || j < b.length) {
    const here = best[i * width + j];
    if (i < a.length && j < b.length && here === Math.fround(weigh(a[i], b[j]) + best[(i + 1) * width + j + 1])) {
      pairs.push([i++, j++]);
    } else if (i < a.length && here === best[(i + 1) * width + j]) pairs.push([i++, null]);
    else pairs.push([null, j++]);
  }
  return pairs;
}

// How much of two lines' words is the same, from 0 to 1 (Dice).
function likeness(a, b) {
  const left = wordsOf[a].filter((x) => x.trim());
  const right = new Map();
  let total = left.length;
  for (const word of wordsOf[b]) {
    if (!word.trim()) continue;
    right.set(word, (right.get(word) || 0) + 1);
    total++;
  }
  let common = 0;
  for (const word of left) {
    if (!right.get(word)) continue;
    right.set(word, right.get(word) - 1);
    common++;
  }
  return total ? (2 * common) / total : 0;
}

const ALIKE = 0.4; // lines less alike than that only stand side by side
function weighLines(a, b) {
  if (a === b) return wordsOf[a].length > 1 ? 4 : 0.5; // blank lines and brackets decide nothing
  if (!wordsOf[a].length || !wordsOf[b].length) return 0;
  const alike = likeness(a, b);
  return alike >= ALIKE ? 2 * alike : 0.01;
}

// Which characters of line a are not in line b: a flag each.
function marks(a, b) {
  const flags = [];
  const pairs = align(wordsOf[a], wordsOf[b], (x, y) => (x === y ? x.length : 0));
  for (const [i, j] of pairs) {
    if (i === null) continue;
    const word = wordsOf[a][i];
    const changed = j === null || word !== wordsOf[b][j];
    for (let k = 0; k < word.length; k++) flags.push(changed);
  }
  return flags.map((x, k) => x || (flags[k - 1] && flags[k + 1])); // one mark over jax.Array
}

// Rows of lines, as many columns as scripts: each is {at: [place or null], same, marks}.
function rowsOf(columns) {
  const [first, ...others] = columns;
  const partners = others.map(() => new Array(first.length).fill(null));
  const gaps = others.map(() => Array.from({ length: first.length + 1 }, () => []));
  others.forEach((other, k) => {
    let place = 0;
    for (const [i, j] of align(first, other, weighLines)) {
      if (i === null) gaps[k][place].push(j);
      else partners[k][i] = j;
      if (i !== null) place = i + 1;
    }
  });
  const rows = [];
  for (let i = 0; i <= first.length; i++) {
    const extra = Math.max(0, ...gaps.map((x) => x[i].length));
    for (let n = 0; n < extra; n++) rows.push({ at: [null, ...gaps.map((x) => x[i][n] ?? null)] });
    if (i < first.length) rows.push({ at: [i, ...partners.map((x) => x[i])] });
  }
  for (const row of rows) {
    row.ids = row.at.map((place, k) => (place === null ? null : columns[k][place]));
    row.same = row.ids.every((x) => x === row.ids[0]);
  }
  return rows;
}

// === Side by side: shown =======================================================================
function showLine(id, other) {
  const flags = other === null || other === id || likeness(id, other) < ALIKE ? [] : marks(id, other);
  const shown = [];
  let at = 0;
  for (const token of DATA.lines[id].split("¦")) {
    const [letter, text] = [token[0], token.slice(1)];
    for (let k = 0; k < text.length; ) {
      const start = k;
      const marked = Boolean(flags[at + k]);
      while (k < text.length && Boolean(flags[at + k]) === marked) k++;
      const piece = text.slice(start, k);
      const node = letter === "p" ? piece : element("span", { class: letter }, piece);
      shown.push(marked ? element("mark", {}, node) : node);
    }
    at += text.length;
  }
  return shown;
}

function cellOf(row, k, starts) {
  const id = row.ids[k];
  if (id === null) return element("td", { class: "none" });
  // A line is marked against the first script's, and the first script's against the next that differs.
  const other = k ? row.ids[0] : row.ids.find((x) => x !== null && x !== id) ?? null;
  const kind = row.same ? "" : `new column${k}`;
  const cell = element("td", { class: kind, "data-line": starts[k] + row.at[k] }, ...showLine(id, other));
  cell.style.setProperty("--indent", textOf[id].search(/\S|$/));
  return cell;
}

// In a narrow window the lines of one script stand above those of the next, as in a unified diff.
function stack(rows, starts) {
  const shown = [];
  for (let i = 0; i < rows.length; ) {
    if (rows[i].same) {
      shown.push(element("tr", {}, cellOf(rows[i++], 0, starts)));
      continue;
    }
    const end = rows.findIndex((x, j) => j > i && x.same);
    const hunk = rows.slice(i, end < 0 ? rows.length : end);
    for (let k = 0; k < starts.length; k++) {
      for (const row of hunk.filter((x) => x.ids[k] !== null)) shown.push(element("tr", {}, cellOf(row, k, starts)));
    }
    i += hunk.length;
  }
  return shown;
}

function trs(rows, starts) {
  if (NARROW.matches) return stack(rows, starts);
  return rows.map((row) => element("tr", {}, ...starts.map((_, k) => cellOf(row, k, starts))));
}

const CONTEXT = 3; // lines around a difference
function body(rows, starts) {
  const shown = element("tbody");
  for (let i = 0; i < rows.length; ) {
    let end = i;
    while (end < rows.length && rows[end].same === rows[i].same) end++;
    const from = i && rows[i].same ? i + CONTEXT : i;
    const to = end < rows.length && rows[i].same ? end - CONTEXT : end;
    if (!rows[i].same || to - from < 4) shown.append(...trs(rows.slice(i, end), starts));
    else {
      shown.append(...trs(rows.slice(i, from), starts));
      shown.append(foldOf(rows.slice(from, to), starts));
      shown.append(...trs(rows.slice(to, end), starts));
    }
    i = end;
  }
  return shown;
}

function foldOf(rows, starts) {
  const button = element("button", { type: "button", class: "fold" }, `the same, ${rows.length} lines`);
  const columns = NARROW.matches ? 1 : starts.length;
  const line = element("tr", {}, element("td", { colspan: columns, class: "folded" }, button));
  button.addEventListener("click", () => {
    const shown = trs(rows, starts);
    line.replaceWith(...shown);
    shown[0].cells[0].tabIndex = -1;
    shown[0].cells[0].focus(); // where the button was
  });
  return line;
}

function headOf(name, section) {
  const script = DATA.scripts[name];
  const end = section.start + section.lines.length - 1;
  const lines = DATA.link.startsWith("http") ? `#L${section.start}-L${end}` : "";
  const address = `${DATA.link}/${name}.py${lines}`;
  const open = element("a", { href: address }, `${name}.py, lines ${section.start} to ${end}`);
  const copy = element("button", { type: "button", "aria-label": `Copy ${section.title} of ${name}` }, "Copy");
  copy.addEventListener("click", async () => {
    await navigator.clipboard.writeText(section.lines.map((x) => textOf[x]).join("\n") + "\n");
    copy.textContent = "Copied";
    $("said").textContent = `Copied ${section.title} of ${name}`;
  });
  const note = (DATA.notes[name] || {})[section.title] || (DATA.notes[script.framework] || {})[section.title];
  const shown = element("div", {}, open, copy);
  return note ? [shown, foreign("p", note)] : [shown];
}

// A section of the chosen scripts; null where a script has none of that title.
function showSection(title, names) {
  const found = names.map((name) => DATA.scripts[name].sections.find((x) => x.title === title) || null);
  const own = names.filter((_, k) => found[k]);
  const parts = found.filter(Boolean);
  const alike = own.length === names.length && parts.every((x) => String(x.lines) === String(parts[0].lines));
  const box = element("section", { id: `section-${title.replaceAll(" ", "-")}`, class: "code", "aria-label": title });
  const link = element("a", { href: `#${names.join("..")}/${title.replaceAll(" ", "-")}`, title: "Link to this section" }, title);
  if (alike) {
    const details = box.appendChild(element("details"));
    const words = `: the same, ${parts[0].lines.length} lines`;
    details.append(element("summary", {}, element("h3", {}, title), words));
    details.addEventListener("toggle", () => {
      if (details.children.length > 1) return;
      details.append(tableOf(names.slice(0, 1), parts.slice(0, 1)));
    });
    return { box, words: "the same" };
  }
  const rows = rowsOf(parts.map((x) => x.lines));
  const differ = rows.filter((x) => !x.same).length;
  const without = names.filter((x) => !own.includes(x));
  const words = without.length ? `only in ${own.join(", ")}` : `${differ} of ${rows.length} lines differ`;
  box.append(element("div", { class: "heading" }, element("h3", {}, link), element("span", {}, words)));
  box.append(tableOf(own, parts, rows));
  return { box, words: without.length ? "own" : String(differ) };
}

function tableOf(names, parts, rows = rowsOf(parts.map((x) => x.lines))) {
  const starts = parts.map((x) => x.start);
  const heads = names.map((name, k) => element("th", { scope: "col", class: `column${k}` }, ...headOf(name, parts[k])));
  const table = element("table", {}, element("thead", {}, element("tr", {}, ...heads)));
  table.append(body(rows, starts));
  return table;
}

// === Side by side: chosen ======================================================================
const PATHS = [
  ["New to JAX? Begin here", "ppo_torch..ppo_linen"],
  ["Linen or NNX?", "ppo_linen..ppo_nnx"],
  ["What torch.compile asks for", "ppo_torch..ppo_torch_compile"],
  ["All four frameworks", "ppo_torch..ppo_linen..ppo_nnx..ppo_equinox"],
  ["My environment is not in JAX", "ppo_linen..ppo_linen_gymnasium"],
  ["Memory", "ppo_linen..ppo_rnn_linen"],
  ["Many agents at once", "ppo_linen..ppo_linen_vmap"],
  ["From PPO to DQN", "ppo_linen..dqn_linen"],
];
const MOST = 4;

// The address says what is chosen: #ppo_linen..ppo_nnx, or with a section, #ppo_linen..ppo_nnx/Loss.
function chosen() {
  const [pair, section] = decodeURIComponent(location.hash.slice(1)).split("/");
  const names = pair.split("..").filter((x) => x in DATA.scripts).slice(0, MOST);
  return names.length > 1 ? { names, section } : null;
}

let shownNames = [];
function showPair() {
  const wanted = chosen();
  const names = wanted ? wanted.names : shownNames.length ? shownNames : PATHS[0][1].split("..");
  if (String(names) !== String(shownNames)) showSections(names);
  if (!wanted) return;
  const target = (wanted.section && $(`section-${wanted.section}`)) || null;
  if (target) {
    const details = target.querySelector(":scope > details");
    if (details) details.open = true;
    target.scrollIntoView();
  } else if ($("compare").getBoundingClientRect().top > innerHeight / 2) $("compare").scrollIntoView();
}

function showSections(names) {
  shownNames = names;
  const titles = [];
  for (const name of names) {
    let place = 0;
    for (const { title } of DATA.scripts[name].sections) {
      const at = titles.indexOf(title);
      if (at < 0) titles.splice(place++, 0, title);
      else place = at + 1;
    }
  }
  document.body.style.setProperty("--columns", names.length);
  const shown = titles.map((title) => ({ title, ...showSection(title, names) }));
  $("sections").replaceChildren(...shown.map((x) => x.box));
  $("map").replaceChildren(...shown.map(({ title, words }) => {
    const address = `#${names.join("..")}/${title.replaceAll(" ", "-")}`;
    return element("a", { href: address, class: words === "the same" ? "same" : "" }, `${title} `, element("span", {}, words));
  }));
  const focused = [...$("chooser").children].indexOf(document.activeElement);
  $("chooser").replaceChildren(...names.map((_, k) => selectOf(names, k)));
  if (names.length < MOST) $("chooser").append(selectOf(names, names.length));
  if (focused >= 0) $("chooser").children[Math.min(focused, names.length)].focus();
  $("said").textContent = `Compared: ${names.join(", ")}`;
  for (const link of $("paths").children) {
    link.toggleAttribute("aria-current", link.hash === `#${names.join("..")}`);
  }
}

const ORDINALS = ["First", "Second", "Third", "Fourth"];
function selectOf(names, k) {
  const select = element("select", { "aria-label": `${ORDINALS[k]} script`, class: k < names.length ? `column${k}` : "more" });
  if (k > 1) select.append(element("option", { value: "" }, k < names.length ? "take away" : "+ one more"));
  for (const group of new Set(Object.values(DATA.scripts).map((x) => x.group))) {
    const own = Object.keys(DATA.scripts).filter((x) => DATA.scripts[x].group === group);
    select.append(element("optgroup", { label: group }, ...own.map((x) => element("option", { value: x }, x))));
  }
  select.value = names[k] || "";
  select.addEventListener("change", () => {
    const next = [...names];
    next[k] = select.value;
    location.hash = next.filter(Boolean).join("..");
  });
  return select;
}

function startPairs() {
  $("paths").append(...PATHS.map(([words, names]) => element("a", { href: `#${names}` }, words, element("span", {}, names.replaceAll("..", " → ")))));
  addEventListener("hashchange", showPair);
  NARROW.addEventListener("change", () => showSections(shownNames));
  showPair();
}

startAnswer();
startPairs();
