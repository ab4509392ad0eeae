// The thirteen steps of `affidavit verify`, of the bytes that were signed.

import { fromBase64 } from "./bytes.js";
import { faultOfSignature, formatInstant, isAhead, isStale, parseInstant, revokedAt,
  shown } from "./dates.js";
import { IN_TOTO, STATEMENT_TYPE, StepError, digestOfEnvelope, envelopeOf } from "./envelope.js";
import { BadJson, Real, canonicalJson, digestOf, get, isCount, isObject, isText, parseStrict,
  requireFields, requireThat, sameJson } from "./json.js";
import { accepts, hasRole } from "./keys.js";
import { BadProof, leafHash, verifyInclusion } from "./merkle_tree.js";
import { BadNote, UnknownSigner, checkpointOf, openCheckpoint } from "./signed_note.js";
import { checkStatus } from "./status_list.js";
import { TimestampsUnchecked, attestedBy, dependentWitness, hasAttestors } from "./trust.js";

export const STEPS = [
  "size and form", "payload type", "key", "signature", "statement", "key window", "plan",
  "accountants and policy", "validity", "inclusion", "checkpoint", "consistency", "status",
];
export const MAX_BUNDLE_BYTES = 8 * 1024 * 1024;
const BUNDLE_TYPE = "application/vnd.affidavit.bundle.v1+json";
const PREDICATE_TYPE = "https://affidavit.dev/dp-certificate/v1";
const CRITICAL = ["verdict", "guarantee", "validity", "obligations", "approvals"];
const VERDICTS = ["certified", "under_noised", "unproved", "refused", "undecided"];
const MAX_HASHES = 128;

// The numbered results of the steps.
export class Report {
  constructor(names) {
    Object.assign(this, { names, steps: [] });
  }

  add(step, detail, checked = true) {
    this.steps.push({ step, name: this.names[step - 1], detail, checked });
  }
}

// What a verification trusts, and its time. `status` is a status list's bytes or null; `usedAt` is
// the time of a past use, after which the certificate may have expired.
export class Verifier {
  constructor({ keys, policy = null, now = Date.now(), status = null, usedAt = null }) {
    const byId = new Map(keys.map((key) => [key.keyId, key]));
    this.trusted = { keys: [...byId.values()], policy, key: (id) => byId.get(id) };
    Object.assign(this, { now, status, usedAt });
  }

  usedFrom(usedAt) {
    const { keys, policy } = this.trusted;
    return new Verifier({ keys, policy, now: this.now, status: this.status, usedAt });
  }
}

// Perform every step; throws a StepError of the first that fails.
export async function verifyBundle(bytes, verifier, report = new Report(STEPS)) {
  const { envelope, log } = readBundle(bytes);
  report.add(1, `${bytes.length} bytes`);
  if (envelope.payloadType !== IN_TOTO) {
    throw new StepError(2, "bad_payload_type", "the envelope contains no in-toto statement.");
  }
  report.add(2, envelope.payloadType);
  const key = await findKey(envelope, verifier);
  report.add(3, key.keyId.slice(0, 16));
  if (!(await accepts(key, envelope.signature, envelope.signed))) {
    await requireNamedSigner(4, envelope, verifier);
    throw new StepError(4, "bad_signature", "the signature does not match the statement.");
  }
  report.add(4, "Ed25519 over the payload as signed");
  const statement = readStatement(envelope);
  const predicate = statement.predicate;
  report.add(5, `verdict ${predicate.verdict}`);
  const [issuedAt, notAfter] = readDates(predicate);
  const attestation = await findAttestation(log?.checkpoint ?? null, verifier);
  checkKeyWindow(key, issuedAt, log, attestation, verifier);
  report.add(6, `issued ${predicate.validity.not_before}`);
  report.add(7, `${await checkPlan(statement)}; its noise is not compared here`);
  report.add(8, "no minimum version or policy required");
  report.add(9, `until ${formatInstant(checkValidity(key, issuedAt, notAfter, verifier))}`);
  await checkLog(envelope, statement, log, attestation, verifier, report, issuedAt);
  report.add(13, ...(await checkStatus(envelope, predicate, verifier)));
  return { predicate, envelope, log, report };
}

