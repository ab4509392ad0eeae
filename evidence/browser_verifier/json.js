// JSON with one meaning, and its canonical form (RFC 8785).
//
// Objects have no prototype, so that a key such as __proto__ is a key and nothing else. A number
// that is not written as an integer is a Real: it is never taken for a count.

import { digestOfBytes, textOf, utf8 } from "./bytes.js";

export class BadJson extends Error {}

export class Real {
  constructor(value) {
    this.value = value;
  }
}

const MAX_DEPTH = 32;
const SMALLEST_NORMAL = 2.2250738585072014e-308;
const NUMBER = /-?(?:0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?/y;
const STRING = /[^"\\\u0000-\u001f]*/y;
const SPACE = /[ \t\n\r]*/y;
const ESCAPES = { '"': '"', "\\": "\\", "/": "/", b: "\b", f: "\f", n: "\n", r: "\r", t: "\t" };

// As strict as Affidavit reads what is signed: no duplicate keys, no number whose value readers
// disagree about, no lone surrogates, no deep nesting.
export function parseStrict(bytes, limit = 1024 * 1024) {
  if (bytes.length > limit) throw new BadJson(`the JSON text has more than ${limit} bytes`);
  return new Parser(decoded(bytes)).document();
}

function decoded(bytes) {
  try {
    return textOf(bytes);
  } catch {
    throw new BadJson("the text is not UTF-8");
  }
}

class Parser {
  constructor(text) {
    Object.assign(this, { text, at: 0 });
  }

  document() {
    const result = this.value(0);
    this.space();
    if (this.at < this.text.length) this.fail();
    return result;
  }

  fail(message = `this is not JSON at character ${this.at}`) {
    throw new BadJson(message);
  }

  match(pattern) {
    pattern.lastIndex = this.at;
    const found = pattern.exec(this.text);
    if (found !== null) this.at = pattern.lastIndex;
    return found;
  }

  space() {
    this.match(SPACE);
  }

  take(word) {
    const found = this.text.startsWith(word, this.at);
    if (found) this.at += word.length;
    return found;
  }

  value(depth) {
    if (depth > MAX_DEPTH) this.fail(`the document is nested deeper than ${MAX_DEPTH} levels`);
    this.space();
    switch (this.text[this.at]) {
      case "{":
        return this.object(depth);
      case "[":
        return this.array(depth);
      case '"':
        return this.string();
    }
    if (this.take("null")) return null;
    if (this.take("true")) return true;
    if (this.take("false")) return false;
    for (const name of ["NaN", "Infinity", "-Infinity"]) {
      if (this.take(name)) this.fail(`${name} is not a finite number`);
    }
    return this.number();
  }

  object(depth) {
    const result = Object.create(null);
    this.at += 1;
    this.space();
    if (this.take("}")) return result;
    do {
      this.space();
      if (this.text[this.at] !== '"') this.fail();
      const key = this.string();
      if (key in result) this.fail("a key is given twice");
      this.space();
      if (!this.take(":")) this.fail();
      result[key] = this.value(depth + 1);
      this.space();
    } while (this.take(","));
    if (!this.take("}")) this.fail();
    return result;
  }

  array(depth) {
    const result = [];
    this.at += 1;
    this.space();
    if (this.take("]")) return result;
    do {
      result.push(this.value(depth + 1));
      this.space();
    } while (this.take(","));
    if (!this.take("]")) this.fail();
    return result;
  }

  string() {
    this.at += 1;
    let result = "";
    for (;;) {
      result += this.match(STRING)[0];
      if (this.take('"')) break;
      if (!this.take("\\")) this.fail();
      const escape = this.text[this.at++];
      if (escape === "u") {
        const digits = this.text.slice(this.at, this.at + 4);
        if (!/^[0-9a-fA-F]{4}$/.test(digits)) this.fail();
        result += String.fromCharCode(parseInt(digits, 16));
        this.at += 4;
      } else if (escape !== undefined && Object.hasOwn(ESCAPES, escape)) {
        result += ESCAPES[escape];
      } else {
        this.fail();
      }
    }
    if (!result.isWellFormed()) this.fail("the text has a lone surrogate");
    return result;
  }

  number() {
    const found = this.match(NUMBER);
    if (found === null) this.fail();
    const [literal, fraction, exponent] = found;
    const value = Number(literal);
    if (fraction === undefined && exponent === undefined) {
      if (Number.isSafeInteger(value)) return value + 0;
      this.fail("an integer is beyond 2^53 - 1");
    }
    if (!Number.isFinite(value)) this.fail("a number is beyond a double's range");
    if (Math.abs(value) < SMALLEST_NORMAL && /[1-9]/.test(literal.split(/e/i)[0])) {
      this.fail("a number is below the smallest normal double");
    }
    return new Real(value + 0);
  }
}

// The text of RFC 8785; throws for what has no canonical form.
export function canonicalText(value) {
  if (value === null || typeof value === "boolean") return String(value);
  if (typeof value === "number") return String(value + 0);
  if (typeof value === "string") {
    if (!value.isWellFormed()) throw new BadJson("a lone surrogate");
    return JSON.stringify(value);
  }
  if (value instanceof Real) {
    if (!Number.isFinite(value.value)) throw new BadJson("no finite number");
    return String(value.value + 0);
  }
  if (Array.isArray(value)) return `[${value.map(canonicalText).join(",")}]`;
  if (typeof value !== "object") throw new BadJson("this is not JSON");
  // Strings compare by UTF-16 code units, as the canonical form orders keys.
  const keys = Object.keys(value).sort();
  return `{${keys.map((key) => `${canonicalText(key)}:${canonicalText(value[key])}`).join(",")}}`;
}

export const canonicalJson = (value) => utf8(canonicalText(value));

export const digestOf = (value) => digestOfBytes(canonicalJson(value));

export const isObject = (value) =>
  value !== null && typeof value === "object" && !Array.isArray(value) && !(value instanceof Real);

export const isText = (value) => typeof value === "string";

export const isCount = (value) => typeof value === "number";

// Whether both are one JSON value.
export const sameJson = (one, other) => canonicalText(one) === canonicalText(other);

// Read a field, or throw: of what is not an object or has no such field.
export function get(value, ...path) {
  for (const name of path) {
    const found = typeof name === "number" ? Array.isArray(value) : isObject(value);
    if (!found || !Object.hasOwn(value, name)) throw new BadJson(`${name} is missing`);
    value = value[name];
  }
  return value;
}

// Check the fields of a signed part: all required, the optional ones or not, and no others.
export function requireFields(value, required, optional = []) {
  if (!isObject(value)) throw new BadJson("not an object");
  for (const name of required) {
    if (!Object.hasOwn(value, name)) throw new BadJson(`${name}: a required field is missing`);
  }
  for (const name of Object.keys(value)) {
    if (!required.includes(name) && !optional.includes(name)) {
      throw new BadJson(`${name}: there is no such field`);
    }
  }
}

export function requireThat(holds, message) {
  if (!holds) throw new BadJson(message);
}
