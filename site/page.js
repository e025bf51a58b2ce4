// Part 1: estimate training times. Part 2: compare scripts side by side.
"use strict";

const $ = (id) => document.getElementById(id);
const DATA = JSON.parse($("data").textContent);
// In narrow windows, the lines of one script are shown above those of the other, and all sections are folded.
const NARROW = matchMedia("(max-width: 719px)");

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

// Return an element with HTML from the build, which has escaped all notes and texts from studies.
function prose(tag, html, attributes = {}) {
  const made = element(tag, attributes);
  made.innerHTML = html;
  return made;
}

// === The answer ================================================================================
const STEPS = [51200, 102400, 204800, 409600, 819200, 1638400, 3276800, 6553600, 13107200];
const COSTS = [0, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000].map((x) => x * 1e-6); // seconds

// A run is [repeat, seconds per iteration, seconds of the entire run]. The time that steady iterations
// do not explain is overhead: imports, compilation, slower first iterations.
const once = (run, cell) => run[2] - cell.iterations * run[1];
const seconds = (run, cell, steps, cost) => once(run, cell) + (steps / cell.batch) * run[1] + steps * cost;

// Geometric mean with a 95% t interval, computed from the logarithms; no interval without repeats.
function geometric(values) {
  const logs = values.map(Math.log);
  const mean = logs.reduce((a, b) => a + b, 0) / logs.length;
  const squares = logs.reduce((a, x) => a + (x - mean) ** 2, 0);
  const quantile = logs.length > 1 ? DATA.t[logs.length - 2] : NaN;
  const half = quantile * Math.sqrt(squares / (logs.length - 1) / logs.length);
  return { mean: Math.exp(mean), low: Math.exp(mean - half), high: Math.exp(mean + half) };
}

// Return the scripts in a cell, fastest first, with their ratios to the fastest. Runs are paired by repeat.
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

const number = (x) => (x >= 100 ? Math.round(x).toLocaleString("en") : x.toPrecision(3));

function duration(s) {
  if (s < 120) return `${number(s)} s`;
  return s < 7200 ? `${number(s / 60)} min` : `${number(s / 3600)} h`;
}

const inWords = (names) => names.join(", ").replace(/, ([^,]*)$/, " or $1");

// Return "JAX", "PyTorch", or the name of another library.
const LIBRARIES = { sb3: "Stable-Baselines3", sbx: "SBX" };
function familyOf({ name, framework }) {
  if (framework === "torch") return "PyTorch";
  return framework === "other" ? LIBRARIES[name.split(" ")[0]] || name : "JAX";
}

// Return a sentence with the times of JAX and PyTorch, and another with the fastest script.
function sentenceOf(rows, steps, cell) {
  const families = Map.groupBy(rows, (row) => familyOf(row.mode));
  const parts = [...families].map(([family, scripts]) => {
    const ends = scripts.map((x) => duration(x.time.mean));
    const span = ends[0] === ends.at(-1) ? ends[0] : `${ends[0].replace(/ s$/, "")} to ${ends.at(-1)}`;
    return `<b>${span}</b> in <b class="${family === "JAX" ? "linen" : scripts[0].mode.framework}">${family}</b>`;
  });
  const text = `${steps.toLocaleString("en")} steps of ${cell.env} take ${parts.join(", ")}.`;
  if (!rows.some((x) => x.known)) return `${text} <small>Each ran with one seed: no conclusion about which is faster.</small>`;
  const alike = rows.filter((x) => x === rows[0] || (x.known && !x.apart)).map((x) => `<code>${x.mode.name}</code>`);
  const other = rows.find((x) => familyOf(x.mode) !== familyOf(rows[0].mode));
  const first = alike.length > 1 ? `No significant difference between the fastest: ${inWords(alike)}.` : `${alike[0]} is the fastest.`;
  const times = other && other.apart ? ` ${familyOf(other.mode)} takes ${timesOf(other)} as long.` : "";
  return `${text} <small>${first}${times}</small>`;
}

