//go:build race

package rocev2

const raceEnabled = true
