// The fifteen steps of `affidavit verify-evidence`, except what needs the accountants' code.

import { concatenated, digestOfBytes, sameBytes, sha256, utf8 } from "./bytes.js";
import { STEPS, Report, checkCheckpoint, checkTrustPolicy, consistencyOf, findAttestation, hashesOf,
  verifyBundle } from "./bundle_verification.js";
import { BadDate, faultOfSignature, isAhead, parseInstant, shown } from "./dates.js";
import { IN_TOTO, STATEMENT_TYPE, StepError, digestOfEnvelope, envelopeOf } from "./envelope.js";
import { TIMESTAMP, readEvidence } from "./evidence_file.js";
import { BadJson, Real, canonicalJson, canonicalText, digestOf, get, isCount, isObject, isText,
  parseStrict, requireThat, sameJson } from "./json.js";
import { accepts, hasRole } from "./keys.js";
import { BadProof, leafHash, verifyConsistency, verifyInclusion } from "./merkle_tree.js";
import { BadNote, checkpointOf } from "./signed_note.js";
import { readStatus } from "./status_list.js";
import { KeysetError, readKeyset } from "./trust.js";

export const EVIDENCE_STEPS = [
  "form", "manifest", "certificate", "log", "plan and policy", "approvals", "status list", "keysets",
  "run", "provenance", "conformance", "ledger", "replay and audit",
  "story", "timestamp",
];
// Steps that the page performs only in part, and why.
const PARTLY = "not checked here:";
const OF_RUNS = ["conformance.json", "ledger.json", "provenance.json", "record.jsonl"];
const ENDS = ["settled", "failed", "cancelled"];
const PROVENANCE_TYPE = "https://slsa.dev/provenance/v1";
const REPLAY_TYPE = "affidavit.replay/1";
const AUDIT_TYPE = "affidavit.audit/1";
const AUDITABLE = ["add_remove", "zero_out"];
const MAX_CANARIES = 1_000_000;
const BUILD_TYPE = "https://affidavit.dev/run/v1";
const START = `sha256:${"0".repeat(64)}`;
const MAX_LINE_BYTES = 8 * 1024 * 1024;

const mismatch = (step, name, what) =>
  new StepError(step, "evidence_mismatch", `${name} has ${what}.`);

// Run a check that reads untrusted data; what cannot be read is a StepError as given.
async function reading(refusal, check) {
  try {
    return await check();
  } catch (error) {
    if (error instanceof StepError || !isUnreadable(error)) throw error;
    throw refusal(error);
  }
}

const UNREADABLE = [BadDate, BadJson, BadNote, BadProof, KeysetError, TypeError];

const isUnreadable = (error) => UNREADABLE.some((kind) => error instanceof kind);

// Perform every step; throws a StepError of the first that fails.
export async function verifyEvidence(raw, verifier, report = new Report(EVIDENCE_STEPS)) {
  const files = await readEvidence(raw);
  const check = new EvidenceCheck(files, verifier, report);
  report.add(1, `${raw.length} bytes, ${files.size} files`);
  report.add(2, "every file has its digest");
  await check.certificate();
  await check.log();
  await check.planAndPolicy();
  await check.approvals();
  await check.statusList();
  await check.keysets();
  await check.run();
  await check.provenance();
  await check.conformance();
  await check.ledger();
  await check.replayAndAudit();
  check.story();
  check.timestamp();
  return { about: check.about, predicate: check.predicate, report };
}

class EvidenceCheck {
  constructor(files, verifier, report) {
    Object.assign(this, { files, verifier, report });
  }

  part(name, step) {
    const content = this.files.get(name);
    if (content === undefined) {
      throw new StepError(step, "evidence_missing", `${name} is missing.`);
    }
    return content;
  }