// ---- steps 1 to 5 --------------------------------------------------------------------

function readBundle(bytes) {
  const refuse = (code, message) => new StepError(1, code, `${message}.`);
  let envelope;
  let document;
  try {
    document = parseStrict(bytes, MAX_BUNDLE_BYTES);
    requireFields(document, ["bundleType", "envelope"], ["log"]);
    requireThat(document.bundleType === BUNDLE_TYPE, "the bundle has a different type or version");
    envelope = envelopeOf(document.envelope);
  } catch (error) {
    throw error instanceof BadJson ? refuse("bad_form", error.message) : error;
  }
  try {
    return { envelope, log: Object.hasOwn(document, "log") ? inclusionOf(document.log) : null };
  } catch (error) {
    throw error instanceof BadJson ? refuse("bad_log_part", error.message) : error;
  }
}

const isSize = (value) => isCount(value) && value >= 0;

export function hashesOf(texts) {
  requireThat(Array.isArray(texts) && texts.length <= MAX_HASHES, "the proof is no list of hashes");
  return texts.map((text) => {
    requireThat(isText(text), "a hash is not base64");
    let hash;
    try {
      hash = fromBase64(text);
    } catch (error) {
      throw new BadJson(error.message);
    }
    requireThat(hash.length === 32, "not a hash of 32 bytes");
    return hash;
  });
}

function inclusionOf(document) {
  requireFields(document, ["leafIndex", "inclusionProof", "checkpoint"], ["treeSize"]);
  const { leafIndex, treeSize = null, checkpoint } = document;
  requireThat(isSize(leafIndex), "leafIndex");
  requireThat(!Object.hasOwn(document, "treeSize") || isSize(treeSize), "treeSize");
  requireThat(isText(checkpoint), "checkpoint");
  return { leafIndex, treeSize, proof: hashesOf(document.inclusionProof), checkpoint };
}

export function consistencyOf(document) {
  requireFields(document, ["first", "second", "hashes"]);
  requireThat(isSize(document.first) && isSize(document.second), "sizes");
  return { first: document.first, second: document.second, proof: hashesOf(document.hashes) };
}

async function findKey(envelope, { trusted }) {
  const key = trusted.key(envelope.keyId);
  const name = `the key ${envelope.keyId.slice(0, 16)}`;
  if (key === undefined) {
    await requireNamedSigner(3, envelope, { trusted });
    throw new StepError(3, "unknown_key", `${name} is not trusted.`);
  }
  if (key.development) {
    throw new StepError(3, "untrusted_key", "it was signed with a development key.");
  }
  if (!hasRole(key, "certificate")) {
    throw new StepError(3, "key_outside_role", `${name} is not for certificates.`);
  }
  return key;
}

async function requireNamedSigner(step, envelope, { trusted }) {
  for (const key of trusted.keys) {
    if (await accepts(key, envelope.signature, envelope.signed)) {
      throw new StepError(step, "wrong_key_id", "it was signed by another key than it names.");
    }
  }
}

function readStatement(envelope) {
  const refuse = (message, code = "bad_statement") => new StepError(5, code, message);
  let document;
  try {
    document = parseStrict(envelope.payload, MAX_BUNDLE_BYTES);
  } catch (error) {
    throw error instanceof BadJson ? refuse(`${error.message}.`) : error;
  }
  if (
    !isObject(document) || document._type !== STATEMENT_TYPE ||
    document.predicateType !== PREDICATE_TYPE || !isObject(document.predicate)
  ) {
    throw refuse("this is not a certificate.");
  }
  const { predicate } = document;
  const { critical } = predicate;
  if (!Array.isArray(critical) || !critical.every((name) => CRITICAL.includes(name))) {
    throw refuse("it has critical fields that this page does not support.", "unknown_critical_field");
  }
  const needed = [...CRITICAL, "plan", "certificate_id"];
  const missing = needed.filter((name) => !Object.hasOwn(predicate, name));
  if (missing.length) throw refuse(`the statement lacks ${missing.join(", ")}.`);
  if (!isReadable(predicate)) {
    throw refuse("its verdict, guarantee or requester is not that of a certificate.");
  }
  return document;
}

