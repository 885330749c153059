// Keyboard focus, the selected GPU, and the state of the connection. The server renders all markup (htmx).
"use strict";

const QUIET_SECONDS = 15; // the server sends an event every five seconds, even if nothing changed

const live = document.getElementById("live");
const lost = document.getElementById("lost");
const chain = document.getElementById("chain");
let lastEventAt = Date.now();
let selectedId = chain.dataset.gpu || null; // id of the GPU whose chain is shown
let focusedId = selectedId; // id of the GPU with tabindex 0
let focusedRackId = null; // id of the cell of a rack with tabindex 0

const rackCells = () => [...document.querySelectorAll("#overview a")];
const cells = () => [...document.querySelectorAll("rect[role=gridcell]")];

function showState(state, text) {
  if (live.dataset.state === state && live.textContent === text) return;
  live.dataset.state = state;
  live.textContent = text;
}

function onEvent() {
  lastEventAt = Date.now();
  lost.hidden = true;
  showState("live", "live");
}

function onLost() {
  if (live.dataset.state === "paused") return; // the page gave its stream up: see streams.js
  showState("lost", "not live");
  const since = `${new Date(lastEventAt).toISOString().slice(11, 19)} UTC`;
  lost.textContent = `Not live since ${since}: nothing arrives from the service, and all below is as it was then. This page tries again by itself.`;
  lost.hidden = false;
}

// htmx replaces whole racks, so the focus and selection attributes must be set again.
function markCells() {
  document.querySelectorAll('rect[tabindex="0"]').forEach((old) => old.setAttribute("tabindex", "-1"));
  document.querySelectorAll("rect[aria-selected]").forEach((old) => old.removeAttribute("aria-selected"));
  const at = document.getElementById(focusedId) || document.querySelector("rect[role=gridcell]");
  if (at) at.setAttribute("tabindex", "0");
  document.getElementById(selectedId)?.setAttribute("aria-selected", "true");
  markRackCells();
}

// Of the cells of all racks, the Tab key reaches one; the cells of opened racks are marked.
function markRackCells() {
  const all = rackCells();
  const opened = new Set([...document.querySelectorAll(".rack")].map((rack) => "c" + rack.id.slice(1)));
  const at = document.getElementById(focusedRackId) || all.find((cell) => opened.has(cell.id)) || all[0];
  for (const cell of all) {
    cell.setAttribute("tabindex", cell === at ? "0" : "-1");
    if (opened.has(cell.id)) cell.setAttribute("aria-current", "true");
  }
}

function focusRackCell(cell) {
  focusedRackId = cell.id;
  markRackCells();
  cell.focus();
}

// The address names the chosen GPU, so that the view is a link; the links to other colours keep it.
function writeAddress() {
  const withChoice = (address) => {
    const url = new URL(address, location.href);
    url.searchParams.delete("gpu");
    if (selectedId) url.searchParams.set("gpu", selectedId);
    return url;
  };
  const here = withChoice(location.href);
  if (!selectedId) here.hash = "";
  history.replaceState(null, "", here);
  document.querySelectorAll("header nav a").forEach((link) => (link.href = withChoice(link.href)));
}

function showChain() {
  const [rack, tray, gpu] = selectedId.split("-");
  htmx.ajax("GET", `${chain.dataset.below}/gpu/${rack}/${tray}/${gpu}?by=${chain.dataset.by}`, { target: "#chain", swap: "innerHTML" });
}

function focusCell(cell) {
  if (!cell) return;
  focusedId = cell.id;
  markCells();
  cell.focus();
}

function selectCell(cell) {
  selectedId = cell.id;
  focusCell(cell);
  showChain();
  writeAddress();
  document.querySelectorAll("aside, .gpu").forEach((box) => (box.scrollTop = 0));
}

// Close the panel. The page stays where it is; the focus goes back to the GPU if it was in the panel.
function closeChain() {
  const cell = document.getElementById(selectedId);
  const inside = document.querySelector(".gpu").contains(document.activeElement);
  selectedId = null;
  chain.replaceChildren(document.getElementById("no-choice").content.cloneNode(true));
  markCells();
  writeAddress();
  if (inside) cell?.focus({ preventScroll: true });
}