  // A JSON document in canonical form.
  document(name, step) {
    const content = this.part(name, step);
    try {
      const document = parseStrict(content, content.length);
      if (sameBytes(canonicalJson(document), content)) return document;
    } catch (error) {
      if (!(error instanceof BadJson)) throw error;
    }
    throw new StepError(step, "evidence_form", `${name} is not canonical JSON.`);
  }

  object(name, step) {
    const document = this.document(name, step);
    if (!isObject(document)) throw mismatch(step, name, "no object");
    return document;
  }

  requireSame(name, content, step) {
    if (!sameBytes(this.part(name, step), content)) {
      throw mismatch(step, name, "something else than what is signed and logged");
    }
  }

  // Reject a file that nothing in the log is about.
  requireNone(step, ...names) {
    const name = names.find((item) => this.files.has(item));
    if (name !== undefined) throw mismatch(step, name, "no entry in the log that it belongs to");
  }

  entriesOf(kind, subject) {
    return this.entries.filter((entry) => entry.kind === kind && entry.subject === subject);
  }

  get runEvents() {
    return this.entriesOf("run", this.about.run);
  }

  async certificate() {
    const bundle = this.part("bundle.json", 3);
    this.about = this.object("about.json", 3);
    this.entries = this.readEntries();
    const began = this.runEvents.find((entry) => entry.body.event === "running");
    let usedAt = null;
    if (began !== undefined) usedAt = timeOf(began.at);
    const steps = new Report(STEPS);
    let verified;
    try {
      verified = await verifyBundle(bundle, this.verifier.usedFrom(usedAt), steps);
    } catch (error) {
      if (!(error instanceof StepError)) throw error;
      throw new StepError(3, error.code, `the certificate: ${error.message}`);
    }
    this.predicate = verified.predicate;
    this.envelope = verified.envelope;
    this.bundleLog = verified.log;
    if (this.about.certificate !== this.predicate.certificate_id) {
      throw mismatch(3, "about.json", "another certificate than bundle.json");
    }
    const used = usedAt === null ? "" : `, used at ${shown(usedAt)}`;
    this.report.add(3, `verdict ${this.predicate.verdict}, ${steps.steps.length} steps${used}`);
  }

  readEntries() {
    try {
      const lines = linesOf(this.files.get("log/entries.jsonl") ?? new Uint8Array());
      return lines.map((line) => {
        const entry = parseStrict(line, line.length);
        requireThat(isObject(get(entry, "body")) && isText(get(entry, "kind")), "an entry");
        requireThat(["subject", "actor", "at"].every((name) => isText(get(entry, name))), "an entry");
        return entry;
      });
    } catch (error) {
      if (!(error instanceof BadJson)) throw error;
      throw mismatch(3, "log/entries.jsonl", "lines that are no entries");
    }
  }

  async log() {
    const proofs = this.object("log/proofs.json", 4);
    const refusal = (error) =>
      new StepError(
        4, "evidence_not_logged", `log/proofs.json does not prove the entries: ${error.message}.`,
      );
    const count = await reading(refusal, async () => {
      const note = get(proofs, "checkpoint");
      requireThat(isText(note), "no checkpoint");
      const checkpoint = checkpointOf(note);
      this.loggedAt = checkpoint.signedAt;
      try {
        const attestation = await findAttestation(note, this.verifier);
        await checkCheckpoint(note, attestation, this.verifier);
        checkTrustPolicy(checkpoint, attestation, this.verifier, false);
      } catch (error) {
        throw error instanceof StepError ? new StepError(4, error.code, error.message) : error;
      }
      const leaves = linesOf(this.part("log/entries.jsonl", 4));
      const listed = get(proofs, "entries");
      requireThat(Array.isArray(listed) && listed.length === leaves.length, "not a proof per entry");
      for (const [at, leaf] of leaves.entries()) {
        const index = get(listed, at, "index");
        requireThat(isCount(index), "an index");
        await verifyInclusion(await leafHash(leaf), {
          index,
          size: checkpoint.size,
          proof: hashesOf(get(listed, at, "hashes")),
          root: checkpoint.rootHash,
        });
      }
      requireThat(this.bundleLog !== null, "the bundle was not logged");
      const first = checkpointOf(this.bundleLog.checkpoint);
      await requireLinked(first, checkpoint, proofs);
      this.requireLater(first, checkpoint);
      return `${leaves.length} entries in the tree of ${checkpoint.size}`;
    });
    this.report.add(4, count);
  }

