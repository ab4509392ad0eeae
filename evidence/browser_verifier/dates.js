// Times of signed documents in milliseconds, and every comparison of one with a key or the clock.

export const SECOND = 1000;
export const HOUR = 3600 * SECOND;
export const DAY = 24 * HOUR;
export const MAX_CLOCK_SKEW = 300 * SECOND;

const FORM =
  /^(\d{4})-(1[0-2]|0[1-9]|[1-9])-(3[01]|[12]\d|0[1-9]|[1-9]| [1-9])T(2[0-3]|[01]\d|\d):([0-5]\d|\d):([0-5]\d|\d)Z$/i;

export class BadDate extends Error {}

// Read a time of a signed document; its numbers may lack leading zeros.
export function parseInstant(text) {
  const found = typeof text === "string" ? FORM.exec(text) : null;
  if (found === null) throw new BadDate("a time cannot be read");
  const [year, month, day, hour, minute, second] = found.slice(1).map(Number);
  const result = new Date(0);
  result.setUTCFullYear(year, month - 1, day);
  if (year < 1 || result.getUTCDate() !== day) throw new BadDate("there is no such day");
  return result.setUTCHours(hour, minute, second, 0);
}

export const formatInstant = (at) => `${new Date(at).toISOString().slice(0, 19)}Z`;

// A time in the one form that signed parts have.
export function isInstant(text) {
  try {
    return formatInstant(parseInstant(text)) === text && text >= "1";
  } catch {
    return false;
  }
}

export const shown = (at) => formatInstant(at).replace("T", " ");

export const revokedAt = (key, at) => key.revokedFrom !== null && at >= key.revokedFrom;

// Why a signature that is dated `at` does not count, or null. `seen` is when others saw it first.
export function faultOfSignature(key, at, { now, seen = null }) {
  if (revokedAt(key, at)) return "revoked";
  if (revokedAt(key, seen ?? now)) return "revoked since";
  if (!(key.notBefore <= at && at <= key.notAfter)) return "outside the window";
  return isAhead(at, now) ? "not yet" : null;
}

export const faultToday = (key, at, now) =>
  faultOfSignature(key, at, { now }) ?? faultOfSignature(key, now, { now });

export const isAhead = (at, of) => at > of + MAX_CLOCK_SKEW;

export const isStale = (hours, at, now) => hours !== null && at < now - hours * HOUR;
