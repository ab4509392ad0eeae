// Vectors of a log, its tiles and a note by Go's own packages, for tests of Affidavit's.
//
// Run with Go 1.19 and golang.org/x/mod 0.6: go run . > go.json
package main

import (
	"crypto/ed25519"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"os"
	"strings"

	"golang.org/x/mod/sumdb/note"
	"golang.org/x/mod/sumdb/tlog"
)

const origin, size, smaller, index = "example.com/go", 700, 300, 600

type store []tlog.Hash

func (s store) ReadHashes(indexes []int64) ([]tlog.Hash, error) {
	hashes := make([]tlog.Hash, len(indexes))
	for i, x := range indexes {
		hashes[i] = s[x]
	}
	return hashes, nil
}

func check(err error) {
	if err != nil {
		panic(err)
	}
}

func main() {
	var hashes store
	for i := 0; i < size; i++ {
		more, err := tlog.StoredHashes(int64(i), []byte(fmt.Sprintf("entry %d", i)), hashes)
		check(err)
		hashes = append(hashes, more...)
	}
	tiles := map[string]string{}
	for _, tile := range tlog.NewTiles(8, 0, size) {
		if tile.W%60 > 1 && tile.W < 256 {
			continue
		}
		data, err := tlog.ReadTileData(tile, hashes)
		check(err)
		sum := sha256.Sum256(data)
		tiles[strings.TrimPrefix(tile.Path(), "tile/8/")] = hex.EncodeToString(sum[:])
	}
	paths := map[string]int64{}
	for _, n := range []int64{0, 999, 1000, 1234067, 999999999} {
		paths[strings.TrimPrefix(tlog.Tile{H: 8, L: 3, N: n, W: 17}.Path(), "tile/8/")] = n
	}
	root, err := tlog.TreeHash(size, hashes)
	check(err)
	old, err := tlog.TreeHash(smaller, hashes)
	check(err)
	inclusion, err := tlog.ProveRecord(size, index, hashes)
	check(err)
	consistency, err := tlog.ProveTree(size, smaller, hashes)
	check(err)
	seed := sha256.Sum256([]byte("seed"))
	private := ed25519.NewKeyFromSeed(seed[:])
	public := private.Public().(ed25519.PublicKey)
	verifier, err := note.NewEd25519VerifierKey(origin, public)
	check(err)
	parts := strings.Split(verifier, "+")
	secret := "PRIVATE+KEY+" + origin + "+" + parts[1] + "+" +
		base64.StdEncoding.EncodeToString(append([]byte{1}, seed[:]...))
	signer, err := note.NewSigner(secret)
	check(err)
	text := fmt.Sprintf("%s\n%d\n%s\n", origin, size, root)
	signed, err := note.Sign(&note.Note{Text: text}, signer)
	check(err)
	out := json.NewEncoder(os.Stdout)
	out.SetIndent("", " ")
	out.Encode(map[string]any{
		"origin": origin, "size": size, "smaller": smaller, "index": index,
		"root": root, "smaller_root": old, "inclusion": inclusion, "consistency": consistency,
		"tiles": tiles, "paths": paths, "seed": hex.EncodeToString(seed[:]), "verifier_key": verifier,
		"checkpoint": string(signed),
	})
}