  // The file's checkpoint is dated after all that it contains: else the holder of a key whose window
  // has ended would vouch for what came after it.
  requireLater(first, last) {
    const contained = this.entries.map((entry) => timeOf(entry.at));
    contained.push(parseInstant(this.predicate.validity.not_before));
    if (first.size < last.size) contained.push(first.signedAt);
    const newest = contained.reduce((one, other) => Math.max(one, other));
    requireThat(!isAhead(newest, last.signedAt), "its checkpoint is dated before what it contains");
  }

  async planAndPolicy() {
    this.requireSame("plan.json", canonicalJson(this.predicate.plan), 5);
    const refusal = () => mismatch(5, "bundle.json", "no policy that can be read");
    const [waived, ...reference] = await reading(refusal, () => [
      get(this.predicate, "waived"),
      ...["digest", "name", "version"].map((field) => get(this.predicate, "policy", field)),
    ]);
    this.requireSame("waivers.json", canonicalJson(waived), 5);
    const policy = this.document("policy.json", 5);
    const [digest, name, version] = reference;
    if ((await digestOf(policy)) !== digest) {
      throw mismatch(5, "policy.json", "another policy than the certificate");
    }
    this.report.add(5, `policy ${wordOf(name)} v${wordOf(version)}`);
  }

  async approvals() {
    const issues = this.document("issues.json", 6);
    const about = this.predicate.certificate_id;
    const text = (...values) => canonicalText(values.map((value) => value ?? null));
    const logged = new Set(
      this.entriesOf("approval", about).map(({ actor, body }) =>
        text(actor, body.decision, body.envelope, body.comment),
      ),
    );
    const revoked = new Set(
      this.entriesOf("revocation", about).map(({ actor, body }) =>
        text(actor, body.code, body.reason),
      ),
    );
    const refusal = () => mismatch(6, "issues.json", "no list of issues");
    const [decisions, revocations] = await reading(refusal, () => {
      requireThat(Array.isArray(issues), "issues");
      const given = issues.flatMap((issue) => {
        const items = get(issue, "approvals", "decisions");
        requireThat(Array.isArray(items), "decisions");
        return items.map((item) =>
          text(...["approver", "decision", "envelope_digest", "comment"].map((key) => get(item, key))),
        );
      });
      const ended = issues
        .map((issue) => get(issue, "revocation"))
        .filter((item) => item !== null)
        .map((item) => text(...["revoked_by", "code", "reason"].map((key) => get(item, key))));
      return [new Set(given), new Set(ended)];
    });
    if (!sameSets(decisions, logged) || !sameSets(revocations, revoked)) {
      throw mismatch(6, "issues.json", "other decisions than the log");
    }
    this.report.add(
      6, `${decisions.size} decisions and ${revoked.size} revocations, as logged`,
    );
  }

