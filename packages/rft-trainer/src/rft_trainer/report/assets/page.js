"use strict";
// Everything that came from a model or a data set reaches the page as text (textContent), never as markup.
const index = JSON.parse(document.getElementById("index").textContent);
const PAGE = 100;
const LONGEST_DIFF = 1500; // words; the table of a longer one would take the browser's memory
const COLOURS = {
  "none": null,
  "log-prob": { of: (r, i) => r.trainer_log_probs[i] ?? r.engine_log_probs[i], kind: "low" },
  "gap": { of: (r, i) => r.trainer_log_probs[i] - r.engine_log_probs[i], kind: "signed" },
  "ratio": { of: (r, i) => Math.log(r.ratios[i]), kind: "signed", shown: (v) => Math.exp(v) },
  "advantage": { of: (r, i) => r.advantages[i] ?? r.advantage, kind: "signed" },
  "entropy": { of: (r, i) => r.entropies[i], kind: "high" },
};
let lines = null;
const unpacked = new Map();
let limit = PAGE;
index.forEach((group, number) => {
  group.number = number;
  group.mixed = Math.min(...group.rewards) !== Math.max(...group.rewards);
});

// A group's responses are packed until it is opened: a page of many rollouts opens as fast as one of few.
async function unpack(line) {
  const packed = Uint8Array.from(atob(line), (character) => character.charCodeAt(0));
  const inflate = new DecompressionStream("deflate-raw");
  const writer = inflate.writable.getWriter();
  writer.write(packed);
  writer.close();
  return JSON.parse(await new Response(inflate.readable).text());
}

async function responsesOf(number) {
  lines ??= document.getElementById("packed").textContent.trim().split("\n");
  if (!unpacked.has(number)) unpacked.set(number, await unpack(lines[number]));
  return unpacked.get(number);
}

// What the search looks through: the prompt and the responses of each group, in lower case.
let texts = null;
async function searchTexts() {
  const found = await unpack(document.getElementById("texts").textContent);
  texts = found.map((group) => group.map((text) => text.toLowerCase()));
}

function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "class") made.className = value;
    else if (name in made && name !== "style") made[name] = value;
    else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

const state = new URLSearchParams(location.hash.slice(1));
function set(name, value) {
  if (value === "" || value === null || value === false) state.delete(name);
  else state.set(name, value === true ? "1" : String(value));
  history.replaceState(null, "", "#" + state);
}
const bound = (name, otherwise) => {
  const value = Number(state.get(name));
  return state.get(name) && Number.isFinite(value) ? value : otherwise;
};

function accepted(group, i) {
  const within = (value, name) => value >= bound(name + "_min", -Infinity) && value <= bound(name + "_max", Infinity);
  if (!within(group.step, "step") || !within(group.rewards[i], "reward") || !within(group.lengths[i], "length")) return false;
  if (state.get("truncated") && !group.truncated[i]) return false;
  if (state.get("mixed") && !group.mixed) return false;
  const text = (state.get("text") ?? "").toLowerCase();
  return !text || texts[group.number][0].includes(text) || texts[group.number][i + 1].includes(text);
}

let asked = 0;
async function showGroups() {
  const mine = ++asked;
  const count = document.getElementById("count");
  if (state.get("text") && !texts) {
    count.textContent = "searching …";
    await searchTexts();
    if (mine !== asked) return; // the filters have changed meanwhile
  }
  const found = [];
  let responses = 0, all = 0;
  for (const group of index) {
    all += group.rewards.length;
    const kept = group.rewards.filter((_, i) => accepted(group, i));
    responses += kept.length;
    if (kept.length) found.push([group, kept]);
  }
  const list = document.getElementById("groups");
  list.replaceChildren(...found.slice(0, limit).map(([group, kept]) => listed(group, kept)));
  document.getElementById("more").hidden = found.length <= limit;
  count.textContent = `${responses} of ${all} responses, ${found.length} groups`;
}

function listed(group, kept) {
  const mean = kept.reduce((sum, reward) => sum + reward, 0) / kept.length;
  // One cell for each response, in the order in which they stand on the right.
  const cells = element("span", { class: "cells", title: `rewards ${group.rewards.map((r) => number(r, 3)).join(", ")}` },
    ...group.rewards.map((reward) => {
      const cell = element("i");
      cell.style.background = rewardColour(reward);
      return cell;
    }));
  const head = element("span", { class: "head" },
    element("span", {}, `step ${group.step}`), cells,
    element("span", { class: group.mixed ? "mixed" : "" }, `${kept.length} × ${mean.toFixed(2)}${group.mixed ? " mixed" : ""}`));
  const button = element("button", { type: "button", title: group.prompt_id }, head, element("span", { class: "prompt" }, group.question));
  button.dataset.key = group.key;
  button.setAttribute("aria-current", String(group.key === state.get("open")));
  button.addEventListener("click", () => open(group.key));
  return element("li", {}, button);
}

const rewardEnds = index.flatMap((group) => group.rewards).reduce(([low, high], reward) =>
  [Math.min(low, reward), Math.max(high, reward)], [0, 1]);
