// The Merkle tree of RFC 9162: leaves, and the verification of its two proofs.

import { concatenated, sameBytes, sha256 } from "./bytes.js";

export class BadProof extends Error {}

export const leafHash = (entry) => sha256(concatenated(Uint8Array.of(0), entry));

const nodeHash = (left, right) => sha256(concatenated(Uint8Array.of(1), left, right));

// Sizes reach 2^53 - 1, where JavaScript's bitwise operators do not.
const half = (value) => Math.floor(value / 2);

const isOdd = (value) => value % 2 === 1;

// Section 2.1.3.2; throws BadProof.
export async function verifyInclusion(leaf, { index, size, proof, root }) {
  if (!(index >= 0 && index < size)) throw new BadProof(`a tree of ${size} has no leaf ${index}`);
  const [, found] = await climbed(index, size - 1, leaf, proof);
  if (!sameBytes(found, root)) throw new BadProof("the proof leads to a different root");
}

// Section 2.1.4.2; throws BadProof.
export async function verifyConsistency({ first, second, firstRoot, secondRoot, proof }) {
  if (!(first > 0 && first <= second)) {
    throw new BadProof(`nothing can be proved from size ${first} to size ${second}`);
  }
  if (first === second) {
    if (proof.length) throw new BadProof("the proof is too long");
    if (!sameBytes(firstRoot, secondRoot)) throw new BadProof("one size has two roots");
    return;
  }
  let [below, last] = [first - 1, second - 1];
  while (isOdd(below)) [below, last] = [half(below), half(last)];
  // What is left of a perfect first tree is its root, which the verifier has.
  const path = below === 0 ? [firstRoot, ...proof] : proof;
  if (!path.length) throw new BadProof("the proof is too short");
  const [old, found] = await climbed(below, last, path[0], path.slice(1));
  if (!sameBytes(old, firstRoot)) throw new BadProof("the proof is not of the first tree");
  if (!sameBytes(found, secondRoot)) throw new BadProof("the proof leads to another second tree");
}

// Fold the proof onto a node; return the root of the tree that ends with it, and of the whole.
async function climbed(position, last, start, proof) {
  if (![start, ...proof].every((hash) => hash.length === 32)) throw new BadProof("no hash");
  let old = start;
  let found = start;
  for (const item of proof) {
    if (last === 0) throw new BadProof("the proof is too long");
    if (isOdd(position) || position === last) {
      [old, found] = [await nodeHash(item, old), await nodeHash(item, found)];
      while (position && !isOdd(position)) [position, last] = [half(position), half(last)];
    } else {
      found = await nodeHash(found, item);
    }
    [position, last] = [half(position), half(last)];
  }
  if (last !== 0) throw new BadProof("the proof is too short");
  return [old, found];
}