function isReadable({ verdict, guarantee, requester, obligations, reasons }) {
  if (!VERDICTS.includes(verdict) || !isText(requester)) return false;
  try {
    for (const stated of [obligations, reasons]) {
      requireThat(Array.isArray(stated), "a list");
      for (const item of stated) requireThat(isText(get(item, "code")), "a code");
    }
    if (guarantee === null) return verdict !== "certified";
    const ends = ["epsilon", "delta"].flatMap((name) =>
      ["lower", "upper"].map((end) => get(guarantee, name, end)),
    );
    const mu = get(guarantee, "mu");
    const gaussian = Object.hasOwn(guarantee, "gaussian_bound")
      ? ["mu", "remainder", "regret"].map((name) => get(guarantee, "gaussian_bound", name))
      : [];
    const bounds = [...ends, mu === null ? "0" : mu, ...gaussian];
    requireThat(isText(get(guarantee, "adjacency")) && bounds.every(isText), "guarantee");
    const [low, high, deltaLow, deltaHigh, ...others] = bounds.map(numberOf);
    const ordered =
      0 <= low && low <= high && 0 <= deltaLow && deltaLow <= deltaHigh &&
      others.every((value) => value >= 0);
    const mayBeUnbounded = ["refused", "undecided"].includes(verdict);
    return ordered && (mayBeUnbounded || (high < Infinity && deltaHigh < 1));
  } catch (error) {
    if (error instanceof BadJson) return false;
    throw error;
  }
}

// The number that a decimal text of the statement means; throws BadJson for another text.
function numberOf(text) {
  requireThat(isText(text), "not a number");
  const word = /^([-+]?)(inf(?:inity)?|nan)$/i.exec(text);
  if (word !== null) {
    return /nan/i.test(word[2]) ? NaN : word[1] === "-" ? -Infinity : Infinity;
  }
  const form = /^[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e[-+]?[0-9]+)?$/i;
  requireThat(form.test(text), "not a number");
  return Number(text);
}

function readDates(predicate) {
  try {
    const { not_before: notBefore, not_after: notAfter } = predicate.validity;
    return [parseInstant(notBefore), parseInstant(notAfter)];
  } catch {
    throw new StepError(5, "bad_statement", "the statement's dates cannot be read.");
  }
}

// ---- steps 6 to 9 --------------------------------------------------------------------

// Return when others first and last saw the checkpoint, or null.
export async function findAttestation(note, { trusted, now }) {
  const { policy } = trusted;
  if (note === null || policy === null) return null;
  const name = dependentWitness(policy, trusted.keys);
  if (name !== null) {
    throw new StepError(
      11, "witness_not_independent", `the witness ${name} has a key of the log that it witnesses.`,
    );
  }
  try {
    return await attestedBy(policy, note, now);
  } catch (error) {
    if (error instanceof BadNote) throw new StepError(11, "bad_cosignature", `${error.message}.`);
    if (error instanceof TimestampsUnchecked) {
      throw new StepError(
        11, "timestamps_unchecked",
        "the trust policy relies on timestamps, which this page does not check.",
      );
    }
    throw error;
  }
}

function checkKeyWindow(key, issuedAt, log, attestation, { trusted, now }) {
  const refuse = (message, code = "key_revoked") => new StepError(6, code, message);
  let fault = faultOfSignature(key, issuedAt, { now: Math.max(issuedAt, now) });
  if (fault === "revoked") throw refuse("its key was revoked before it was issued.");
  if (fault === "revoked since") {
    const { policy } = trusted;
    const mustBeAttested = key.roles !== null || (policy !== null && hasAttestors(policy));
    let seen = issuedAt;
    if (log === null || mustBeAttested) {
      if (log === null || attestation === null) {
        throw refuse("its key was revoked, and nobody else attests that it was issued before.");
      }
      [seen] = attestation;
    }
    fault = faultOfSignature(key, issuedAt, { now, seen });
    if (fault === "revoked since") {
      throw refuse("its key was revoked before others saw it in the log.");
    }
  }
  if (fault === "outside the window") {
    throw refuse("its key was not allowed to sign when it was issued.", "key_outside_window");
  }
}

