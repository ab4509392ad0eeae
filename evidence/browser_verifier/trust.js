// What a verifier trusts: keys or a keyset below trusted roots, and a trust policy.

import { digestOfBytes, hexOf, sameBytes } from "./bytes.js";
import { formatInstant, isAhead, isInstant, parseInstant } from "./dates.js";
import { cosignedEnvelope, countSigners } from "./envelope.js";
import {
  BadJson, canonicalJson, isCount, isObject, isText, parseStrict, requireFields, requireThat,
} from "./json.js";
import { ROLES, hasRole, keyOf } from "./keys.js";
import { BadNote, cosignedAt, hasTimestamp, parseNote, requireName, witnessOf } from "./signed_note.js";

const KEYSET_TYPE = "https://affidavit.dev/keyset/v1";
const KEYSET_PAYLOAD = "application/vnd.affidavit.keyset.v1+json";
const MAX_ROOTS = 32;
const MAX_KEYS = 1024;
const MAX_WITNESSES = 32;

// A keyset cannot be used.
export class KeysetError extends Error {
  constructor(code, message) {
    super(message);
    this.code = code;
  }
}

const isIn = (value, least, most) => isCount(value) && value >= least && value <= most;

export const isDigest = (value) => isText(value) && /^sha256:[0-9a-f]{64}$/.test(value);

const isKeyId = (value) => isText(value) && /^[0-9a-f]{64}$/.test(value);

const isLabel = (value) => isText(value) && [...value].length <= 255;

// ---- trust policies ------------------------------------------------------------------

// Read the data of a trust policy; throws BadJson.
export async function policyOf(data) {
  requireFields(data, ["schema_version", "origin"], ["witnesses", "timestamps", "freshness"]);
  requireThat(data.schema_version === 1, "schema_version is not 1");
  requireThat(isText(data.origin), "origin is not a text");
  const { witnesses = null, timestamps = null, freshness = Object.create(null) } = data;
  try {
    requireName(data.origin);
    return {
      origin: data.origin,
      witnesses: witnesses === null ? null : await witnessesOf(witnesses),
      timestamps: timestamps === null ? null : timestampsOf(timestamps),
      checkpointHours: hoursOf(freshness, "checkpoint_hours"),
      statusHours: hoursOf(freshness, "status_hours"),
    };
  } catch (error) {
    if (error instanceof BadNote) throw new BadJson(error.message);
    throw error;
  }
}

async function witnessesOf(data) {
  requireFields(data, ["threshold", "keys"]);
  const { threshold, keys } = data;
  requireThat(Array.isArray(keys) && isIn(keys.length, 1, MAX_WITNESSES), "witnesses: keys");
  requireThat(keys.every(isText), "witnesses: a key is not a text");
  const parsed = [];
  for (const text of keys) parsed.push(await witnessOf(text));
  const distinct = new Set(parsed.map((key) => hexOf(key.raw))).size;
  requireThat(distinct === keys.length, "a witness is listed twice");
  requireThat(isIn(threshold, 1, distinct), "witnesses: threshold");
  return { threshold, keys: parsed };
}

function timestampsOf(data) {
  requireFields(data, ["roots"]);
  requireThat(isText(data.roots) && data.roots.length <= 200_000, "timestamps: roots");
  requireThat(data.roots.includes("-----BEGIN CERTIFICATE-----"), "there is no certificate");
  return data;
}

function hoursOf(data, name) {
  requireFields(data, [], ["checkpoint_hours", "status_hours"]);
  const value = data[name] ?? null;
  requireThat(value === null || isIn(value, 1, 24 * 366), `freshness: ${name}`);
  return value;
}

export const hasAttestors = (policy) => policy.witnesses !== null || policy.timestamps !== null;

// The name of a witness with a key of the log itself, or null.
export function dependentWitness(policy, trusted) {
  const others = ROLES.filter((role) => role !== "witness");
  const logKeys = trusted.filter((key) => others.some((role) => hasRole(key, role)));
  const found = (policy.witnesses?.keys ?? []).find((witness) =>
    logKeys.some((key) => sameBytes(key.raw, witness.raw)),
  );
  return found?.name ?? null;
}