function rewardColour(reward) {
  const share = (reward - rewardEnds[0]) / (rewardEnds[1] - rewardEnds[0]);
  return `hsl(${Math.round(8 + 130 * share)} 55% ${Math.round(62 - 14 * share)}%)`;
}

async function open(key) {
  set("open", key); set("left", ""); set("right", "");
  for (const button of document.querySelectorAll("#groups button"))
    button.setAttribute("aria-current", String(button.dataset.key === key));
  await showDetail();
  scrollTo({ top: Math.min(scrollY, document.querySelector("main").offsetTop) });
}

function shade(value, scale, low, high) {
  if (!Number.isFinite(value)) return "";
  if (scale.kind === "signed") {
    const reach = Math.max(Math.abs(low), Math.abs(high)) || 1;
    const strength = Math.min(1, Math.abs(value) / reach) * 0.6;
    return value >= 0 ? `rgba(214, 96, 30, ${strength})` : `rgba(34, 102, 204, ${strength})`;
  }
  const share = high === low ? 0 : (value - low) / (high - low);
  return `rgba(150, 60, 180, ${0.6 * (scale.kind === "low" ? 1 - share : share)})`;
}

function tokens(response, scale, low, high) {
  const box = element("div", { class: "tokens" });
  const texts = response.tokens.length ? response.tokens : [response.response];
  texts.forEach((text, i) => {
    const trained = response.mask.length === 0 || response.mask[i];
    const shown = element("span", { class: trained ? "token" : "token untrained" }, text);
    shown.dataset.token = i;
    if (scale && response.tokens.length) shown.style.background = shade(scale.of(response, i), scale, low, high);
    box.append(shown);
  });
  box.addEventListener("mousemove", (event) => {
    const place = event.target.dataset?.token;
    if (place !== undefined) tip(response, Number(place), event.clientX, event.clientY);
  });
  box.addEventListener("mouseleave", () => { document.getElementById("tip").hidden = true; });
  return box;
}

const number = (value, digits = 4) => (Number.isFinite(value) ? Number(value).toPrecision(digits) : "–");

function describe(response, i) {
  const gap = response.trainer_log_probs[i] - response.engine_log_probs[i];
  const parts = Object.entries(response.scores).map(([name, score]) => `  ${name} ${number(score)}`);
  return [
    `token ${i + 1} of ${response.length}: id ${response.token_ids[i] ?? "–"} ${JSON.stringify(response.tokens[i] ?? "")}`,
    `log-prob trainer ${number(response.trainer_log_probs[i])}, engine ${number(response.engine_log_probs[i])}, gap ${number(gap)}`,
    `ratio ${number(response.ratios[i])}  advantage ${number(response.advantages[i] ?? response.advantage)}  entropy ${number(response.entropies[i])}`,
    `mask ${response.mask.length ? response.mask[i] : 1}`,
    `reward ${number(response.reward)}`, ...parts,
  ].join("\n");
}

function tip(response, i, x, y) {
  const box = document.getElementById("tip");
  box.textContent = describe(response, i);
  box.hidden = false;
  box.style.left = Math.min(x + 14, innerWidth - box.offsetWidth - 8) + "px";
  box.style.top = Math.min(y + 16, innerHeight - box.offsetHeight - 8) + "px";
}

function choice(name, options, chosen, onchange) {
  const select = element("select", { "aria-label": name });
  for (const option of options) select.append(element("option", { value: option.value, textContent: option.text }));
  select.value = chosen;
  select.addEventListener("change", () => onchange(select.value));
  return select;
}

async function showDetail() {
  const detail = document.getElementById("detail");
  const group = index.find((entry) => entry.key === state.get("open"));
  if (!group) return;
  const responses = await responsesOf(group.number);
  const colour = state.get("colour") in COLOURS ? state.get("colour") : "advantage";
  const scale = COLOURS[colour];
  const values = scale ? responses.flatMap((r) => r.tokens.map((_, i) => scale.of(r, i))).filter(Number.isFinite) : [];
  const low = values.reduce((a, b) => Math.min(a, b), Infinity);
  const high = values.reduce((a, b) => Math.max(a, b), -Infinity);
  const picker = choice("colour tokens by", Object.keys(COLOURS).map((name) => ({ value: name, text: name })), colour,
    (value) => { set("colour", value); showDetail(); });
  const bar = element("div", { class: "bar" }, element("label", {}, "colour tokens by ", picker), legend(scale, low, high),
    element("span", { class: "hint" }, "rest on a token for its numbers"));
  const place = [`step ${group.step}`, group.prompt_id, group.label].filter(Boolean).join(" · ");
  const cards = responses.map((response, i) => card(response, i, scale, low, high));
  const compared = await comparison(group);
  if (group.key !== state.get("open")) return; // another group was opened meanwhile
  detail.replaceChildren(
    element("h2", {}, place), element("pre", { class: "asked" }, responses[0].prompt),
    element("p", { class: "hint" }, "reference answer: ", element("b", {}, responses[0].reference ?? "none")),
    bar, ...cards, compared);
}

