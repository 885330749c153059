// What helps around the map: copying, the age of times, the last day, the theme, and a drawing of what is shown.
"use strict";

// Copy buttons.
async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // Without TLS a browser has no clipboard for scripts: copy a selection instead.
    const field = Object.assign(document.createElement("textarea"), { value: text });
    document.body.append(field);
    field.select();
    document.execCommand("copy");
    field.remove();
  }
}

document.addEventListener("click", async (event) => {
  const button = event.target.closest?.("button.copy");
  if (!button) return;
  await copyText(button.dataset.copy);
  button.textContent = "copied";
  setTimeout(() => (button.textContent = "copy"), 1500);
});

// How long ago it was: beside the times of what lasts, and in the title of all.
const AGED = "#summary .sentence time, #findings li time, #timeline time";
const AGE_EVERY_MS = 10000;

function ageText(seconds) {
  if (seconds < 1) return "now";
  if (seconds < 100) return `${Math.round(seconds)} s`;
  if (seconds < 6000) return `${Math.round(seconds / 60)} min`;
  if (seconds < 172800) return `${Math.round(seconds / 3600)} h`;
  return `${Math.round(seconds / 86400)} d`;
}

function showAges() {
  for (const time of document.querySelectorAll("time")) {
    const age = ageText((Date.now() - Date.parse(time.dateTime)) / 1000);
    time.title = age === "now" ? age : `${age} ago`;
    if (time.matches(AGED)) time.dataset.ago = age;
  }
}

document.addEventListener("htmx:sse:after:message", showAges);
setInterval(showAges, AGE_EVERY_MS);
showAges();

// The charts of the last day, and the slider: it leads to the page of a past time, or back to the present.
const trends = document.getElementById("trends");
const HISTORY_EVERY_MS = 30000;

async function showHistory() {
  if (document.hidden || document.activeElement?.id === "when") return; // never under the user's hand
  const answer = await fetch(`${chain.dataset.below}/history`).catch(() => null);
  if (answer?.ok && document.activeElement?.id !== "when") trends.innerHTML = await answer.text();
}

const isoTime = (seconds) => new Date(seconds * 1000).toISOString().replace(".000Z", "Z");

function showSliderTime(slider) {
  const output = trends.querySelector("output");
  const isIn = (gap) => slider.value > Number(gap[0]) && slider.value < Number(gap[1]);
  const gaps = slider.dataset.gaps.trim().split(" ").map((gap) => gap.split("-"));
  const unrecorded = gaps.some(isIn) ? ": nothing was recorded" : "";
  output.textContent = `${isoTime(slider.value).slice(11, 19)} UTC${unrecorded}`;
  slider.setAttribute("aria-valuetext", output.textContent);
}

function goToSliderTime({ value, max }, hash = "") {
  window.location.assign((value === max ? "/" : `/map/at/${isoTime(value)}`) + window.location.search + hash);
}

// By mouse a time is chosen when the slider is let go; keys move it by minutes, and Enter chooses.
const SLIDER_KEYS = { ArrowLeft: -60, ArrowDown: -60, ArrowRight: 60, ArrowUp: 60, PageDown: -900, PageUp: 900 };

trends.addEventListener("input", (event) => showSliderTime(event.target));
trends.addEventListener("change", (event) => goToSliderTime(event.target));
trends.addEventListener("keydown", (event) => {
  const slider = event.target;
  if (slider.id !== "when" || event.altKey || event.ctrlKey || event.metaKey) return;
  const ends = { Home: slider.min, End: slider.max };
  if (event.key === "Enter") goToSliderTime(slider, "#when");
  else if (event.key in SLIDER_KEYS) slider.value = Number(slider.value) + SLIDER_KEYS[event.key];
  else if (event.key in ends) slider.value = ends[event.key];
  else return;
  event.preventDefault();
  showSliderTime(slider);
});
document.addEventListener("visibilitychange", showHistory);
setInterval(showHistory, HISTORY_EVERY_MS);
showHistory().then(() => location.hash === "#when" && document.getElementById("when")?.focus());

// The theme.
const theme = document.getElementById("theme");
theme.value = storedTheme();
theme.addEventListener("change", () => setTheme(theme.value));

// A drawing of what is shown: the cells of all racks and the racks that are drawn whole, with their colours.
const SVG = "http://www.w3.org/2000/svg";
const KEPT_STYLES = ["fill", "stroke", "stroke-width", "stroke-dasharray", "font", "text-anchor", "text-decoration"];
const CELL_PATTERNS = { q: "url(#hatch)", o: "url(#dots)" };

function svgElement(name, attributes, text) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text) made.textContent = text;
  return made;
}

// A copy that looks the same without the style sheet.
function styledCopy(original) {
  const copy = original.cloneNode(true);
  const copies = [copy, ...copy.querySelectorAll("*")];
  [original, ...original.querySelectorAll("*")].forEach((element, number) => {
    const style = getComputedStyle(element);
    for (const name of KEPT_STYLES) copies[number].style.setProperty(name, style.getPropertyValue(name));
    if (element.localName !== "rect") return;
    for (const name of ["width", "height", "rx"]) copies[number].setAttribute(name, parseFloat(style.getPropertyValue(name)) || 0);
  });
  return copy;
}

function drawnBox(element, origin) {
  const box = element.getBoundingClientRect();
  const style = getComputedStyle(element);
  return svgElement("rect", {
    x: box.x - origin.x,
    y: box.y - origin.y,
    width: box.width,
    height: box.height,
    fill: CELL_PATTERNS[element.className.split(" ")[0]] || style.backgroundColor,
    stroke: style.borderTopStyle === "none" ? "none" : style.borderTopColor,
  });
}

function drawnText(element, origin) {
  const box = element.getBoundingClientRect();
  const style = getComputedStyle(element);
  const at = { x: box.x - origin.x, y: box.y - origin.y + box.height * 0.8, fill: style.color };
  return svgElement("text", { ...at, "font-family": style.fontFamily, "font-size": style.fontSize }, element.textContent);
}

function drawing() {
  const stage = document.querySelector(".stage");
  const origin = stage.getBoundingClientRect();
  const [width, height] = [origin.width, origin.height];
  const whole = svgElement("svg", { xmlns: SVG, width, height, viewBox: `0 0 ${width} ${height}` });
  whole.append(styledCopy(document.querySelector("svg.defs defs")));
  const ground = getComputedStyle(document.body).backgroundColor;
  whole.append(svgElement("rect", { width, height, fill: ground }));
  for (const cell of document.querySelectorAll("#overview a")) {
    whole.append(drawnBox(cell, origin));
    for (const part of cell.querySelectorAll("i, b")) whole.append(drawnBox(part, origin));
    for (const text of cell.querySelectorAll("span, b")) whole.append(drawnText(text, origin));
  }
  for (const rack of document.querySelectorAll(".rack")) {
    const svg = rack.querySelector("svg");
    const box = svg.getBoundingClientRect();
    const copy = styledCopy(svg);
    const place = { x: box.x - origin.x, y: box.y - origin.y, width: box.width, height: box.height };
    for (const [key, value] of Object.entries(place)) copy.setAttribute(key, value);
    whole.append(copy, drawnText(rack.querySelector("figcaption b"), origin));
  }
  return new XMLSerializer().serializeToString(whole);
}

document.getElementById("svg").addEventListener("click", () => {
  const address = URL.createObjectURL(new Blob([drawing()], { type: "image/svg+xml" }));
  const link = Object.assign(document.createElement("a"), { href: address, download: "rackloom-map.svg" });
  link.click();
  URL.revokeObjectURL(address);
});
