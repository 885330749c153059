// Shows /openapi.json and sends requests to this service. All texts are set as text, never as markup; the token is
// kept in its field alone and goes to this service alone.
"use strict";

const ROLES = "x-rackloom-roles";
const ORG = "org";
const MAX_SHOWN = 262144; // characters of an answer that are shown
const DEEPEST = 6; // schemas may refer to themselves
const METHODS_WITH_BODY = new Set(["post", "patch", "put"]);

const org = document.getElementById("org");
const token = document.getElementById("token");
const find = document.getElementById("find");
const main = document.getElementById("operations");

function element(name, attributes, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes || {})) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

// Schemas.

function resolve(schema, root) {
  const name = schema && schema.$ref && schema.$ref.split("/").pop();
  return name ? root.components.schemas[name] || {} : schema || {};
}

function choices(schema, root) {
  const found = resolve(schema, root);
  return (found.anyOf || [found]).map((one) => resolve(one, root)).filter((one) => one.type !== "null");
}

function typeText(schema, root) {
  return choices(schema, root).map((one) => {
    if (one.enum) return one.enum.join(" | ");
    if ("const" in one) return String(one.const);
    if (one.type === "array") return `${typeText(one.items, root)} …`;
    return [one.type || "any", one.format].filter(Boolean).join(" ");
  }).join(" or ");
}

// An example of a body or an answer: the first choice of everything.
function example(schema, root, depth) {
  const one = choices(schema, root)[0] || {};
  if ("default" in one && depth > 0) return one.default;
  if ("const" in one) return one.const;
  if (one.enum) return one.enum[0];
  if (one.type === "array") return depth < DEEPEST ? [example(one.items, root, depth + 1)] : [];
  if (one.type === "object" || one.properties) {
    const fields = depth < DEEPEST ? Object.entries(one.properties || {}) : [];
    return Object.fromEntries(fields.map(([name, field]) => [name, example(field, root, depth + 1)]));
  }
  if (one.type === "integer" || one.type === "number") return one.minimum || 0;
  if (one.type === "boolean") return false;
  return one.format === "uuid" ? "00000000-0000-0000-0000-000000000000" : "";
}

function requiredOnly(schema, root) {
  const one = choices(schema, root)[0] || {};
  const whole = example(schema, root, 0);
  const needed = (one.required || []).map((name) => [name, whole[name]]);
  return needed.length ? Object.fromEntries(needed) : whole;
}

// One operation.

function parameterField(parameter, root) {
  const schema = choices(parameter.schema, root)[0] || {};
  const values = schema.type === "boolean" ? ["true", "false"] : schema.enum;
  const field = values
    ? element("select", {}, element("option", { value: "" }, ""))
    : element("input", { spellcheck: "false", autocomplete: "off" });
  for (const value of values || []) field.append(element("option", { value }, String(value)));
  if (parameter.required) field.required = true;
  return field;
}

function parameterRow(parameter, root, fields) {
  const field = parameterField(parameter, root);
  const id = `p${document.querySelectorAll("td input, td select").length}-${fields.length}-${parameter.name}`;
  field.id = id;
  fields.push({ parameter, field });
  const roles = (parameter.schema || {})[ROLES];
  const notes = [
    typeText(parameter.schema, root),
    parameter.in,
    parameter.required && "required",
    roles && `only ${roles.join(", ")}`,
    parameter.description,
  ];
  return element("tr", {},
    element("th", { scope: "row" }, element("label", { for: id }, element("code", {}, parameter.name))),
    element("td", {}, field),
    element("td", { class: "note" }, notes.filter(Boolean).join(", ")));
}

const json = (value) => element("pre", {}, JSON.stringify(value, null, 2));

function answersTable(operation, root) {
  const table = element("table");
  for (const [status, answer] of Object.entries(operation.responses)) {
    const content = Object.values(answer.content || {})[0];
    const row = element("td", {}, answer.description || "");
    if (content && content.schema && Number(status) < 400) row.append(json(example(content.schema, root, 0)));
    table.append(element("tr", {}, element("th", { scope: "row" }, status), row));
  }
  return table;
}

function requestOf(path, method, fields, body) {
  let url = path.replace(`{${ORG}}`, encodeURIComponent(org.value.trim()));
  const query = new URLSearchParams();
  const headers = {};
  for (const { parameter, field } of fields) {
    const value = field.value.trim();
    if (parameter.in === "path") url = url.replace(`{${parameter.name}}`, encodeURIComponent(value));
    else if (value === "") continue;
    else if (parameter.in === "header") headers[parameter.name] = value;
    else if ((parameter.schema || {}).type === "array") value.split(",").forEach((part) => query.append(parameter.name, part.trim()));
    else query.append(parameter.name, value);
  }
  if (token.value.trim()) headers.Authorization = `Bearer ${token.value.trim()}`;
  if (body) headers["Content-Type"] = "application/json";
  const options = { method: method.toUpperCase(), headers, credentials: "omit", cache: "no-store" };
  if (body) options.body = body.value;
  return [query.size ? `${url}?${query}` : url, options];
}