  async statusList() {
    let content;
    try {
      ({ content } = await readStatus(this.part("status.json", 7), this.verifier.trusted));
    } catch (error) {
      throw error instanceof StepError ? new StepError(7, error.code, error.message) : error;
    }
    if (!content.keys.includes(this.envelope.keyId)) {
      throw mismatch(7, "status.json", "a list of another service");
    }
    const end = parseInstant(content.next_update);
    const refusal = () => mismatch(7, "about.json", "no time");
    if ((await reading(refusal, () => parseInstant(this.about.at))) > end) {
      throw mismatch(7, "about.json", "a time after the end of the status list");
    }
    if (end < this.loggedAt) {
      throw mismatch(7, "status.json", "an end before the log's checkpoint");
    }
    const digest = await digestOfEnvelope(this.envelope);
    const listed = content.listed.find((item) => item.envelope === digest);
    const revoked = this.entries.some(
      (entry) => entry.kind === "revocation" && entry.body.envelope === digest,
    );
    // A list may leave out what was no longer valid in its time.
    const validThen =
      parseInstant(content.issued_at) <= parseInstant(this.predicate.validity.not_after);
    if (revoked && listed === undefined && validThen) {
      throw mismatch(7, "status.json", "no word of a revocation that the log has");
    }
    const status = listed ? `${listed.status} since ${listed.since}` : "does not list the issue";
    this.report.add(7, `list ${content.sequence.value ?? content.sequence}: ${status}`);
  }

  async keysets() {
    const documents = this.document("keysets.json", 8);
    this.document("keys.json", 8);
    this.document("audit.json", 8);
    const refusal = () => mismatch(8, "keysets.json", "a document that is no keyset");
    await reading(refusal, async () => {
      requireThat(Array.isArray(documents), "keysets");
      const numbers = [];
      for (const item of documents) numbers.push((await readKeyset(canonicalJson(item))).version);
      if (numbers.some((number, at) => number !== at + 1)) {
        throw mismatch(8, "keysets.json", "a gap");
      }
      this.report.add(8, `${numbers.length} keysets`, numbers.length > 0);
    });
  }

  get hasRun() {
    return (this.about.run ?? null) !== null;
  }

  async run() {
    if (!this.hasRun) {
      this.requireNone(9, ...OF_RUNS);
      for (const step of [9, 10, 11, 12]) this.report.add(step, "no run", false);
      return;
    }
    const events = this.runEvents.map((entry) => entry.body);
    const numbered = events.every((event, at) => event.seq === at + 1);
    if (!events.length || events[0].certificate === undefined) {
      throw mismatch(9, "log/entries.jsonl", "no run");
    }
    this.first = events[0];
    this.end = events.at(-1);
    const belongs = this.first.certificate === this.predicate.certificate_id;
    if (!numbered || !ENDS.includes(this.end.event) || !belongs) {
      throw mismatch(9, "log/entries.jsonl", "a run with missing events");
    }
    this.report.add(9, `${events.length} logged events; ${this.end.event}`);
  }

  async provenance() {
    if (!this.hasRun) return;
    const stated = this.end.provenance ?? null;
    if (stated === null) {
      this.requireNone(10, "provenance.json");
      this.report.add(10, "the run ended without a record", false);
      return;
    }
    this.requireSame("provenance.json", canonicalJson(stated), 10);
    const refusal = (error) =>
      new StepError(10, "bad_provenance", `provenance.json: ${error.message}.`);
    const signed = await reading(refusal, () => this.readProvenance(stated));
    const about = [this.about.run, this.about.certificate, await digestOf(this.predicate.plan)];
    if (!sameJson([signed.run, signed.certificate, signed.plan], about)) {
      throw mismatch(10, "provenance.json", "another run");
    }
    this.report.add(10, `signed by ${signed.worker}, key ${signed.key.keyId.slice(0, 16)}`);
  }

  async readProvenance(document) {
    const envelope = envelopeOf(document);
    const key = this.verifier.trusted.key(envelope.keyId);
    const name = envelope.keyId.slice(0, 16);
    requireThat(key !== undefined, `the key ${name} is not a trusted worker's`);
    requireThat(hasRole(key, "run"), `the key ${name} is not for run records`);
    const holds =
      envelope.payloadType === IN_TOTO &&
      (await accepts(key, envelope.signature, envelope.signed));
    requireThat(holds, "the signature does not match");
    const signed = provenanceIn(parseStrict(envelope.payload));
    const fault = faultOfSignature(key, signed.finished, { now: this.verifier.now });
    requireThat(!key.development && fault === null, "the key was not allowed to sign then");
    return { ...signed, key };
  }