// Timestamps decide, and this page does not read them.
export class TimestampsUnchecked extends Error {}

// Return when others first and last saw a checkpoint, or null if too few did.
export async function attestedBy(policy, raw, now) {
  let cosigned = null;
  if (policy.witnesses !== null) {
    const note = parseNote(raw);
    const times = [];
    for (const witness of policy.witnesses.keys) {
      const at = await cosignedAt(note, witness);
      if (at !== null && !isAhead(at, now)) times.push(at);
    }
    times.sort((one, other) => one - other);
    const { threshold } = policy.witnesses;
    if (times.length >= threshold) {
      cosigned = [times[threshold - 1], times[times.length - threshold]];
    }
  }
  if (policy.timestamps === null || (policy.witnesses !== null && cosigned === null)) {
    return cosigned;
  }
  if (await hasTimestamp(parseNote(raw))) throw new TimestampsUnchecked();
  return cosigned;
}

// ---- keysets -------------------------------------------------------------------------

const malformed = (message) => new KeysetError("keyset_malformed", message);

// Read a keyset; its signatures are not checked.
export async function readKeyset(bytes) {
  try {
    const envelope = cosignedEnvelope(parseStrict(bytes));
    requireThat(envelope.payloadType === KEYSET_PAYLOAD, "the envelope contains no keyset");
    const keyset = await keysetOf(parseStrict(envelope.payload));
    requireThat(
      sameBytes(canonicalJson(keyset.document), envelope.payload),
      "the payload is not in canonical JSON",
    );
    return { ...keyset, envelope, digest: await digestOfBytes(envelope.payload) };
  } catch (error) {
    throw error instanceof KeysetError ? error : malformed(error.message);
  }
}

async function keysetOf(document) {
  requireFields(
    document,
    ["_type", "version", "previous", "issued_at", "expires_at", "roots", "keys", "revoked"],
    ["trust", "administrators"],
  );
  requireThat(document._type === KEYSET_TYPE, "_type is that of no keyset");
  requireThat(isIn(document.version, 1, Number.MAX_SAFE_INTEGER), "version");
  requireThat(document.previous === null || isDigest(document.previous), "previous");
  requireThat((document.previous === null) === (document.version === 1), "previous");
  requireThat(isInstant(document.issued_at) && isInstant(document.expires_at), "dates");
  requireThat(document.issued_at < document.expires_at, "it would expire before its issue date");
  if (Object.hasOwn(document, "administrators")) {
    requireThat(isIn(document.administrators, 2, 10), "administrators");
  }
  const roots = await rootsOf(document.roots, { complete: true });
  const revoked = revocationsOf(document.revoked);
  const keys = await entriesOf(document.keys, revoked);
  const ids = new Set(keys.map((key) => key.keyId));
  requireThat(!roots.keys.some((key) => ids.has(key.keyId)), "a root key signs certificates");
  requireThat([...revoked.keys()].every((id) => ids.has(id)), "a revoked key is not listed");
  let trust = null;
  if (Object.hasOwn(document, "trust")) {
    requireFields(document.trust, ["schema_version", "origin", "witnesses", "timestamps", "freshness"]);
    requireFields(document.trust.freshness, ["checkpoint_hours", "status_hours"]);
    trust = await policyOf(document.trust);
    requireThat(dependentWitness(trust, keys) === null, "a witness has a key of this keyset");
  }
  const { version, previous, issued_at: issuedAt, expires_at: expiresAt } = document;
  return { document, version, previous, issuedAt, expiresAt, roots, keys, revoked, trust };
}

// Read root keys, `threshold` of which must sign; a keyset states every field of them.
export async function rootsOf(data, { complete = false } = {}) {
  requireFields(data, ["threshold", "keys"]);
  const listed = data.keys;
  requireThat(Array.isArray(listed) && isIn(listed.length, 1, MAX_ROOTS), "roots: keys");
  const window = { not_before: "1970-01-01T00:00:00Z", not_after: "9999-12-31T23:59:59Z" };
  const keys = [];
  for (const item of listed) {
    const defaults = ["algorithm", "label"];
    const required = ["key_id", "public_key", ...(complete ? defaults : [])];
    requireFields(item, required, complete ? [] : defaults);
    requireThat(isKeyId(item.key_id) && isText(item.public_key), "roots: a key");
    const { algorithm = "ed25519", label = "" } = item;
    requireThat(algorithm === "ed25519" && isLabel(label), "roots");
    keys.push(await keyOf(Object.assign(Object.create(null), item, window)));
  }
  requireThat(new Set(keys.map((key) => key.keyId)).size === keys.length, "a root is listed twice");
  requireThat(isIn(data.threshold, 1, keys.length), "roots: threshold");
  return { threshold: data.threshold, keys };
}