// The move of a key, from a cell to its neighbour in the grid.
function moveOf(cell, key) {
  const tray = cell.parentElement;
  const column = [...tray.querySelectorAll("rect")].indexOf(cell);
  const rows = [...cell.ownerSVGElement.querySelectorAll("g[role=row]")];
  const inRow = (row) => row && (row.querySelectorAll("rect")[column] || row.querySelector("rect"));
  const beside = (step) => {
    const all = cells();
    return all[all.indexOf(cell) + step];
  };
  const rack = (step) => {
    const racks = [...document.querySelectorAll(".rack")];
    const next = racks[racks.indexOf(cell.closest(".rack")) + step];
    return next && (document.getElementById(cell.id.replace(/^[^-]+/, next.id)) || next.querySelector("rect[role=gridcell]"));
  };
  const moves = {
    ArrowLeft: () => beside(-1),
    ArrowRight: () => beside(1),
    ArrowUp: () => inRow(rows[rows.indexOf(tray) - 1]),
    ArrowDown: () => inRow(rows[rows.indexOf(tray) + 1]),
    PageUp: () => rack(-1),
    PageDown: () => rack(1),
    Home: () => cells()[0],
    End: () => cells().at(-1),
  };
  return moves[key] && (() => focusCell(moves[key]()));
}

// The cell of a rack that a key leads to, from the cell of another.
function rackCellAt(cell, key) {
  const all = rackCells();
  const column = (other) => Math.abs(other.offsetLeft - cell.offsetLeft);
  const row = (step) => {
    const beyond = all.filter((other) => Math.sign(other.offsetTop - cell.offsetTop) === step);
    const near = Math.min(...beyond.map((other) => Math.abs(other.offsetTop - cell.offsetTop)));
    const next = beyond.filter((other) => Math.abs(other.offsetTop - cell.offsetTop) === near);
    return next.sort((one, other) => column(one) - column(other))[0];
  };
  const moves = {
    ArrowLeft: () => all[all.indexOf(cell) - 1],
    ArrowRight: () => all[all.indexOf(cell) + 1],
    ArrowUp: () => row(-1),
    ArrowDown: () => row(1),
    Home: () => all[0],
    End: () => all.at(-1),
  };
  return moves[key]?.();
}

document.addEventListener("keydown", (event) => {
  const from = event.target.closest?.("#overview a");
  const to = from && !event.altKey && !event.ctrlKey && !event.metaKey && rackCellAt(from, event.key);
  if (!to) return;
  event.preventDefault();
  focusRackCell(to);
});

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && selectedId) closeChain();
  const cell = event.target.closest?.("rect[role=gridcell]");
  if (!cell || event.altKey || event.ctrlKey || event.metaKey) return;
  const move = event.key === "Enter" || event.key === " " ? () => selectCell(cell) : moveOf(cell, event.key);
  if (!move) return;
  event.preventDefault();
  move();
});

// What a mouse reads in tooltips is written out for whoever walks by keys; screen readers have the labels.
const hint = document.getElementById("hint");

document.addEventListener("focusin", (event) => {
  const cell = event.target.matches("#overview a, rect[role=gridcell]") && event.target.matches(":focus-visible");
  const tray = cell && event.target.closest("g[role=row]")?.querySelector("title").textContent.replace(/^[^,]*,? ?/, ""); // without the name
  hint.textContent = cell ? event.target.getAttribute("aria-label") + (tray ? ` (${tray})` : "") : "";
});
document.addEventListener("focusout", () => (hint.textContent = ""));

// A link to a rack or a GPU of another page: the keyboard goes on there.
function focusAimed() {
  const aimed = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (aimed?.matches("rect[role=gridcell]")) focusCell(aimed);
  else if (aimed?.matches(".rack")) focusCell(aimed.querySelector("rect[role=gridcell]"));
  else if (aimed?.matches("#overview a")) focusRackCell(aimed);
}

// A link of a finding or an operation: select its GPU, or focus the first GPU of its rack.
function followLink(link, event) {
  const target = document.getElementById(link.dataset.shows);
  if (!target) return;
  event.preventDefault();
  if (target.matches("rect")) selectCell(target);
  else focusCell(target.querySelector("rect[role=gridcell]"));
}

document.addEventListener("click", (event) => {
  const cell = event.target.closest?.("rect[role=gridcell]");
  const link = event.target.closest?.("a[data-shows]");
  if (event.target.closest?.("a.close")) {
    event.preventDefault();
    closeChain();
  }
  if (cell) selectCell(cell);
  if (link) followLink(link, event);
});

