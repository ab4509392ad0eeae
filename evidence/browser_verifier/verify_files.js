// Verify one file with what its reader trusts, and say what was and was not checked.

import { STEPS, MAX_BUNDLE_BYTES, Report, Verifier, verifyBundle } from "./bundle_verification.js";
import { parseInstant } from "./dates.js";
import { StepError } from "./envelope.js";
import { MAX_EVIDENCE_BYTES } from "./evidence_file.js";
import { EVIDENCE_STEPS, verifyEvidence } from "./evidence_verification.js";
import { isObject, parseStrict } from "./json.js";
import { canVerify, keysOf, recordsIn } from "./keys.js";
import { KeysetError, acceptKeysets, isEnvelope, policyOf, readKeyset, rootsOf } from "./trust.js";

const MAX_TRUST_BYTES = 32 * 1024 * 1024;

// What the reader gave to trust cannot be used: nothing is verified.
export class BadTrust extends Error {}

export const isZip = (bytes) => bytes[0] === 0x50 && bytes[1] === 0x4b;

export const sizeLimit = (bytes) => (isZip(bytes) ? MAX_EVIDENCE_BYTES : MAX_BUNDLE_BYTES);

// Return the trusted keys, the trust policy and the status list in files of any of these kinds.
async function trustIn(files, now) {
  const found = { records: [], keysets: [], roots: null, policy: null, status: null };
  for (const { name, bytes } of files) {
    try {
      await sortIn(found, bytes);
    } catch (error) {
      if (error instanceof KeysetError) throw new StepError(3, error.code, `${error.message}.`);
      throw new BadTrust(`${name}: ${error.message}.`);
    }
  }
  const { keysets, roots, records, status } = found;
  if (keysets.length > 0 !== (roots !== null)) {
    throw new BadTrust("A keyset and its roots go together: add the other one.");
  }
  if (keysets.length && records.length) throw new BadTrust("Give key records or a keyset, not both.");
  if (!keysets.length) return { keys: await keysOf(records), policy: found.policy, status };
  keysets.sort((one, other) => one.version - other.version);
  try {
    const { keys, trust } = await acceptKeysets(keysets, roots, now);
    return { keys, policy: found.policy ?? trust, status };
  } catch (error) {
    if (error instanceof KeysetError) throw new StepError(3, error.code, `${error.message}.`);
    throw error;
  }
}

async function sortIn(found, bytes) {
  const document = parseStrict(bytes, MAX_TRUST_BYTES);
  if (isEnvelope(document)) {
    const isStatus = String(document.payloadType).includes("status-list");
    if (!isStatus) found.keysets.push(await readKeyset(bytes));
    else if (found.status !== null) throw new Error("there is another status list");
    else found.status = bytes;
  } else if (isObject(document) && Object.hasOwn(document, "threshold")) {
    if (found.roots !== null) throw new Error("there are other roots");
    found.roots = await rootsOf(document);
  } else if (isObject(document) && Object.hasOwn(document, "origin")) {
    if (found.policy !== null) throw new Error("there is another trust policy");
    found.policy = await policyOf(document);
  } else {
    await keysOf(document);
    found.records.push(...recordsIn(document));
  }
}

// Of `subject` and the files to trust, each with its bytes, return the steps and the outcome:
// "held" if no step rejected the subject, "rejected", or "unusable" if nothing could be verified.
export async function verifyFiles({ subject, trust, now = null, usedAt = null }) {
  const evidence = isZip(subject);
  const report = new Report(evidence ? EVIDENCE_STEPS : STEPS);
  const result = { evidence, steps: report.steps, error: null, predicate: null };
  if (!(await canVerify())) {
    return { ...result, outcome: "unusable", error: {
      message: "This browser cannot verify Ed25519 signatures. Use a current release of Chrome, " +
        "Edge, Firefox or Safari, or affidavit on a command line." } };
  }
  try {
    const at = now === null ? Date.now() : parseInstant(now);
    let trusted = await trustIn(trust, at);
    if (evidence && trusted.policy !== null) {
      // An old checkpoint is no fault of evidence about the past.
      trusted = { ...trusted, policy: { ...trusted.policy, checkpointHours: null } };
    }
    const used = usedAt === null ? null : parseInstant(usedAt);
    const verifier = new Verifier({ ...trusted, now: at, usedAt: used });
    const verify = evidence ? verifyEvidence : verifyBundle;
    const { predicate } = await verify(subject, verifier, report);
    return { ...result, outcome: "held", predicate };
  } catch (error) {
    if (error instanceof StepError) {
      const { step, code, message } = error;
      return { ...result, outcome: "rejected", error: { step, name: report.names[step - 1], code, message } };
    }
    const message = error instanceof BadTrust ? error.message : `This page failed: ${error.message}`;
    return { ...result, outcome: "unusable", error: { message } };
  }
}
