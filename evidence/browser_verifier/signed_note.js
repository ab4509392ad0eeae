// Signed notes of C2SP, the checkpoints and cosignatures in them.

import { concatenated, fromBase64, sameBytes, sha256, utf8 } from "./bytes.js";
import { parseInstant } from "./dates.js";
import { hasRole, noteKeyHash, signedBy } from "./keys.js";

const MAX_BYTES = 1_000_000;
const MAX_SIGNATURES = 100;
const KEY = 1;
const WITNESS = 4;
const LAST_SECOND = 253402300799n;

export class BadNote extends Error {}
export class UnknownSigner extends BadNote {}

export function requireName(name) {
  if (!name || /[+\p{Cc}\p{Cf}\p{Cs}\p{Co}\p{Z}]/u.test(name) || utf8(name).length > 255) {
    throw new BadNote("a name is 1 to 255 characters without space, plus or control");
  }
}

function bytesOf(text) {
  try {
    return fromBase64(text);
  } catch (error) {
    throw new BadNote(`a part of the note is ${error.message}`);
  }
}

// Read a note; its signatures are not verified.
export function parseNote(raw) {
  if (!raw.isWellFormed() || utf8(raw).length > MAX_BYTES) throw new BadNote("the note is too long");
  if (/[\u0000-\u0009\u000b-\u001f]/.test(raw)) throw new BadNote("the note has control characters");
  const end = raw.lastIndexOf("\n\n");
  const lines = raw.slice(end + 2);
  if (end < 0 || !lines.endsWith("\n")) throw new BadNote("the note has no signature");
  const signatures = lines.slice(0, -1).split("\n").map(signatureOf);
  if (signatures.length > MAX_SIGNATURES) throw new BadNote("the note has too many signatures");
  return { text: raw.slice(0, end + 1), signatures };
}

function signatureOf(line) {
  const found = /^— ([^ ]+) ([^ ]+)$/.exec(line);
  if (found === null) throw new BadNote("a signature line does not have the form '— name base64'");
  requireName(found[1]);
  const raw = bytesOf(found[2]);
  if (raw.length < 5) throw new BadNote("a signature is too short");
  return { name: found[1], keyHash: raw.slice(0, 4), signature: raw.slice(4) };
}

// Read the checkpoint of a note: `signedAt` is a time, null if there is none, or NaN if malformed.
export function checkpointOf(raw) {
  const { text } = parseNote(raw);
  const lines = text.split("\n");
  if (lines.length < 4 || lines.pop() !== "" || lines.includes("")) {
    throw new BadNote("a checkpoint has three lines or more, none of them empty");
  }
  const [origin, size, root, ...extensions] = lines;
  const isSize = /^(0|[1-9][0-9]{0,15})$/.test(size) && Number.isSafeInteger(Number(size));
  if (!isSize) throw new BadNote("a checkpoint's second line is its size, in decimal");
  const rootHash = bytesOf(root);
  requireName(origin);
  if (rootHash.length !== 32) throw new BadNote("a root hash has 32 bytes");
  return { origin, size: Number(size), rootHash, signedAt: timeIn(extensions) };
}

function timeIn(extensions) {
  const line = extensions.find((text) => text.startsWith("time "));
  if (line === undefined) return null;
  try {
    return parseInstant(line.slice(5));
  } catch {
    return NaN;
  }
}

// Return the checkpoint of a note and the trusted checkpoint keys that signed it, at least one.
export async function openCheckpoint(raw, trusted) {
  const checkpoint = checkpointOf(raw);
  const note = parseNote(raw);
  const keys = new Map();
  for (const key of trusted) {
    if (!hasRole(key, "checkpoint")) continue;
    const keyHash = await noteKeyHash(checkpoint.origin, KEY, key.raw);
    keys.set(key.keyId, { key, keyHash });
  }
  const signers = new Set();
  for (const line of note.signatures) {
    const known = [...keys.values()].filter(
      (item) => line.name === checkpoint.origin && sameBytes(item.keyHash, line.keyHash),
    );
    if (known.length > 1) throw new BadNote("two trusted keys share the hash of a signature");
    for (const { key } of known) {
      if (!(await signedBy(key.raw, line.signature, utf8(note.text)))) {
        throw new BadNote(`the signature of ${line.name} does not match the text`);
      }
      signers.add(key);
    }
  }
  if (!signers.size) throw new UnknownSigner("no key that you trust signed the note");
  return { checkpoint, signers: [...signers] };
}

// Read a witness's verifier key: `name+hash+base64(0x04 || key)`.
export async function witnessOf(text) {
  const [, name, hash, encoded] = /^([^+]*)\+?([^+]*)\+?([^]*)$/.exec(text);
  const bytes = bytesOf(encoded);
  if (bytes.length !== 33 || bytes[0] !== WITNESS) throw new BadNote("no key of a witness");
  requireName(name);
  const raw = bytes.slice(1);
  const keyHash = await noteKeyHash(name, WITNESS, raw);
  const stated = Array.from(keyHash, (value) => value.toString(16).padStart(2, "0")).join("");
  if (stated !== hash) throw new BadNote("a verifier key's hash is not that of its name and key");
  return { name, raw, keyHash };
}

// Return when a witness first cosigned a parsed note, or null; an invalid cosignature throws.
export async function cosignedAt(note, witness) {
  const times = [];
  for (const line of note.signatures) {
    if (line.name !== witness.name || !sameBytes(line.keyHash, witness.keyHash)) continue;
    const seconds = line.signature
      .subarray(0, 8)
      .reduce((sum, byte) => sum * 256n + BigInt(byte), 0n);
    const message = utf8(`cosignature/v1\ntime ${seconds}\n${note.text}`);
    const holds = await signedBy(witness.raw, line.signature.slice(8), message);
    if (!holds || seconds > LAST_SECOND) {
      throw new BadNote(`the cosignature of ${line.name} does not match the text`);
    }
    times.push(Number(seconds) * 1000);
  }
  return times.length ? Math.min(...times) : null;
}

// Whether an authority stamped a parsed note (RFC 3161): this page cannot check whether it is
// one that is trusted.
export async function hasTimestamp(note) {
  const content = concatenated(utf8("timestamp\n"), Uint8Array.of(0xff), utf8("rfc3161"));
  const keyHash = (await sha256(content)).slice(0, 4);
  return note.signatures.some(
    (line) => line.name === "timestamp" && sameBytes(line.keyHash, keyHash),
  );
}
