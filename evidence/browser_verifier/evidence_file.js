// The zip of an evidence file: stored files in the order of their names, in one form.

import { digestOfBytes, sameBytes, textOf, utf8 } from "./bytes.js";
import { StepError } from "./envelope.js";
import { BadJson, canonicalJson, get, isObject, parseStrict } from "./json.js";

export const MAX_EVIDENCE_BYTES = 1024 * 1024 * 1024;
const FORMAT = "affidavit-evidence/v1";
const MANIFEST = "manifest.json";
export const TIMESTAMP = "timestamp.tsr";
const UNLISTED = [MANIFEST, TIMESTAMP];
const NAMES = [
  "about.json", "audit.json", "bundle.json", "canary-audit.json", "conformance.json", "index.html",
  "issues.json", "keys.json", "keysets.json", "ledger.json", "log/entries.jsonl", "log/proofs.json",
  "manifest.json", "plan.json", "policy.json", "provenance.json", "record.jsonl", "replay.json",
  "status.json", "timestamp.tsr", "verify.html", "waivers.json",
];
const LOCAL = 30;
const CENTRAL = 46;
const END = 22;
const VERSION = 20;
const UTF8 = 0x0800;
const DATE = 0x0021;
const MADE_BY = (3 << 8) | VERSION;
const REGULAR_FILE = 0o100644 * 0x10000;

const altered = (message) => new StepError(1, "evidence_altered", message);

// Return the files by name, as they were written; throws a StepError of the first two steps.
export async function readEvidence(raw) {
  if (raw.length > MAX_EVIDENCE_BYTES) {
    throw new StepError(1, "evidence_too_large", `it has more than ${MAX_EVIDENCE_BYTES} bytes.`);
  }
  const files = readZip(raw);
  const manifest = files.get(MANIFEST);
  if (manifest === undefined) throw new StepError(1, "evidence_form", `it has no ${MANIFEST}.`);
  requireSameBytes(raw, files);
  await requireListed(manifest, files);
  return files;
}

const startsWith = (raw, offset, ...bytes) =>
  sameBytes(raw.subarray(offset, offset + bytes.length), Uint8Array.from(bytes));

function readZip(raw) {
  const view = new DataView(raw.buffer, raw.byteOffset, raw.byteLength);
  const files = new Map();
  let offset = 0;
  let last = "its beginning";
  while (startsWith(raw, offset, 0x50, 0x4b, 3, 4) && files.size < NAMES.length) {
    if (offset + LOCAL > raw.length) break;
    const size = view.getUint32(offset + 22, true);
    const start = offset + LOCAL + view.getUint16(offset + 26, true);
    let name;
    try {
      name = textOf(raw.subarray(offset + LOCAL, start));
    } catch {
      break;
    }
    if (!NAMES.includes(name)) throw altered(`the zip has another file after ${last}.`);
    if (start + size > raw.length || files.has(name)) break;
    files.set(name, raw.subarray(start, start + size));
    offset = start + size;
    last = name;
  }
  if (!startsWith(raw, offset, 0x50, 0x4b, 1, 2)) {
    throw altered(`the zip cannot be read after ${last}.`);
  }
  return files;
}

function header(length, signature, ...fields) {
  const result = new Uint8Array(length);
  const view = new DataView(result.buffer);
  result.set([0x50, 0x4b, ...signature]);
  let at = 4;
  for (const [size, value] of fields) {
    if (size === 2) view.setUint16(at, value, true);
    else view.setUint32(at, value, true);
    at += size;
  }
  return result;
}

// Write the zip again, header by header, and compare: it has one form.
function requireSameBytes(raw, files) {
  let offset = 0;
  const compare = (part, name) => {
    const same = sameBytes(raw.subarray(offset, offset + part.length), part);
    if (!same) throw altered(`${name} was altered.`);
    offset += part.length;
  };
  const central = [];
  for (const name of [...files.keys()].sort()) {
    const content = files.get(name);
    const rawName = utf8(name);
    const shared = [
      [2, VERSION], [2, UTF8], [2, 0], [2, 0], [2, DATE],
      [4, crc32(content)], [4, content.length], [4, content.length],
      [2, rawName.length], [2, 0],
    ];
    const place = [[2, 0], [2, 0], [2, 0], [4, REGULAR_FILE], [4, offset]];
    central.push(header(CENTRAL, [1, 2], [2, MADE_BY], ...shared, ...place), rawName);
    compare(header(LOCAL, [3, 4], ...shared), name);
    compare(rawName, name);
    if (content.byteOffset === raw.byteOffset + offset) offset += content.length;
    else compare(content, name);
  }
  const directory = offset;
  for (const part of central) compare(part, "the directory of the zip");
  const counts = [[2, 0], [2, 0], [2, files.size], [2, files.size]];
  const sizes = [[4, offset - directory], [4, directory], [2, 0]];
  compare(header(END, [5, 6], ...counts, ...sizes), "the directory of the zip");
  if (offset !== raw.length) throw altered("the zip goes on after its end.");
}

async function requireListed(manifest, files) {
  const digests = {};
  for (const [name, content] of files) {
    if (!UNLISTED.includes(name)) digests[name] = await digestOfBytes(content);
  }
  if (sameBytes(manifest, canonicalJson({ format: FORMAT, files: digests }))) return;
  let stated = {};
  try {
    const listed = get(parseStrict(manifest), "files");
    if (isObject(listed)) stated = listed;
  } catch (error) {
    if (!(error instanceof BadJson)) throw error;
  }
  const missing = Object.keys(stated).filter((name) => !files.has(name) || UNLISTED.includes(name));
  if (missing.length) {
    throw new StepError(2, "evidence_missing", `${missing.slice(0, 5).join(", ")} is missing.`);
  }
  const wrong = Object.keys(digests).filter((name) => stated[name] !== digests[name]);
  const where = Object.keys(stated).length ? wrong.slice(0, 5).join(", ") : "";
  throw new StepError(2, "evidence_altered", `${where || MANIFEST} was altered.`);
}

const CRC = new Uint32Array(256).map((_, index) => {
  let value = index;
  for (let bit = 0; bit < 8; bit++) value = value & 1 ? (value >>> 1) ^ 0xedb88320 : value >>> 1;
  return value;
});

function crc32(bytes) {
  let result = 0xffffffff;
  for (let at = 0; at < bytes.length; at++) result = CRC[(result ^ bytes[at]) & 255] ^ (result >>> 8);
  return (result ^ 0xffffffff) >>> 0;
}