// Return text such as "2.32× [2.24, 2.40]", with more digits if a number would be rounded to 1.
function timesOf({ ratio: { mean, low, high } }) {
  const values = Number.isFinite(low) ? [mean, low, high] : [mean];
  let digits = 2;
  while (digits < 5 && values.some((x) => Number(x.toFixed(digits)) === 1)) digits++;
  const [first, ...ends] = values.map((x) => x.toFixed(digits));
  return ends.length ? `${first}× [${ends.join(", ")}]` : `${first}×`;
}

// Draw a bar per row; its dark part is overhead.
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
    line.append(prose("span", row.mode.name, { class: "name" }), track);
    line.append(element("span", { class: "value" }, duration(mean)));
    const doubt = row.known ? ", not significant" : ", no interval";
    const verdict = row === rows[0] ? "fastest" : `${timesOf(row)}${row.apart ? "" : doubt}`;
    line.append(element("span", { class: "verdict" }, verdict));
  }
}

function choices(select, pairs) {
  const before = select.value;
  select.replaceChildren(...pairs.map(([value, html]) => prose("option", html, { value })));
  if (pairs.some(([value]) => value === before)) select.value = before;
}

function showAnswer() {
  const size = new FormData($("controls")).get("size");
  const steps = STEPS[$("steps").value];
  const cost = COSTS[$("cost").value];
  const here = [...DATA.cells.entries()].filter(([, x]) => x.device === $("device").value && x.size === size);
  choices($("cell"), here.map(([i, x]) => [String(i), cellName(x)]));
  $("cell").disabled = !here.length;
  const cell = DATA.cells[$("cell").value];
  const env = cell ? cell.env : "a measured one";
  $("steps-text").textContent = steps.toLocaleString("en");
  $("cost-text").innerHTML = cost ? `${Math.round(cost * 1e6)} µs more than ${env}` : `as in ${env}`;
  for (const id of ["steps", "cost"]) $(id).setAttribute("aria-valuetext", $(`${id}-text`).textContent);

  const isFar = cell && steps > DATA.farthest * cell.iterations * cell.batch;
  for (const id of ["counted", "formula", "measured-box"]) $(id).hidden = !cell || isFar;
  if (!cell || isFar) {
    const why = `This is more than ${DATA.farthest}x the measured length with this network, which is too far to extrapolate.`;
    const elsewhere = [...new Set(DATA.cells.filter((x) => x.size === size).map((x) => x.device))];
    const missing = $("device").value === "none"
      ? `On an NVIDIA H100, only iterations were measured, not complete runs: see <a href="${DATA.link}/studies/gpu">studies/gpu</a>.`
      : elsewhere.length
      ? `Not measured yet on this device. This network was measured on ${elsewhere.join("; ")}.`
      : "Not measured yet.";
    $("sentence").innerHTML = `${isFar ? why : missing} <small>To measure it on your machine:
      <code>./benchmark.sh --sizes ${size} --repeats 5 --runs-dir runs/mine &amp;&amp; python -m analysis pack runs/mine
      studies/mine</code>. If you contribute the result, this page will show it.</small>`;
    return;
  }
  const rows = count(cell, (run) => seconds(run, cell, steps, cost));
  $("sentence").innerHTML = sentenceOf(rows, steps, cell);
  bars($("computed"), rows);
  $("batch").textContent = cell.batch.toLocaleString("en");
  $("study").innerHTML = `<a href="${cell.link}">${cell.study}</a> at commit ${cell.commit}`;
  bars($("measured"), count(cell, (run) => run[2]));
  const measured = (cell.iterations * cell.batch).toLocaleString("en");
  $("measured-text").innerHTML = `Training runs of ${measured} steps on ${cell.env}, ${cell.study}. At this length the formula reproduces these times by definition.`;
}

function cellName(cell) {
  const repeats = Math.max(...cell.modes.map((x) => x.runs.length));
  const seeds = repeats > 1 ? `${repeats} seeds` : "1 seed";
  return `${cell.env}: ${cell.modes.length} programs, ${seeds}, ${cell.iterations} iterations (${cell.study})`;
}