async function checkPlan(statement) {
  const carried = await digestOf(statement.predicate.plan);
  const subject = [{ name: "plan", digest: { sha256: carried.slice(7) } }];
  const stated = statement.subject ?? null;
  if (!sameJson(stated, subject)) {
    throw new StepError(7, "bad_subject", "its subject does not match the plan in the statement.");
  }
  if (!isPossible(statement.predicate)) {
    throw new StepError(7, "bad_statement", "its guarantee is not one that its plan can have.");
  }
  return carried;
}

// Whether the plan can have the guarantee. Its joint noise multiplier is only read: what it is
// for the plan follows from the plan's mechanisms.
function isPossible(predicate) {
  try {
    if (predicate.guarantee === null) return true;
    get(predicate, "sampling", 0);
    const joint = get(predicate, "noise_multiplier", "joint");
    if (joint instanceof Real || isCount(joint)) return followsFromPlan(predicate);
    return (joint === null || !Number.isNaN(numberOf(joint))) && followsFromPlan(predicate);
  } catch (error) {
    if (error instanceof BadJson) return false;
    throw error;
  }
}

// Whether the guarantee has the plan's neighbours and unit, and meets its target if certified.
function followsFromPlan({ verdict, guarantee, plan }) {
  if (!isObject(plan)) return true;
  const { adjacency, dataset, target } = plan;
  if (isText(adjacency) && guarantee.adjacency !== adjacency) return false;
  if (isObject(dataset) && guarantee.unit !== (dataset.unit ?? "example")) return false;
  if (verdict !== "certified" || !isObject(target)) return true;
  return ["epsilon", "delta"].every((name) => {
    const most = target[name] instanceof Real ? target[name].value : target[name];
    return typeof most !== "number" || numberOf(guarantee[name].upper) <= roundedUp(most);
  });
}

// A target in twelve digits, as certificates state it.
function roundedUp(value) {
  const near = Number(value.toPrecision(12));
  return near >= value ? near : Number((value * (1 + 5e-12)).toPrecision(12));
}

function checkValidity(key, notBefore, notAfter, { now, usedAt }) {
  const end = key.roles === null ? notAfter : Math.min(notAfter, key.notAfter);
  const at = usedAt ?? now;
  if (at < notBefore) throw new StepError(9, "not_yet_valid", "it is not valid yet.");
  if (at > end) throw new StepError(9, "expired", "it has expired.");
  return end;
}

// ---- steps 10 to 12 ------------------------------------------------------------------

async function checkLog(envelope, statement, log, attestation, verifier, report, issuedAt) {
  const { trusted, now } = verifier;
  if (log === null) {
    if (trusted.policy !== null) {
      throw new StepError(10, "not_logged", "the bundle does not give its place in a log.");
    }
    for (const step of [10, 11, 12]) report.add(step, "not logged: the bundle has no log proof", false);
    return;
  }
  const checkpoint = await checkInclusion(envelope, statement, log);
  report.add(10, `leaf ${log.leafIndex} of ${checkpoint.size}`);
  const key = await checkCheckpoint(log.checkpoint, attestation, verifier, issuedAt);
  const mayBeOld = revokedAt(trusted.key(envelope.keyId), now);
  const others = checkTrustPolicy(checkpoint, attestation, verifier, mayBeOld);
  report.add(11, `${checkpoint.origin}, key ${key.keyId.slice(0, 16)}${others}`);
  report.add(12, `the first checkpoint of ${checkpoint.origin} seen here; this page keeps none`);
}

async function checkInclusion(envelope, statement, log) {
  const refuse = (code, message) => new StepError(10, code, message);
  let checkpoint;
  try {
    checkpoint = checkpointOf(log.checkpoint);
  } catch (error) {
    throw error instanceof BadNote ? refuse("bad_checkpoint", `${error.message}.`) : error;
  }
  if (log.treeSize !== null && log.treeSize !== checkpoint.size) {
    throw refuse("bad_tree_size", "the tree size does not match the checkpoint.");
  }
  const entry = await entryOf(envelope, statement.predicate);
  if (entry === null) throw refuse("bad_leaf", "the statement lacks fields of its log entry.");
  const { leafIndex: index, proof } = log;
  try {
    const { size, rootHash: root } = checkpoint;
    await verifyInclusion(await leafHash(entry), { index, size, proof, root });
  } catch (error) {
    if (!(error instanceof BadProof)) throw error;
    throw refuse("not_included", `the certificate is not in the log: ${error.message}.`);
  }
  return checkpoint;
}

