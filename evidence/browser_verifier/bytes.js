// Bytes and their forms as text. Hashes come from WebCrypto.

export const utf8 = (text) => new TextEncoder().encode(text);

// The text of UTF-8 bytes, with a byte order mark if they have one; throws on other bytes.
export const textOf = (bytes) =>
  new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(bytes);

export function concatenated(...parts) {
  const result = new Uint8Array(parts.reduce((size, part) => size + part.length, 0));
  let at = 0;
  for (const part of parts) {
    result.set(part, at);
    at += part.length;
  }
  return result;
}

export function sameBytes(one, other) {
  if (one.length !== other.length) return false;
  for (let at = 0; at < one.length; at++) if (one[at] !== other[at]) return false;
  return true;
}

export const hexOf = (bytes) =>
  Array.from(bytes, (value) => value.toString(16).padStart(2, "0")).join("");

export const sha256 = async (bytes) =>
  new Uint8Array(await crypto.subtle.digest("SHA-256", bytes));

export const digestOfBytes = async (bytes) => `sha256:${hexOf(await sha256(bytes))}`;

const ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
const VALUES = new Int16Array(128).fill(-1);
for (let index = 0; index < 64; index++) VALUES[ALPHABET.charCodeAt(index)] = index;

// Canonical base64: no white space, full padding, no bits beyond the bytes. Throws on others.
export function fromBase64(text) {
  if (text.length % 4) throw new Error("not base64");
  const padding = text.endsWith("==") ? 2 : text.endsWith("=") ? 1 : 0;
  const length = text.length - padding;
  const result = new Uint8Array((text.length / 4) * 3 - padding);
  let bits = 0;
  let count = 0;
  let at = 0;
  for (let index = 0; index < length; index++) {
    const code = text.charCodeAt(index);
    const value = code < 128 ? VALUES[code] : -1;
    if (value < 0) throw new Error("not base64");
    bits = ((bits << 6) | value) & 0xffff;
    count += 6;
    if (count >= 8) {
      count -= 8;
      result[at++] = (bits >> count) & 0xff;
    }
  }
  if (bits & ((1 << count) - 1)) throw new Error("not in canonical base64");
  return result;
}

export function toBase64(bytes) {
  let result = "";
  for (let at = 0; at < bytes.length; at += 3) {
    const [one, two, three] = [bytes[at], bytes[at + 1], bytes[at + 2]];
    result += ALPHABET[one >> 2] + ALPHABET[((one & 3) << 4) | ((two ?? 0) >> 4)];
    result += two === undefined ? "=" : ALPHABET[((two & 15) << 2) | ((three ?? 0) >> 6)];
    result += three === undefined ? "=" : ALPHABET[three & 63];
  }
  return result;
}