function legend(scale, low, high) {
  if (!scale || low > high) return element("span", { class: "legend" }, scale ? "not recorded" : "");
  const bar = element("span", { class: "scale" });
  bar.style.background = `linear-gradient(90deg, ${[0, 0.25, 0.5, 0.75, 1].map((at) => shade(low + at * (high - low), scale, low, high)).join(", ")})`;
  const shown = scale.shown ?? ((value) => value);
  return element("span", { class: "legend" }, number(shown(low), 3), bar, number(shown(high), 3));
}

function card(response, i, scale, low, high) {
  const parts = Object.entries(response.scores).map(([name, score]) => element("span", {}, `${name} ${number(score, 3)}`));
  const dot = element("i", { class: "dot" });
  dot.style.background = rewardColour(response.reward);
  const sign = response.advantage > 0 ? "good" : response.advantage < 0 ? "bad" : "";
  const meta = element("div", { class: "meta" }, element("span", {}, dot, `no. ${i + 1}`),
    element("b", {}, `reward ${number(response.reward, 3)}`), ...parts,
    element("span", { class: sign }, `advantage ${response.advantage > 0 ? "+" : ""}${number(response.advantage, 3)}`),
    element("span", {}, `${response.length} tokens`), element("span", {}, `weights ${response.weights_version}`));
  if (response.truncated) meta.append(element("span", { class: "flag" }, "truncated"));
  return element("article", { class: "response" }, meta, tokens(response, scale, low, high));
}

async function comparison(group) {
  const same = index.filter((entry) => entry.prompt_id === group.prompt_id);
  const box = element("section", { class: "diff" });
  if (new Set(same.map((entry) => entry.step)).size < 2) return box;
  const options = same.flatMap((entry) => entry.rewards.map((reward, i) =>
    ({ value: `${entry.number}.${i}`, text: `step ${entry.step}, no. ${i + 1}, reward ${number(reward, 3)}` })));
  const known = (value, otherwise) => (options.some((option) => option.value === value) ? value : otherwise);
  const left = known(state.get("left"), options[0].value), right = known(state.get("right"), options.at(-1).value);
  const response = async (value) => (await responsesOf(Number(value.split(".")[0])))[Number(value.split(".")[1])].response;
  const a = choice("earlier response", options, left, (value) => { set("left", value); showDetail(); });
  const b = choice("later response", options, right, (value) => { set("right", value); showDetail(); });
  const [before, after] = difference(words(await response(left)), words(await response(right)));
  box.append(element("h2", {}, "The same prompt over steps"), element("div", { class: "bar" }, a, "→", b),
    element("div", { class: "columns" }, element("pre", {}, ...before), element("pre", {}, ...after)));
  return box;
}

const words = (text) => (text.match(/\s+|[^\s]+/g) ?? []).slice(0, LONGEST_DIFF);

// The longest common subsequence of words; what is outside of it is marked.
function difference(a, b) {
  const width = b.length + 1;
  const best = new Uint16Array((a.length + 1) * width);
  for (let i = a.length - 1; i >= 0; i--)
    for (let j = b.length - 1; j >= 0; j--)
      best[i * width + j] = a[i] === b[j] ? best[(i + 1) * width + j + 1] + 1 : Math.max(best[(i + 1) * width + j], best[i * width + j + 1]);
  const before = [], after = [];
  let i = 0, j = 0;
  while (i < a.length || j < b.length) {
    if (i < a.length && j < b.length && a[i] === b[j]) { before.push(a[i++]); after.push(b[j++]); }
    else if (j >= b.length || (i < a.length && best[(i + 1) * width + j] >= best[i * width + j + 1])) before.push(element("del", {}, a[i++]));
    else after.push(element("ins", {}, b[j++]));
  }
  return [before, after];
}

const filters = document.getElementById("filters");
for (const field of filters.elements) {
  if (!field.name) continue;
  if (field.type === "checkbox") field.checked = state.get(field.name) === "1";
  else field.value = state.get(field.name) ?? "";
}
filters.addEventListener("input", (event) => {
  set(event.target.name, event.target.type === "checkbox" ? event.target.checked : event.target.value.trim());
  limit = PAGE;
  showGroups();
});
filters.addEventListener("reset", () => {
  for (const field of filters.elements) if (field.name) set(field.name, "");
  limit = PAGE;
  showGroups();
});
filters.addEventListener("submit", (event) => event.preventDefault());
document.getElementById("more").addEventListener("click", () => { limit += PAGE; showGroups(); });
// The list scrolls to what the address opens, without moving the page.
function showOpened() {
  const opened = document.querySelector('#groups button[aria-current="true"]'), list = document.getElementById("browse");
  if (opened) list.scrollTop += opened.getBoundingClientRect().top - list.getBoundingClientRect().top - list.clientHeight / 2;
}

Promise.all([showGroups().then(showOpened), showDetail()]).catch((error) => {
  document.getElementById("count").textContent = typeof DecompressionStream === "undefined"
    ? "This browser is too old for the page: it needs DecompressionStream (any of 2023 or newer)." : String(error);
}).finally(() => { document.documentElement.dataset.ready = performance.now().toFixed(0); });