// The bytes of the leaf of a certificate, or null if its statement lacks a field.
async function entryOf(envelope, predicate) {
  if (!Object.hasOwn(predicate, "policy")) return null;
  const supersedes = predicate.supersedes ?? null;
  const { verdict, requester, policy } = predicate;
  const at = formatInstant(parseInstant(predicate.validity.not_before));
  const body = {
    envelope: await digestOfEnvelope(envelope),
    key_id: envelope.keyId,
    plan_digest: await digestOf(predicate.plan),
    policy,
    verdict,
    ...(supersedes ? { supersedes } : {}),
  };
  return canonicalJson({
    kind: verdict === "certified" ? "certificate" : "refusal",
    subject: predicate.certificate_id,
    actor: requester,
    at: at.replace("Z", ".000000+00:00"),
    body,
  });
}

// Return the trusted key that signed the checkpoint inside its window.
export async function checkCheckpoint(note, attestation, { trusted, now }, issuedAt = null) {
  const refuse = (code, message) => new StepError(11, code, message);
  let opened;
  try {
    opened = await openCheckpoint(note, trusted.keys);
    if (Number.isNaN(opened.checkpoint.signedAt)) throw new BadNote("its time cannot be read");
  } catch (error) {
    if (error instanceof UnknownSigner) {
      throw refuse("unknown_checkpoint_key", "no key that you trust for checkpoints signed it.");
    }
    if (error instanceof BadNote) throw refuse("bad_checkpoint_signature", `${error.message}.`);
    throw error;
  }
  const { checkpoint, signers } = opened;
  const at = checkpoint.signedAt;
  if (at === null) throw refuse("undated_checkpoint", "the checkpoint has no time of signing.");
  if (issuedAt !== null && isAhead(issuedAt, at)) {
    throw refuse("checkpoint_before_certificate", "the checkpoint is older than the certificate.");
  }
  const keys = signers.filter((key) => !key.development);
  if (!keys.length) throw refuse("untrusted_checkpoint_key", "a development key signed it.");
  const seen = attestation?.[0] ?? null;
  const faults = keys.map((key) => faultOfSignature(key, at, { now, seen }));
  if (faults.includes(null)) return keys[faults.indexOf(null)];
  if (faults.includes("not yet")) {
    throw refuse("checkpoint_not_yet", `the checkpoint is dated ${shown(at)}, in the future.`);
  }
  if (faults.includes("revoked") || faults.includes("revoked since")) {
    throw refuse("checkpoint_key_revoked", "the checkpoint's key is revoked.");
  }
  throw refuse(
    "checkpoint_key_outside_window", "the checkpoint's key was not allowed to sign at that time.",
  );
}

// Check log, witnesses and freshness by the trust policy; return a description.
export function checkTrustPolicy(checkpoint, attestation, { trusted, now }, mayBeOld) {
  const { policy } = trusted;
  const refuse = (code, message) => new StepError(11, code, message);
  if (policy === null) return "";
  if (checkpoint.origin !== policy.origin) {
    throw refuse("wrong_origin", `the checkpoint is of the log ${checkpoint.origin}.`);
  }
  const { witnesses, checkpointHours } = policy;
  if (hasAttestors(policy) && attestation === null) {
    throw refuse("not_witnessed", "too few of the others that you trust attest the checkpoint.");
  }
  const last = attestation !== null && witnesses !== null ? attestation[1] : checkpoint.signedAt;
  if (!mayBeOld && last !== null && isStale(checkpointHours, last, now)) {
    throw refuse("stale_checkpoint", `the checkpoint is older than ${checkpointHours} hours.`);
  }
  return witnesses === null ? "" : `, ${witnesses.threshold} or more witnesses`;
}