  // Compare the record with the log. Whether each step conforms needs the plan's mechanisms.
  async conformance() {
    if (!this.hasRun) return;
    const logged = this.end.record ?? null;
    if (logged === null) {
      this.requireNone(11, "record.jsonl", "conformance.json");
      this.report.add(11, "no record", false);
      return;
    }
    const head = await headOf(this.part("record.jsonl", 11));
    if (head !== logged) {
      throw mismatch(11, "record.jsonl", "another record than the logged one");
    }
    const stated = this.part("conformance.json", 11);
    const result = parsedOr(null, stated);
    const id = this.predicate.certificate_id;
    if (!isObject(result) || result.head !== head || result.certificate_id !== id) {
      throw mismatch(11, "conformance.json", "the result of another record");
    }
    if (result.conformant !== true && this.end.event === "settled") {
      throw mismatch(11, "record.jsonl", "a run that does not conform and was settled");
    }
    this.report.add(
      11, `${PARTLY} each step against the plan; the record is the logged one`, false,
    );
  }

  async ledger() {
    if (!this.hasRun) return;
    const document = this.object("ledger.json", 12);
    const refusal = () => mismatch(12, "ledger.json", "no events of a ledger");
    const [stated, logged] = await reading(refusal, async () => {
      const reservation = get(this.first, "reservation");
      const known = new Map(
        this.entries
          .filter((entry) => entry.subject === reservation)
          .map(({ body }) => [get(body, "seq"), get(body, "state_digest")]),
      );
      const events = get(document, "events");
      requireThat(Array.isArray(events), "events");
      const given = new Map();
      for (const event of events) {
        const state = get(event, "state");
        requireThat(isText(state) && state.isWellFormed(), "a state");
        given.set(get(event, "seq"), await digestOfBytes(utf8(state)));
      }
      return [given, known];
    });
    const same =
      stated.size === logged.size && [...stated].every(([seq, digest]) => logged.get(seq) === digest);
    if (!same || !stated.size) throw mismatch(12, "ledger.json", "other states than the log");
    this.report.add(12, `${stated.size} events with their logged states`);
  }

  // Both are of the certified plan, and the logged ones. The bounds of an audit need Python.
  async replayAndAudit() {
    const replay = await this.replay();
    const audit = await this.audit();
    const detail = [replay, audit].filter((text) => text).join("; ") || "neither replay nor audit";
    if (audit) this.report.add(13, `${PARTLY} the bounds of the audit; ${detail}`, false);
    else this.report.add(13, detail, replay !== "");
  }

  // The entry about a file that was added to the run, if there is one.
  async loggedTest(kind, name) {
    const logged = this.hasRun ? this.entriesOf(kind, this.about.run)[0] : undefined;
    if (logged !== undefined) {
      const digest = await digestOfBytes(this.part(name, 13));
      if (logged.body.digest !== digest) {
        throw mismatch(13, name, "another record than the logged one");
      }
    }
    return logged;
  }

  async replay() {
    const name = "replay.json";
    const logged = await this.loggedTest("replay", name);
    if (!this.files.has(name)) return "";
    const record = this.object(name, 13);
    if (record.type !== REPLAY_TYPE) throw mismatch(13, name, "no replay record");
    if (record.plan !== (await digestOf(this.predicate.plan))) {
      throw mismatch(13, name, "another plan than the certificate");
    }
    const author = logged === undefined ? "" : `, as ${logged.actor} added`;
    return `replay of the certified plan${author}; what it says is declared`;
  }

