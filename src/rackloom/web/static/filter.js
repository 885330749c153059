// The filter of the legend, without loading the page anew. The server writes the same page for the address.
"use strict";

const filterForm = document.getElementById("filter");
const filtered = document.getElementById("filtered");
let only = filterForm.dataset.only || null; // the mark of the entry that keeps its colours

const entries = () => [...document.querySelectorAll("#legend button[name=only]")];

function markEntries() {
  for (const entry of entries()) entry.setAttribute("aria-pressed", String(entry.value === only));
}

// The form that opens racks keeps the filter, and so do the links of cells, which are the same for all viewers.
function keepInLinks() {
  for (const field of document.querySelectorAll("input[type=hidden][name=only]")) {
    field.value = only || "";
    field.disabled = !only;
  }
}

function withFilter(address) {
  const url = new URL(address, location.href);
  url.searchParams.delete("only");
  if (only) url.searchParams.set("only", only);
  return url;
}

function showOnly(entry) {
  only = entry?.value || null;
  document.getElementById("only")?.remove();
  if (entry) document.head.append(Object.assign(document.createElement("link"), { id: "only", rel: "stylesheet", href: entry.dataset.style }));
  filtered.querySelector("b").textContent = entry?.querySelector("span").textContent || "";
  filtered.hidden = !only;
  history.replaceState(null, "", withFilter(location.href));
  markEntries();
  keepInLinks();
}

filterForm.addEventListener("submit", (event) => {
  event.preventDefault();
  showOnly(event.submitter.value === only ? null : event.submitter);
});

filtered.querySelector("a").addEventListener("click", (event) => {
  event.preventDefault();
  const entry = entries().find((found) => found.value === only);
  showOnly(null);
  entry?.focus();
});

document.addEventListener("click", (event) => {
  const link = event.target.closest?.("#overview a, .open a, #findings a, #timeline a");
  if (!link || event.defaultPrevented || !link.getAttribute("href").startsWith("?")) return;
  link.href = withFilter(link.href);
});

document.addEventListener("htmx:sse:after:message", markEntries);
markEntries();