// Environments outside JAX: the same formula, with runs in an environment with very fast steps.
function showOutside() {
  const cell = DATA.outside[$("outside-cell").value];
  const steps = STEPS[$("steps").value];
  const microseconds = Math.max(0, Number($("microseconds").value));
  const rows = count(cell, (run) => seconds(run, cell, steps, microseconds * 1e-6));
  const env = `an environment outside JAX with ${microseconds.toLocaleString("en")} µs per step`;
  const share = duration(steps * microseconds * 1e-6);
  $("outside-sentence").innerHTML = `${sentenceOf(rows, steps, { env })} <small>The environment takes ${share} of this time.</small>`;
  bars($("outside-bars"), rows);
  for (const id of ["batch", "measured"]) $(`outside-${id}`).textContent = cell[id].toLocaleString("en");
  $("outside-study").innerHTML = `<a href="${cell.link}">${cell.study}</a> at commit ${cell.commit} on ${cell.device}`;
}

function startOutside() {
  choices($("outside-cell"), DATA.outside.map((x, i) => [String(i), x.title]));
  $("outside").addEventListener("input", showOutside);
  $("outside").addEventListener("submit", (event) => event.preventDefault());
  $("steps").addEventListener("input", showOutside);
  showOutside();
}

function startAnswer() {
  const devices = [...new Map(DATA.cells.map((x) => [x.device, x.device]))];
  if (!DATA.cells.some((x) => x.on_gpu)) devices.push(["none", "an NVIDIA GPU: only iterations measured"]);
  choices($("device"), devices);
  $("controls").addEventListener("input", showAnswer);
  showAnswer();
}

// === Side by side: alignment ===================================================================
const textOf = DATA.lines.map((line) => line.split("¦").map((x) => x.slice(1)).join(""));
const wordsOf = textOf.map((text) => text.match(/\w+|\s+|[^\w\s]/g) || []);
const namesOf = textOf.map((text) => new Set(text.match(/\w+/g)));

// Weighted longest common subsequence. Return pairs [i, j] in order, with null for a missing partner.
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

// Fraction of words that two lines have in common, from 0 to 1 (Dice coefficient).
function likeness(a, b) {
  const common = [...namesOf[a]].filter((x) => namesOf[b].has(x)).length;
  return (2 * common) / (namesOf[a].size + namesOf[b].size || 1);
}

const ALIKE = 0.4; // do not align lines that are less similar
function weighLines(a, b) {
  if (a === b) return wordsOf[a].length > 1 ? 4 : 0.5; // blank lines and brackets carry little weight
  if (!wordsOf[a].length || !wordsOf[b].length) return 0;
  const alike = likeness(a, b);
  return alike >= ALIKE ? 2 * alike : 0.01;
}

// Return a flag per character in line a: true if the character is not in line b.
function marks(a, b) {
  const flags = [];
  const pairs = align(wordsOf[a], wordsOf[b], (x, y) => (x === y ? x.length : 0));
  for (const [i, j] of pairs) {
    if (i === null) continue;
    const word = wordsOf[a][i];
    const changed = word.trim() !== "" && (j === null || word !== wordsOf[b][j]);
    for (let k = 0; k < word.length; k++) flags.push(changed);
  }
  return flags.map((x, k) => x || (flags[k - 1] && flags[k + 1])); // close gaps: mark the dot in jax.Array
}

// Return rows {at, ids, same}: per script, the position and the id of its line, or null.
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

// === Side by side: display =====================================================================
// Return the tokens of a line; those that are not in line `other` are marked.
function tokensOf(id, other) {
  const flags = other === null || other === id || likeness(id, other) < ALIKE ? [] : marks(id, other);
  const shown = [];
  let at = 0;
  for (const token of DATA.lines[id].split("¦")) {
    const text = token.slice(1);
    const indent = at ? 0 : text.search(/\S|$/); // a separate element, which narrow windows hide
    if (indent) shown.push(element("span", { class: "indent" }, text.slice(0, indent)));
    for (let k = indent, start = indent; k < text.length; start = k) {
      const marked = Boolean(flags[at + start]);
      while (k < text.length && Boolean(flags[at + k]) === marked) k++;
      const piece = text.slice(start, k);
      const node = token[0] === "p" ? piece : element("span", { class: token[0] }, piece);
      shown.push(marked ? element("mark", {}, node) : node);
    }
    at += text.length;
  }
  return shown;
}

