// DSSE envelopes and the errors of numbered steps.

import { concatenated, fromBase64, utf8 } from "./bytes.js";
import { BadJson, digestOf, isText, requireFields, requireThat } from "./json.js";
import { accepts } from "./keys.js";

export const IN_TOTO = "application/vnd.in-toto+json";
export const STATEMENT_TYPE = "https://in-toto.io/Statement/v1";
const MAX_SIGNATURES = 64;

// A step rejected what is verified. Anything else that is thrown is a fault of this page.
export class StepError extends Error {
  constructor(step, code, message) {
    super(message);
    Object.assign(this, { step, code });
  }
}

function bytesOf(text) {
  requireThat(isText(text), "a field is not base64");
  try {
    return fromBase64(text);
  } catch (error) {
    throw new BadJson(error.message);
  }
}

// Read an envelope with any number of signatures; throws BadJson.
export function cosignedEnvelope(document) {
  requireFields(document, ["payload", "payloadType", "signatures"]);
  const { payload, payloadType, signatures } = document;
  requireThat(isText(payloadType), "payloadType is not a text");
  requireThat(Array.isArray(signatures) && signatures.length <= MAX_SIGNATURES, "signatures");
  const read = signatures.map((item) => {
    requireFields(item, ["keyid", "sig"]);
    requireThat(isText(item.keyid), "keyid is not a text");
    return { keyId: item.keyid, signature: bytesOf(item.sig) };
  });
  requireThat(
    new Set(read.map((item) => item.keyId)).size === read.length,
    "a key signed more than once",
  );
  const bytes = bytesOf(payload);
  const type = utf8(payloadType);
  const head = utf8(`DSSEv1 ${type.length} ${payloadType} ${bytes.length} `);
  return { document, payload: bytes, payloadType, signatures: read,
    signed: concatenated(head, bytes) };
}

// Read an envelope with one signature.
export function envelopeOf(document) {
  const result = cosignedEnvelope(document);
  requireThat(result.signatures.length === 1, "the envelope must have exactly one signature");
  return { ...result, ...result.signatures[0] };
}

export const digestOfEnvelope = (envelope) => digestOf(envelope.document);

// How many of the keys signed the envelope.
export async function countSigners(envelope, keys) {
  const known = new Map(keys.map((key) => [key.keyId, key]));
  let count = 0;
  for (const { keyId, signature } of envelope.signatures) {
    const key = known.get(keyId);
    if (key !== undefined && (await accepts(key, signature, envelope.signed))) count += 1;
  }
  return count;
}