function revocationsOf(data) {
  requireThat(Array.isArray(data) && data.length <= MAX_KEYS, "revoked is not a list");
  const result = new Map();
  for (const item of data) {
    requireFields(item, ["key_id", "since", "reason"]);
    requireThat(isKeyId(item.key_id) && isInstant(item.since) && isText(item.reason), "revoked");
    requireThat([...item.reason].length <= 1000, "revoked: reason");
    requireThat(!result.has(item.key_id), "a revoked key is listed twice");
    result.set(item.key_id, parseInstant(item.since));
  }
  return result;
}

async function entriesOf(data, revoked) {
  requireThat(Array.isArray(data) && data.length <= MAX_KEYS, "keys is not a list");
  const keys = [];
  for (const item of data) {
    const required = ["key_id", "algorithm", "public_key", "not_before", "not_after", "label"];
    requireFields(item, required, ["roles"]);
    requireThat(isKeyId(item.key_id) && item.algorithm === "ed25519", "keys: a key");
    requireThat(isText(item.public_key) && isLabel(item.label), "keys: a key");
    requireThat(isInstant(item.not_before) && isInstant(item.not_after), "keys: a window");
    requireThat(item.not_before <= item.not_after, "keys: a window ends before it begins");
    requireThat(item.roles !== null, "keys: roles");
    const key = await keyOf(item);
    keys.push({ ...key, revokedFrom: revoked.get(key.keyId) ?? null });
  }
  requireThat(new Set(keys.map((key) => key.keyId)).size === keys.length, "a key is listed twice");
  return keys;
}

// Check that each keyset makes the next one trusted, from the roots on, and return the last one.
export async function acceptKeysets(chain, roots, now) {
  let anchor = roots;
  let last = null;
  for (const candidate of chain) {
    await checkKeyset(candidate, anchor, last);
    [anchor, last] = [candidate.roots, candidate];
  }
  if (now < parseInstant(last.issuedAt)) {
    throw new KeysetError("keyset_not_yet", `the keyset is dated ${last.issuedAt}, in the future`);
  }
  if (now > parseInstant(last.expiresAt)) {
    throw new KeysetError("keyset_expired", `the keyset expired at ${last.expiresAt}`);
  }
  return last;
}

const signedEnough = async (envelope, roots) =>
  (await countSigners(envelope, roots.keys)) >= roots.threshold;

async function checkKeyset(candidate, anchor, last) {
  if (!(await signedEnough(candidate.envelope, candidate.roots))) {
    throw new KeysetError("keyset_unsigned", "too few of its own root keys signed the keyset");
  }
  if (!(await signedEnough(candidate.envelope, anchor))) {
    throw new KeysetError(
      "keyset_untrusted", "too few of the root keys that you trust signed the keyset",
    );
  }
  if (last === null) return;
  const { version } = candidate;
  if (version < last.version) {
    throw new KeysetError("keyset_rollback", `version ${version} is older than ${last.version}`);
  }
  const forked =
    (version === last.version && candidate.digest !== last.digest) ||
    (version === last.version + 1 && candidate.previous !== last.digest);
  if (forked) throw new KeysetError("keyset_fork", `there are two keysets of version ${version}`);
  for (const [keyId, since] of last.revoked) {
    const now = candidate.revoked.get(keyId);
    if (now === undefined || now > since) {
      throw new KeysetError(
        "keyset_unrevoked",
        `the key ${keyId.slice(0, 16)} was revoked from ${formatInstant(since)} on, ` +
          "but this keyset undoes that",
      );
    }
  }
}

export const isEnvelope = (document) => isObject(document) && Object.hasOwn(document, "payloadType");