// A part is a section of one script: {name, title, start, lines}.
function cellOf(row, k, parts) {
  const id = row.ids[k];
  if (id === null) return element("td", { class: "none" });
  // Mark differences from the first script; in the first script, from the next script that differs.
  const other = k ? row.ids[0] : row.ids.find((x) => x !== null && x !== id) ?? null;
  const kind = row.same ? "" : `new column${k}`;
  const cell = element("td", { class: kind, "data-line": parts[k].start + row.at[k] }, ...tokensOf(id, other));
  cell.style.setProperty("--indent", textOf[id].search(/\S|$/));
  return cell;
}

// Return table rows for lines that are all identical, or all different. In a narrow window, the lines
// of one script are shown above those of the next, as in a unified diff.
function trs(rows, parts) {
  if (!NARROW.matches) return rows.map((row) => element("tr", {}, ...parts.map((_, k) => cellOf(row, k, parts))));
  return parts.slice(0, rows[0]?.same ? 1 : MOST).flatMap(({ name }, k) => {
    const lines = rows.filter((row) => row.ids[k] !== null).map((row) => element("tr", {}, cellOf(row, k, parts)));
    if (lines.length && !rows[0].same) lines[0].cells[0].prepend(element("span", { class: "hidden" }, `${name}: `));
    return lines;
  });
}

const CONTEXT = 3; // lines around a difference
function bodyOf(rows, parts) {
  const shown = element("tbody");
  for (let i = 0, end; i < rows.length; i = end) {
    end = rows.findIndex((row, j) => j > i && row.same !== rows[i].same);
    if (end < 0) end = rows.length;
    const from = i ? i + CONTEXT : i;
    const to = end < rows.length ? end - CONTEXT : end;
    if (!rows[i].same || to - from < 4 || parts.length === 1) shown.append(...trs(rows.slice(i, end), parts));
    else {
      const fold = foldOf(rows.slice(from, to), parts);
      shown.append(...trs(rows.slice(i, from), parts), fold, ...trs(rows.slice(to, end), parts));
    }
  }
  return shown;
}

function foldOf(rows, parts) {
  const button = element("button", { type: "button", class: "fold" }, `identical, ${rows.length} lines`);
  const line = element("tr", {}, element("td", { colspan: NARROW.matches ? 1 : parts.length, class: "folded" }, button));
  button.addEventListener("click", () => {
    const shown = trs(rows, parts);
    line.replaceWith(...shown);
    shown[0].cells[0].tabIndex = -1;
    shown[0].cells[0].focus(); // the button had the focus and is gone
  });
  return line;
}

function headOf({ name, title, start, lines, note }, k) {
  const end = start + lines.length - 1;
  const place = DATA.link.startsWith("http") ? `#L${start}-L${end}` : "";
  const file = DATA.scripts[name].file;
  const open = element("a", { href: `${DATA.link}/${file}${place}` }, `${file}, lines ${start} to ${end}`);
  const copy = element("button", { type: "button", "aria-label": `Copy ${title} of ${name}` }, "Copy");
  copy.addEventListener("click", async () => {
    await navigator.clipboard.writeText(lines.map((x) => `${textOf[x]}\n`).join(""));
    copy.textContent = "Copied";
    $("said").textContent = `Copied ${title} of ${name}`;
  });
  const head = element("th", { scope: "col", class: `column${k}` }, element("div", {}, open, copy));
  if (note) head.append(prose("p", note));
  return head;
}

function tableOf(parts, rows) {
  const head = element("thead", {}, element("tr", {}, ...parts.map(headOf)));
  return element("table", {}, head, bodyOf(rows, parts));
}

const slug = (title) => title.replaceAll(" ", "-");

