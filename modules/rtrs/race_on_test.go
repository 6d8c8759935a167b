//go:build race

package rtrs

const raceEnabled = true
