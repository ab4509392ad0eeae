// The signed list of certificates that are no longer valid (step 13).

import { DAY, faultOfSignature, faultToday, isInstant, isStale, parseInstant } from "./dates.js";
import { StepError, envelopeOf, digestOfEnvelope } from "./envelope.js";
import {
  BadJson, get, isCount, isText, parseStrict, Real, requireFields, requireThat,
} from "./json.js";
import { accepts, hasRole } from "./keys.js";
import { isDigest } from "./trust.js";

const PAYLOAD_TYPE = "application/vnd.affidavit.status-list.v1+json";
const TYPE = "https://affidavit.dev/status-list/v1";
const MAX_BYTES = 32 * 1024 * 1024;
const MAX_VALIDITY = 7 * DAY;

const refusal = (code, message) => new StepError(13, code, message);

const bad = (message) => refusal("bad_status", `the status list: ${message}`);

// The list is read from its canonical form, in which 1.0 is an integer.
const isWhole = (value) =>
  isCount(value) || (value instanceof Real && Number.isSafeInteger(value.value));

const isPositive = (value) => isWhole(value) && Number(value.value ?? value) >= 1;

function contentOf(document) {
  const fields = ["_type", "issuer", "sequence", "issued_at", "next_update", "keyset_version"];
  requireFields(document, [...fields, "keys", "listed"]);
  const { issuer, keys, listed } = document;
  requireThat(document._type === TYPE, "_type");
  requireThat(isText(issuer) && issuer && [...issuer].length <= 255, "issuer");
  requireThat(isPositive(document.sequence), "sequence");
  requireThat(isInstant(document.issued_at) && isInstant(document.next_update), "dates");
  requireThat(document.issued_at <= document.next_update, "it ends before it begins");
  const version = document.keyset_version;
  requireThat(version === null || (isWhole(version) && Number(version.value ?? version) >= 0), "keyset");
  requireThat(Array.isArray(keys) && keys.every(isText), "keys");
  requireThat(Array.isArray(listed), "listed");
  for (const item of listed) {
    requireFields(item, ["envelope", "certificate_id", "issue", "status", "reason", "since"]);
    requireThat(isDigest(item.envelope) && isDigest(item.certificate_id), "listed: a digest");
    requireThat(isPositive(item.issue) && isText(item.reason) && isInstant(item.since), "listed");
    requireThat(["revoked", "superseded"].includes(item.status), "listed: status");
  }
  return document;
}

// Read a list that a trusted key signed inside its window; throws a StepError of step 13.
export async function readStatus(bytes, trusted) {
  let envelope;
  try {
    envelope = envelopeOf(parseStrict(bytes, MAX_BYTES));
  } catch (error) {
    throw error instanceof BadJson ? bad(`${error.message}.`) : error;
  }
  if (envelope.payloadType !== PAYLOAD_TYPE) throw bad("the envelope contains no status list.");
  const key = trusted.key(envelope.keyId);
  if (key === undefined || key.development) throw bad("no key that you trust signed it.");
  if (!hasRole(key, "status")) throw bad("its key is not for status lists.");
  if (!(await accepts(key, envelope.signature, envelope.signed))) {
    throw bad("its signature does not match its content.");
  }
  let content;
  try {
    content = contentOf(parseStrict(envelope.payload, MAX_BYTES));
  } catch (error) {
    throw error instanceof BadJson ? bad(`${error.message}.`) : error;
  }
  const at = parseInstant(content.issued_at);
  if (faultOfSignature(key, at, { now: at }) !== null) {
    throw bad("its key was not allowed to sign when it was signed.");
  }
  return { content, key };
}

function requireApproved(predicate) {
  if (predicate.verdict !== "certified") return;
  const stated = predicate.approvals;
  if (Array.isArray(stated) && !stated.length) return;
  let required;
  let given;
  try {
    [required, given] = [get(stated, "required"), get(stated, "given")];
    requireThat(isCount(required) && required >= 0 && Array.isArray(given), "approvals");
    for (const item of given) {
      requireFields(item, ["name", "at", "comment", "envelope"]);
      requireThat(Object.values(item).every(isText), "approvals");
    }
  } catch (error) {
    if (!(error instanceof BadJson)) throw error;
    throw refusal("not_approved", "its approvals cannot be read.");
  }
  const names = new Set(given.map((item) => item.name));
  names.delete(predicate.requester);
  if (names.size < required) {
    throw refusal("not_approved", `${names.size} of the ${required} required approvals were given.`);
  }
  if (given.some((item) => item.envelope !== (predicate.supersedes ?? null))) {
    throw refusal("not_approved", "its approvals are for another envelope.");
  }
}

// Check approvals and revocation; return a description, and whether a list was checked.
export async function checkStatus(envelope, predicate, verifier) {
  requireApproved(predicate);
  const { trusted, now, status } = verifier;
  const hours = trusted.policy?.statusHours ?? null;
  if (status === null) {
    if (hours !== null) throw refusal("no_status", "no status list was given.");
    return ["revocation not checked: no status list given", false];
  }
  const { content, key } = await readStatus(status, trusted);
  const at = parseInstant(content.issued_at);
  const fault = faultToday(key, at, now);
  if (fault === "not yet") throw bad("it is from the future; check this machine's clock.");
  if (fault !== null) throw bad("its key was revoked or has expired, so its dates prove nothing.");
  if (parseInstant(content.next_update) - at > MAX_VALIDITY) throw bad("it is valid for too long.");
  if (parseInstant(content.next_update) < now) {
    throw refusal("stale_status", `the status list was valid until ${content.next_update}.`);
  }
  if (isStale(hours, at, now)) {
    throw refusal("stale_status", `the status list is older than ${hours} hours.`);
  }
  if (!content.keys.includes(envelope.keyId)) {
    throw refusal("other_status", "the status list is from another service.");
  }
  const digest = await digestOfEnvelope(envelope);
  const listed = content.listed.find((item) => item.envelope === digest);
  if (listed !== undefined) {
    throw listed.status === "superseded"
      ? refusal("superseded", `it was superseded at ${listed.since}.`)
      : refusal("revoked", `it was revoked at ${listed.since}: ${listed.reason}.`);
  }
  const sequence = content.sequence.value ?? content.sequence;
  return [`not listed in status list ${sequence} of ${content.issuer}`, true];
}