  async audit() {
    const name = "canary-audit.json";
    const logged = await this.loggedTest("audit", name);
    if (logged === undefined && !this.files.has(name)) return "";
    const audit = this.object(name, 13);
    if (logged === undefined) throw mismatch(13, name, "an audit that was not added to the run");
    const refusal = (error) => mismatch(13, name, `no audit of the run: ${error.message}`);
    const right = await reading(refusal, () => this.rightGuesses(audit));
    const same =
      audit.type === AUDIT_TYPE && audit.right === right &&
      audit.plan === (await digestOf(this.predicate.plan));
    if (!same) throw mismatch(13, name, "another result than its canaries and losses");
    return `audit of the record's canaries, as ${logged.actor} added; its losses are declared`;
  }

  // How many coins of the canaries the losses tell. The record's first line commits to them.
  async rightGuesses(audit) {
    const canaries = get(audit, "canaries");
    requireThat((this.end.record ?? null) !== null, "the run has no record");
    const header = firstEntry(this.part("record.jsonl", 13));
    const same = (await digestOf(canaries)) === get(header, "canaries");
    requireThat(same, "other canaries than the record commits to");
    const { version, nonce, count, guesses, ...rest } = canaries;
    const whole =
      version === 1 && isText(nonce) && /^[0-9a-f]{64}$/.test(nonce) && !Object.keys(rest).length &&
      isCount(count) && count >= 2 && count <= MAX_CANARIES &&
      isCount(guesses) && guesses % 2 === 0 && guesses >= 2 && guesses <= count;
    requireThat(whole, "no canaries");
    const planned = this.predicate.plan.canaries ?? null;
    if (planned !== null) {
      const guessed = planned.guesses ?? Math.max(2, Math.floor(planned.count / 6) * 2);
      requireThat(count === planned.count && guesses === guessed, "other numbers than the plan");
    }
    const adjacency = get(this.predicate, "guarantee", "adjacency");
    requireThat(AUDITABLE.includes(adjacency), "an adjacency that no audit is about");
    const losses = get(audit, "losses");
    requireThat(Array.isArray(losses) && losses.length === count, "not a loss per canary");
    const numbers = losses.map((loss) => (loss instanceof Real ? loss.value : loss));
    requireThat(numbers.every((loss) => typeof loss === "number"), "losses");
    const order = numbers.map((_, index) => index);
    order.sort((one, other) => numbers[one] - numbers[other]);
    const key = Uint8Array.from(nonce.match(/../g), (pair) => parseInt(pair, 16));
    const included = async (index) => (await sha256(coinOf(key, index)))[0] < 128;
    let right = 0;
    for (const index of order.slice(0, guesses / 2)) right += await included(index);
    for (const index of order.slice(-guesses / 2)) right += !(await included(index));
    return right;
  }

  story() {
    this.report.add(14, `${PARTLY} the pages index.html and verify.html`, false);
  }

  timestamp() {
    const detail = this.files.has(TIMESTAMP) ? `${PARTLY} ${TIMESTAMP}` : "no timestamp";
    this.report.add(15, detail, false);
  }
}

// What a file has where a word belongs, which may be an object.
const wordOf = (value) => (isText(value) ? value : canonicalText(value ?? null));

function parsedOr(otherwise, content) {
  try {
    return parseStrict(content, content.length);
  } catch (error) {
    if (error instanceof BadJson) return otherwise;
    throw error;
  }
}

const sameSets = (one, other) => one.size === other.size && [...one].every((item) => other.has(item));

// The lines of a text, which end in a line feed, a carriage return, or both.
function linesOf(bytes) {
  const result = [];
  let start = 0;
  for (let at = 0; at < bytes.length; at++) {
    if (bytes[at] !== 10 && bytes[at] !== 13) continue;
    result.push(bytes.subarray(start, at));
    if (bytes[at] === 13 && bytes[at + 1] === 10) at += 1;
    start = at + 1;
  }
  if (start < bytes.length) result.push(bytes.subarray(start));
  return result;
}

