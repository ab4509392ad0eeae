// The page: two places for files, and the result. Everything is shown as text, never as markup.

import { verifyFiles, sizeLimit } from "./verify_files.js";

const NOT_HERE = {
  name: "proof of ε",
  detail:
    "not checked here: the checker computes in ball arithmetic with python-flint. A page would " +
    "have to load it, and a Python interpreter, from a registry; this page loads nothing. " +
    "`affidavit verify --recompute` computes ε again.",
};
const RESULTS = { holds: "holds", rejected: "rejected", unchecked: "not checked" };
const MAX_SHOWN = 2000;

const element = (id) => document.getElementById(id);
const chosen = { subject: null, trust: [] };
let verifications = 0;

// Text of others: what is invisible or reorders other text is escaped.
function printable(text) {
  const short = text.length > MAX_SHOWN ? `${text.slice(0, MAX_SHOWN)}…` : text;
  return short.replace(/[\p{C}\p{Zl}\p{Zp}]/gu, (mark) => `\\u{${mark.codePointAt(0).toString(16)}}`);
}

function add(parent, tag, text, className = "") {
  const child = document.createElement(tag);
  child.textContent = printable(text);
  if (className) child.className = className;
  parent.append(child);
  return child;
}

async function read(file) {
  const first = new Uint8Array(await file.slice(0, 4).arrayBuffer());
  const limit = sizeLimit(first);
  // One byte beyond the limit is enough for the step that rejects it.
  return new Uint8Array(await file.slice(0, limit + 1).arrayBuffer());
}

async function choose(place, files) {
  const read_ = await Promise.all(files.map(async (file) => ({ name: file.name, bytes: await read(file) })));
  if (place === "subject") chosen.subject = read_[0] ?? chosen.subject;
  else chosen.trust.push(...read_);
  show();
  await verifyChosen();
}

function show() {
  element("subject-files").textContent = printable(chosen.subject?.name ?? "");
  element("trust-files").replaceChildren();
  for (const { name } of chosen.trust) add(element("trust-files"), "li", name);
}

async function verifyChosen() {
  const result = element("result");
  result.hidden = true;
  const verification = ++verifications;
  if (chosen.subject === null || !chosen.trust.length) return;
  const found = await verifyFiles({ subject: chosen.subject.bytes, trust: chosen.trust });
  // Files that were chosen meanwhile are not those that were verified.
  if (verification !== verifications) return;
  result.hidden = false;
  showVerdict(found);
  showSteps(found);
}

function showVerdict({ outcome, error, steps, predicate, evidence }) {
  const verdict = element("verdict");
  verdict.replaceChildren();
  verdict.className = outcome === "held" && predicate.verdict === "certified" ? "held" : outcome;
  if (outcome === "unusable") {
    add(verdict, "strong", "Nothing was verified.");
    add(verdict, "p", error.message);
    return;
  }
  if (outcome === "rejected") {
    add(verdict, "strong", `Rejected at step ${error.step} (${error.name}): ${error.code}`);
    add(verdict, "p", error.message);
    return;
  }
  const open = steps.filter((step) => !step.checked).map((step) => `${step.step} (${step.name})`);
  add(verdict, "strong", "Verified, except what this page does not check.");
  const what = evidence ? "The certificate in it" : "It";
  add(verdict, "p", `${what} has the verdict ${predicate.verdict}. ${guaranteeOf(predicate)}`);
  if (predicate.verdict !== "certified") {
    verdict.className = "other";
    add(verdict, "p", "Nothing is certified: it is a verified record of another verdict.");
  }
  const missing = [...open.map((name) => `step ${name}`), NOT_HERE.name].join(", ");
  add(verdict, "p", `Not checked: ${missing}.`);
}

function guaranteeOf({ guarantee }) {
  if (guarantee === null) return "";
  const { epsilon, delta, adjacency } = guarantee;
  return `It states that ε is at most ${epsilon.upper} at δ = ${delta.upper} (${adjacency}).`;
}

function showSteps({ steps, error, outcome }) {
  const table = element("steps");
  table.replaceChildren();
  const line = (number, name, state, detail) => {
    const row = table.insertRow();
    for (const text of [number, name, RESULTS[state], detail]) add(row, "td", text);
    row.className = state;
  };
  for (const { step, name, detail, checked } of steps) {
    line(String(step), name, checked ? "holds" : "unchecked", detail);
  }
  if (outcome === "rejected") {
    line(String(error.step), error.name, "rejected", `${error.code}: ${error.message}`);
  } else if (outcome === "held") {
    line("", NOT_HERE.name, "unchecked", NOT_HERE.detail);
  }
}

function listen(place) {
  const area = element(place);
  const input = area.querySelector("input");
  input.addEventListener("change", () => choose(place, [...input.files]));
  area.addEventListener("dragover", (event) => {
    event.preventDefault();
    area.classList.add("over");
  });
  area.addEventListener("dragleave", () => area.classList.remove("over"));
  area.addEventListener("drop", (event) => {
    event.preventDefault();
    area.classList.remove("over");
    choose(place, [...event.dataTransfer.files]);
  });
}

listen("subject");
listen("trust");
element("clear").addEventListener("click", () => {
  Object.assign(chosen, { subject: null, trust: [] });
  for (const input of document.querySelectorAll("input")) input.value = "";
  show();
  verifyChosen();
});
// For scripts that verify many files in one page.
globalThis.verifyFiles = verifyFiles;