// Search: `/` leads to the field, Enter to the first or the chosen result, Escape back to where one was.
const search = document.getElementById("search");
const find = document.getElementById("find");
const found = document.getElementById("found");
const SEARCH_PAUSE_MS = 120;
let searching = null; // the request that is under way, or the pause before it
let cameFrom = null; // what had the focus before the search

const results = () => [...found.querySelectorAll("[role=option]")];
const isTyping = (element) => element?.matches?.("input, textarea, select, [contenteditable]");

function chooseResult(result) {
  for (const other of results()) other.setAttribute("aria-selected", String(other === result));
  if (result) find.setAttribute("aria-activedescendant", result.id);
  else find.removeAttribute("aria-activedescendant");
  result?.scrollIntoView({ block: "nearest" });
}

function showFound(markup) {
  found.innerHTML = markup; // the server escapes all names
  const listed = results().length > 0;
  find.setAttribute("aria-expanded", String(listed));
  if (listed) find.setAttribute("aria-controls", "results");
  else find.removeAttribute("aria-controls");
  chooseResult(results()[0]);
}

function closeSearch() {
  searching?.abort();
  searching = null;
  find.value = "";
  showFound("");
}

// Asks the server; gives null where a newer query took over.
async function askFor(text) {
  searching?.abort();
  const mine = (searching = new AbortController());
  try {
    await new Promise((resolve) => setTimeout(resolve, SEARCH_PAUSE_MS));
    if (mine.signal.aborted) return;
    const asked = new URLSearchParams({ by: chain.dataset.by, find: text });
    const answer = await fetch(`${chain.dataset.below}/search?${asked}`, { signal: mine.signal });
    if (answer.status === 401) return window.location.assign("/map/login"); // the token has ended
    if (!answer.ok) throw new Error(answer.statusText);
    showFound(await answer.text());
  } catch {
    if (!mine.signal.aborted) showFound('<p class="none">The search got no answer. Try it again.</p>');
  } finally {
    if (searching === mine) searching = null;
  }
}

function goTo(result) {
  result.click();
  closeSearch();
}

find.addEventListener("input", () => (find.value.trim() ? askFor(find.value) : showFound("")));
find.addEventListener("keydown", async (event) => {
  const all = results();
  const at = all.findIndex((result) => result.getAttribute("aria-selected") === "true");
  const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
  if (step && all.length) {
    event.preventDefault();
    chooseResult(all[(at + step + all.length) % all.length]);
  } else if (event.key === "Enter") {
    event.preventDefault();
    if (searching && find.value.trim()) await askFor(find.value); // what is listed is of an earlier text
    const chosen = results().find((result) => result.getAttribute("aria-selected") === "true");
    if (chosen) goTo(chosen);
  } else if (event.key === "Escape") {
    event.preventDefault();
    event.stopPropagation(); // the details stay open
    closeSearch();
    find.blur();
    cameFrom?.focus?.({ preventScroll: true });
  }
});
search.addEventListener("focusout", (event) => {
  if (!search.contains(event.relatedTarget)) showFound("");
});
find.addEventListener("focus", (event) => {
  if (event.relatedTarget) cameFrom = event.relatedTarget;
  if (find.value.trim() && !results().length) askFor(find.value);
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "/" || event.altKey || event.ctrlKey || event.metaKey || isTyping(event.target)) return;
  event.preventDefault();
  cameFrom = document.activeElement;
  find.focus();
  find.select();
});

document.addEventListener("htmx:sse:after:connection", onEvent);
document.addEventListener("htmx:sse:error", (event) => {
  onLost();
  if (event.detail?.status === 401) window.location.assign("/map/login"); // the token has ended
});
document.addEventListener("htmx:sse:close", onLost);
document.addEventListener("htmx:sse:after:message", () => {
  onEvent();
  markCells();
  if (selectedId) showChain();
});
setInterval(() => {
  if (Date.now() - lastEventAt > QUIET_SECONDS * 1000 && live.dataset.state === "live") onLost();
}, 1000);
markCells();
// The browser's own jump to the place takes the focus away from everything else, and comes first.
window.addEventListener("load", () => setTimeout(focusAimed));