// The first line of a record, which step 11 found in its chain.
function firstEntry(record) {
  const end = record.indexOf(10);
  return parseStrict(record.subarray(0, end < 0 ? 0 : end), MAX_LINE_BYTES);
}

// What is hashed for the coin of a canary.
function coinOf(key, index) {
  const place = new Uint8Array(8);
  new DataView(place.buffer).setBigUint64(0, BigInt(index));
  return concatenated(key, utf8("included"), place);
}

function timeOf(text) {
  const found = /^(\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2})\.(\d{3})\d{3}\+00:00$/.exec(text);
  const time = found === null ? "" : `${found[1]}.${found[2]}Z`;
  const at = Date.parse(time);
  // A day beyond the end of its month is read as one of the next.
  if (Number.isNaN(at) || new Date(at).toISOString() !== time) throw mismatch(3, "log/entries.jsonl", "a time that cannot be read");
  return at;
}

// Check that the bundle's checkpoint and that of the file are of one growing log.
async function requireLinked(first, second, proofs) {
  requireThat(first.origin === second.origin, "two logs");
  let proof = [];
  if (first.size !== second.size) {
    const stated = consistencyOf(get(proofs, "consistency"));
    const same = stated.first === first.size && stated.second === second.size;
    requireThat(same, "a consistency proof of other trees");
    ({ proof } = stated);
  }
  await verifyConsistency({
    first: first.size,
    second: second.size,
    firstRoot: first.rootHash,
    secondRoot: second.rootHash,
    proof,
  });
}

// The last digest of a record's chain; a line that breaks the chain ends it.
async function headOf(record) {
  let head = START;
  let start = 0;
  while (start < record.length) {
    const end = record.indexOf(10, start);
    if (end < 0) break;
    const line = record.subarray(start, end);
    let stated;
    try {
      stated = parseStrict(line, MAX_LINE_BYTES);
      requireThat(isObject(stated) && sameBytes(canonicalJson(stated), line), "a line");
      const { digest, ...rest } = stated;
      requireThat(digest === (await digestOf(rest)) && stated.previous === head, "a line");
    } catch (error) {
      if (!(error instanceof BadJson)) throw error;
      return null;
    }
    head = stated.digest;
    start = end + 1;
  }
  return start === record.length && start > 0 ? head : null;
}

function provenanceIn(statement) {
  const definition = get(statement, "predicate", "buildDefinition");
  const details = get(statement, "predicate", "runDetails");
  const kinds = [get(statement, "_type"), get(statement, "predicateType"), get(definition, "buildType")];
  const materials = get(definition, "resolvedDependencies");
  const result = get(details, "byproducts", 0, "annotations", "conformance");
  const steps = get(result, "steps", "to_charge");
  const head = get(result, "head");
  const named = ["certificate", "plan", "data", "code"];
  const holds =
    sameJson(kinds, [STATEMENT_TYPE, PROVENANCE_TYPE, BUILD_TYPE]) &&
    Array.isArray(materials) &&
    sameJson(materials.map((item) => get(item, "name")), named) &&
    isCount(steps) && steps >= 0 && steps < 2 ** 31 &&
    typeof get(result, "conformant") === "boolean" &&
    (head === null || isText(head)) &&
    get(statement, "subject").length === 1;
  requireThat(holds, "this is not the provenance of a run");
  get(statement, "subject", 0, "name");
  get(statement, "subject", 0, "digest", "sha256");
  get(materials, 3, "annotations", "recorded");
  for (const item of get(result, "findings")) get(item, "code");
  for (const name of ["data", "model"]) get(definition, "externalParameters", name);
  const hash = (at) => `sha256:${get(materials, at, "digest", "sha256")}`;
  return {
    run: wordOf(get(definition, "internalParameters", "run")),
    certificate: hash(0),
    plan: hash(1),
    worker: wordOf(get(details, "builder", "id")),
    finished: parseInstant(get(details, "metadata", "finishedOn")),
  };
}