async function show(answer, output) {
  const good = answer.status < 400;
  const pages = answer.headers.get("X-Pagination");
  const text = element("pre");
  const status = `${answer.status} ${answer.statusText}`;
  output.replaceChildren(element("p", { class: `status ${good ? "good" : "bad"}` }, status));
  if (pages) output.append(element("p", { class: "note" }, `X-Pagination: ${pages}`));
  output.append(text);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let whole = "";
  for (let part = await reader.read(); !part.done && whole.length < MAX_SHOWN; part = await reader.read()) {
    whole += part.value;
    text.textContent = whole;
  }
  await reader.cancel();
  if ((answer.headers.get("Content-Type") || "").startsWith("application/json") && whole.length < MAX_SHOWN) {
    text.textContent = JSON.stringify(JSON.parse(whole), null, 2);
  }
}

function missing(fields) {
  return [org, ...fields.map(({ field }) => field)].find((field) => (field === org || field.required) && !field.value.trim());
}

function sender(path, method, fields, body) {
  const output = element("div", { "aria-live": "polite" });
  const send = element("button", { type: "button" }, "Send");
  const stop = element("button", { type: "button", hidden: "" }, "Stop");
  let running = null;
  stop.addEventListener("click", () => running.abort());
  send.addEventListener("click", async () => {
    const empty = missing(fields);
    if (empty) {
      const problem = empty === org ? "Name the organisation first." : "Fill in what is required.";
      output.replaceChildren(element("p", { class: "status bad" }, problem));
      empty.focus();
      return;
    }
    running = new AbortController();
    send.disabled = true;
    stop.hidden = false;
    try {
      const [url, options] = requestOf(path, method, fields, body);
      await show(await fetch(url, { ...options, signal: running.signal }), output);
    } catch (error) {
      const problem = error.name === "AbortError" ? "Stopped." : String(error.message);
      output.append(element("p", { class: "status bad" }, problem));
    } finally {
      send.disabled = false;
      stop.hidden = true;
    }
  });
  return [element("p", {}, send, " ", stop), output];
}

function fillOperation(box, path, method, operation, root) {
  const fields = [];
  const inside = element("div", { class: "body" }, element("p", {}, operation.description || ""));
  const parameters = (operation.parameters || []).filter((parameter) => parameter.name !== ORG);
  if (parameters.length) {
    const table = element("table");
    for (const parameter of parameters) table.append(parameterRow(parameter, root, fields));
    inside.append(element("h3", {}, "Parameters (of several values, separate them with commas)"), table);
  }
  let body = null;
  if (METHODS_WITH_BODY.has(method) && operation.requestBody) {
    const { schema } = operation.requestBody.content["application/json"];
    body = element("textarea", { "aria-label": "Body", spellcheck: "false" });
    body.value = JSON.stringify(requiredOnly(schema, root), null, 2);
    inside.append(element("h3", {}, "Body"), body);
    const whole = json(example(schema, root, 0));
    inside.append(element("details", {}, element("summary", {}, "All fields of the body"), whole));
  }
  inside.append(...sender(path, method, fields, body), element("h3", {}, "Answers"), answersTable(operation, root));
  box.append(inside);
}

function operationBox(path, method, operation, root) {
  const shown = path.replace("/v2/org/{org}/nico", "");
  const roles = (operation[ROLES] || []).join(", ");
  const box = element("details", { id: operation.operationId },
    element("summary", {},
      element("span", { class: `method ${method}` }, method.toUpperCase()),
      element("span", { class: "path" }, shown),
      element("span", { class: "soft" }, roles)));
  box.dataset.words = `${operation.operationId} ${method} ${path} ${roles}`.toLowerCase();
  box.addEventListener("toggle", () => {
    if (box.open && box.children.length === 1) fillOperation(box, path, method, operation, root);
  });
  return box;
}

function showAll(root) {
  const groups = new Map();
  for (const [path, methods] of Object.entries(root.paths)) {
    const name = path.split("/nico/").pop().split("/")[0];
    for (const [method, operation] of Object.entries(methods)) {
      if (!groups.has(name)) groups.set(name, element("section", {}, element("h2", {}, name)));
      groups.get(name).append(operationBox(path, method, operation, root));
    }
  }
  main.replaceChildren(...groups.values());
  openNamed();
}

function filter() {
  const words = find.value.toLowerCase().split(/\s+/).filter(Boolean);
  for (const section of main.querySelectorAll("section")) {
    const boxes = [...section.querySelectorAll("details[data-words]")];
    for (const box of boxes) box.hidden = !words.every((word) => box.dataset.words.includes(word));
    section.hidden = boxes.every((box) => box.hidden);
  }
}

// /docs#get-all-site opens that operation.
function openNamed() {
  const box = document.getElementById(location.hash.slice(1));
  if (box instanceof HTMLDetailsElement) {
    box.open = true;
    box.scrollIntoView();
  }
}

find.addEventListener("input", filter);
document.getElementById("who").addEventListener("submit", (event) => event.preventDefault());
addEventListener("hashchange", openNamed);
fetch("/openapi.json", { credentials: "omit" })
  .then((answer) => answer.json())
  .then(showAll)
  .catch((error) => main.replaceChildren(element("p", { role: "alert" }, `The description cannot be read: ${error.message}`)));