// Return a section of the chosen scripts, and the number of lines that differ, which the map shows.
function sectionOf(title, names) {
  const parts = names.flatMap((name) => {
    const found = DATA.scripts[name].sections.find((x) => x.title === title);
    return found ? [{ name, ...found }] : [];
  });
  const rows = rowsOf(parts.map((x) => x.lines));
  const differ = rows.filter((x) => !x.same).length;
  const isUnique = parts.length < names.length;
  const isSame = !isUnique && !differ;
  let words = `${differ} of ${rows.length} lines differ`;
  let count = String(differ);
  if (isUnique) [words, count] = [`only in ${parts.map((x) => x.name).join(", ")}`, "unique"];
  if (isSame) [words, count] = [`identical, ${rows.length} lines`, "identical"];
  const box = element("details", { id: `section-${slug(title)}`, class: "code" });
  box.append(element("summary", {}, element("h3", {}, title), `: ${words}`));
  const fill = () => {
    if (box.children.length < 2) box.append(tableOf(isSame ? parts.slice(0, 1) : parts, rows));
  };
  box.addEventListener("toggle", fill);
  if (!isSame && !NARROW.matches) {
    box.open = true;
    fill();
  }
  return { title, box, count };
}

// === Side by side: selection ===================================================================
const MOST = 4;
let chosen = []; // names of scripts

// The address contains the selection: #ppo_linen..ppo_nnx, or with a section #ppo_linen..ppo_nnx/Loss.
function readAddress() {
  const [pair, section] = location.hash.slice(1).split("/");
  const names = pair.split("..").filter((x) => Object.hasOwn(DATA.scripts, x)).slice(0, MOST);
  if (names.length > 1 && String(names) !== String(chosen)) choose(names);
  const target = names.length > 1 && section && $(`section-${section}`);
  if (target) {
    target.open = true;
    target.scrollIntoView();
  } else if (names.length > 1 && $("compare").getBoundingClientRect().top > innerHeight / 2) {
    $("compare").scrollIntoView();
  }
}

// Return the section titles of all chosen scripts, in order.
function titlesOf(names) {
  const titles = [];
  for (const name of names) {
    let place = 0;
    for (const { title } of DATA.scripts[name].sections) {
      if (!titles.includes(title)) titles.splice(place, 0, title);
      place = titles.indexOf(title) + 1;
    }
  }
  return titles;
}

function choose(names) {
  chosen = names;
  const pair = names.join("..");
  const shown = titlesOf(names).map((title) => sectionOf(title, names));
  $("sections").replaceChildren(...shown.map((x) => x.box));
  $("map").replaceChildren(...shown.map(({ title, count }) => {
    const kind = count === "identical" ? "same" : "";
    return element("a", { href: `#${pair}/${slug(title)}`, class: kind }, `${title} `, element("span", {}, count));
  }));
  for (const [k, select] of [...$("chooser").children].entries()) {
    select.value = names[k] ?? "";
    select.hidden = k > names.length;
    select.className = names[k] ? "" : "more";
    if (k > 1) select.options[0].text = names[k] ? "remove" : "+ add a script";
  }
  for (const link of $("paths").children) link.setAttribute("aria-current", link.hash === `#${pair}`);
  $("said").textContent = `Side by side: ${names.join(", ")}`;
}

function selectOf(k) {
  const select = element("select", { "aria-label": `${["First", "Second", "Third", "Fourth"][k]} script` });
  if (k > 1) select.append(element("option", { value: "" }));
  for (const [group, names] of Map.groupBy(Object.keys(DATA.scripts), (x) => DATA.scripts[x].group)) {
    select.append(element("optgroup", { label: group }, ...names.map((x) => element("option", { value: x }, x))));
  }
  select.addEventListener("change", () => {
    const next = [...chosen];
    next[k] = select.value;
    location.hash = next.filter(Boolean).join("..");
  });
  return select;
}

if (NARROW.matches) for (const idiom of document.querySelectorAll(".idioms details")) idiom.open = false;
startAnswer();
if (DATA.outside.length) startOutside();
for (let k = 0; k < MOST; k++) $("chooser").append(selectOf(k));
choose($("paths").firstElementChild.hash.slice(1).split(".."));
readAddress();
addEventListener("hashchange", readAddress);
NARROW.addEventListener("change", () => choose(chosen));
