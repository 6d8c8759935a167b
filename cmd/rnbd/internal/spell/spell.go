// Package spell finds the known word nearest to a misspelled one.
package spell

import "fmt"

// Suggest returns the end of an error message about an unknown word: "; did
// you mean ...?" with the nearest known word, or nothing.
func Suggest(word string, known []string) string {
	if best := Nearest(word, known); best != "" {
		return fmt.Sprintf("; did you mean %q?", best)
	}
	return ""
}

// maxWord is more than the length of any known word.
const maxWord = 64

// Nearest returns the known word with the smallest edit distance from word,
// the first of several; "" if all are further than a third of its letters.
// For a known word it returns "", because the error must be elsewhere.
func Nearest(word string, known []string) string {
	if len(word) > maxWord {
		return ""
	}
	best, limit := "", max(1, (len([]rune(word))+1)/3)
	for _, k := range known {
		if d := Distance(word, k); d <= limit && d > 0 {
			best, limit = k, d-1
		}
	}
	return best
}

// Distance is the number of letters to insert, delete, replace or swap with
// their neighbour to get from a to b (optimal string alignment).
func Distance(a, b string) int {
	x, y := []rune(a), []rune(b)
	d := make([][]int, len(x)+1)
	for i := range d {
		d[i] = make([]int, len(y)+1)
		d[i][0] = i
	}
	for j := range d[0] {
		d[0][j] = j
	}
	for i := 1; i <= len(x); i++ {
		for j := 1; j <= len(y); j++ {
			cost := 1
			if x[i-1] == y[j-1] {
				cost = 0
			}
			d[i][j] = min(d[i-1][j]+1, d[i][j-1]+1, d[i-1][j-1]+cost)
			if i > 1 && j > 1 && x[i-1] == y[j-2] && x[i-2] == y[j-1] {
				d[i][j] = min(d[i][j], d[i-2][j-2]+1)
			}
		}
	}
	return d[len(x)][len(y)]
}
