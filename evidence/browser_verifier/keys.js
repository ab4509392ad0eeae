// Ed25519 keys: their records, roles and windows.

import { concatenated, fromBase64, hexOf, sameBytes, sha256 } from "./bytes.js";
import { parseInstant } from "./dates.js";
import { BadJson, Real, get, isObject, isText, requireThat, sameJson } from "./json.js";

export const ROLES = ["certificate", "checkpoint", "status", "run", "witness"];
const PREFIX = Uint8Array.of(0x30, 0x2a, 0x30, 5, 6, 3, 0x2b, 0x65, 0x70, 3, 0x21, 0);
const PEM = /^\s*-----BEGIN PUBLIC KEY-----\s+([A-Za-z0-9+/=\s]+)-----END PUBLIC KEY-----\s*$/;

export const hasRole = (key, role) => key.roles === null || key.roles.includes(role);

// Whether this browser can verify Ed25519 signatures: those of RFC 8032's first test vector.
export async function canVerify() {
  const key = "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a";
  const signature =
    "e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e06522490155" +
    "5fb8821590a33bacc61e39701cf9b46bd25bf5f0595bbe24655141438e7a100b";
  const bytes = (hex) => Uint8Array.from(hex.match(/../g), (pair) => parseInt(pair, 16));
  try {
    const accepts = await verifierOf(bytes(key));
    const wrong = Uint8Array.of(1);
    return (
      (await accepts(bytes(signature), new Uint8Array())) && !(await accepts(bytes(signature), wrong))
    );
  } catch {
    return false;
  }
}

// Return the function that tells whether a signature of a message is this key's.
async function verifierOf(raw) {
  const key = await crypto.subtle.importKey("raw", raw, "Ed25519", false, ["verify"]);
  return (signature, message) => crypto.subtle.verify("Ed25519", key, signature, message);
}

const verifiers = new Map();

// Whether the signature of the message is that of the key with these 32 bytes.
export async function signedBy(raw, signature, message) {
  const name = hexOf(raw);
  if (!verifiers.has(name)) verifiers.set(name, await verifierOf(raw).catch(() => null));
  const accepts = verifiers.get(name);
  return accepts !== null && signature.length === 64 && accepts(signature, message);
}

export const accepts = (key, signature, message) => signedBy(key.raw, signature, message);

// Read one public key record, as `GET /v1/keys` has it.
export async function keyOf(record) {
  const found = PEM.exec(get(record, "public_key"));
  requireThat(found !== null, "a key is not in PEM");
  let der;
  try {
    der = fromBase64(found[1].replace(/\s/g, ""));
  } catch {
    throw new BadJson("a key is not in PEM");
  }
  const isKey = der.length === 44 && sameBytes(der.subarray(0, 12), PREFIX);
  requireThat(isKey, "a key is not an Ed25519 key");
  const keyId = hexOf(await sha256(der));
  requireThat(record.key_id === keyId, "a record's key id does not match its key");
  return {
    keyId,
    raw: der.slice(12),
    notBefore: parseInstant(get(record, "not_before")),
    notAfter: parseInstant(get(record, "not_after")),
    label: String(record.label ?? ""),
    development: isTruthy(record.development),
    revokedFrom: null,
    roles: rolesOf(record.roles),
  };
}

function rolesOf(value) {
  if (value === undefined || value === null) return null;
  requireThat(Array.isArray(value) && value.length > 0, "roles is not a list");
  requireThat(value.every((role) => ROLES.includes(role)), "there is no such role");
  return value;
}

const isTruthy = (value) =>
  value instanceof Real ? value.value !== 0 : isObject(value) ? true : Boolean(value?.length ?? value);

export function recordsIn(document) {
  if (!isObject(document)) return document;
  return Object.hasOwn(document, "keys") ? document.keys : [document];
}

// Read the keys of a record, a list of records, or an answer of `GET /v1/keys`.
export async function keysOf(document) {
  const records = recordsIn(document);
  requireThat(Array.isArray(records) && records.every(isObject), "there are no key records");
  const known = new Map();
  for (const record of records) {
    requireThat(isText(record.public_key), "a record has no public key");
    const key = await keyOf(record);
    const earlier = known.get(key.keyId);
    requireThat(
      earlier === undefined || sameRecord(earlier, key),
      `two records of the key ${key.keyId.slice(0, 16)} differ; keep only the newest`,
    );
    known.set(key.keyId, key);
  }
  return [...known.values()];
}

const sameRecord = (one, other) =>
  ["notBefore", "notAfter", "label", "development"].every((name) => one[name] === other[name]) &&
  sameJson([...(one.roles ?? ["every"])].sort(), [...(other.roles ?? ["every"])].sort());

// The name and four bytes by which signed notes refer to a key; `kind` is its type.
export const noteKeyHash = async (name, kind, raw) =>
  (await sha256(concatenated(new TextEncoder().encode(`${name}\n`), Uint8Array.of(kind), raw)))
    .slice(0, 4);
